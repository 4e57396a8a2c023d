"""`ScheduledForward`: a forward that follows a schedule, and its backwards; `ScheduledSaves`: its pack hook. After a deviation,
copied values are freed, and the rest goes save by save.

[Note: other sizes] A schedule tells for each save whether its value leaves and which copies are due, whatever its size. A
forward whose tensors have other shapes, as of longer sequences, follows it too: their sizes are read as they come (`Sized`),
each batch gets host memory of its own when it leaves, and its copies are prepared then. The next forward of that size knows all
of this ahead: the shape of its first save finds the size. If a later save has another shape, the forward goes on at a known
size with the same first saves, or at a new one.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.traces import NO_VALUE, SaveKey, SeenSave, Trace
from memkit.core import backwards, torch_private
from memkit.core.interrupts import mended
from memkit.core.kept import KeptHandle, ScheduledHandle, modified_error, nothing
from memkit.core.sizes import ALIGNMENT_BYTES, format_mib, rounded, total_rounded
from memkit.core.tensors import Geometry, extent
from memkit.core.torch_state import is_saved_by_compiled_code, label
from memkit.device.base import CopyBatch, Device, Piece, busy_s_of
from memkit.errors import HostMemoryError, note_no_room
from memkit.plan import Plan
from memkit.plan.copies import CopySchedule, schedule_copies
from memkit.plan.plans import Action
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes, copy_by_turns

_MOST_LOOKS = 3
_MAX_PLACES = 4
_MOST_SIZES = 64
_MOST_STALL = 1 / 20


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ScheduledSave:
    """A save of any size. `before` is the value, moved as well, that the same storage was saved as before; else `NO_VALUE`."""

    place: int
    num_dims: int | None  # None for a tensor that is not told from others
    dtype: torch.dtype | None
    value: int
    is_written: bool
    num_values: int
    before: int
    is_seen: bool
    small_bytes: int  # if it has no value: the bytes that it had, which may have been too few to move
    is_moved: bool
    is_rest: bool
    is_first: bool
    stays: bool  # nothing is done with it, even at its request; other actions may be due with the save
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
        self.placed: dict[object, PlacedCopies] = {}
        # the figures that a forward adds to `Counts` if it goes to its end
        self.unique_bytes = self.kept_bytes = self.window_bytes = 0
        self.host_bytes = 0, 0  # its bytes in the arena, in one span for requested values and one for the rest; 0 for none

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
        return first.sizes_bytes.items() <= self.sizes_bytes.items() and first.geometries.items() <= self.geometries.items()


class Schedule:
    """The copies of forwards of one trace at one ratio, whatever their sizes: see [Note: other sizes]."""

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
        self.parts, self.num_values = parts, num_values
        self.min_bytes = min_bytes  # values of other sizes with as many bytes move; None if none follow
        self._leaving, self._held, self._window_bytes = leaving, held, window_bytes
        self.rest = leaving.difference(*requests)  # moved values that no backward asks for: they may outlive the backwards
        self.saves = self._saves(seen, leaving, device.torch_device)
        self.num_requests = [[0] * num_values for _ in parts]
        for counted, asking in zip(self.num_requests, requests, strict=True):
            for value in asking:
                counted[value] += 1
        num_handles = Counter(save.value for save in self.saves)
        self.is_alone = [
            num_handles[value] == 1 and max(counted[value] for counted in self.num_requests) == 1 for value in range(num_values)
        ]  # whether one request covers all uses of a value
        self.batch_of = {value: number for number, batch in enumerate(copies.out) for value in batch}
        self._placed_values = [
            [value for value in self.batch_of if (value in self.rest) is is_rest] for is_rest in (False, True)
        ]  # in the order of their batches, those with each span
        self.behind = [self._behind(part.back) for part in parts]  # by fetched batch: the last moved batch of its values
        self.takes_turns = self.takes_turns_back = False
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
        is_plain = geometry.offset == 0 and not (geometry.is_conj or geometry.is_neg or 0 in geometry.size)
        if (
            self.is_alone[save.value]
            and is_plain
            and extent(geometry.size, geometry.stride) * geometry.dtype.itemsize == num_bytes
        ):
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

    def sum_up(self, sized: Sized) -> None:
        leaving, held = self._leaving, self._held
        sizes_bytes = {value: num_bytes for value, num_bytes in sized.sizes_bytes.items() if value not in held}
        sized.unique_bytes = sum(sizes_bytes.values())
        sized.kept_bytes = sized.unique_bytes - sum(map(sizes_bytes.__getitem__, leaving))
        largest = max(sizes_bytes.values(), default=0)
        sized.window_bytes = 2 * largest if self._window_bytes is None else self._window_bytes
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
        place = len(shapes)
        for sized in self.sizes:
            if sized.shapes[place] == shape and sized.shapes[:place] == shapes:
                return sized
        return None

    def see_to_turns(self, placement: PlacedCopies) -> None:
        """Let copies take turns from the next forward on where no step waits for them: see [Note: copies by turns]."""
        before = self.takes_turns, self.takes_turns_back
        if not self.takes_turns and placement.out and placement.out[-1].done.is_reached():
            self.takes_turns = True
        if not self.takes_turns_back and self._num_looks < _MOST_LOOKS:
            came = [batch for part in placement.back for batch in part if batch.waited is not None]
            if came and all(batch.done.is_reached() for batch in reversed(came)):  # the last may be of an earlier step
                self._num_looks += 1
                self.takes_turns_back = sum(batch.stall_s() for batch in came) <= _MOST_STALL * busy_s_of(came)
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


def wait_for(batch: CopyBatch) -> None:
    if torch_private.profiler_is_on():
        with label("wait"):
            batch.wait()
    else:
        batch.wait()


_NO_BACKWARD = -1
_MOST_OFF = 0.05  # the share of bytes that leaves may differ by so much from the ratio, or as at the planned size
_NO_CONTEXT = nullcontext()


class Life:
    """Each handle of a forward holds it, as does its taker of saves: its death says that the forward is over."""

    __slots__ = ("__weakref__", "forward")

    def __init__(self, forward: ScheduledForward) -> None:
        self.forward = forward


def take_spans(window: OffloadWindow, sized: Sized) -> list[Span | None] | None:
    """Return host memory for the values of a size, of which a new one has none yet; None if there is too little."""
    spans = list[Span | None]()
    with suppress(HostMemoryError):
        for num_bytes in sized.host_bytes:
            spans.append(window.arena.take(num_bytes) if num_bytes else None)
    taken = [span for span in spans if span is not None]
    if len(spans) < len(sized.host_bytes) or any(span.staging is not None for span in taken):
        for span in taken:
            window.arena.give(span)
        return None
    for span in taken:
        for event in span.free_events:
            window.device.wait_event(window.lanes.out, event)
    return spans


class ScheduledForward:
    """One forward by a schedule, and its backwards; without `spans` it takes host memory batch by batch, as far as it can."""

    def __init__(
        self,
        window: OffloadWindow,
        schedule: Schedule,
        sized: Sized,
        spans: Sequence[Span | None],
        trace: Trace,
        counts: Counts,
    ) -> None:
        self.schedule, self.trace, self.counts = schedule, trace, counts
        self.window, self.lock = window, window.lock
        self.device = device = window.device
        self.sized = sized
        self.is_new = len(sized.shapes) < len(schedule.saves)  # its sizes are read as they come: no forward had them
        if any(spans):
            self.placement = schedule.place(sized, spans, device, window.lanes)
        else:
            self.placement = PlacedCopies(schedule, device, window.lanes)
        self.out: list[CopyBatch] = self.placement.out
        self.is_broken = False
        self.is_forward = True
        self.life: Callable[[], Life | None] = lambda: None  # what handles of requested values hold, while any may be
        self.rest: Callable[[], Life | None] = lambda: None
        self.saves: Callable[[], ScheduledSaves | None] = lambda: None
        self.was_stopped = False
        self.num_saves = 0
        self.began_at = 0  # the number of its first saves that another schedule, which begins alike, has handled
        self.tried: tuple[Trace, ...] = (trace,)
        self.num_sent = self.num_released = 0
        num_values = schedule.num_values
        self.held: list[torch.UntypedStorage | None] = [None] * num_values  # by value: saved or fetched, on the device
        self.originals: list[Any] = [None] * num_values
        self.counters: list[Any] = [None] * num_values
        self.use_orders: list[int] | None = None  # by value: when it was saved; None if no others fetch by the lanes
        if window.lanes.are_shared(window):
            self.use_orders = [0] * num_values
        self.nodes: dict[int, int] = {}
        self.alone: dict[int, CopyBatch] = {}
        self.stream, self.home = device.stream_number(), device.current_stream()
        self._has_left = self._is_asking = False
        self.has_room = True
        self._go_along(0)
        self._fetched = bytearray(num_values)
        self._coming: dict[int, int] = {}
        self._ready: list[Tensor | None] = [None] * num_values
        self._behind = -1
        self.task = _NO_BACKWARD
        self._num_backwards = 0
        self._requested_spans, self._rest_spans = list(filter(None, spans[:1])), list(filter(None, spans[1:]))
        self._lent: dict[int, list[KeptHandle]] = {}  # for values with further requests: tensors handed out
        self.on_end: Callable[[], None] | None = None
        self._leaving: deque[tuple[torch.UntypedStorage, CopyBatch]] = deque()  # held only for a copy under way

    # The forward

    def at_home(self) -> AbstractContextManager[object]:
        return _NO_CONTEXT if self.device.stream_number() == self.stream else self.device.on_stream(self.home)

    def keep_up(self, num_sent: int, num_released: int) -> None:
        schedule = self.schedule
        while self.num_sent < num_sent:
            values = schedule.copies.out[self.num_sent]
            if self.nodes and torch_private.node_number() in map(self.nodes.get, values):
                break  # its op may not have written them yet
            if self.num_sent == len(self.out) and not self._place(values):
                break
            batch = self.out[self.num_sent]
            held: list[Any] = [self.held[value] for value in values]
            if torch_private.profiler_is_on():
                with label("evict"):
                    batch.start(held)
            else:
                batch.start(held)
            self.num_sent += 1
            self.counts.moved_out.batches.append(batch)
        while self.num_released < min(num_released, self.num_sent):
            self._release_next()

    def _place(self, values: Sequence[int]) -> bool:
        if self.has_room:
            try:
                self._take_memory(values)
            except HostMemoryError as error:
                self.has_room = False
                self.window.warn_no_host(self.sized.sizes_bytes[values[0]], error)
                return False
            except BaseException:  # it may have taken memory that nothing holds yet
                self.window.is_broken = True
                raise
            self.placement.prepare([values], self.out, is_out=True)
        return self.has_room

    def _take_memory(self, values: Sequence[int]) -> None:
        sizes_bytes, rest, requested = self.sized.sizes_bytes, list[int](), list[int]()
        for value in values:
            if value not in self.placement.pieces:
                (rest if value in self.schedule.rest else requested).append(value)
        for new, spans in ((requested, self._requested_spans), (rest, self._rest_spans)):
            if new:
                span = self.window.arena.take(total_rounded(map(sizes_bytes.__getitem__, new), ALIGNMENT_BYTES))
                if span.staging is not None:  # copies would go past its buffers
                    self.window.arena.give(span)
                    raise HostMemoryError("the system pins no more memory")
                spans.append(span)
                for event in span.free_events:
                    for stream in self.window.lanes.out_by_turns:
                        self.device.wait_event(stream, event)
                self.placement.add(span, new, sizes_bytes)

    def resize(self, place: int, shape: torch.Size) -> None:
        known = self.schedule.size_beginning_with(self.sized.shapes[:place], shape)
        fork, spans = self.sized.fork(self.schedule.saves[:place]), None
        placed: Iterable[int] = fork.sizes_bytes
        if self.num_sent == 0 and self.held.count(None) == len(self.held):
            unused, self._requested_spans, self._rest_spans = [*self._requested_spans, *self._rest_spans], [], []
            for span in unused:
                self.window.arena.give(span)
            placed, spans = (), None if known is None else take_spans(self.window, known)
        elif known is not None and not known.includes(fork):
            known = None
        if known is None or spans is None:
            self.placement = self.placement.fork(placed, self.num_sent)
        else:
            self._requested_spans, self._rest_spans = list(filter(None, spans[:1])), list(filter(None, spans[1:]))
            self.placement = self.schedule.place(known, spans, self.device, self.window.lanes)
        self.sized, self.is_new = known or fork, known is None
        self.out, self._back = self.placement.out, self.placement.back[0]

    def _release_next(self) -> None:
        schedule, number = self.schedule, self.num_released
        batch = self.out[number]
        wait_for(batch)
        for value in schedule.copies.out[number]:
            self.held[value] = None
        self.num_released = number + 1

    def take_no_more(self) -> None:
        self.is_forward, saves = False, self.saves()
        if saves is not None and saves.forward is self:
            saves.life = saves.rest = None

    @mended
    def stop(self) -> None:
        with self.at_home():
            if self.is_forward:
                self.take_no_more()
                self.was_stopped = True
                for value, storage in enumerate(self.held):
                    if storage is None or self.nodes.get(value) == torch_private.node_number() or value in self.alone:
                        continue
                    if self.schedule.batch_of[value] >= self.num_sent:  # the other values of its batch do not come
                        try:
                            self._take_memory([value])
                        except HostMemoryError:
                            continue
                        batch = self.placement.copy_alone(value, is_out=True)
                        batch.start([storage])
                        self.counts.moved_out.batches.append(batch)
                        self.alone[value] = batch
                        batch.wait()
                        self.held[value] = None
                self.let_go_of_sent()

    @mended
    def let_go_of_sent(self) -> None:
        with self.at_home():
            while self.num_released < self.num_sent:
                self._release_next()

    @property
    def is_complete(self) -> bool:
        return self.num_saves == len(self.schedule.saves) and not self.was_stopped

    @property
    def is_over(self) -> bool:
        return self.life() is None and self.rest() is None

    @property
    def leaving(self) -> set[int]:
        return {value for batch in self.schedule.copies.out[: self.num_sent] for value in batch} | set(self.alone)

    @property
    def num_values(self) -> int:
        return self.schedule.saves[self.num_saves - 1].num_values if self.num_saves else 0

    @property
    def num_live(self) -> int:
        return self.num_values if self.life() is not None else sum(value < self.num_values for value in self.schedule.rest)

    @mended
    def end_forward(self) -> None:
        with self.at_home():
            if self.num_saves < len(self.schedule.saves):
                self.stop()
            elif self.is_forward:
                copies = self.schedule.copies
                self.take_no_more()
                self.nodes = {}
                self.keep_up(copies.num_sent[-1], copies.num_released[-1])
                self.schedule.see_to_turns(self.placement)
                if self.is_new:
                    self.schedule.sum_up(self.sized)
                    self._keep_to_ratio()
                if self.has_room and self.sized is not self.schedule.sizes[0]:
                    self.schedule.keep_size(self.sized)

    def _keep_to_ratio(self) -> None:
        """If at this size another share leaves than the ratio, make the schedule once more, for both sizes."""
        schedule, trace, sized, ratio = self.schedule, self.trace, self.sized, self.counts.ratio
        if not trace.others_bytes and sized.off_by(ratio) > max(schedule.first.off_by(ratio), _MOST_OFF):
            others_bytes = [sized.sizes_bytes.get(value, 0) for value in range(schedule.num_values)]
            trace.others_bytes, trace.schedule = others_bytes, None

    @property
    def stayed_bytes(self) -> int:
        num_sent, batch_of, sizes_bytes = self.num_sent, self.schedule.batch_of, self.sized.sizes_bytes
        return 0 if self.has_room else sum(sizes_bytes[value] for value in batch_of if batch_of[value] >= num_sent)

    @property
    def live_bytes(self) -> int:
        sizes_bytes = self.sized.sizes_bytes
        return sum(sizes_bytes[value] for value, storage in enumerate(self.held) if storage is not None)

    def keys(self) -> list[SaveKey]:
        """Return the key of each value's first save at this size; as in the trace for values that others hold."""
        sized, found = self.sized, list(self.trace.keys[: self.num_values])
        for save in reversed(self.schedule.saves[: self.num_saves]):
            if save.value != NO_VALUE:
                num_bytes, shape = sized.sizes_bytes[save.value], sized.shapes[save.place]
                found[save.value] = found[save.value]._replace(num_bytes=num_bytes, shape=tuple(shape or ()))
        return found

    # Fetches, backward by backward

    def _go_along(self, number: int) -> None:
        schedule = self.schedule
        self._copies, self._behind_of = schedule.parts[number], schedule.behind[number]
        if not self.has_room:
            self._copies, self._behind_of = schedule.part_of(number, self.num_sent)
        self._back = self.placement.back[number]
        self._cursor = self._num_fetched = 0
        self._asked = bytearray(schedule.num_values)
        self._awaiting = list(schedule.num_requests[number])

    def _leave(self) -> None:
        self._has_left, self.trace.requests = True, None

    def _note_request(self, value: int) -> None:
        self._asked[value] = 1
        if self._has_left or self.was_stopped:
            return
        copies, cursor = self._copies, self._cursor
        if cursor == len(copies.requests) or copies.requests[cursor] != value:
            self._leave()
            return
        self._cursor = cursor + 1
        while self._num_fetched < copies.num_fetched[cursor]:
            if (
                self.use_orders is not None
                and (self.held[value] is not None or value not in self.schedule.batch_of)
                and not self.window.bring_sooner(self._next_use_order(self.use_orders))
            ):
                return  # the rest comes at a later request
            if not self._fetch_next():
                return

    def _next_use_order(self, use_orders: list[int]) -> int:
        return max(use_orders[value] for value in self._copies.back[self._num_fetched])

    def bring_until(self, use_order: int) -> bool:
        copies, use_orders = self._copies, self.use_orders
        if use_orders is None or not self._is_asking or self._cursor == 0 or self.device.stream_number() != self.stream:
            return True
        while not self._has_left and self._num_fetched < len(copies.back) and self._next_use_order(use_orders) > use_order:
            if self._num_fetched == copies.num_fetched[self._cursor - 1]:
                return False  # there is no room for it yet
            self._fetch_next()
        return True

    def _fetch_next(self) -> bool:
        if self.device.stream_number() != self.stream:  # each request gets its own tensor there
            self._has_left = True
            return False
        sized, number = self.sized, self._num_fetched
        values = self._copies.back[number]
        device, held, storages, made = self.device, self.held, [], []
        for value in values:
            if held[value] is not None or self._awaiting[value] <= 0:
                self._has_left = True
                return False
            whole, tensor = sized.whole.get(value), None
            try:
                if whole is None:
                    storage = device.allocate(sized.sizes_bytes[value])
                else:
                    tensor = device.allocate_tensor(*whole)
                    storage = tensor.untyped_storage()
            except torch.OutOfMemoryError:
                self._has_left = True  # the fetches that took the room may be needed sooner
                return False
            storages.append(storage)
            made.append(tensor)
        if number == len(self._back):
            self.placement.prepare([values], self._back, is_out=False)
        batch, behind = self._back[number], self._behind_of[number]
        for value, storage in zip(values, storages, strict=True):
            held[value] = storage
        after = self.out[behind] if behind > self._behind else None
        if torch_private.profiler_is_on():
            with label("fetch"):
                batch.start(storages, after)
        else:
            batch.start(storages, after)
        if after is not None:
            self._behind = behind
        for value, tensor in zip(values, made, strict=True):
            self._coming[value] = number
            self._fetched[value] = 1
            self._ready[value] = tensor  # last: a ready tensor is handed out as it is
        self._num_fetched = number + 1
        self.counts.moved_in.batches.append(batch)
        return True

    def _await(self, number: int) -> None:
        wait_for(self._back[number])
        for value in self._copies.back[number]:
            self._coming.pop(value, None)

    # Requests

    def unpack(self, handle: tuple[Any, ScheduledSave, Tensor, int]) -> Tensor:
        with self.lock:
            if self.is_broken:
                self.mend()
            try:
                return self._unpack(*handle)
            except BaseException:
                self.is_broken = True
                raise

    def _unpack(self, _: object, save: ScheduledSave, alias: Tensor, version: int) -> Tensor:
        now = torch_private.version_of(alias)
        if now != version:
            shape = self.sized.shapes[save.place]
            raise modified_error(alias, version, lambda: shape or torch.Size())
        task, value = torch_private.backward_task(), save.value
        if task != _NO_BACKWARD:
            if task != self.task:
                self._turn(task)
            if not self._asked[value]:
                self._note_request(value)
        if not save.is_moved:
            return alias
        if self._leaving and self._leaving[0][1].done.is_reached():
            self._let_go_of_served(wait=False)
        ready = self._ready[value]
        if ready is not None and task != _NO_BACKWARD and self.device.stream_number() == self.stream:
            return self._give_ready(value, ready)
        storage = self._storage_of(value)
        if storage is not self.originals[value]():
            self.device.note_read(storage)
            tensor = self._over(storage, save)
            if self._awaiting[value] > 1 or value in self._lent:
                lent = KeptHandle(tensor)
                lent.alias.data = save.nothing  # type: ignore[assignment]  # set if the value leaves
                self._lent.setdefault(value, []).append(lent)
        else:  # writes to it count as writes to the saved tensor
            tensor = alias.detach()
            tensor.data = self._over(storage, save)
        if task != _NO_BACKWARD:
            self._awaiting[value] -= 1
            if self._awaiting[value] <= 0:
                self._serve_last(value, storage, save, alias)
        return tensor

    def _give_ready(self, value: int, tensor: Tensor) -> Tensor:
        number = self._coming.get(value)
        if number is not None:
            self._await(number)
        self.device.note_read(tensor.untyped_storage())
        self._awaiting[value] -= 1
        self._ready[value] = self.held[value] = None
        self._fetched[value] = 0
        return tensor

    def _over(self, storage: torch.UntypedStorage, save: ScheduledSave) -> Tensor:
        geometry = self.sized.geometries[save.place]
        if torch_private.num_dispatch_modes() or geometry.is_conj or geometry.is_neg:
            return geometry.over(storage)
        made = torch.empty(0, dtype=save.dtype, device=storage.device)
        return made.set_(storage, geometry.offset, geometry.size, geometry.stride)

    def _turn(self, task: int) -> None:
        number, num_known = self._num_backwards, len(self.schedule.parts)
        if number == 0:
            self.end_forward()
            if not self.has_room:
                self._go_along(0)
            late = self.schedule.copies.num_released_at_request
            if late > self.num_released and not self.was_stopped:
                with self.at_home():
                    self.keep_up(self.num_sent, late)
        else:
            self._has_left = self._has_left or self._is_asking
            self._give_up_fetched()
            self._go_along(min(number, num_known - 1))
        if number >= num_known and not (self._has_left or self.was_stopped):
            self._leave()
        self.task, self._num_backwards, self._is_asking = task, number + 1, True
        backwards.on_end(functools.partial(_end_backward, weakref.ref(self), task))

    def _storage_of(self, value: int) -> torch.UntypedStorage:
        storage = self.held[value]
        if storage is not None and self._fetched[value]:
            if self.device.stream_number() != self.stream:
                return self._fetch_one(value)
            if value in self._coming:
                self._await(self._coming[value])
            if value in self._lent and not all(lent.is_unchanged() for lent in self._lent[value]):
                del self._lent[value]
                storage = None
        if storage is None:
            original = self.originals[value]()
            if original is not None:
                return original  # type: ignore[no-any-return]
            storage = self._fetch_one(value)
        return storage

    def _fetch_one(self, value: int) -> torch.UntypedStorage:
        schedule, batch = self.schedule, self.placement.copy_alone(value, is_out=False)
        storage = self._allocate_now(self.sized.sizes_bytes[value])
        if self.device.stream_number() == self.stream:
            self.held[value], self._fetched[value] = storage, 1
        else:  # it is for this request alone
            self._leaving.append((storage, batch))
        with label("fetch"):
            batch.start([storage], self.alone.get(value) or self.out[schedule.batch_of[value]])
            batch.wait()
        self.counts.moved_in.batches.append(batch)
        return storage

    def _allocate_now(self, num_bytes: int) -> torch.UntypedStorage:
        try:
            return self.device.allocate(num_bytes)
        except torch.OutOfMemoryError:
            self._has_left = True
            self._let_go_of_served(wait=True)
            self._give_up_fetched()
        try:
            return self.device.allocate(num_bytes)
        except torch.OutOfMemoryError as error:
            note_no_room(error, format_mib(num_bytes), self.window.name)
            raise

    def _serve_last(self, value: int, storage: torch.UntypedStorage, save: ScheduledSave, alias: Tensor) -> None:
        """Drop the reference to a value whose last tensor was unpacked, unless other handles need it."""
        if self._fetched[value]:
            self.held[value] = self._ready[value] = None
            self._fetched[value] = 0
            self._lent.pop(value, None)
            return
        number = self.schedule.batch_of[value]
        if self.held[value] is None:
            return
        if number < self.num_sent:
            self.held[value] = None
            if number >= self.num_released:
                self._leaving.append((storage, self.out[number]))
                self.counts.served_bytes += storage.nbytes()
        elif self.schedule.is_alone[value]:  # it was not copied: its handle holds it
            alias.data = self._over(storage, save)
            self.held[value] = None

    def _let_go_of_served(self, *, wait: bool) -> None:
        device = self.device
        while self._leaving and (wait or self._leaving[0][1].done.is_reached()):
            device.wait_event(self.home, self._leaving[0][1].done)
            self._leaving.popleft()

    @mended
    def end_backward(self, task: int, *, has_failed: bool) -> None:
        self._has_left = self._has_left or has_failed
        if self.task == task:
            self._is_asking = False
            self._let_go_of_served(wait=True)
            self._give_up_fetched()
            if self.is_spent:
                self.window.settle()
        if self.on_end is not None and not has_failed:
            on_end, self.on_end = self.on_end, None
            on_end()

    def _give_up_fetched(self) -> None:
        for number in dict.fromkeys(self._coming.values()):
            self.device.wait_event(self.home, self._back[number].done)
        self._coming.clear()
        for value, is_fetched in enumerate(self._fetched):
            if is_fetched:
                self.held[value] = self._ready[value] = None
        self._fetched = bytearray(len(self._fetched))
        self._lent.clear()

    # The end

    @property
    def has_backward(self) -> bool:
        return self.task != _NO_BACKWARD

    @property
    def is_spent(self) -> bool:
        return not self.is_forward and self.life() is None

    @mended
    def close(self, *, keeps_rest: bool = False) -> None:
        spans = self._requested_spans if keeps_rest else [*self._requested_spans, *self._rest_spans]
        held = [span for span in spans if self.window.arena.has(span)]  # perhaps not, after an interrupt
        self.let_go_of_sent()
        self._let_go_of_served(wait=True)
        self._give_up_fetched()
        kept = self.schedule.rest if keeps_rest else ()  # those that had no host memory
        self.held = [storage if value in kept else None for value, storage in enumerate(self.held)]
        # by now it has waited for all copies, single ones included
        last = self.device.record_event(self.home, timed=False) if self.num_sent or self.alone else None
        for span in held:
            self.window.arena.give(span, last)
        self._requested_spans, self._rest_spans = [], self._rest_spans if keeps_rest else []

    def mend(self) -> list[Span]:
        self.device.synchronize()
        self.was_stopped = self.was_stopped or self.is_forward
        self.take_no_more()
        self._has_left = True
        for value in (*self.leaving, *itertools.compress(range(len(self._fetched)), self._fetched)):
            self.held[value] = None
        self.num_released = self.num_sent
        self._ready, self._fetched = [None] * len(self._ready), bytearray(len(self._fetched))
        self._coming.clear()
        self._lent.clear()
        self._leaving.clear()
        self.is_broken = False
        return [*self._requested_spans, *self._rest_spans]


def _end_backward(reference: weakref.ref[ScheduledForward], task: int, has_failed: bool) -> None:
    if (forward := reference()) is not None:
        forward.end_backward(task, has_failed=has_failed)


_Parameter = nn.Parameter


class _NoForward:
    num_saves = 0
    is_forward = False


class ScheduledSaves:
    """Takes saved tensors while each is the next of the schedule. `take` gets all others, and may `follow` from there."""

    def __init__(self, take: Callable[[Tensor], Any]) -> None:
        self.forward: Any = _NoForward
        self.life: Life | None = None
        self.rest: Life | None = None
        self._num_saves = 0
        self._take = take

    def follow(self, forward: ScheduledForward) -> None:
        self.forward, self.life, self.rest = forward, Life(forward), Life(forward)
        forward.life, forward.rest, forward.saves = weakref.ref(self.life), weakref.ref(self.rest), weakref.ref(self)
        self._device = forward.device
        self._torch_device = forward.device.torch_device
        self._notes = forward.device.takes_notes
        self._stream = forward.device.stream_number()
        self._saves, self._num_saves = forward.schedule.saves, len(forward.schedule.saves)
        self._shapes, self._min_bytes = forward.sized.shapes, forward.schedule.min_bytes
        self._addresses: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Any:
        forward = self.forward
        place = forward.num_saves
        if place < self._num_saves and forward.is_forward:
            save, kind = self._saves[place], type(tensor)
            is_due = (
                (kind is Tensor or kind is _Parameter) and tensor.dtype is save.dtype and torch_private.backward_task() == -1
            )
            if is_due:
                try:
                    shape = tensor.shape
                except RuntimeError:  # it has none
                    is_due = False
                else:
                    is_due = (place < len(self._shapes) and shape == self._shapes[place]) or self._grow(save, tensor)
            if is_due:
                if self._notes and save.value >= 0 and self._is_here(tensor):
                    self._device.note_written(tensor.untyped_storage(), torch_private.version_of(tensor))
                if save.stays and save.num_sent == forward.num_sent and save.num_released == forward.num_released:
                    forward.num_saves = place + 1
                    return tensor.detach(), torch_private.version_of(tensor)
                packed = self._pack(save, tensor)
                if packed is not None:
                    return packed
            elif save.num_dims is None:
                if place == len(self._shapes):
                    self._shapes.append(None)
                    forward.sized.seen_bytes.append(0)
                forward.num_saves = place + 1
                return KeptHandle(tensor)
        if forward.is_forward and torch_private.backward_task() == -1:
            forward.stop()
        return self._take(tensor)

    def _grow(self, save: ScheduledSave, tensor: Tensor) -> bool:
        """Read the size of a save that no forward has shown; tell whether it is the expected save at another size."""
        forward, min_bytes, place = self.forward, self._min_bytes, save.place
        if min_bytes is None or tensor.dim() != save.num_dims:
            return False
        num_bytes = tensor.nbytes
        if save.value != NO_VALUE and save.is_first:
            if not self._is_here(tensor):
                return False
            num_bytes = tensor.untyped_storage().nbytes()
            if num_bytes < max(min_bytes, 1):
                return False
        elif save.value == NO_VALUE and save.is_seen and save.small_bytes < min_bytes <= num_bytes:
            return False  # it is large enough to have a value now
        if place < len(self._shapes):
            with forward.lock:
                try:
                    forward.resize(place, tensor.shape)
                except BaseException:  # it may have taken memory that nothing holds yet
                    forward.is_broken = forward.window.is_broken = True
                    raise
            self._shapes = forward.sized.shapes
            if place < len(self._shapes):
                return True
        sized = forward.sized
        if save.value != NO_VALUE and save.is_first:
            sized.sizes_bytes[save.value] = num_bytes
        sized.seen_bytes[place:] = [tensor.nbytes if save.is_seen else 0]
        sized.shapes.append(tensor.shape)  # last: from here on it is known
        return True

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device == self._torch_device and tensor.layout is torch.strided

    def _pack(self, save: ScheduledSave, tensor: Tensor) -> Any:
        forward = self.forward
        with forward.lock:
            if forward.is_broken:
                forward.mend()
            if not forward.is_forward:
                return None
            try:
                version = torch_private.version_of(tensor)
                if save.is_moved:
                    if not self._hold(save, tensor, version):
                        return None
                    alias = tensor.detach()
                    alias.data = save.nothing  # type: ignore[assignment]  # set if the value leaves
                else:
                    alias = tensor.detach()
                forward.num_saves += 1
                if save.num_sent > forward.num_sent or save.num_released > forward.num_released:
                    if save.is_moved:  # on the stream that holds it
                        forward.keep_up(save.num_sent, save.num_released)
                    else:
                        with forward.at_home():
                            forward.keep_up(save.num_sent, save.num_released)
                if save.stays:
                    return alias, version
                return tuple.__new__(ScheduledHandle, (self.rest if save.is_rest else self.life, save, alias, version))
            except BaseException:
                forward.is_broken = True
                raise

    def _hold(self, save: ScheduledSave, tensor: Tensor, version: int) -> bool:
        if tensor.device != self._torch_device or tensor.layout is not torch.strided:
            return False
        storage, sized = tensor.untyped_storage(), self.forward.sized
        geometry = sized.geometries.get(save.place)
        if geometry is None:
            geometry = Geometry.of(tensor)
            self.forward.schedule.note_geometry(sized, save, geometry, storage.nbytes())
        if (
            tensor.stride() != geometry.stride
            or tensor.storage_offset() != geometry.offset
            or storage.nbytes() != sized.sizes_bytes[save.value]
            or type(tensor) is not Tensor
            or (tensor.requires_grad != save.is_written and not (save.is_written and is_saved_by_compiled_code()))
            or tensor.is_conj() != geometry.is_conj
            or tensor.is_neg() != geometry.is_neg
            or torch_private.is_zero_tensor(tensor)
            or self._device.stream_number() != self._stream
        ):
            return False
        forward, value, address = self.forward, save.value, torch_private.storage_address(storage)
        base = torch_private.base_of(tensor)
        if not save.is_first:
            counter, was = forward.counters[value]
            is_same = forward.originals[value]() is storage and counter() is (tensor if base is None else base)
            return is_same and bool(was == version)
        known = self._addresses.get(address, NO_VALUE)
        if known != NO_VALUE and forward.originals[known]() is not storage:
            known = NO_VALUE  # another one had that address
        if known != save.before:
            return False
        forward.originals[value] = weakref.ref(storage)
        forward.counters[value] = (weakref.ref(tensor if base is None else base), version)
        self._addresses[address] = value
        if forward.use_orders is not None:
            forward.use_orders[value] = forward.window.lanes.next_use()
        if not save.is_written:
            forward.nodes[value] = torch_private.node_number()
        forward.held[value] = storage
        return True
