"""`Schedule`: the copies of a step, ahead of it; `PlacedCopies`: the same copies from and to given host memory."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memkit.activations.saved.traces import NO_VALUE, SeenSave, Trace
from memkit.core.kept import nothing
from memkit.core.sizes import ALIGNMENT_BYTES, rounded, total_rounded
from memkit.core.tensors import Geometry, extent
from memkit.device.base import CopyBatch, Device, Piece, busy_s_of
from memkit.plan import Plan
from memkit.plan.copies import CopySchedule, schedule_copies
from memkit.plan.plans import Action
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes, copy_by_turns

_MOST_LOOKS = 3
_MAX_PLACES = 4
_MOST_SIZES = 64
_MOST_STALL = 1 / 20
"""A backward hardly waited for its copies if it waited for at most this share of their time."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ScheduledSave:
    """A save of any size. `before` is the value, moved as well, that the same storage was saved as before; else `NO_VALUE`."""

    place: int
    num_dims: int | None
    """None for a tensor that is not told from others."""
    dtype: torch.dtype | None
    value: int
    is_written: bool
    num_values: int
    before: int
    is_seen: bool
    small_bytes: int
    """If it has no value: the bytes that it had, which may have been too few to move."""
    is_moved: bool
    is_rest: bool
    is_first: bool
    stays: bool
    """Nothing is done with it, even at its request; other actions may be due with the save."""
    num_sent: int
    num_released: int
    nothing: Tensor | None


class Sized:
    """What forwards of one size save, by the places of their saves. A forward of a size that was never seen fills it in."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size | None] = []
        self.seen_bytes: list[int] = []
        self.geometries: dict[int, Geometry] = {}
        self.sizes_bytes: dict[int, int] = {}
        self.whole: dict[int, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
        """For each value that one request covers whole, its geometry in the storage."""
        self.placed: dict[object, PlacedCopies] = {}
        # the figures that a forward adds to `Counts` if it goes to its end
        self.unique_bytes = self.kept_bytes = self.window_bytes = self.peak_bytes = 0
        self.host_bytes = 0, 0
        """Its bytes in the arena, in one span for requested values and one for the rest; 0 for none."""

    def off_by(self, ratio: float) -> float:
        return abs(1 - self.kept_bytes / max(self.unique_bytes, 1) - ratio)

    def fork(self, saves: Sequence[ScheduledSave]) -> Sized:
        made, values = Sized(), {save.value for save in saves}
        made.shapes, made.seen_bytes = self.shapes[: len(saves)], self.seen_bytes[: len(saves)]
        made.sizes_bytes = {value: num_bytes for value, num_bytes in self.sizes_bytes.items() if value in values}
        made.whole = {value: whole for value, whole in self.whole.items() if value in values}
        made.geometries = {place: found for place, found in self.geometries.items() if place < len(saves)}
        return made

    def includes(self, first: Sized) -> bool:
        """Tell whether these are the sizes of its first saves, whose shapes are the same."""
        return first.sizes_bytes.items() <= self.sizes_bytes.items() and first.geometries.items() <= self.geometries.items()


class Schedule:
    """The copies of forwards of one trace at one ratio, whatever their sizes: see [Note: other sizes] in `scheduled`."""

    def __init__(
        self,
        seen: Sequence[SeenSave],
        window_bytes: int | None,
        leaving: frozenset[int],
        parts: Sequence[CopySchedule],
        device: Device,
        num_values: int,
        requests: Sequence[Sequence[int]],
        *,
        min_bytes: int | None = None,
        held: Collection[int] = (),
    ) -> None:
        copies = self.copies = parts[0]
        self.parts, self.num_values, self._requests = parts, num_values, requests
        self.min_bytes = min_bytes
        """Values of other sizes move if they have as many bytes; None if forwards of other sizes do not follow it."""
        self._leaving, self._held, self._window_bytes = leaving, held, window_bytes
        self.rest = leaving.difference(*requests)
        """Moved values that no backward asks for: they may outlive the backwards."""
        self.saves = self._saves(seen, leaving, device.torch_device)
        self.num_requests = [[0] * num_values for _ in parts]
        for counted, asking in zip(self.num_requests, requests, strict=True):
            for value in asking:
                counted[value] += 1
        num_handles = Counter(save.value for save in self.saves)
        self.is_alone = [
            num_handles[value] == 1 and max(counted[value] for counted in self.num_requests) == 1 for value in range(num_values)
        ]
        """Whether one request covers all uses of a value."""
        self.batch_of = {value: number for number, batch in enumerate(copies.out) for value in batch}
        self._placed_values = [
            [value for value in self.batch_of if (value in self.rest) is is_rest] for is_rest in (False, True)
        ]
        """In the order of their batches, those with each span."""
        self.behind = [self._behind(part.back) for part in parts]
        """For each fetched batch of each backward, the last moved batch with one of its values."""
        self.takes_turns = self.takes_turns_back = False
        """Copies to the host, and copies to the device, take turns on two streams."""
        self._num_looks = 0
        self.sizes: list[Sized] = []
        self.most_host_bytes = 0
        self.first = sized = Sized()
        for save, known in zip(self.saves, seen, strict=True):
            sized.shapes.append(known.shape)
            sized.seen_bytes.append(known.seen_bytes)
            if known.value != NO_VALUE:
                sized.sizes_bytes[known.value] = known.num_bytes
            if save.is_moved and known.geometry is not None:
                self.note_geometry(sized, save, known.geometry, known.num_bytes)
        self.sum_up(sized)
        self.keep_size(sized)

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
                    place=place,
                    num_dims=None if save.shape is None else len(save.shape),
                    dtype=save.dtype,
                    value=value,
                    is_written=save.is_written,
                    num_values=save.num_values,
                    before=before,
                    is_seen=save.seen_bytes > 0,
                    small_bytes=save.seen_bytes if value == NO_VALUE else 0,
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

    def note_geometry(self, sized: Sized, save: ScheduledSave, geometry: Geometry, num_bytes: int) -> None:
        sized.geometries[save.place] = geometry
        if self.is_alone[save.value] and is_all_of(geometry, num_bytes):
            sized.whole[save.value] = geometry.size, geometry.stride, geometry.dtype

    def _behind(self, back: Iterable[Sequence[int]]) -> list[int]:
        return [max(map(self.batch_of.__getitem__, values)) for values in back]

    def part_of(self, number: int, num_sent: int) -> tuple[CopySchedule, list[int]]:
        """Return a part and its `behind` for a forward of which only the first batches have left."""
        part, back, num_left = self.parts[number], list[tuple[int, ...]](), [0]
        for values in part.back:
            left = tuple(value for value in values if self.batch_of[value] < num_sent)
            back += [left] if left else []
            num_left.append(len(back))
        num_fetched = tuple(num_left[number] for number in part.num_fetched)
        return replace(part, back=tuple(back), num_fetched=num_fetched), self._behind(back)

    # Sizes

    def sum_up(self, sized: Sized) -> None:
        leaving, held = self._leaving, self._held
        sizes_bytes = {value: num_bytes for value, num_bytes in sized.sizes_bytes.items() if value not in held}
        sized.unique_bytes = sum(sizes_bytes.values())
        sized.kept_bytes = sized.unique_bytes - sum(map(sizes_bytes.__getitem__, leaving))
        largest = max(sizes_bytes.values(), default=0)
        sized.window_bytes = 2 * largest if self._window_bytes is None else self._window_bytes
        sized.peak_bytes = self._peak_bytes(sizes_bytes)
        size_of = sizes_bytes.__getitem__
        sized.host_bytes = (
            total_rounded(map(size_of, leaving - self.rest), ALIGNMENT_BYTES),
            total_rounded(map(size_of, self.rest), ALIGNMENT_BYTES),
        )

    def keep_size(self, sized: Sized) -> None:
        others = [other for other in self.sizes if other.shapes != sized.shapes]
        self.sizes = [sized, *others[: _MOST_SIZES - 1]]
        self.most_host_bytes = max(self.most_host_bytes, sum(sized.host_bytes))

    def size_beginning_with(self, shapes: list[torch.Size | None], shape: torch.Size | None) -> Sized | None:
        """Return the size with these first shapes and this next one that was used last."""
        place = len(shapes)
        for sized in self.sizes:
            if sized.shapes[place] == shape and sized.shapes[:place] == shapes:
                return sized
        return None

    def _peak_bytes(self, sizes_bytes: Mapping[int, int]) -> int:
        """Return the most bytes of its values on the device. A value that stays is freed by its last requesting backward."""
        copies, requests = self.copies, self._requests
        gone = {value for batch in copies.out[: copies.num_released[-1]] for value in batch}
        live = set(sizes_bytes) - gone
        live_bytes, peak_bytes = sum(map(sizes_bytes.__getitem__, live)), self._peak_of_saves(sizes_bytes)
        for number, (part, asked) in enumerate(zip(self.parts, requests, strict=True), start=1):
            due, last = dict(zip(part.requests, part.num_fetched, strict=True)), {value: at for at, value in enumerate(asked)}
            num_fetched = 0
            for at, value in enumerate(asked):
                coming = {value}
                if due.get(value, 0) > num_fetched:
                    for batch in part.back[num_fetched : due[value]]:
                        coming.update(batch)
                    num_fetched = due[value]
                coming -= live
                live |= coming
                for each in coming:
                    live_bytes += sizes_bytes.get(each, 0)
                peak_bytes = max(peak_bytes, live_bytes)
                if last[value] == at and (value in self.batch_of or number == len(requests)):
                    live.discard(value)
                    live_bytes -= sizes_bytes.get(value, 0)
        return peak_bytes

    def _peak_of_saves(self, sizes_bytes: Mapping[int, int]) -> int:
        copies, live_bytes, peak_bytes, num_released = self.copies, 0, 0, 0
        for save in self.saves:
            if save.value != NO_VALUE and save.is_first:
                live_bytes += sizes_bytes.get(save.value, 0)
            peak_bytes = max(peak_bytes, live_bytes)
            for batch in copies.out[num_released : save.num_released]:
                live_bytes -= sum(map(sizes_bytes.__getitem__, batch))
            num_released = save.num_released
        return peak_bytes

    def see_to_turns(self, placement: PlacedCopies) -> None:
        """Let copies take turns from the next forward on where no step waits for them: see [Note: copies by turns]."""
        before = self.takes_turns, self.takes_turns_back
        if not self.takes_turns and placement.out and placement.out[-1].done.is_reached():
            self.takes_turns = True
        if not self.takes_turns_back and self._num_looks < _MOST_LOOKS and placement.has_come_back():
            self._num_looks += 1
            self.takes_turns_back = placement.has_come_early()
        if before != (self.takes_turns, self.takes_turns_back):
            for sized in self.sizes:
                sized.placed.clear()

    def place(self, sized: Sized, spans: Sequence[Span | None], device: Device, lanes: Lanes) -> PlacedCopies:
        key = tuple(
            None if span is None else (span.offset, span.ranges, tuple(piece.data_ptr() for piece in span.pieces))
            for span in spans
        )
        found, placed = sized.placed.get(key), sized.placed
        if found is None:
            if len(placed) == _MAX_PLACES:
                del placed[next(iter(placed))]
            found = placed[key] = PlacedCopies(self, device, lanes)
            for span, values in zip(spans, self._placed_values, strict=True):
                if span is not None:
                    found.add(span, values, sized.sizes_bytes)
            found.prepare(self.copies.out, found.out, is_out=True)
            for part, made in zip(self.parts, found.back, strict=True):
                found.prepare(part.back, made, is_out=False)
        return found


def is_all_of(geometry: Geometry, num_bytes: int) -> bool:
    if geometry.offset != 0 or geometry.is_conj or geometry.is_neg or 0 in geometry.size:
        return False
    return extent(geometry.size, geometry.stride) * geometry.dtype.itemsize == num_bytes


def make_schedule(trace: Trace, plan: Plan, device: Device, *, window_bytes: int | None, min_bytes: int) -> Schedule:
    """Return the schedule of a trace, for other sizes as well unless the window is a fixed number of bytes."""
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
    vary = min_bytes if window_bytes is None else None
    return Schedule(
        seen, window_bytes, leaving, parts, device, len(plan.saves), asked_for, min_bytes=vary, held=frozenset(trace.held)
    )


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
    """Prepared copies of a schedule, in host memory of their own. Forwards that are alive at once never share one."""

    def __init__(self, schedule: Schedule, device: Device, lanes: Lanes) -> None:
        self._schedule, self._device, self._lanes = schedule, device, lanes
        self.pieces: dict[int, list[tuple[int, Tensor]]] = {}
        self.out: list[CopyBatch] = []
        self.back: list[list[CopyBatch]] = [[] for _ in schedule.parts]
        self._turns = schedule.takes_turns, schedule.takes_turns_back
        self._alone: dict[tuple[int, bool], CopyBatch] = {}

    def add(self, span: Span, values: Iterable[int], sizes_bytes: Mapping[int, int]) -> None:
        edges, start = list(itertools.accumulate(map(Tensor.numel, span.pieces), initial=0)), 0
        for value in values:
            num_bytes = sizes_bytes[value]
            self.pieces[value] = list(_parts(span.pieces, edges, start, num_bytes))
            start += rounded(num_bytes, ALIGNMENT_BYTES)

    def prepare(self, batches: Sequence[Sequence[int]], made: list[CopyBatch], *, is_out: bool) -> None:
        """Prepare the next batches, behind those `made` before, of values that have host memory."""
        lanes, by_turns = self._lanes, self._turns[not is_out]
        streams = lanes.out_by_turns if is_out else lanes.back_by_turns
        for values in batches:
            pieces, ahead = self._of(values), made[-1] if made else None
            if by_turns:
                made.append(copy_by_turns(self._device, streams, pieces, is_out=is_out, ahead=ahead))
            else:
                made.append(self._device.copy_batch(streams[0], pieces, is_out=is_out))

    def fork(self, values: Iterable[int], num_out: int) -> PlacedCopies:
        """Return the same for a forward that goes on at another size: values that have come keep their places."""
        made = PlacedCopies(self._schedule, self._device, self._lanes)
        made.pieces = {value: self.pieces[value] for value in values if value in self.pieces}
        made.out = self.out[:num_out]
        made._turns = self._turns
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
            for start, host in self.pieces[value]
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
