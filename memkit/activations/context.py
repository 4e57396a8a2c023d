"""What a context for saved tensors offers beside `with`, so that `attach` can put it around each forward of a module."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from memkit.activations.stats import SavedTensorStats, stats
from memkit.hooks import stacked_owners
from memkit.interrupts import Exclusive
from memkit.kept import KeptHandle
from memkit.plan import Action


@runtime_checkable
class Mover(Protocol):
    """What is there while a context is entered that moves saved tensors to host memory."""

    def take(self, tensor: Tensor, action: Action | None) -> KeptHandle:
        """Return the handle of a tensor that a context inside does not drop.

        Args:
            tensor: the real one, with grad mode off.
            action: what to do with it; by default the context decides.
        """

    def mark(self, tensor: Tensor, action: Action) -> None:
        """Do this with what is in a tensor now."""


_Context = TypeVar("_Context", bound="ForwardContext")


class TaggedEntry:
    """One time in a context under a tag, from `with` to its end: the owner of its hooks."""

    tag: str


def is_within(tag: str) -> bool:
    """Tell whether this thread is in a context under a tag."""
    return any(isinstance(owner, TaggedEntry) and owner.tag == tag for owner in stacked_owners())


class ForwardContext(Exclusive):
    """A context around forwards. One object is entered once at a time; `again` makes another that does the same."""

    tag = ""
    """Under which it keeps what it learns; "" where it learns nothing."""
    goes_outside = False
    """Whether it is entered ahead of others that are attached to the same module, whichever was attached first."""
    _entry: Any = None
    """What is there while it is entered."""

    @abstractmethod
    def __enter__(self) -> ForwardContext: ...

    @property
    def plan(self) -> Any:
        """What it follows under its tag; None before there is one, and for what plans nothing."""
        return None

    def stats(self) -> SavedTensorStats:
        """Return what contexts did under its tag: see `memkit.stats`.

        Raises:
            ValueError: it has no tag, or nothing was done under it.
        """
        if not self.tag:
            raise ValueError(f"stats needs a context with a tag; found {self!r}. Ask the CPUOffload that it is in")
        return stats(self.tag)

    def end_block(self, *, has_failed: bool) -> None:
        try:
            if self._entry is not None:
                self._entry.end(has_failed=has_failed)
        finally:
            self._entry = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy does the same, and nobody is in it."""
        return {**self.__dict__, "_entry": None, "_looked_up": None, "_block": None, "is_entered": False}

    def again(self: _Context) -> _Context:
        """Return a context that does the same, and was not entered yet. Cheap: it is called before each forward."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, _entry=None, _looked_up=None, _block=None, is_entered=False)
        return made

    def attached_to(self, model: nn.Module) -> ForwardContext:
        """Return the context to be entered around each forward of a model."""
        return self

    def enter_with(self, resident: Mapping[int, weakref.ref[torch.UntypedStorage]]) -> None:
        """Enter; the storages in `resident`, by their keys (`storages.storage_key`), are held by others in any case."""
        self.__enter__()
