"""`Schedule`: the copies of a step, ahead of it; `PlacedCopies`: the same copies from and to given host memory."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memkit.activations.saved.traces import NO_VALUE, SeenSave, Trace
from memkit.core.kept import nothing
from memkit.core.sizes import ALIGNMENT_BYTES, rounded
from memkit.core.tensors import Geometry, extent
from memkit.device.base import CopyBatch, Device, Piece, Stream, busy_s_of
from memkit.plan import Plan
from memkit.plan.copies import CopySchedule, schedule_copies
from memkit.plan.plans import Action
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes, copy_by_turns

_MOST_PASSED = 64
_MOST_LOOKS = 3
_MAX_PLACES = 4
_MOST_STALL = 1 / 20
"""A backward hardly waited for its copies if it waited for at most this share of their time."""


@dataclass(eq=False, slots=True)
class ScheduledSave(SeenSave):
    """`before` is the value, moved as well, that the same storage was saved as before; else `NO_VALUE`."""

    is_moved: bool
    is_rest: bool
    is_first: bool
    stays: bool
    """Nothing is done with it, even at its request; other actions may be due with the save."""
    num_sent: int
    num_released: int
    nothing: Tensor | None


class Schedule:
    """The copies of forwards of one trace at one ratio, one forward at a time: each part is for one backward."""

    def __init__(
        self,
        seen: Sequence[SeenSave],
        window_bytes: int,
        leaving: frozenset[int],
        parts: Sequence[CopySchedule],
        device: Device,
        num_values: int,
        requests: Sequence[Sequence[int]],
    ) -> None:
        copies = self.copies = parts[0]
        self.parts, self.num_values = parts, num_values
        self.num_passed = self._num_refused = 0
        """How many more forwards go without it, since host memory is short: some values may find room."""
        self.sizes_bytes = {save.value: save.num_bytes for save in seen if save.value != NO_VALUE}
        self.rest = leaving.difference(*requests)
        """Moved values that no backward asks for: they may outlive the backwards."""
        self.saves = self._saves(seen, leaving, device.torch_device)
        self.num_requests = [[0] * num_values for _ in parts]
        for counted, asking in zip(self.num_requests, requests, strict=True):
            for value in asking:
                counted[value] += 1
        num_handles = Counter(save.value for save in self.saves)
        self.whole: list[tuple[torch.Size, tuple[int, ...], torch.dtype] | None] = [None] * num_values
        """For each value that one request covers whole, its geometry in the storage."""
        for save in self.saves:
            is_alone = save.is_moved and num_handles[save.value] == 1
            is_alone = is_alone and max(counted[save.value] for counted in self.num_requests) == 1
            if is_alone and save.geometry is not None and is_all_of(save.geometry, save.num_bytes):
                self.whole[save.value] = save.geometry.size, save.geometry.stride, save.geometry.dtype
        self.batch_of = {value: number for number, batch in enumerate(copies.out) for value in batch}
        self.behind = [[max(self.batch_of[value] for value in batch) for batch in part.back] for part in parts]
        """For each fetched batch of each backward, the last moved batch with one of its values."""
        # the figures that a forward adds to `Counts` if it follows the schedule to its end
        self.seen_bytes, self.unique_bytes = sum(save.seen_bytes for save in seen), sum(self.sizes_bytes.values())
        self.kept_bytes = self.unique_bytes - sum(self.sizes_bytes[value] for value in leaving)
        self.window_bytes, self.peak_bytes = window_bytes, self._peak_bytes(requests)
        self.host_bytes = tuple(
            sum(rounded(self.sizes_bytes[value], ALIGNMENT_BYTES) for value in values)
            for values in (leaving - self.rest, self.rest)
        )
        """Its bytes in the arena, in one span for requested values and one for the rest; 0 for none."""
        self.takes_turns = self.takes_turns_back = False
        """Copies to the host, and copies to the device, take turns on two streams."""
        self._num_looks = 0
        self._placed: dict[object, PlacedCopies] = {}

    def _saves(self, seen: Sequence[SeenSave], leaving: Collection[int], torch_device: torch.device) -> list[ScheduledSave]:
        asked = {value for part in self.parts for value in part.requests}
        befores, made = dict[int, int](), list[ScheduledSave]()
        for place, save in enumerate(seen):
            value, is_moved, is_first = save.value, save.value in leaving, save.value not in befores
            before = save.before if is_moved and is_first else NO_VALUE
            while before != NO_VALUE and before not in leaving:
                before = befores[before]
            if value != NO_VALUE:
                befores.setdefault(value, save.before)
            made.append(
                ScheduledSave(
                    **{name: getattr(save, name) for name in SeenSave.__slots__} | {"before": before},
                    is_moved=is_moved,
                    is_rest=value in self.rest,
                    is_first=is_first,
                    stays=not (is_moved or value in asked),
                    num_sent=self.copies.num_sent[place],
                    num_released=self.copies.num_released[place],
                    nothing=nothing(save.dtype, torch_device) if is_moved and save.dtype is not None else None,
                )
            )
        return made

    def note_no_room(self) -> None:
        """Note that there is no host memory for it: some forwards do without it, more each time, up to `_MOST_PASSED`."""
        self._num_refused += 1
        self.num_passed = min(2**self._num_refused, _MOST_PASSED)

    def pass_once(self) -> bool:
        if self.num_passed:
            self.num_passed -= 1
            return True
        return False

    def _peak_bytes(self, requests: Sequence[Sequence[int]]) -> int:
        """Return the most bytes of its values on the device. A value that stays is freed by its last requesting backward."""
        copies, sizes_bytes = self.copies, self.sizes_bytes
        gone = {value for batch in copies.out[: copies.num_released[-1]] for value in batch}
        live = set(sizes_bytes) - gone
        live_bytes, peak_bytes = sum(sizes_bytes[value] for value in live), copies.peak_bytes
        for number, (part, asked) in enumerate(zip(self.parts, requests, strict=True), start=1):
            due, last = dict(zip(part.requests, part.num_fetched, strict=True)), {value: at for at, value in enumerate(asked)}
            num_fetched = 0
            for at, value in enumerate(asked):
                coming = {value, *(each for batch in part.back[num_fetched : due.get(value, 0)] for each in batch)} - live
                num_fetched = max(num_fetched, due.get(value, 0))
                live |= coming
                live_bytes += sum(sizes_bytes.get(each, 0) for each in coming)
                peak_bytes = max(peak_bytes, live_bytes)
                if last[value] == at and (value in self.batch_of or number == len(requests)):
                    live.discard(value)
                    live_bytes -= sizes_bytes.get(value, 0)
        return peak_bytes

    def see_to_turns(self, placement: PlacedCopies) -> None:
        """Let copies take turns from the next forward on, by direction, if a step need not wait for them: see [Note: copies by
        turns] in `transfer.lanes`. If the host is ahead of all copies, nothing is known."""
        before = self.takes_turns, self.takes_turns_back
        if not self.takes_turns and placement.out and placement.out[-1].done.is_reached():
            self.takes_turns = True
        if not self.takes_turns_back and self._num_looks < _MOST_LOOKS and placement.has_come_back():
            self._num_looks += 1
            self.takes_turns_back = placement.has_come_early()
        if before != (self.takes_turns, self.takes_turns_back):
            self._placed.clear()

    def place(self, spans: Sequence[Span | None], device: Device, lanes: Lanes) -> PlacedCopies:
        key = tuple(
            None if span is None else (span.offset, span.ranges, tuple(piece.data_ptr() for piece in span.pieces))
            for span in spans
        )
        found = self._placed.get(key)
        if found is None:
            if len(self._placed) == _MAX_PLACES:
                del self._placed[next(iter(self._placed))]
            found = self._placed[key] = PlacedCopies(self, spans, device, lanes)
        return found


def is_all_of(geometry: Geometry, num_bytes: int) -> bool:
    if geometry.offset != 0 or geometry.is_conj or geometry.is_neg or 0 in geometry.size:
        return False
    return extent(geometry.size, geometry.stride) * geometry.dtype.itemsize == num_bytes


def make_schedule(trace: Trace, plan: Plan, device: Device) -> Schedule:
    """Return the schedule of a trace. The forecast of the device's bytes counts if there is one backward alone."""
    seen, requests = trace.seen, trace.requests
    assert seen is not None
    assert requests is not None
    limit_bytes = max(int(plan.limit_bytes), plan.window_bytes)
    sizes_bytes = {save.value: save.num_bytes for save in seen if save.value != NO_VALUE}
    # moving an overwritten value that no backward asks for frees nothing, and the copy would race with the write
    idle = {save.before for save in seen}.difference(*requests)
    leaving = frozenset(value for value in sizes_bytes if plan.saves[value].action is Action.OFFLOAD and value not in idle)
    ready = ready_at(seen)
    parts = [
        schedule_copies(
            sizes_bytes,
            leaving,
            saves=[save.value for save in seen],
            ready=ready,
            requests=[value for value in asked if value in sizes_bytes],
            limit_bytes=limit_bytes,
            forecast=trace.forecast(plan, limit_bytes) if len(requests) == 1 else None,
        )
        for asked in requests
    ]
    visible = leaving.union(*(part.requests for part in parts))
    told = [(_told(part, asked, visible), asked) for part, asked in zip(parts, requests, strict=True)]
    told = [(part, asked) for part, asked in told if part.requests] or told[:1]  # the others do nothing
    parts, asked_for = [part for part, _ in told], [asked for _, asked in told]
    return Schedule(seen, plan.window_bytes, leaving, parts, device, len(plan.saves), asked_for)


def _told(part: CopySchedule, asked: Sequence[int], visible: Collection[int]) -> CopySchedule:
    due = dict(zip(part.requests, part.num_fetched, strict=True))
    requests, num_fetched, num = [], [], 0
    for value in dict.fromkeys(asked):
        num = due.get(value, num)
        if value in visible:
            requests.append(value)
            num_fetched.append(num)
    return replace(part, requests=tuple(requests), num_fetched=tuple(num_fetched))


def ready_at(seen: Sequence[SeenSave]) -> dict[int, int]:
    """Return the next save of another node for each value that is saved before it is written."""
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


class PlacedCopies:
    """Prepared copies of a schedule. Forwards that are alive at once never share one."""

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
        """Tell whether backwards have waited for fetches, and all are done: the last may be of an earlier step."""
        came = self._came()
        return bool(came) and all(batch.done.is_reached() for batch in reversed(came))

    def has_come_early(self) -> bool:
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
        found = self._alone.get((value, is_out))
        if found is None:
            lane = self._lanes.out if is_out else self._lanes.back
            found = self._alone[value, is_out] = self._device.copy_batch(lane, self._of([value]), is_out=is_out)
        return found


def _parts(pieces: Sequence[Tensor], edges: Sequence[int], start: int, num_bytes: int) -> list[tuple[int, Tensor]]:
    found, at = [], start
    index = bisect_right(edges, start) - 1
    while at < start + num_bytes:
        end = min(edges[index + 1], start + num_bytes)
        found.append((at - start, pieces[index][at - edges[index] : end - edges[index]]))
        at, index = end, index + 1
    return found
