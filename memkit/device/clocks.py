"""The streams of a reference device: queues of late copies with vector clocks; and the last accesses to a piece of memory."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit.core.tensors import byte_view
from memkit.device.base import Event, Stream
from memkit.errors import RaceError

if TYPE_CHECKING:
    from memkit.device.reference import ReferenceDevice


@dataclass(eq=False, slots=True)
class ReferenceStream(Stream):
    name: str
    number: int
    is_compute: bool
    """Whether torch's own work, which is done at once, runs on it: then all that it waits for must land at once, too."""
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
            self.device.note_reached(self)
        return is_reached


@dataclass(slots=True)
class Accesses:
    written: Stamp
    reads: dict[int, Stamp] = field(default_factory=dict)

    def check(self, stream: ReferenceStream, *, is_write: bool, what: str) -> None:
        """Raise unless `stream` comes after the last write and, to write itself, after the reads since."""
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

    def copy(self) -> Accesses:
        return Accesses(self.written, dict(self.reads))


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
