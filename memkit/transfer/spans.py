"""`Span`: host memory that was allocated from an arena."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from memkit.device.base import Event

if TYPE_CHECKING:
    from memkit.transfer.staging import Staging

ALIGNMENT_BYTES = 512
Range = tuple[int, int]
"""Where bytes start and end in the arena's addresses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """Allocated host memory: `num_bytes` at `offset`, or scattered over several `ranges` of which that is the first.

    `pieces` are its bytes, in order: tensors of dtype uint8, cut where pinned segments meet, since one copy must not cross such
    an edge. Work that writes to the span waits for `free_events` first: copies that may still read what was there before.
    """

    offset: int
    num_bytes: int
    pieces: tuple[Tensor, ...]
    free_events: tuple[Event, ...]
    ranges: tuple[Range, ...]
    whole: Tensor | None
    """All its bytes as one tensor, also across such edges: for the host. None if it is scattered."""
    staging: Staging | None
    """Used by `Lanes` to copy from and to it if it is not pinned; None if it is pinned."""

    def part(self, start: int, end: int) -> Span:
        """Return some bytes of a span that was pinned as one, as a span. Only the whole is given back."""
        assert self.whole is not None
        assert len(self.pieces) == 1
        piece = self.whole[start:end]
        return replace(self, offset=self.offset + start, num_bytes=end - start, pieces=(piece,), ranges=(), whole=piece)


def rounded(num_bytes: int, to: int) -> int:
    """Return a number of bytes, rounded up to a multiple."""
    return -(-num_bytes // to) * to
