"""What is known from one step to the next of a module whose forward only reads its buffers. It holds nothing of the module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

_MOST_KEPT_BYTES = 2**16
"""Of a buffer this large what is in it is kept: should a forward write to it after all, that is still exact."""


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
    clones: dict[int, Tensor]
    """By their places, what is in the small ones."""

    def is_of(self, parts: Sequence[nn.Module], buffers: Sequence[Tensor | None]) -> bool:
        """Tell whether these are the same."""
        return (
            len(parts) == len(self.parts)
            and len(buffers) == len(self.buffers)
            and all(map(is_, map(weakref.ref.__call__, self.parts), parts))
            and all(map(is_, [known and known() for known in self.buffers], buffers))
        )

    def clones_of(self, places: Iterable[int], buffers: Sequence[Tensor | None], versions: Sequence[int]) -> dict[int, Tensor]:
        """Return, by their places, what was in buffers that a forward has written to after all, as far as it is known.

        Args:
            places: of these.
            buffers, versions: as the forward has found them.
        """
        found: dict[int, Tensor] = {}
        for place in places:
            known = self.buffers[place] if place < len(self.buffers) else None
            is_same = known is not None and known() is buffers[place] and self.versions[place] == versions[place]
            if is_same and place in self.clones:
                found[place] = self.clones[place]
        return found


def small_of(clones: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the clones of buffers that are worth keeping."""
    return {place: clone for place, clone in clones.items() if clone.untyped_storage().nbytes() <= _MOST_KEPT_BYTES}
