"""A CPU stand-in for an accelerator on which every missing order between streams shows. It cannot show speed.

A copy lands when something waits for it (or, with a seed, at a random legal moment). Until then its destination holds poison,
0xFF, which is NaN in every floating-point format; so do host spans that were freed. Streams carry vector clocks: recording an
event takes a snapshot, waiting joins it. Every storage and every range of host memory knows which streams wrote, read and freed
it, and when; an access that is not ordered behind those raises `RaceError`, also where the bytes would have been right by luck.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.tensors import byte_view
from memkit.device.base import Device, Event, MemoryCounter, Stream
from memkit.errors import RaceError


@dataclass(eq=False, slots=True)
class ReferenceStream(Stream):
    name: str
    number: int
    is_compute: bool  # whether torch's own work, done at once, runs on it: all that it waits for must land at once, too
    clock: dict[int, int] = field(default_factory=dict)
    queue: deque[ReferenceCopy | ReferenceEvent] = field(default_factory=deque)
    num_enqueued: int = 0

    @property
    def num_landed(self) -> int:
        return self.num_enqueued - len(self.queue)

    def tick(self) -> Stamp:
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return Stamp(self, self.clock[self.number])

    def join(self, clock: dict[int, int]) -> None:
        for number, count in list(clock.items()):
            self.clock[number] = max(self.clock.get(number, 0), count)

    def is_after(self, stamp: Stamp) -> bool:
        return self.clock.get(stamp.stream.number, 0) >= stamp.count


@dataclass(frozen=True, slots=True)
class Stamp:
    stream: ReferenceStream
    count: int


@dataclass(frozen=True, eq=False, slots=True)
class ReferenceEvent(Event):
    device: ReferenceDevice
    stream: ReferenceStream
    clock: dict[int, int]
    position: int
    at_s: float

    def elapsed_s(self, end: Event) -> float:
        end = end.recorded()
        assert isinstance(end, ReferenceEvent)
        return end.at_s - self.at_s

    def is_reached(self) -> bool:
        is_reached = self.stream.num_landed >= self.position
        if is_reached and not self.stream.is_compute:  # a compute stream would hide each missing wait
            with self.device._lock:  # the host has seen it: all later work on any stream comes behind
                self.device._order_all_behind(self.clock)
        return is_reached


@dataclass(slots=True)
class Accesses:
    written: Stamp
    reads: dict[int, Stamp] = field(default_factory=dict)

    def check(self, stream: ReferenceStream, *, is_write: bool, what: str) -> None:
        verb = "writes to" if is_write else "reads"
        others = [("writer", self.written), *(("reader", read) for read in self.reads.values() if is_write)]
        for who, stamp in others:
            if not stream.is_after(stamp):
                raise RaceError(f'stream "{stream.name}" {verb} {what} without waiting for its {who}, "{stamp.stream.name}"')

    def note(self, stamp: Stamp, *, is_write: bool) -> None:
        if is_write:
            self.written = stamp
            self.reads.clear()
        else:
            self.reads[stamp.stream.number] = stamp


@dataclass(frozen=True, slots=True)
class CopySide:
    host: Tensor | None
    storage: weakref.ref[torch.UntypedStorage] | None
    start: int
    num_bytes: int

    @classmethod
    def of(cls, tensor: Tensor, *, is_host: bool) -> CopySide:
        storage = None if is_host else weakref.ref(tensor.untyped_storage())
        return cls(tensor if is_host else None, storage, tensor.data_ptr(), tensor.nbytes)

    def tensor(self) -> Tensor:
        if self.host is not None:
            return self.host
        storage = self.storage() if self.storage is not None else None
        if storage is None:
            raise RaceError("a tensor was freed before a copy from or to it had landed")
        return byte_view(storage).narrow(0, self.start - storage.data_ptr(), self.num_bytes)

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.start + self.num_bytes


@dataclass(frozen=True, slots=True)
class ReferenceCopy:
    destination: CopySide
    source: CopySide


def own(stream: Stream) -> ReferenceStream:
    assert isinstance(stream, ReferenceStream)
    return stream


POISON = 0xFF


@dataclass(slots=True)
class _KnownStorage:
    home: ReferenceStream
    num_bytes: int
    accesses: Accesses
    version: int | None = None


@dataclass(eq=False, slots=True)
class _HostRange:
    start: int
    end: int
    accesses: Accesses

    def outside(self, start: int, end: int) -> list[_HostRange]:
        parts = (self.start, min(self.end, start)), (max(self.start, end), self.end)
        found = self.accesses
        return [_HostRange(*part, Accesses(found.written, dict(found.reads))) for part in parts if part[0] < part[1]]


class _Counter(MemoryCounter):
    def __init__(self, device: ReferenceDevice) -> None:
        self._device = device

    def allocated_bytes(self) -> int:
        return self._device._allocated_bytes

    def peak_bytes(self) -> int:
        return self._device._peak_bytes

    def peak_reserved_bytes(self) -> None:
        return None

    def capacity_bytes(self) -> int | None:
        return self._device.capacity_bytes

    def reset_peak(self) -> None:
        self._device._peak_bytes = self._device._allocated_bytes


class ReferenceDevice(Device):
    """A device in the CPU's memory that shows races: see the module's docstring. CPU tensors count as the device's own.

    Args:
        seed: None lets every copy land as late as it may; a number lets copies land at random legal moments.

    Attributes:
        capacity_bytes: its counter's limit, None for none. More can be allocated all the same.
        races: races found where no exception could be raised, because a storage was freed without waiting for the copies
            from or to it. The next call on the device raises it.

    Example:
        >>> import torch
        >>> from memkit.device import ReferenceDevice
        >>> device = ReferenceDevice()
        >>> lane = device.new_stream("lane")
        >>> source, host = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        >>> device.pin(host)
        >>> device.note_written(source.untyped_storage(), source._version)
        >>> device.wait_event(lane, device.record_event())
        >>> device.copy(host, source, lane)
        >>> host.tolist()
        [255, 255, 255, 255]
        >>> device.wait_event(device.current_stream(), device.record_event(lane))
        >>> host.tolist()
        [1, 1, 1, 1]
    """

    takes_notes = True
    name = "reference"

    def __init__(self, *, seed: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.capacity_bytes: int | None = None
        self.races: list[RaceError] = []
        self._random = None if seed is None else random.Random(seed)
        self._lock = threading.RLock()
        self._default = ReferenceStream("compute", 0, is_compute=True)
        self._streams = [self._default]  # by their numbers in the clocks
        self._current = threading.local()
        self._storages: dict[int, _KnownStorage] = {}
        self._host_ranges: list[_HostRange] = []
        self._pinned: list[Tensor] = []
        self._allocated_bytes = 0
        self._peak_bytes = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "what is pickled needs a device that another process can open; found a ReferenceDevice, which knows what was done "
            'in this one. Leave the device out, or name one (device="cuda")'
        )

    def current_stream(self) -> ReferenceStream:
        stream: ReferenceStream = getattr(self._current, "stream", self._default)
        return stream

    def new_stream(self, name: str) -> ReferenceStream:
        with self._lock:
            self._streams.append(ReferenceStream(name, len(self._streams), is_compute=False))
            return self._streams[-1]

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Enter the stream after its queue has landed: from now on torch's work is done on it, at once."""
        before, entered = self.current_stream(), own(stream)
        entered.is_compute = True
        self._land(entered, entered.num_enqueued)
        self._current.stream = entered
        try:
            yield
        finally:
            self._current.stream = before

    def record_event(self, stream: Stream | None = None, *, timed: bool = True) -> ReferenceEvent:
        with self._lock:
            self._pass_time()
            recorded = self.current_stream() if stream is None else own(stream)
            return ReferenceEvent(self, recorded, dict(recorded.clock), recorded.num_enqueued, time.perf_counter())

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Join the event's clock. A compute stream's awaited copies land now, another's when the event's turn comes."""
        event = event.recorded()  # another thread may need the lock to do so
        with self._lock:
            self._pass_time()
            waiting = own(stream)
            assert isinstance(event, ReferenceEvent)
            waiting.join(event.clock)
            if waiting.is_compute:
                self._land(event.stream, event.position)
            else:
                waiting.queue.append(event)
                waiting.num_enqueued += 1

    def synchronize(self, event: Event | None = None) -> None:
        """Let all land, and order it ahead of all later work on any stream."""
        event = None if event is None else event.recorded()
        with self._lock:
            assert event is None or isinstance(event, ReferenceEvent)
            ends = [(stream, stream.num_enqueued, stream.clock) for stream in self._streams]
            for stream, position, clock in ends if event is None else [(event.stream, event.position, event.clock)]:
                self._land(stream, position)
                self._order_all_behind(clock)
            self._raise_races()

    def _order_all_behind(self, clock: dict[int, int]) -> None:
        for stream in self._streams:
            stream.join(clock)

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Return poison, which the current stream has written."""
        with self._lock:
            self._pass_time()
            storage = torch.UntypedStorage(num_bytes)
            byte_view(storage).fill_(POISON)
            self._know(storage)
            return storage

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Check both ends for races, and poison the destination until the copy lands."""
        with self._lock:
            self._pass_time()
            lane = own(stream)
            if self._is_host(destination) == self._is_host(source):
                raise ValueError("a copy goes between the device and pinned host memory; both ends were on the same side")
            stamp = lane.tick()
            self._access(source, stamp, is_write=False)
            self._access(destination, stamp, is_write=True)
            if not self._is_awaited(destination):
                destination.fill_(POISON)
            lane.queue.append(ReferenceCopy(*(CopySide.of(end, is_host=self._is_host(end)) for end in (destination, source))))
            lane.num_enqueued += 1
            if lane.is_compute:
                self._land(lane, lane.num_enqueued)

    def copy_pageable(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        with self._lock:
            self._pass_time()
            lane = own(stream)
            stamp = lane.tick()
            for tensor, is_write in ((source, False), (destination, True)):
                if torch_private.storage_address(tensor.untyped_storage()) in self._storages:  # the other is any memory
                    self._access(tensor, stamp, is_write=is_write)
            self._land(lane, lane.num_enqueued)
            destination.copy_(source)
            self._order_all_behind(lane.clock)

    def pin(self, host: Tensor) -> None:
        with self._lock:
            self._pinned.append(host)

    def unpin(self, host: Tensor) -> None:
        with self._lock:
            self._pinned = [tensor for tensor in self._pinned if tensor.data_ptr() != host.data_ptr()]

    def memory_counter(self) -> MemoryCounter:
        return _Counter(self)

    def is_capturing(self) -> bool:
        return False

    def note_written(self, storage: torch.UntypedStorage, version: int) -> None:
        with self._lock:
            known, stream = self._storages.get(torch_private.storage_address(storage)), self.current_stream()
            if known is None:
                known = self._know(storage)
            elif known.version != version:
                known.accesses.check(stream, is_write=True, what="a storage")
                known.accesses.note(stream.tick(), is_write=True)
            known.version = version

    def note_read(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            known = self._storages.get(torch_private.storage_address(storage))
            if known is not None:
                stream = self.current_stream()
                known.accesses.check(stream, is_write=False, what="a storage")
                known.accesses.note(stream.tick(), is_write=False)

    def note_host_free(self, host: Tensor) -> None:
        """Poison the bytes, unless a copy is yet to read them."""
        with self._lock:
            if not self._is_awaited(host):
                host.fill_(POISON)

    def _land(self, stream: ReferenceStream, position: int) -> None:
        """Land the first `position` entries that were ever put on a stream's queue."""
        while stream.num_landed < position:
            self._land_next(stream)

    def _land_next(self, stream: ReferenceStream) -> None:
        entry = stream.queue[0]
        if isinstance(entry, ReferenceEvent):
            self._land(entry.stream, entry.position)
        else:
            with torch_private.without_python_dispatch():  # a mode that saw it might come back here
                entry.destination.tensor().copy_(entry.source.tensor())
        stream.queue.popleft()

    def _pass_time(self) -> None:
        """Let some work land by chance, and raise the races that finalizers found."""
        self._raise_races()
        if self._random is not None:
            for stream in self._streams:
                while stream.queue and self._random.random() < 0.4:
                    self._land_next(stream)

    def _raise_races(self) -> None:
        if self.races:
            raise self.races.pop(0)

    def _know(self, storage: torch.UntypedStorage) -> _KnownStorage:
        """Keep book of a storage until it dies: it was handed to, or made by, work on the current stream."""
        home, key = self.current_stream(), torch_private.storage_address(storage)
        known = self._storages[key] = _KnownStorage(home, storage.nbytes(), Accesses(home.tick()))
        self._allocated_bytes += storage.nbytes()
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
        weakref.finalize(storage, self._forget, key).atexit = False
        return known

    def _forget(self, key: int) -> None:
        """Forget a dead storage: it goes back to its home stream, which should have waited for all others."""
        known = self._storages.pop(key)
        self._allocated_bytes -= known.num_bytes
        for stamp in (known.accesses.written, *known.accesses.reads.values()):
            if not known.home.is_after(stamp):
                self.races.append(
                    RaceError(
                        f'a storage of stream "{known.home.name}" was freed while "{stamp.stream.name}" may still use it: '
                        "let its stream wait first"
                    )
                )

    def _is_host(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        return any(pinned.data_ptr() <= start < pinned.data_ptr() + pinned.nbytes for pinned in self._pinned)

    def _is_awaited(self, tensor: Tensor) -> bool:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        copies = (entry for stream in self._streams for entry in stream.queue if isinstance(entry, ReferenceCopy))
        return any(copy.source.overlaps(start, end) or copy.destination.overlaps(start, end) for copy in copies)

    def _access(self, tensor: Tensor, stamp: Stamp, *, is_write: bool) -> None:
        if self._is_host(tensor):
            self._access_host(tensor, stamp, is_write=is_write)
            return
        storage = tensor.untyped_storage()
        known = self._storages.get(torch_private.storage_address(storage)) or self._know(storage)
        known.accesses.check(stamp.stream, is_write=is_write, what="a storage")
        known.accesses.note(stamp, is_write=is_write)

    def _access_host(self, tensor: Tensor, stamp: Stamp, *, is_write: bool) -> None:
        """Check and note an access to a range of host memory, of which others may have touched parts."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        touched = [known for known in self._host_ranges if known.start < end and start < known.end]
        for known in touched:
            known.accesses.check(stamp.stream, is_write=is_write, what="host memory")
        for known in touched:
            self._host_ranges += known.outside(start, end)
            known.start, known.end = max(known.start, start), min(known.end, end)
            known.accesses.note(stamp, is_write=False)
        if is_write:
            self._host_ranges = [known for known in self._host_ranges if known not in touched]
            self._host_ranges.append(_HostRange(start, end, Accesses(stamp)))
