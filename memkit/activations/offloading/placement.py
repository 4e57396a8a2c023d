"""The prepared copies of a schedule, from and to the host memory that a forward holds."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from memkit.device.base import CopyBatch, Device, Piece, Stream, busy_s_of
from memkit.sizes import ALIGNMENT_BYTES, rounded
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes, copy_by_turns

if TYPE_CHECKING:
    from memkit.activations.offloading.schedule import Schedule


_MOST_STALL = 1 / 20
"""A backward has hardly waited for its copies if it was for no more than this share of the time that they took."""


class Placement:
    """The prepared copies of a schedule from and to given spans. Forwards that are alive at once never share one."""

    def __init__(self, schedule: Schedule, spans: Sequence[Span | None], device: Device, lanes: Lanes) -> None:
        self._device, self._lanes = device, lanes
        self._pieces: dict[int, list[tuple[int, Tensor]]] = {}
        for span, is_rest in zip(spans, (False, True), strict=True):
            if span is None:
                continue
            edges, start = list(itertools.accumulate((piece.numel() for piece in span.pieces), initial=0)), 0
            for batch in schedule.copies.out:
                for value in batch:
                    if (value in schedule.rest) is is_rest:
                        num_bytes = schedule.sizes_bytes[value]
                        self._pieces[value] = list(_parts(span.pieces, edges, start, num_bytes))
                        start += rounded(num_bytes, ALIGNMENT_BYTES)
        self.out = self._prepare(schedule.copies.out, lanes.out_by_turns, is_out=True, by_turns=schedule.takes_turns)
        self.back = [
            self._prepare(part.back, lanes.back_by_turns, is_out=False, by_turns=schedule.takes_turns_back)
            for part in schedule.parts
        ]
        """For each backward."""
        self._alone: dict[tuple[int, bool], CopyBatch] = {}

    def _prepare(
        self, batches: Sequence[Sequence[int]], streams: tuple[Stream, Stream], *, is_out: bool, by_turns: bool
    ) -> list[CopyBatch]:
        made = list[CopyBatch]()
        for values in batches:
            pieces, ahead = self._of(values), made[-1] if made else None
            if by_turns:
                made.append(copy_by_turns(self._device, streams, pieces, is_out=is_out, ahead=ahead))
            else:
                made.append(self._device.copy_batch(streams[0], pieces, is_out=is_out))
        return made

    def has_come_back(self) -> bool:
        """Tell whether backwards have waited for copies to the device, and all of these are done.

        The last one may be of an earlier step than others, if a backward has ended before it came to that.
        """
        came = self._came()
        return bool(came) and all(batch.done.is_reached() for batch in reversed(came))

    def has_come_early(self) -> bool:
        """Tell whether backwards have hardly waited for copies to the device, of which `has_come_back` has told that they are
        done."""
        came = self._came()
        return sum(batch.stall_s() for batch in came) <= _MOST_STALL * busy_s_of(came)

    def _came(self) -> list[CopyBatch]:
        return [batch for part in self.back for batch in part if batch.waited is not None]

    def _of(self, values: Sequence[int]) -> list[Piece]:
        return [
            Piece(index, start, host, host.data_ptr(), host.numel())
            for index, value in enumerate(values)
            for start, host in self._pieces[value]
        ]

    def copy_alone(self, value: int, *, is_out: bool) -> CopyBatch:
        """Return the copy of a single value, for a step that deviates."""
        found = self._alone.get((value, is_out))
        if found is None:
            lane = self._lanes.out if is_out else self._lanes.back
            found = self._alone[value, is_out] = self._device.copy_batch(lane, self._of([value]), is_out=is_out)
        return found


def _parts(pieces: Sequence[Tensor], edges: Sequence[int], start: int, num_bytes: int) -> list[tuple[int, Tensor]]:
    """Return the host memory of some bytes of a span, cut where its pieces meet, with where each part begins."""
    found, at = [], start
    index = bisect_right(edges, start) - 1
    while at < start + num_bytes:
        end = min(edges[index + 1], start + num_bytes)
        found.append((at - start, pieces[index][at - edges[index] : end - edges[index]]))
        at, index = end, index + 1
    return found
