"""The contract of a device. The docstrings here are the specification; the other files of this room only fulfil it.

Work is put on *streams*: queues whose work runs in order, each on its own. Work that must come after work of another stream
waits for an *event* that was recorded behind that work. Nothing else orders two streams, and no call here makes the host wait
unless it says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from memkit.core.tensors import byte_view, tensor_over


class MemoryCounter(ABC):
    """Counts the bytes of live storages on one device: those handed out to tensors, as in `torch.cuda.memory_stats`. It does
    not tell how much can still be allocated."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Return the bytes that are allocated now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes that were allocated at once since the last `reset_peak`."""

    @abstractmethod
    def peak_reserved_bytes(self) -> int | None:
        """Return the most bytes that the allocator held from the device since the last `reset_peak`; None without one."""

    def capacity_bytes(self) -> int | None:
        """Return the most bytes that this process could have allocated at once, as far as others leave room; None if not
        known."""
        return None

    @abstractmethod
    def reset_peak(self) -> None:
        """Start the peaks again from the bytes allocated and reserved now."""


class Stream:
    """A queue of work on one device. Two objects that stand for the same queue are equal and have the same hash."""


class Event(ABC):
    """A moment in the work of a stream."""

    @abstractmethod
    def elapsed_s(self, end: Event) -> float:
        """Return the seconds from this event to `end`. Both were recorded with `timed=True` and have been reached."""

    @abstractmethod
    def is_reached(self) -> bool:
        """Tell whether all work recorded before the event is done. Does not wait for it."""

    def recorded(self) -> Event:
        """Return the event as the device has recorded it: a promised one waits for its thread, and raises its error."""
        return self


@dataclass(frozen=True, slots=True)
class Piece:
    index: int
    start: int
    host: Tensor  # one-dimensional, of dtype uint8; `Device.pin` has seen it, in one piece
    address: int
    num_bytes: int


class CopyBatch:
    """Copies between host memory and storages that are made ahead, and put on a stream together, again in each step, behind
    those of the batch `ahead`. `started`, `done` and `waited` are replaced each time. No two pieces overlap."""

    started: Event  # recorded on the stream that was current when the copies were put on theirs: they wait for it
    done: Event
    waited: Event | None = None  # on the waiting stream, ahead of its wait for the copies; None if none waited since `start`

    def __init__(
        self, device: Device, stream: Stream, pieces: Sequence[Piece], *, is_out: bool, ahead: CopyBatch | None = None
    ) -> None:
        self.device, self.stream, self.pieces = device, stream, pieces
        self.is_out, self.ahead = is_out, ahead
        self.num_bytes = sum(piece.num_bytes for piece in pieces)
        self.num_storages = len({piece.index for piece in pieces})

    def start(self, storages: Sequence[torch.UntypedStorage], behind: CopyBatch | None = None) -> None:
        """Put the copies behind the current stream's work and another batch's. The storages live until `done` is waited for."""
        device, stream = self.device, self.stream
        self.waited = None
        self.started = device.record_event()
        device.wait_event(stream, self.started)
        for batch in (self.ahead, behind):
            if batch is not None:
                device.wait_event(stream, batch.done)
        for piece in self.pieces:
            part = byte_view(storages[piece.index]).narrow(0, piece.start, piece.num_bytes)
            destination, source = (piece.host, part) if self.is_out else (part, piece.host)
            device.copy(destination, source, stream)
        self.done = device.record_event(stream)

    def wait(self) -> None:
        self.waited = self.device.record_event()
        self.device.wait_event(self.device.current_stream(), self.done)

    def stall_s(self) -> float:
        """Return how long the stream that last waited for the copies had nothing else to do; 0 where that is not over."""
        waited = self.waited
        if waited is None or not (waited.is_reached() and self.done.is_reached()):
            return 0.0
        return max(0.0, waited.elapsed_s(self.done))


def busy_s_of(batches: Sequence[CopyBatch]) -> float:
    """Return for how long a stream has copied, from its finished batches in the order in which they were put on it."""
    total_s, before = 0.0, None
    for batch in batches:
        own_s = batch.started.elapsed_s(batch.done)
        total_s += own_s if before is None else min(own_s, before.done.elapsed_s(batch.done))
        before = batch
    return max(0.0, total_s)


class Device(ABC):
    """One place where tensors live and kernels run."""

    torch_device: torch.device
    """The device in torch's terms, as `Tensor.device`."""
    has_own_memory = True
    """Whether its memory is not the host's, so that moving bytes to the host frees some."""

    def __deepcopy__(self, _: object) -> Device:
        return self  # a copied owner has the same device

    @property
    @abstractmethod
    def name(self) -> str:
        """The name for users: "NVIDIA H200", "cpu"."""

    # Streams and events

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that PyTorch puts this thread's work on now."""

    def stream_number(self) -> int:
        """Return a number that tells the current stream from the device's other live ones, without an object for it."""
        return hash(self.current_stream())

    @abstractmethod
    def new_stream(self, name: str) -> Stream:
        """Make a stream. Errors call it by the name."""

    @abstractmethod
    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which `stream` is the current one."""

    def make_events(self, num_events: int) -> None:  # noqa: B027
        """Make timed events ahead of need: recording one of these costs the host less than a new event."""

    @abstractmethod
    def record_event(self, stream: Stream | None = None, *, timed: bool = True) -> Event:
        """Mark the point that the work enqueued so far on `stream` (the current one by default) will reach."""

    @abstractmethod
    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let all later work on `stream` start only when `event` is reached."""

    @abstractmethod
    def synchronize(self, event: Event | None = None) -> None:
        """Make the host wait until an event is reached, or until all work on the device is done."""

    def enter_thread(self) -> None:
        """Have a thread of memkit's own use this device. Else its first call makes a context on the first GPU, which takes
        memory there."""
        if self.torch_device.type not in ("cpu", "meta"):
            torch.accelerator.set_device_index(self.torch_device)

    def record_begin(self, ahead_s: float = 3e-4) -> Event:
        """Record an event on the current stream, as the start of a timing. The stream is kept busy ahead of it, so that ops
        that the host enqueues within about `ahead_s` run without a gap: else events around an op would tell the host's time."""
        return self.record_event()

    # Memory and copies

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a new storage on the device, for work on the current stream. Its bytes are undefined. It goes back to that
        stream when it is freed, for its next storage: work of other streams on it comes after an event recorded here since,
        and this stream must wait for that work before the last reference is dropped. Raises torch.OutOfMemoryError without
        room."""

    def allocate_tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that fills a new storage of `allocate` from its first byte to its last."""
        num_elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        return tensor_over(self.allocate(num_elements * dtype.itemsize), dtype, offset=0, size=size, stride=stride)

    @abstractmethod
    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Put a copy of bytes on `stream`, which waits for all that the stream waits for, and for nothing else. Both tensors
        are one-dimensional, of dtype uint8 and one length, one of them on this device and one in host memory that `pin` has
        seen; they must stay alive, and the source unchanged, until the copy is done."""

    @abstractmethod
    def copy_pageable(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy bytes as `copy` does, from or to host memory that was not pinned. The host waits until it is done, and so for
        all that the stream waits for."""

    def copy_batch(self, stream: Stream, pieces: Sequence[Piece], *, is_out: bool, ahead: CopyBatch | None = None) -> CopyBatch:
        """Make copies ahead that are put on a stream together, any number of times: see `CopyBatch`."""
        return CopyBatch(self, stream, pieces, is_out=is_out, ahead=ahead)

    @abstractmethod
    def pin(self, host: Tensor) -> None:
        """Lock host memory in place, so that copies from and to it run at full speed and beside other work; the host waits.
        Several threads may do so at once. Raises HostMemoryError if the system refuses to lock more."""

    @abstractmethod
    def unpin(self, host: Tensor) -> None:
        """Undo `pin` for the same tensor, if still pinned. No copy from or to it may be under way."""

    @abstractmethod
    def memory_counter(self) -> MemoryCounter | None:
        """Return the allocator's own counter, or None where the allocator keeps none (the CPU's)."""

    def empty_cache(self) -> None:  # noqa: B027
        """Give the allocator's memory that no tensor uses back to the device. Source: `torch.cuda.empty_cache`."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Tell whether the work of the current stream is being captured into a graph instead of run."""

    # What a device cannot see by itself, and `ReferenceDevice` checks. Real devices have nothing to do here.

    takes_notes = False
    """Whether the notes below have any effect."""

    def note_written(self, storage: torch.UntypedStorage, version: int) -> None:  # noqa: B027
        """Say that work on the current stream has made `storage`, or written to it if the version differs from the last
        call's."""

    def note_read(self, storage: torch.UntypedStorage) -> None:  # noqa: B027
        """Say that work on the current stream is about to read `storage`."""

    def note_host_free(self, host: Tensor) -> None:  # noqa: B027
        """Say that the bytes of a span of host memory mean nothing any more."""
