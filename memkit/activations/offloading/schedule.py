"""All that can be known ahead of a forward that goes as an earlier one did: what becomes of each save, and the copies."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memkit.activations.saved.seen import NO_VALUE, SeenSave
from memkit.device.base import CopyBatch, Device, Piece, Stream
from memkit.kept import nothing
from memkit.plan import CopySchedule, Forecast, Plan, schedule_copies
from memkit.plan.actions import Action
from memkit.storages import Geometry
from memkit.transfer.lanes import Lanes
from memkit.transfer.spans import ALIGNMENT_BYTES, Span, rounded


class ScheduledSave:
    """What becomes of one save."""

    __slots__ = (
        "before",
        "dtype",
        "geometry",
        "is_conj",
        "is_first",
        "is_kept",
        "is_moved",
        "is_neg",
        "is_written",
        "nothing",
        "num_bytes",
        "num_pauses",
        "num_released",
        "num_sent",
        "num_values",
        "offset",
        "shape",
        "stays",
        "stride",
        "value",
    )

    def __init__(
        self, seen: SeenSave, torch_device: torch.device, *, is_moved: bool, is_asked: bool, is_first: bool, num_pauses: int
    ) -> None:
        self.shape, self.dtype, self.value, self.num_bytes = seen.shape, seen.dtype, seen.value, seen.num_bytes
        self.num_values = seen.num_values
        self.is_moved = is_moved
        """Whether it leaves. Else it stays, and its request may be a moment at which something is fetched."""
        self.is_first = is_first
        """Whether it is the first of its value."""
        self.is_written = seen.is_written
        self.before: int | None = None
        """The value that leaves as well, and that the same storage was saved as before; None if there is none."""
        self.is_kept = not (is_moved or is_asked)
        """Whether nothing is done with it, at its request neither."""
        self.num_pauses = num_pauses
        """How many times a region of `no_offload` has begun or ended, if one did so since the save before; else -1."""
        self.stays = self.is_kept and num_pauses < 0
        """Whether nothing is done with it, or asked; what is due with the save may be much."""
        self.geometry: Geometry | None = seen.geometry
        self.stride: tuple[int, ...] | None = None if seen.geometry is None else seen.geometry.stride
        self.offset: int | torch.SymInt | None = None if seen.geometry is None else seen.geometry.offset
        self.is_conj = seen.geometry is not None and seen.geometry.is_conj
        self.is_neg = seen.geometry is not None and seen.geometry.is_neg
        self.nothing: Tensor | None = None
        if is_moved and seen.dtype is not None:
            self.nothing = nothing(seen.dtype, torch_device)
        self.num_sent = self.num_released = 0
        """How many batches are on the lane, and were let go of, once the save was noted."""


@dataclass(frozen=True, slots=True)
class ScheduledTotals:
    """What a forward that follows the schedule adds to what is counted."""

    seen_bytes: int
    unique_bytes: int
    kept_bytes: int
    moved_bytes: int
    window_bytes: int


class Schedule:
    """What forwards of one trace do at one ratio. It serves one of them at a time.

    Args:
        seen: what was saved.
        plan: what leaves.
        copies: when.
        requests: the value of each request of the backward.
        paused: before which saves a region of `no_offload` began, or ended.
    """

    def __init__(
        self,
        seen: Sequence[SeenSave],
        plan: Plan,
        copies: CopySchedule,
        device: Device,
        num_values: int,
        requests: Sequence[int],
        paused: Sequence[int],
    ) -> None:
        self.copies = copies
        self.num_values = num_values
        self.finds_no_room = False
        """Whether host memory is short: some of what leaves may find room as it goes."""
        self.sizes_bytes = {save.value: save.num_bytes for save in seen if save.value != NO_VALUE}
        leaving = {value for value in self.sizes_bytes if plan.saves[value].action is Action.OFFLOAD}
        asked, known = set(copies.requests), set[int]()
        self.saves: list[ScheduledSave] = []
        self.num_handles = [0] * num_values
        """For each value, how many saves it is of."""
        self.num_requests = [0] * num_values
        """For each value, how often the backward asks for it."""
        for value in requests:
            self.num_requests[value] += 1
        pauses = {place: number for number, place in enumerate(paused, start=1)}
        befores: dict[int, int] = {}
        for place, save in enumerate(seen):
            made = ScheduledSave(
                save,
                device.torch_device,
                is_moved=save.value in leaving,
                is_asked=save.value in asked,
                is_first=save.value not in known,
                num_pauses=pauses.get(place, -1),
            )
            if made.is_moved and made.is_first:
                before = save.before
                while before != NO_VALUE and before not in leaving:
                    before = befores[before]
                made.before = None if before == NO_VALUE else before
            if made.is_first:
                befores[save.value] = save.before
            if save.value != NO_VALUE:
                known.add(save.value)
                self.num_handles[save.value] += 1
            made.num_sent, made.num_released = copies.num_sent[place], copies.num_released[place]
            self.saves.append(made)
        self.whole: list[tuple[torch.Size, tuple[int, ...], torch.dtype] | None] = [None] * num_values
        """For each value that is asked for once, as all of its storage, how it lies in that."""
        for made in self.saves:
            geometry = made.geometry
            is_alone = made.is_moved and self.num_handles[made.value] == self.num_requests[made.value] == 1
            if is_alone and geometry is not None and is_all_of(geometry, made.num_bytes):
                self.whole[made.value] = geometry.size, geometry.stride, geometry.dtype
        self.batch_of = {value: number for number, batch in enumerate(copies.out) for value in batch}
        """For each value that leaves, the batch it leaves with."""
        self.fetched_with = {value: number for number, batch in enumerate(copies.back) for value in batch}
        self.behind = [max(self.batch_of[value] for value in batch) for batch in copies.back]
        """For each batch that comes back, the last one of those it left with."""
        moved_bytes = sum(self.sizes_bytes[value] for value in leaving)
        unique_bytes = sum(self.sizes_bytes.values())
        self.totals = ScheduledTotals(
            seen_bytes=sum(save.seen_bytes for save in seen),
            unique_bytes=unique_bytes,
            kept_bytes=unique_bytes - moved_bytes,
            moved_bytes=moved_bytes,
            window_bytes=plan.window_bytes,
        )
        self.host_bytes = sum(rounded(self.sizes_bytes[value], ALIGNMENT_BYTES) for value in leaving)
        """What it takes of the arena, in one span."""
        self.out: list[CopyBatch] = []
        self.back: list[CopyBatch] = []
        self.takes_turns = False
        """Whether copies to the host are on two streams."""
        self._alone: dict[tuple[int, bool], CopyBatch] = {}
        self._pieces: dict[int, list[tuple[int, Tensor]]] = {}
        self._placed: tuple[object, ...] | None = None

    def place(self, span: Span, device: Device, lanes: Lanes) -> None:
        """Make the copies from and to a span of `host_bytes`, unless it lies where the last one did."""
        placed = (span.offset, span.ranges, tuple(piece.data_ptr() for piece in span.pieces))
        if placed == self._placed:
            return
        self._device, self._lanes, self._placed = device, lanes, placed
        edges = list(itertools.accumulate((piece.numel() for piece in span.pieces), initial=0))
        start, self._pieces = 0, {}
        for batch in self.copies.out:
            for value in batch:
                self._pieces[value] = list(_parts(span.pieces, edges, start, self.sizes_bytes[value]))
                start += rounded(self.sizes_bytes[value], ALIGNMENT_BYTES)
        self.out = self._out_by_turns() if self.takes_turns else self._on(lanes.out, self.copies.out, is_out=True)
        self.back = self._on(lanes.back, self.copies.back, is_out=False)
        self._alone = {}

    def take_turns(self) -> None:
        """Have copies to the host take turns from the next forward on: see [Note: copies by turns] in `transfer.lanes`."""
        self.takes_turns, self._placed = True, None

    def _on(self, lane: Stream, batches: Sequence[Sequence[int]], *, is_out: bool) -> list[CopyBatch]:
        return [self._device.copy_batch(lane, self._of(values), is_out=is_out) for values in batches]

    def _out_by_turns(self) -> list[CopyBatch]:
        made: list[CopyBatch] = []
        for number, values in enumerate(self.copies.out):
            stream, ahead = self._lanes.out_by_turns[number % 2], made[-1] if made else None
            made.append(self._device.copy_batch(stream, self._of(values), is_out=True, ahead=ahead))
        return made

    def _of(self, values: Sequence[int]) -> list[Piece]:
        return [
            Piece(index, start, host, host.data_ptr(), host.numel())
            for index, value in enumerate(values)
            for start, host in self._pieces[value]
        ]

    def copy_alone(self, value: int, *, is_out: bool) -> CopyBatch:
        """Return the copy of a single value: for steps that go another way."""
        found = self._alone.get((value, is_out))
        if found is None:
            lane = self._lanes.out if is_out else self._lanes.back
            found = self._alone[value, is_out] = self._device.copy_batch(lane, self._of([value]), is_out=is_out)
        return found


def is_all_of(geometry: Geometry, num_bytes: int) -> bool:
    """Tell whether a tensor begins and ends with its storage of so many bytes, and is read as it is."""
    if geometry.offset != 0 or geometry.is_conj or geometry.is_neg or 0 in geometry.size:
        return False
    last = sum((length - 1) * step for length, step in zip(geometry.size, geometry.stride, strict=True))
    return (1 + last) * geometry.dtype.itemsize == num_bytes


def _parts(pieces: Sequence[Tensor], edges: Sequence[int], start: int, num_bytes: int) -> list[tuple[int, Tensor]]:
    """Return the host memory of some bytes of a span, cut where its pieces meet, with where each part begins."""
    found, at = [], start
    index = bisect_right(edges, start) - 1
    while at < start + num_bytes:
        end = min(edges[index + 1], start + num_bytes)
        found.append((at - start, pieces[index][at - edges[index] : end - edges[index]]))
        at, index = end, index + 1
    return found


def make_schedule(
    seen: Sequence[SeenSave],
    plan: Plan,
    *,
    requests: Sequence[int],
    limit_bytes: int,
    forecast: Forecast | None,
    device: Device,
    paused: Sequence[int],
) -> Schedule:
    """Return the schedule of a trace.

    Args:
        seen: what was saved.
        plan: what leaves.
        requests: the value of each request of the backward.
        limit_bytes: what of these values the device may hold.
        forecast: how full the device is in the backward, None if that is not known.
        paused: before which saves a region of `no_offload` began, or ended.
    """
    sizes_bytes = {save.value: save.num_bytes for save in seen if save.value != NO_VALUE}
    leaving = frozenset(value for value in sizes_bytes if plan.saves[value].action is Action.OFFLOAD)
    copies = schedule_copies(
        sizes_bytes,
        leaving,
        saves=[save.value for save in seen],
        ready=_ready(seen),
        requests=[value for value in requests if value in sizes_bytes],
        limit_bytes=limit_bytes,
        forecast=forecast,
    )
    return Schedule(seen, plan, copies, device, len(plan.saves), requests, paused)


def _ready(seen: Sequence[SeenSave]) -> dict[int, int]:
    """Return for each value that is saved before it is written the next save of another node."""
    ready: dict[int, int] = {}
    known, waiting = set[int](), list[tuple[int, int]]()
    for place, save in enumerate(seen):
        for value, node in waiting:
            if node != save.node:
                ready.setdefault(value, place)
        waiting = [(value, node) for value, node in waiting if value not in ready]
        if save.value != NO_VALUE and save.value not in known:
            known.add(save.value)
            if not save.is_written:
                waiting.append((save.value, save.node))
    ready.update({value: len(seen) for value, _ in waiting})
    return ready
