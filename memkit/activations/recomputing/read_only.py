"""What is known from one step to the next of a module whose forward only reads its buffers. It holds nothing of the module."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

_MOST_CLONED_BYTES = 2**16
"""Up to this size a recompute reads a clone of a buffer: should a forward write to that after all, it is still exact."""


class LearnedReads:
    """What the last step has learned of a module's buffers, for the next one."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: ReadOnly | None = None
        """How all was when they were only read; None if they were not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOnly:
    """How a module was when its forward wrote to no buffer. A forward that finds it like that is expected to do the same.

    Not seen is what decides that elsewhere: in a global, or in what the module is given.
    """

    flags: tuple[bool, ...]
    """Which parts train."""
    attributes: tuple[Any, ...]
    """The values of their plain attributes."""
    names: tuple[str, ...]
    """The names of these."""
    nums_attributes: tuple[int, ...]
    """How many attributes of any kind each part has."""
    parts: tuple[weakref.ref[nn.Module], ...]
    buffers: tuple[weakref.ref[Tensor] | None, ...]
    versions: tuple[int, ...]
    """Those of the buffers."""
    small: tuple[int, ...]
    """The places of the small ones."""

    def is_of(self, parts: Sequence[nn.Module], buffers: Sequence[Tensor | None]) -> bool:
        """Tell whether these are the same."""
        return (
            len(parts) == len(self.parts)
            and len(buffers) == len(self.buffers)
            and all(map(is_, map(weakref.ref.__call__, self.parts), parts))
            and all(map(is_, [known and known() for known in self.buffers], buffers))
        )


def small_of(clones: dict[int, Tensor]) -> tuple[int, ...]:
    """Return the places of the buffers that are cloned for each recompute."""
    return tuple(place for place, clone in clones.items() if clone.untyped_storage().nbytes() <= _MOST_CLONED_BYTES)
