"""What is remembered from one step to the next of a module whose forward only reads its buffers. It holds nothing of the
module."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

_MOST_CLONED_BYTES = 2**16
"""Up to this size, a recompute reads a clone of a buffer, and is exact even if the forward does write to it."""


class LearnedReads:
    """What the last step has learned of a module's buffers, for the next one."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: ReadOnly | None = None
        """The state in which the forward only read its buffers; None if it wrote to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOnly:
    """The state of a module whose forward wrote to no buffer. A forward in the same state is expected to write to none either.

    This can't be known if the forward depends on something else, such as a global or its inputs.
    """

    flags: tuple[bool, ...]
    """The training flag of each submodule."""
    attributes: tuple[Any, ...]
    """The values of their plain attributes."""
    names: tuple[str, ...]
    """The names of these attributes."""
    nums_attributes: tuple[int, ...]
    """How many attributes of any type each submodule has."""
    parts: tuple[weakref.ref[nn.Module], ...]
    buffers: tuple[weakref.ref[Tensor] | None, ...]
    versions: tuple[int, ...]
    """The versions of the buffers."""
    small: tuple[int, ...]
    """The indices of the small buffers."""

    def is_of(self, parts: Sequence[nn.Module], buffers: Sequence[Tensor | None]) -> bool:
        """Tell whether this is about the given submodules and buffers."""
        return (
            len(parts) == len(self.parts)
            and len(buffers) == len(self.buffers)
            and all(map(is_, map(weakref.ref.__call__, self.parts), parts))
            and all(map(is_, [known and known() for known in self.buffers], buffers))
        )


def small_of(clones: dict[int, Tensor]) -> tuple[int, ...]:
    """Return the indices of the buffers that are cloned for each recompute."""
    return tuple(place for place, clone in clones.items() if clone.untyped_storage().nbytes() <= _MOST_CLONED_BYTES)
