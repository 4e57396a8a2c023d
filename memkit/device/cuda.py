"""CUDA devices: the one file that names `torch.cuda`."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from memkit.device.base import Device, Event, MemoryCounter, Stream
from memkit.errors import DeviceUnavailableError, HostMemoryError

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context, whichever made it


def cuda_is_available() -> bool:
    """Tell whether this machine has a CUDA device that torch can use."""
    return torch.cuda.is_available()


def cuda_is_capturing() -> bool:
    """Tell whether the work of the current stream of the current device is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def cuda_generator(torch_device: torch.device) -> torch.Generator:
    """Return the random number generator that ops on a CUDA device draw from by default."""
    index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


class CudaStream(Stream):
    """A CUDA stream. Source: `torch.cuda.Stream`."""

    __slots__ = ("stream",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and bool(self.stream == other.stream)

    def __hash__(self) -> int:
        return hash(self.stream)


class CudaEvent(Event):
    """An event on a stream. Source: `torch.cuda.Event`."""

    __slots__ = ("event",)

    def __init__(self, *, timed: bool = True) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)

    def elapsed_s(self, end: Event) -> float:
        end = end.recorded()
        assert isinstance(end, CudaEvent)
        return float(self.event.elapsed_time(end.event)) / 1e3

    def is_reached(self) -> bool:
        return bool(self.event.query())


class CudaMemoryCounter(MemoryCounter):
    """The counters of PyTorch's caching allocator.

    There is one set per device: `reset_peak` also resets what `torch.cuda.max_memory_allocated` reports to all others.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device

    def _current_and_peak(self, what: str) -> tuple[int, int]:
        # The nested form is read straight from the allocator; `memory_stats` flattens and sorts it first, which costs more
        # than all else that happens at a module's boundary.
        stats = torch.cuda.memory_stats_as_nested_dict(self._torch_device)[what]["all"]
        return int(stats["current"]), int(stats["peak"])

    def allocated_bytes(self) -> int:
        return self._current_and_peak("allocated_bytes")[0]

    def peak_bytes(self) -> int:
        return self._current_and_peak("allocated_bytes")[1]

    def peak_reserved_bytes(self) -> int:
        return self._current_and_peak("reserved_bytes")[1]

    def capacity_bytes(self) -> int:
        """Return what is free and what this process holds, up to the share that `set_per_process_memory_fraction` leaves it."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._torch_device)
        cap_bytes = int(torch.cuda.get_per_process_memory_fraction(self._torch_device) * total_bytes)
        return min(free_bytes + self._current_and_peak("reserved_bytes")[0], cap_bytes)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._torch_device)


class CudaDevice(Device):
    """One CUDA device. See `Device`.

    Args:
        torch_device: which; without an index the current one.
        advice: what to do where there is none, for the error.

    Raises:
        DeviceUnavailableError: this machine has no CUDA device, or none with that index.
    """

    def __init__(self, torch_device: torch.device, *, advice: str = "Run on a machine with a GPU") -> None:
        if not cuda_is_available():
            raise DeviceUnavailableError(
                f'"{torch_device}" was asked for, but torch {torch.__version__} finds no CUDA device here. {advice}.'
            )
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        if index >= torch.cuda.device_count():
            raise DeviceUnavailableError(
                f'"{torch_device}" was asked for; this machine has {torch.cuda.device_count()} CUDA device(s), from cuda:0 on.'
            )
        self.torch_device = torch.device("cuda", index)
        self._spare_events: list[CudaEvent] = []
        self._runtime: Any = torch.cuda.cudart()  # a module made in C++: torch has no types for it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaDevice) and self.torch_device == other.torch_device

    def __hash__(self) -> int:
        return hash(self.torch_device)

    def __reduce__(self) -> tuple[type[CudaDevice], tuple[torch.device]]:
        return CudaDevice, (self.torch_device,)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.torch_device))

    def new_stream(self, name: str) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.torch_device))

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(_of(stream))

    def make_events(self, num_events: int) -> None:
        """Record events once, since CUDA makes one when it is first recorded; `record_event` takes of these."""
        while len(self._spare_events) < num_events:
            event = CudaEvent()
            event.event.record(torch.cuda.current_stream(self.torch_device))
            self._spare_events.append(event)

    def record_event(self, stream: Stream | None = None, *, timed: bool = True) -> CudaEvent:
        event = self._spare_events.pop() if timed and self._spare_events else CudaEvent(timed=timed)
        event.event.record(torch.cuda.current_stream(self.torch_device) if stream is None else _of(stream))
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        event = event.recorded()
        assert isinstance(event, CudaEvent)
        _of(stream).wait_event(event.event)

    def synchronize(self, event: Event | None = None) -> None:
        if event is None:
            torch.cuda.synchronize(self.torch_device)
        else:
            event = event.recorded()
            assert isinstance(event, CudaEvent)
            event.event.synchronize()

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(num_bytes, device=self.torch_device)

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Put an asynchronous copy on the stream: the host's side is pinned."""
        with torch.cuda.stream(_of(stream)):
            destination.copy_(source, non_blocking=True)

    def copy_pageable(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        _of(stream).synchronize()  # else CUDA would wait itself, and might have other threads wait as well
        with torch.cuda.stream(_of(stream)):
            destination.copy_(source)

    def pin(self, host: Tensor) -> None:
        """Pin memory where it is, by `cudaHostRegister`."""
        # cudaHostRegister belongs to a context, which a thread of ours has not made current yet.
        with torch.cuda.device(self.torch_device):
            status = self._runtime.cudaHostRegister(host.data_ptr(), host.nbytes, _REGISTER_PORTABLE)
        if int(status) != 0:
            self._clear_error()
            raise HostMemoryError(
                f"CUDA could not pin {host.nbytes} bytes of host memory: cudaHostRegister gave {status}. "
                "The system limits locked memory (ulimit -l, or the container)."
            )

    def unpin(self, host: Tensor) -> None:
        """Undo `pin`; CUDA's refusal for what is not pinned is none."""
        with torch.cuda.device(self.torch_device):
            status = self._runtime.cudaHostUnregister(host.data_ptr())
        if int(status) != 0:
            self._clear_error()

    def _clear_error(self) -> None:
        """Take up the error that CUDA has noted, which the next kernel's launch check would else raise as its own."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def memory_counter(self) -> CudaMemoryCounter:
        return CudaMemoryCounter(self.torch_device)


def _of(stream: Stream) -> torch.cuda.Stream:
    assert isinstance(stream, CudaStream)
    return stream.stream
