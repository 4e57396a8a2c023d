"""Values that replays begin with: roots, which nothing in a recording makes, and those that are held on purpose."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from memkit import torch_private
from memkit.owners import owner_of
from memkit.torch_state import sharing_counters


class Root:
    """A value that nothing here makes: weakly known until something is to be made from it, held from then on."""

    __slots__ = ("alias", "is_inside", "is_lost", "lent", "num_bytes", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, version: int | None, *, is_inside: bool) -> None:
        owner = owner_of(storage)
        self.lent = None if owner is None else owner.lend(tensor)
        """Gives the tensor again, where its storage is another's at times."""
        self.tensor = weakref.ref(tensor)
        self.storage = weakref.ref(storage)
        self.num_bytes = storage.nbytes()
        self.version = version
        """Of the tensor's counter when it was seen; None where that is not known, as just after a write."""
        self.is_inside = is_inside
        """Whether it was made here, by what cannot run again, so that nothing else may hold it."""
        self.is_lost = False
        """Whether something else has been written where it was, or may have been."""
        self.alias: Tensor | None = None

    def living(self) -> Tensor | None:
        """Return the tensor, if it is alive, over the storage that it had, and nothing else was written there."""
        tensor = None if self.is_lost else self.tensor()
        return tensor if tensor is not None and tensor.untyped_storage() is self.storage() else None

    def held_storage(self) -> torch.UntypedStorage:
        """Return the storage of a root that is held, and see that it is as it was.

        Raises:
            RuntimeError: it was written to, or resized, behind the recorder's back.
        """
        if self.lent is not None:
            return self.lent().untyped_storage()
        alias = self.alias
        assert alias is not None, "a root that is needed for a replay is not held"
        version = None if self.version is None else torch_private.version_of(alias)
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{alias.type()} {list(alias.size())}], from which Rematerialize makes saved tensors again, is at version "
                f"{version}; expected version {self.version} instead. Hint: write to it after the backward, or mark "
                "with memkit.keep what is computed from it."
            )
        if self.is_lost:
            raise RuntimeError(
                f"one of the variables needed for gradient computation: [{alias.type()} {list(alias.size())}], from which "
                "Rematerialize makes saved tensors again, belongs to an op that has returned it again since, and may have "
                "written to it. Hint: let the op return a copy, or mark with memkit.keep what is computed from what it returns."
            )
        storage = alias.untyped_storage()
        if storage.nbytes() < self.num_bytes:
            raise RuntimeError(
                f"a tensor of {self.num_bytes} bytes, from which Rematerialize makes saved tensors again, has only "
                f"{storage.nbytes()} bytes now: was it resharded since, in the midst of a forward or a backward? Mark with "
                "memkit.keep what is computed from it."
            )
        return storage


class Held(Protocol):
    """A value that is held so that others can be made from it."""

    alias: Any
    """A tensor that shares its bytes and its counter; None if it is not held any more."""
    version: Any
    """Of the tensor's counter when it was held, None where an op is just writing to it."""


class Holder(Protocol):
    """What holds values that were made, and that a plan needs: *anchors*. It is called from within an op."""

    def hold(self, value: int, tensor: Tensor) -> Held:
        """Hold a value from now on."""

    def copy(self, value: int) -> None:
        """An op is about to write over a value: hold a copy instead, if it is held."""

    def release(self, value: int) -> None:
        """Let go of a value, if it is held."""


def alias_in_dispatch(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor that shares its version counter, though autograd's layers are off, as they are in a mode."""
    with sharing_counters(), torch_private.without_python_dispatch(), torch.no_grad():
        return tensor.detach()


def written_error() -> RuntimeError:
    """Return what to raise where a saved tensor was written to that others are made from, and that nothing recomputes."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a saved tensor, from "
        "which others are recomputed. Hint: write to it after the backward, or mark with memkit.keep what is computed from it."
    )
