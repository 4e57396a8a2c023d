"""Roots, which replays start from and which nothing in a recording makes; and other values that are held."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from memkit import torch_private
from memkit.owners import owner_of
from memkit.torch_state import sharing_counters


class Root:
    """A value that nothing here makes: referred to weakly until something is to be recomputed from it, held from then on."""

    __slots__ = ("alias", "is_inside", "is_lost", "lent", "num_bytes", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, version: int | None, *, is_inside: bool) -> None:
        owner = owner_of(storage)
        self.lent = None if owner is None else owner.lend(tensor)
        """Returns the tensor again, if its storage has other contents at times."""
        self.tensor = weakref.ref(tensor)
        self.storage = weakref.ref(storage)
        self.num_bytes = storage.nbytes()
        self.version = version
        """The tensor's version when it was seen; None just after a write, until the next op, and if the tensor counts no writes."""
        self.is_inside = is_inside
        """Whether it was made here by an op that can't run again, so that nothing else may hold it."""
        self.is_lost = False
        """Whether it was overwritten, or may have been."""
        self.alias: Tensor | None = None

    def living(self) -> Tensor | None:
        """Return the tensor, or the alias that is held, if it has the same storage and contents; else None."""
        if self.alias is not None:
            return self.alias if self._is_as_seen(self.alias) else None
        tensor = self.tensor()
        return tensor if tensor is not None and tensor.untyped_storage() is self.storage() and self._is_as_seen(tensor) else None

    def _is_as_seen(self, tensor: Tensor) -> bool:
        return not self.is_lost and (self.version is None or torch_private.version_of(tensor) == self.version)

    def held_storage(self) -> torch.UntypedStorage:
        """Return the storage of a root that is held, after checking that it is unchanged.

        Raises:
            RuntimeError: it was written to, or resized, without the recorder seeing it.
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
    """A value that is held so that others can be recomputed from it."""

    version: Any
    """The version when it was held, None while an op is writing to it."""

    @property
    def alias(self) -> Any:
        """A tensor that shares its bytes and its version counter."""


class Holder(Protocol):
    """Holds *anchors*: values made in the forward that a plan needs. It is called from within an op."""

    def hold(self, value: int, tensor: Tensor) -> Held:
        """Hold a value from now on."""

    def copy(self, value: int) -> None:
        """Called before an op overwrites a value: hold a copy instead, if the value is held."""

    def release(self, value: int) -> None:
        """Stop holding a value, if it is held."""


def alias_in_dispatch(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor that shares its version counter, although autograd's layers are off inside a dispatch
    mode."""
    with sharing_counters(), torch_private.without_python_dispatch(), torch.no_grad():
        return tensor.detach()


def written_error() -> RuntimeError:
    """Return the error to raise if a saved tensor was written to that others are recomputed from and that can't be
    recomputed."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a saved tensor, from "
        "which others are recomputed. Hint: write to it after the backward, or mark with memkit.keep what is computed from it."
    )
