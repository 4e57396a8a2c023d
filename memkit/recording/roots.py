"""Roots, which replays start from and which nothing in a recording makes; and other values that are held."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from memkit import torch_private
from memkit.owners import owner_of
from memkit.torch_state import sharing_counters

if TYPE_CHECKING:
    from memkit.recording.recording import Recording

_MOST_STATISTICS = 2**16
"""Statistics have at most this many channels."""

recordings_over: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()
"""By their ids, recordings of forwards that are over and whose graphs live: they copy what a later forward writes to."""


class Root:
    """A value that nothing here makes: referred to weakly until something is to be recomputed from it, held from then on."""

    __slots__ = ("alias", "is_inside", "is_lost", "lent", "num_bytes", "seen", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, version: int | None, *, is_inside: bool) -> None:
        owner = owner_of(storage)
        self.lent = None if owner is None else owner.lend(tensor)
        """Returns the tensor again, if its storage has other contents at times."""
        self.tensor = weakref.ref(tensor)
        self.storage = weakref.ref(storage)
        self.num_bytes = storage.nbytes()
        self.version = version
        """The tensor's version when it was seen; None between a write and the next op, and if the tensor counts no writes."""
        self.seen: int | None = None
        """The same, once a copy is held: `version` is the copy's then."""
        self.is_inside = is_inside
        """Whether it was made here by an op that can't run again, so that nothing else may hold it."""
        self.is_lost = False
        """Whether it was overwritten, or may have been."""
        self.alias: Tensor | None = None

    def living(self) -> Tensor | None:
        """Return the tensor, or the alias that is held, if it has the same storage and contents; else None."""
        tensor = self.tensor() if self.alias is None else self.alias
        if tensor is None or (self.alias is None and tensor.untyped_storage() is not self.storage()):
            return None
        is_as_seen = not self.is_lost and (self.version is None or torch_private.version_of(tensor) == self.version)
        return tensor if is_as_seen else None

    @property
    def is_rewritten(self) -> bool:
        """Whether the tensor is alive and was written to since it was seen. Parameters don't count: they may be stepped within
        the backward, behind their last use, and autograd itself refuses earlier writes."""
        tensor, version = self.tensor(), self.version if self.seen is None else self.seen
        if tensor is None or version is None or tensor.requires_grad:
            return False
        return torch_private.version_of(tensor) != version

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


def retained_bytes(roots: Mapping[int, Root]) -> dict[int, int]:
    """Return the bytes of the roots that are gone unless they are held.

    These are roots made here, overwritten, or gone by now. If the storage is the caller's, holding them takes no bytes.
    """
    found = {}
    for value, root in roots.items():
        if root.is_inside or root.is_lost:
            found[value] = root.num_bytes
        elif root.alias is None and root.lent is None and root.living() is None:
            found[value] = 0 if root.storage() is not None else root.num_bytes
    return found


def rewritten_bytes(roots: Mapping[int, Root], overwritten: Container[int]) -> dict[int, int]:
    """Return the bytes of the roots that were written to since they were seen, but for those `overwritten` by recorded ops."""
    return {value: root.num_bytes for value, root in roots.items() if root.is_rewritten and value not in overwritten}


def may_be_statistics(tensor: Tensor) -> bool:
    """Tell whether a tensor from before the forward may be statistics of a norm, whose writes raise no version counter."""
    is_vector = tensor.dim() == 1 and len(tensor) <= _MOST_STATISTICS
    return is_vector and tensor.is_floating_point() and not tensor.requires_grad
