"""Copies between a device and host memory that the system did not pin, through a few pinned buffers, on threads of their own.

[Note: why threads cannot wait for each other in a circle] One thread per direction takes copies in the order of the requests. A
copy waits for events; events that a thread has yet to record belong to earlier copies. So the oldest unfinished copy waits for
nothing but the device, and the device for nothing but recorded events.
"""

from __future__ import annotations

import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress

import torch
from torch import Tensor

from memkit.core.forks import OwnThreads, forked
from memkit.core.sizes import format_bytes
from memkit.core.tensors import byte_view
from memkit.device.base import Device, Event, Stream

CHUNK_BYTES = 16 * 2**20
"""Size of a buffer: one is filled while another is on its way, and far fewer bytes reach the link's full speed."""
NUM_BUFFERS = 4
"""Two in each direction."""


class PromisedEvent(Event):
    """An event that a thread has yet to record. If the thread has failed, waiting raises why."""

    __slots__ = ("_recording", "_thread", "_which")

    def __init__(self, recording: Future[tuple[Event, Event]], which: int, thread: OwnThreads) -> None:
        self._recording, self._which, self._thread = recording, which, thread

    def recorded(self) -> Event:
        if not (self._thread.are_here or self._recording.done()):
            raise forked("a feature of memkit")
        return self._recording.result()[self._which]

    def elapsed_s(self, end: Event) -> float:
        return self.recorded().elapsed_s(end)

    def is_reached(self) -> bool:
        recording = self._recording
        return recording.done() and (recording.exception() is not None or self.recorded().is_reached())


class Staging:
    """Copies of unpinned host memory, beside the work of the host. To the device, a thread fills one buffer after the other and
    puts the copy of each on the lane; the event is recorded once the host memory was read. To the host, the thread also waits
    for each buffer to be full, and empties it; the host memory was written when the event is recorded, not only when it is
    reached. Until `add_buffers`, copies go straight, and the threads wait for each of them."""

    def __init__(self, device: Device) -> None:
        self._sides = {is_out: _Side(device, is_out=is_out) for is_out in (False, True)}

    def add_buffers(self, buffers: Sequence[Tensor]) -> None:
        for is_out, side in self._sides.items():
            side.buffers.extend((buffer, None) for buffer in buffers[is_out::2])

    def copy(
        self,
        lane: Stream,
        storage: torch.UntypedStorage,
        pieces: Sequence[Tensor],
        *,
        is_out: bool,
        after: Iterable[Event],
        start: int = 0,
    ) -> tuple[Event, Event]:
        """Request a copy between a storage and pieces of host memory. Return its begin and end, for which the caller waits."""
        side = self._sides[is_out]
        # A weak reference, since a slot counts the holders of its storage.
        recording = side.thread.submit(side.copy, lane, weakref.ref(storage), pieces, tuple(after), start)
        return PromisedEvent(recording, 0, side.thread), PromisedEvent(recording, 1, side.thread)

    def drain(self) -> None:
        """Make the host wait until each requested copy is on a lane, or has failed."""
        for side in self._sides.values():
            side.drain()

    def close(self) -> None:
        """Stop the threads; the host waits for all copies. The buffers may be given back then."""
        for side in self._sides.values():
            side.close()


class _Side:
    def __init__(self, device: Device, *, is_out: bool) -> None:
        self._device, self._is_out = device, is_out
        self.thread = OwnThreads(1, "memkit-staging", device.enter_thread)
        self._is_closed = False
        self.buffers: deque[tuple[Tensor, Event | None]] = deque()

    def drain(self) -> None:
        if not self._is_closed:
            self.thread.submit(int).result()  # behind all of them, also one whose asking was broken off

    def close(self) -> None:
        self.thread.shutdown()
        self._is_closed = True
        for _, last_use in self.buffers:
            if last_use is not None:
                self._device.synchronize(last_use)
        self.buffers.clear()

    def copy(
        self,
        lane: Stream,
        held: weakref.ref[torch.UntypedStorage],
        pieces: Sequence[Tensor],
        after: Sequence[Event],
        start: int,
    ) -> tuple[Event, Event]:
        for event in [event.recorded() for event in after]:  # the other thread may be writing to these pieces
            self._device.wait_event(lane, event)
        started, storage = self._device.record_event(lane), held()
        assert storage is not None, "a storage was freed before a copy from or to it was on its lane"
        try:
            staged = self._copy_out if self._is_out else self._copy_back
            copy, most_bytes = (staged, self.buffers[0][0].numel()) if self.buffers else (self._copy_straight, None)
            copy(lane, _chunks(pieces, byte_view(storage)[start:], most_bytes))
            return started, self._device.record_event(lane)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the storage
            with suppress(Exception):
                self._device.synchronize(self._device.record_event(lane, timed=False))
            raise
        finally:
            del storage

    def _copy_back(self, lane: Stream, chunks: Iterator[tuple[Tensor, Tensor]]) -> None:
        for host, part in chunks:
            buffer, last_use = self.buffers[0]
            if last_use is not None:
                self._device.synchronize(last_use)
            staged = buffer[: host.numel()]
            staged.copy_(host)
            self._device.copy(part, staged, lane)
            self.buffers[0] = (buffer, self._device.record_event(lane, timed=False))
            self.buffers.rotate(-1)

    def _copy_out(self, lane: Stream, chunks: Iterator[tuple[Tensor, Tensor]]) -> None:
        landing: deque[tuple[Tensor, Tensor, Event]] = deque()
        for host, part in chunks:
            if len(landing) == len(self.buffers):
                self._empty(*landing.popleft())
            staged = self.buffers[0][0][: host.numel()]
            self.buffers.rotate(-1)
            self._device.copy(staged, part, lane)
            landing.append((host, staged, self._device.record_event(lane, timed=False)))
        for entry in landing:
            self._empty(*entry)

    def _empty(self, host: Tensor, staged: Tensor, landed: Event) -> None:
        self._device.synchronize(landed)
        host.copy_(staged)

    def _copy_straight(self, lane: Stream, chunks: Iterator[tuple[Tensor, Tensor]]) -> None:
        for host, part in chunks:
            destination, source = (host, part) if self._is_out else (part, host)
            self._device.copy_pageable(destination, source, lane)


def _chunks(pieces: Sequence[Tensor], on_device: Tensor, most_bytes: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    offset = 0
    for piece in pieces:
        for host in piece.split(most_bytes or piece.numel()):
            yield host, on_device.narrow(0, offset, host.numel())
            offset += host.numel()


def describe_refusal(num_bytes: int, chunk_bytes: int, reason: str, *, has_buffers: bool) -> str:
    buffers = f"{NUM_BUFFERS} buffers of {format_bytes(chunk_bytes)}"
    if has_buffers:
        how = f"copies go through {buffers}, and the host copies each byte once more"
    else:
        how = f"copies go straight from and to it, several times slower, since {buffers} could not be pinned either"
    return (
        f"the system did not pin {format_bytes(num_bytes)} of host memory ({reason}), so it is ordinary memory: {how}. Raise "
        "the limit on locked memory (ulimit -l; a container's --ulimit memlock; memory= in .wslconfig), or offload less."
    )
