"""CUDA devices: the one file that names `torch.cuda`."""

from __future__ import annotations

import torch

from memkit.device.base import Device, Event, MemoryCounter
from memkit.errors import DeviceUnavailableError


def cuda_is_available() -> bool:
    """Tell whether this machine has a CUDA device that torch can use."""
    return torch.cuda.is_available()


class CudaEvent(Event):
    """A timing event on a stream. Source: `torch.cuda.Event`."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Move the event to where the work enqueued on `stream` ends now."""
        self._event.record(stream)

    def elapsed_s(self, end: Event) -> float:
        assert isinstance(end, CudaEvent)
        return float(self._event.elapsed_time(end._event)) / 1e3


class CudaMemoryCounter(MemoryCounter):
    """The counters of PyTorch's caching allocator.

    There is one set per device: `reset_peak` also resets what `torch.cuda.max_memory_allocated` reports to everybody else.
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

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._torch_device)


class CudaDevice(Device):
    """One CUDA device. See `Device`.

    Raises:
        DeviceUnavailableError: this machine has no CUDA device, or none with that index.
    """

    def __init__(self, torch_device: torch.device) -> None:
        if not cuda_is_available():
            raise DeviceUnavailableError(
                f'"{torch_device}" was asked for, but torch {torch.__version__} finds no CUDA device here. '
                'Use device "meta", which needs none.'
            )
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        if index >= torch.cuda.device_count():
            raise DeviceUnavailableError(
                f'"{torch_device}" was asked for; this machine has {torch.cuda.device_count()} CUDA device(s), from cuda:0 on.'
            )
        self.torch_device = torch.device("cuda", index)
        self._spare_events: list[CudaEvent] = []

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def make_events(self, num_events: int) -> None:
        while len(self._spare_events) < num_events:
            event = CudaEvent()
            event.record(torch.cuda.current_stream(self.torch_device))  # CUDA makes it only now
            self._spare_events.append(event)

    def record_event(self) -> CudaEvent:
        event = self._spare_events.pop() if self._spare_events else CudaEvent()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory_counter(self) -> CudaMemoryCounter:
        return CudaMemoryCounter(self.torch_device)
