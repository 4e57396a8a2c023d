"""`Entry`: one `with` block of a context, with its saved-tensor hooks, and the stages that each saved tensor goes through.

A tensor comes to the first *stage* of the entry. The recording stage drops recomputable tensors, the moving stage moves tensors
to host memory. A stage hands on all others, and the last one keeps them. The stages of an outer context of memkit come after
those of an inner one: the inner context decides first. `Unasked` notices forwards without a backward.
"""

from __future__ import annotations

import functools
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.hooks import HookPair, HookSet, SavedTensorHooks, stacked_owners
from memkit.core.interrupts import Block
from memkit.core.kept import ForwardedHandle, KeptHandle, ScheduledHandle, modified_error
from memkit.core.sizes import format_bytes
from memkit.errors import warn_user
from memkit.plan import Action


def all_too_small(sizes_bytes: Collection[int], min_bytes: int, *, done: str) -> str:
    """Return the warning for a forward whose saved tensors are all smaller than `min_bytes`: none is `done` ("moved")."""
    found = (
        "the only saved tensor has"
        if len(sizes_bytes) == 1
        else (f"the {len(sizes_bytes)} saved tensors have {format_bytes(sum(sizes_bytes))} in all, and the largest")
    )
    return (
        f"nothing was {done}: only tensors of at least min_bytes ({format_bytes(min_bytes)}) are, and {found} "
        f"{format_bytes(max(sizes_bytes))}. Pass a smaller min_bytes (min_bytes=0 to try it out), or leave the context out: "
        "where all tensors are as small as these it saves little."
    )


_MOST = 4
"""So many graphs may go before the first backward without a warning. The last step's graph is often still alive."""


class Unasked:
    """Watches forwards until the first backward: an object in their graphs tells of requests and of its death."""

    def __init__(self, title: str) -> None:
        self._title = title
        self.is_over = False
        """A backward has asked, or the user was warned: from then on, watching costs nothing."""
        self.num_unasked = 0

    @property
    def was_asked(self) -> bool:
        return self.is_over and self.num_unasked < _MOST

    def watching(self, pair: HookPair) -> HookPair:
        """Return watching hooks that do the same for a forward; warn if too many forwards went unasked before it."""
        if self.num_unasked >= _MOST:
            self.is_over = True
            warn_user(
                f"{self._title}: {self.num_unasked} forwards saved tensors for a backward, and none came. What is done with "
                "these tensors only costs time then. Call loss.backward() on what the forward returns; put forwards that only "
                "evaluate under torch.no_grad(), where nothing is saved"
            )
            return pair
        (pack, unpack), graph = pair, _Graph(self)

        def watched_pack(tensor: Tensor) -> tuple[Any, _Graph]:
            packed = pack(tensor)
            graph.is_used = True
            return packed, graph

        def watched_unpack(held: tuple[Any, _Graph]) -> Tensor:
            self.is_over = True
            return unpack(held[0])

        return watched_pack, watched_unpack


class _Graph:
    is_used = False

    def __init__(self, among: Unasked) -> None:
        self._among = among

    def __del__(self) -> None:
        if self.is_used and not self._among.is_over:  # never, if `__init__` was interrupted
            self._among.num_unasked += 1


NO_PAIR: HookPair = (KeptHandle, KeptHandle.unpack)
"""Stands for no hooks at all."""


class Stage(ABC):
    moves: ClassVar[bool]
    is_untouched = True
    """Another stage may still take its place."""
    model: nn.Module | None = None
    """The module that the context is attached to; None if it was entered by `with`."""

    @property
    def take_own(self) -> Callable[[Tensor], KeptHandle]:
        """The function for tensors that come from autograd itself, rather than a stage before this one."""
        return self.take

    def begin(self) -> None:  # noqa: B027  # some stages have nothing to begin or to end
        """Called once the hooks are on."""

    def take_off(self) -> None:  # noqa: B027
        """Undo the effects of `begin`; may be called again."""

    def end(self, *, has_failed: bool) -> None:  # noqa: B027
        """Called when no more tensors come; again, if an interrupt broke it off."""

    @abstractmethod
    def take(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        """Return the handle for a tensor that autograd saves, by the action that the user or a stage before decided."""

    @abstractmethod
    def mark(self, tensor: Tensor, action: Action) -> None:
        """Apply a user's mark to the present contents of a tensor, here or in the next stage."""


def handing_on(
    moving: Stage | None, outer: SavedTensorHooks | None, *, is_checked: bool = True
) -> Callable[[Tensor], KeptHandle]:
    """Return a function that gives tensors to the next stage, else to outer hooks, else keeps them. With `is_checked`, a later
    write to a tensor in outer hooks raises, but for classes with `__torch_dispatch__`."""
    if moving is not None:
        return moving.take
    if outer is None:
        return KeptHandle
    return functools.partial(ForwardedHandle, pack=outer.pack, unpack=outer.unpack, is_checked=is_checked)


class Entry:
    """One `with` block of a context, which tells whether the user is still in it. If it is the last, no context may be entered
    inside, since that would hide tensors from this one."""

    def __init__(self, name: str, tag: str, *, is_last: bool, block: Block | None) -> None:
        self.kind = name
        self.tag = tag
        self.is_last = is_last
        self.block = block
        self.recording: Stage | None = None
        self.moving: Stage | None = None
        self.around: Entry | None = None
        """If the same context has a second entry, the stages here leave other tensors to it."""
        self.unasked: Unasked | None = None
        self.door: HookSet | None = None
        """Hooks on the module that is called first, until its call."""
        self._take: Callable[[Tensor], KeptHandle] = KeptHandle
        self._hooks: SavedTensorHooks | None = None
        self.name = f'{name} (tag "{tag}")'

    @property
    def stages(self) -> list[Stage]:
        return [stage for stage in (self.recording, self.moving) if stage is not None]

    def begin(self, pair: HookPair | None = None) -> None:
        """Set the hooks, by default those that give each tensor to the first stage. With `NO_PAIR` there are none."""
        try:
            if pair is NO_PAIR:
                _bare.entries.append((len(stacked_owners()), self))
            else:
                pair = pair or (self.pack, unpack)
                if self.unasked is not None and not self.unasked.is_over:
                    pair = self.unasked.watching(pair)
                self._hooks = SavedTensorHooks(*pair, owner=self, name=self.name, block=self.block)
                self._hooks.__enter__()
            for stage in reversed(self.stages):
                stage.begin()
                self._take = stage.take_own
        except BaseException:
            self._take_off()
            raise

    def pack(self, tensor: Tensor) -> KeptHandle:
        return KeptHandle(tensor) if torch_private.backward_task() != -1 else self._take(tensor)

    def end(self, *, has_failed: bool) -> None:
        """End, since the context was left. Called again if an interrupt broke it off."""
        self._take_off()
        self._hooks, self._take = None, KeptHandle  # the hooks hold `pack`, and so the entry
        try:
            for stage in self.stages:
                stage.end(has_failed=has_failed)
            self.recording = self.moving = None
        finally:
            if self.around is not None:
                self.around.end(has_failed=has_failed)
                self.around = None

    def begin_anew(self, stage: Stage, pair: HookPair) -> None:
        """Go on with another stage in place of the recording one, which is untouched."""
        self.end(has_failed=True)
        self.recording = stage
        self.begin(pair)

    def _take_off(self) -> None:
        if self.door is not None:
            self.door.remove()
            self.door = None
        for stage in self.stages:
            stage.take_off()
        if self._hooks is not None:
            self._hooks.__exit__()  # last: while the hooks are on, `end_left` also ends the others
        else:
            _bare.entries[:] = [found for found in _bare.entries if found[1] is not self]

    def stop_recording(self) -> None:
        recording = self.recording
        if recording is not None and self.moving is not None:
            self._take = self.moving.take_own
            recording.take_off()
            self.recording = None  # before its end, after which it answers no requests
            recording.end(has_failed=False)


class _Bare(threading.local):
    """A thread's entries that have no hooks, the innermost last, each with the number of hook pairs around it."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, Entry]] = []


_bare = _Bare()


def entries_around() -> list[Entry]:
    for _, entry in _bare.entries[::-1]:
        if entry.block is not None and entry.block() is None:
            entry.end(has_failed=True)  # an interrupt has prevented its end
    owners = list(enumerate(stacked_owners(), start=1))
    around = sorted([*owners, *_bare.entries], key=operator.itemgetter(0)) if _bare.entries else owners
    return [owner for _, owner in reversed(around) if isinstance(owner, Entry)]


def moving_in(outer: SavedTensorHooks | None) -> Stage | None:
    return outer.owner.moving if outer is not None and isinstance(outer.owner, Entry) else None


def refuse_in_budget(title: str) -> None:
    """Raise `ValueError` inside a `MemoryBudget` of this thread. `title` names the entered context."""
    for entry in entries_around():
        if entry.kind == "MemoryBudget":
            raise ValueError(
                f"{title} was entered inside a {entry.name}, which plans for itself: one budget holds for all that is saved. "
                "Use one of the two, and memkit.keep, memkit.offload or memkit.recompute for parts of a model"
            )


def stop_recording() -> None:
    for entry in entries_around():
        entry.stop_recording()


def is_within(tag: str) -> bool:
    return any(entry.tag == tag for entry in entries_around())


def unpack(packed: Any) -> Tensor:
    if torch_private.num_dispatch_modes():
        from memkit.recording.recorder import hide_recorders  # a mode is on, perhaps one: else its base need not be looked up

        hide_recorders()
    kind = type(packed)
    if kind is tuple:
        alias, version = packed
        if torch_private.version_of(alias) != version:
            raise modified_error(alias, version)
        return alias  # type: ignore[no-any-return]  # a tensor that stays
    if kind is ScheduledHandle:
        return packed[0].forward.unpack(packed)  # type: ignore[no-any-return]
    return packed.unpack()  # type: ignore[no-any-return]
