"""One time in a context, from `with` to its end: the hooks that autograd gives its saved tensors to, and what becomes of each.

A tensor comes to the first *stage* of the entry. The recording stage drops what can be recomputed, the moving stage lets leave
for host memory; what a stage does nothing with, it hands on to the next, and the last one keeps it. The stages of a context
outside come behind those of the one inside, if both are memkit's: the inner context decides first.
"""

from __future__ import annotations

import functools
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from memkit import torch_private
from memkit.hooks import HookPair, SavedTensorHooks, stacked_owners
from memkit.interrupts import Block
from memkit.kept import ForwardedHandle, KeptHandle, ScheduledHandle, modified_error
from memkit.plan import Action

NO_PAIR: HookPair = (KeptHandle, KeptHandle.unpack)
"""Stands for no hooks at all."""


class Stage(ABC):
    """What one context does with each saved tensor."""

    moves: ClassVar[bool]
    """Whether it moves to host memory."""
    model: nn.Module | None = None
    """Around whose forward the context is, if that is known."""

    @property
    def take_own(self) -> Callable[[Tensor], KeptHandle]:
        """What takes the tensors that come to the context itself, and not from a stage before."""
        return self.take

    @abstractmethod
    def begin(self) -> None:
        """The hooks are on."""

    @abstractmethod
    def take_off(self) -> None:
        """Undo what `begin` has set; may be called again."""

    @abstractmethod
    def end(self, *, has_failed: bool) -> None:
        """No more tensors come. After an interrupt in here this may be called again."""

    @abstractmethod
    def take(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        """Return what autograd is to hold in place of a tensor that it saves.

        Args:
            tensor: the real one, with grad mode off.
            action: what to do with it, if the user or a stage before has said; by default the stage decides.
        """

    @abstractmethod
    def mark(self, tensor: Tensor, action: Action) -> None:
        """Do this with what is in a tensor now, or have the next stage do it."""


def handing_on(
    moving: Stage | None, outer: SavedTensorHooks | None, *, is_checked: bool = True
) -> Callable[[Tensor], KeptHandle]:
    """Return what makes the handles of tensors that a stage does nothing with: they go to the next stage, else to the hooks
    outside, else they are kept.

    Args:
        moving: the stage that comes next, of the same context or of the one outside.
        outer: else the hooks that are on top.
        is_checked: whether a write to them is noticed here: it is not, in tensors of a class that says itself what ops do.
    """
    if moving is not None:
        return moving.take
    if outer is None:
        return KeptHandle
    return functools.partial(ForwardedHandle, pack=outer.pack, unpack=outer.unpack, is_checked=is_checked)


class Entry:
    """One time in a context.

    Args:
        name: what the user calls the context.
        tag: that of the context.
        is_last: whether no other context may be entered inside, which would hide tensors from this one. What it keeps it offers
            to those outside.
        block: tells whether the user is still in the context.
    """

    def __init__(self, name: str, tag: str, *, is_last: bool, block: Block | None) -> None:
        self.kind = name
        self.tag = tag
        self.is_last = is_last
        self.block = block
        self.recording: Stage | None = None
        """The stage that records ops, and drops."""
        self.moving: Stage | None = None
        """The stage that moves to host memory."""
        self.around: Entry | None = None
        """That of the same context which the stages here leave to what they do nothing with, if they are two."""
        self._take: Callable[[Tensor], KeptHandle] = KeptHandle
        self._hooks: SavedTensorHooks | None = None
        self.name = f'{name} (tag "{tag}")'

    @property
    def stages(self) -> list[Stage]:
        """The stages, the one that a tensor comes to first ahead."""
        return [stage for stage in (self.recording, self.moving) if stage is not None]

    def begin(self, pair: HookPair | None = None) -> None:
        """Take the tensors that are saved from now on.

        Args:
            pair: the hooks, by default its own, which give each tensor to the first stage. With `NO_PAIR` there are none: what
                is saved never comes here.
        """
        try:
            if pair is NO_PAIR:
                _bare.entries.append((len(stacked_owners()), self))
            else:
                pack, unpack_ = pair or (self.pack, unpack)
                self._hooks = SavedTensorHooks(pack, unpack_, owner=self, name=self.name, block=self.block)
                self._hooks.__enter__()
            for stage in reversed(self.stages):
                stage.begin()
                self._take = stage.take_own
        except BaseException:
            self._take_off()
            raise

    def pack(self, tensor: Tensor) -> KeptHandle:
        """Take a tensor that autograd saves. This is a saved-tensor hook: grad mode is off, the tensor is the real one."""
        return KeptHandle(tensor) if torch_private.backward_task() != -1 else self._take(tensor)

    def end(self, *, has_failed: bool) -> None:
        """The context was left. After an interrupt in here this may be called again."""
        self._take_off()
        self._hooks, self._take = None, KeptHandle  # they hold `pack`, and so the entry, whatever comes
        try:
            for stage in self.stages:
                stage.end(has_failed=has_failed)
            self.recording = self.moving = None
        finally:
            if self.around is not None:
                self.around.end(has_failed=has_failed)
                self.around = None

    def _take_off(self) -> None:
        for stage in self.stages:
            stage.take_off()
        if self._hooks is not None:
            self._hooks.__exit__()  # last: for as long as they are on, `end_left` will see to the others as well
        else:
            _bare.entries[:] = [found for found in _bare.entries if found[1] is not self]

    def stop_recording(self) -> None:
        """Leave the ops to a context inside, where this one has recorded them only to heed the user's marks."""
        recording = self.recording
        if recording is not None and self.moving is not None:
            self._take = self.moving.take_own
            recording.take_off()
            self.recording = None  # ahead of its end, from which on nothing may be asked of it
            recording.end(has_failed=False)


class _Bare(threading.local):
    """The entries without hooks that a thread is in, the innermost last, each with how many pairs of hooks it is in."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, Entry]] = []


_bare = _Bare()


def entries_around() -> list[Entry]:
    """Return the entries of the contexts that this thread is in, the innermost first."""
    for _, entry in _bare.entries[::-1]:
        if entry.block is not None and entry.block() is None:
            entry.end(has_failed=True)  # an interrupt has kept it from hearing that it was left
    owners = list(enumerate(stacked_owners(), start=1))
    around = sorted([*owners, *_bare.entries], key=operator.itemgetter(0)) if _bare.entries else owners
    return [owner for _, owner in reversed(around) if isinstance(owner, Entry)]


def refuse_in_budget(title: str) -> None:
    """Raise `ValueError` where a context, which is called so, is entered inside a `MemoryBudget`."""
    for entry in entries_around():
        if entry.kind == "MemoryBudget":
            raise ValueError(
                f"{title} was entered inside a {entry.name}, which plans for itself: one budget holds for all that is saved. "
                "Use one of the two, and memkit.keep, memkit.offload or memkit.recompute for parts of a model"
            )


def stop_recording() -> None:
    """Have the contexts around leave the ops to one inside: see `Entry.stop_recording`."""
    for entry in entries_around():
        entry.stop_recording()


def is_within(tag: str) -> bool:
    """Tell whether this thread is in a context under a tag."""
    return any(entry.tag == tag for entry in entries_around())


def unpack(packed: Any) -> Tensor:
    """Return the tensor that autograd holds something else of. This is a saved-tensor hook, of all entries."""
    kind = type(packed)
    if kind is tuple:
        alias, version = packed
        if torch_private.version_of(alias) != version:
            raise modified_error(alias, version)
        return alias  # type: ignore[no-any-return]  # a tensor that stays
    if kind is ScheduledHandle:
        return packed[0].forward.unpack(packed)  # type: ignore[no-any-return]
    return packed.unpack()  # type: ignore[no-any-return]
