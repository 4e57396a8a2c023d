"""One stream for each direction of copies, shared by all features; long copies take turns on two. Their speed, measured."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.tensors import byte_view
from memkit.core.torch_state import NO_LABEL, label
from memkit.device.base import CopyBatch, Device, Event, Piece, Stream
from memkit.plan.gpu import Link
from memkit.transfer.host_memory import Arena, Span

TURN_BYTES = 16 * 2**20


class CopiesByTurns(CopyBatch):
    def __init__(
        self,
        device: Device,
        streams: tuple[Stream, Stream],
        pieces: Sequence[Sequence[Piece]],
        *,
        is_out: bool,
        ahead: CopyBatch | None,
    ) -> None:
        super().__init__(device, streams[0], [piece for turn in pieces for piece in turn], is_out=is_out, ahead=ahead)
        self.turns: list[CopyBatch] = []
        for number, turn in enumerate(pieces):
            before = self.turns[-1] if self.turns else ahead
            self.turns.append(device.copy_batch(streams[number % 2], turn, is_out=is_out, ahead=before))

    def start(self, storages: Sequence[torch.UntypedStorage], behind: CopyBatch | None = None) -> None:
        self.waited = None
        for turn in self.turns:
            turn.start(storages, behind)
            behind = None
        self.started, self.done = self.turns[0].started, self.turns[-1].done

    def wait(self) -> None:
        last = self.turns[-1]
        last.wait()
        self.waited = last.waited


def copy_by_turns(
    device: Device, streams: tuple[Stream, Stream], pieces: Sequence[Piece], *, is_out: bool, ahead: CopyBatch | None
) -> CopyBatch:
    """Return copies like those of `Device.copy_batch`, whose turns are not those of the batch ahead, which they wait for."""
    before = ahead.turns[-1] if isinstance(ahead, CopiesByTurns) else ahead
    if before is not None and before.stream == streams[0]:
        streams = streams[1], streams[0]
    turns = [*_cut(pieces)]
    if len(turns) > 1:
        return CopiesByTurns(device, streams, turns, is_out=is_out, ahead=ahead)
    return device.copy_batch(streams[0], pieces, is_out=is_out, ahead=ahead)


def _cut(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    turn, num_bytes = list[Piece](), 0
    for piece in pieces:
        for start in range(0, piece.num_bytes, TURN_BYTES):
            part = piece
            if piece.num_bytes > TURN_BYTES:
                host = piece.host[start : start + TURN_BYTES]
                part = Piece(piece.index, piece.start + start, host, piece.address + start, len(host))
            if turn and num_bytes + part.num_bytes > TURN_BYTES:
                yield turn
                turn, num_bytes = [], 0
            turn.append(part)
            num_bytes += part.num_bytes
    if turn:
        yield turn


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy over the link. Others wait for `done`; the lane is busy with it from `started` to `done`."""

    num_bytes: int
    started: Event
    done: Event


class Prefetcher(Protocol):
    @property
    def is_active(self) -> bool: ...

    def bring_until(self, use_order: int) -> bool:
        """Put on the lane what the backward needs sooner than the use `use_order`; tell whether all of it is on its way."""


class Lanes:
    """One queue from a device to the host and one back, for all copies of memkit.

    A copy waits for the events that it is given. The caller keeps the storage alive until the stream that it goes back to has
    waited for `Transfer.done`.

    [Note: one queue for all] Several prefetchers bring weights and activations back, and a backward needs tensors in the
    reverse order of the forward's uses. So in the forward, whatever will be needed again takes a number from one counter
    (`next_use`), its `use_order`, and the highest is fetched first: a prefetcher asks `bring_sooner` before each copy, and
    stops there if another has yet to bring something that is needed sooner.

    [Note: copies by turns] Any other copy to the host, as by `item()`, waits behind all copies of a stream that are ready to
    go: on an H200, 38 ms behind 2 GiB; so do FSDP2's copies to the device. If copies of 16 MiB alternate between two streams,
    each waiting for the one before, it is 0.04 ms, but they are slower by 1 to 3 %. So a schedule puts its copies on
    `out_by_turns` once they have ended before the forward did, and those back on `back_by_turns` once a backward has hardly
    waited for them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.out = device.new_stream("D2H")
        self.back = device.new_stream("H2D")
        self.out_by_turns = self.out, device.new_stream("D2H, by turns")
        self.back_by_turns = self.back, device.new_stream("H2D, by turns")
        self.next_use: Callable[[], int] = itertools.count(1).__next__  # counts uses: see [Note: one queue for all]
        self.prefetchers = weakref.WeakSet[Prefetcher]()

    def join(self, prefetcher: Prefetcher) -> None:
        self.prefetchers.add(prefetcher)

    def are_shared(self, prefetcher: Prefetcher) -> bool:
        return any(other is not prefetcher and other.is_active for other in tuple(self.prefetchers))

    def bring_sooner(self, prefetcher: Prefetcher, use_order: int) -> bool:
        """Let other prefetchers bring what they need before `use_order`; return whether all of it is on its way."""
        return all(other.bring_until(use_order) for other in tuple(self.prefetchers) if other is not prefetcher)

    def copy_out(self, storage: torch.UntypedStorage, span: Span, *, after: Event) -> Transfer:
        """Copy the first bytes of a storage into a span, once `after` is reached and the span's last users are done with it."""
        return self.copy(self.out, storage, span, is_out=True, after=(after, *span.free_events))

    def copy_back(self, span: Span, storage: torch.UntypedStorage, *, after: Iterable[Event]) -> Transfer:
        return self.copy(self.back, storage, span, is_out=False, after=after)

    def batch_out(self, spans: Sequence[Span]) -> CopyBatch:
        """Prepare copies to pinned spans, one from a storage to each. The lane waits for the spans' last users now."""
        for event in {event for span in spans for event in span.free_events}:
            self._device.wait_event(self.out, event)
        pieces = []
        for index, span in enumerate(spans):
            starts = itertools.accumulate((host.nbytes for host in span.pieces), initial=0)
            pieces += [
                Piece(index, start, host, host.data_ptr(), host.nbytes)
                for start, host in zip(starts, span.pieces, strict=False)
            ]
        return self._device.copy_batch(self.out, pieces, is_out=True)

    def start_out(self, batch: CopyBatch, storages: Sequence[torch.UntypedStorage]) -> Event:
        """Put a batch on the lane, behind the current stream. Return the event at its end, which the next start reuses."""
        with label("evict") if torch_private.profiler_is_on() else NO_LABEL:
            batch.start(storages)
            return batch.done

    def copy(
        self,
        lane: Stream,
        storage: torch.UntypedStorage,
        span: Span,
        *,
        is_out: bool,
        after: Iterable[Event],
        parts: Sequence[Tensor] | None = None,
        start: int = 0,
    ) -> Transfer:
        device = self._device
        with label("evict" if is_out else "fetch") if torch_private.profiler_is_on() else NO_LABEL:
            if span.staging is not None:
                events = span.staging.copy(lane, storage, span.pieces, is_out=is_out, after=after, start=start)
                return Transfer(span.num_bytes, *events)
            if parts is None:
                parts = byte_view(storage).narrow(0, start, span.num_bytes).split(list(map(len, span.pieces)))
            for event in after:
                device.wait_event(lane, event)
            started = device.record_event(lane)
            for piece, part in zip(span.pieces, parts, strict=True):
                destination, source = (piece, part) if is_out else (part, piece)
                device.copy(destination, source, lane)
            return Transfer(span.num_bytes, started, device.record_event(lane))

    def copy_parts(self, span: Span, parts: Sequence[Tensor], *, after: Iterable[Event], is_out: bool = False) -> Event:
        """As `copy` with `parts` of a pinned span, for less of the host's time, untimed. Return the event at its end."""
        device, lane = self._device, self.out if is_out else self.back
        for event in after:
            device.wait_event(lane, event)
        for piece, part in zip(span.pieces, parts, strict=True):
            destination, source = (piece, part) if is_out else (part, piece)
            device.copy(destination, source, lane)
        return device.record_event(lane, timed=False)

    def copy_back_by_turns(self, pieces: Sequence[Tensor], parts: Sequence[Tensor], *, after: Iterable[Event]) -> Event:
        """Copy pieces of pinned memory to a storage on two streams in turn. Return an event on `back` at the end of all."""
        device = self._device
        for number, (piece, part) in enumerate(zip(pieces, parts, strict=True), start=1):
            lane = self.back_by_turns[(len(pieces) - number) % 2]
            for event in after:
                device.wait_event(lane, event)
            device.copy(part, piece, lane)
            done = device.record_event(lane, timed=False)
            after = (done,)
        return done


_lanes: dict[Device, Lanes] = {}
_lock = threading.RLock()


def lanes_of(device: Device) -> Lanes:
    with _lock:
        if device not in _lanes:
            _lanes[device] = Lanes(device)
        return _lanes[device]


_SMALL_BYTES = 4096
_NUM_SMALL = 32
_MOST_ACTS = 10_000


def measure_link(device: Device, *, num_bytes: int = 256 * 2**20, repeats: int = 5) -> Link:
    """Return the speed of copies between a device and pinned host memory, one at a time: the median of `repeats` timed copies
    of each size and direction, after one that is not timed. Copies of `num_bytes` tell the bandwidth, much smaller ones the
    latency. Raises ValueError for an argument that is not positive, HostMemoryError or torch.OutOfMemoryError without room."""
    if num_bytes <= 0 or repeats <= 0:
        raise ValueError(f"num_bytes and repeats must be positive; found {num_bytes} and {repeats}")
    big_out_s, big_back_s = _seconds(device, num_bytes, repeats, num_copies=1)
    small_out_s, small_back_s = _seconds(device, _SMALL_BYTES, repeats, num_copies=_NUM_SMALL)
    return Link(
        d2h_bytes_per_s=num_bytes / max(big_out_s, 1e-9),
        h2d_bytes_per_s=num_bytes / max(big_back_s, 1e-9),
        latency_s=max(small_out_s, small_back_s),
    )


def measure_both_ways(device: Device, *, num_bytes: int = 256 * 2**20) -> float:
    lanes, both_s = Lanes(device), []
    with _memory(device, num_bytes, num_pairs=2) as (storages, spans):
        lanes.copy_out(storages[1], spans[1], after=device.record_event())
        device.synchronize()
        for _ in range(6):  # the first is to warm up
            ready = device.record_event()
            out = lanes.copy_out(storages[0], spans[0], after=ready)
            back = lanes.copy_back(spans[1], storages[1], after=(ready,))
            device.synchronize()
            both_s.append(max(ready.elapsed_s(out.done), ready.elapsed_s(back.done)))
    return num_bytes / max(statistics.median(both_s[1:]), 1e-9)


def measure_beside_copies(
    device: Device, act: Callable[[], object], *, num_bytes: int, num_copies: int, most_acts: int | None = None
) -> tuple[float, float]:
    lanes = Lanes(device)
    with _memory(device, num_bytes, num_pairs=2) as (storages, spans):
        out = lanes.copy_out(storages[1], spans[1], after=device.record_event())
        device.synchronize()
        ready = device.record_event()
        for _ in range(num_copies):
            out = lanes.copy_out(storages[0], spans[0], after=ready)
            back = lanes.copy_back(spans[1], storages[1], after=(ready,))
        num_done, begin = 0, time.perf_counter()
        while num_done < (most_acts or _MOST_ACTS):
            act()
            num_done += 1
            if out.done.is_reached() and back.done.is_reached():
                break
        acted_s = max(time.perf_counter() - begin, 1e-9)
        device.synchronize()
        copied_s = max(ready.elapsed_s(out.done), ready.elapsed_s(back.done), 1e-9)
    return num_done / acted_s, num_copies * num_bytes / copied_s


@contextmanager
def _memory(device: Device, num_bytes: int, *, num_pairs: int = 1) -> Iterator[tuple[list[torch.UntypedStorage], list[Span]]]:
    arena, storages = Arena(device), [device.allocate(num_bytes) for _ in range(num_pairs)]
    try:
        yield storages, [arena.take(num_bytes) for _ in range(num_pairs)]
    finally:
        device.synchronize()  # also after an interrupt nothing is under way when the storages go
        arena.give_all()
        arena.close()


def _seconds(device: Device, num_bytes: int, repeats: int, *, num_copies: int) -> tuple[float, float]:
    lanes, out_s, back_s = Lanes(device), [], []
    with _memory(device, num_bytes) as ((storage,), (span,)):
        for _ in range(1 + repeats):  # the first is to warm up
            ready = device.record_event()
            out = [lanes.copy_out(storage, span, after=ready) for _ in range(num_copies)]
            device.synchronize()
            back = [lanes.copy_back(span, storage, after=(out[-1].done,)) for _ in range(num_copies)]
            device.synchronize()
            out_s.append(out[0].started.elapsed_s(out[-1].done) / num_copies)
            back_s.append(back[0].started.elapsed_s(back[-1].done) / num_copies)
    return statistics.median(out_s[1:]), statistics.median(back_s[1:])
