"""One stream for each direction of copies, shared by all features; long copies take turns on two streams."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.tensors import byte_view
from memkit.core.torch_state import NO_LABEL, label
from memkit.device.base import CopyBatch, Device, Event, Piece, Stream
from memkit.transfer.host_memory import Span

TURN_BYTES = 16 * 2**20
"""About the bytes of one turn."""


class CopiesByTurns(CopyBatch):
    """A `CopyBatch` whose pieces are copied one after the other, alternating between two streams."""

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
    def is_active(self) -> bool:
        """Whether it may have something to fetch."""

    def bring_until(self, use_order: int) -> bool:
        """Put on the lane what the backward needs sooner than the use `use_order`; tell whether all of it is on its way."""


class Lanes:
    """One queue from a device to the host and one back, for all copies of memkit.

    A copy waits for the events that it is given, and nothing waits for it by itself. The caller keeps the storage alive until
    the stream that the storage goes back to has waited for `Transfer.done`.

    [Note: one queue for all] Copies on a lane run in order, and several prefetchers bring weights and activations back. A
    backward needs tensors in the reverse order of the forward's uses. So in the forward, whatever will be needed again takes a
    number from one counter (`next_use`), its `use_order`, and the highest is fetched first: a prefetcher asks `bring_sooner`
    before each copy, and stops there if another has yet to bring something that is needed sooner.

    [Note: copies by turns] Any other copy to the host, as by `item()`, waits behind all copies of a stream that are ready to
    go: on an H200, 2 GiB of them hold up an `item()` for 38 ms. The same holds for copies to the device of more than a KiB,
    such as FSDP2's. If copies alternate between two streams, each waiting for the one before, CUDA goes on to other streams in
    between: with pieces of 16 MiB it is 0.04 ms. But copies are then slower by 1 to 3 %. So a schedule puts its copies on
    `out_by_turns` once they have ended before the forward did, and those back on `back_by_turns` once a backward has hardly
    waited for them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.out = device.new_stream("D2H")
        self.back = device.new_stream("H2D")
        self.out_by_turns = self.out, device.new_stream("D2H, by turns")
        self.back_by_turns = self.back, device.new_stream("H2D, by turns")
        self.next_use: Callable[[], int] = itertools.count(1).__next__
        """Returns the next number of the counter: see [Note: one queue for all]."""
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
            if is_out:
                device.copy(piece, part, lane)
            else:
                device.copy(part, piece, lane)
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
