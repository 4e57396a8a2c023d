"""The CPU: work is done when a call returns, the clock is the host's, and no allocator keeps count."""

from __future__ import annotations

import time

import torch

from memkit.device.base import Device, Event


class CpuEvent(Event):
    """A reading of `time.perf_counter`."""

    __slots__ = ("_at_s",)

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def elapsed_s(self, end: Event) -> float:
        assert isinstance(end, CpuEvent)
        return end._at_s - self._at_s


class CpuDevice(Device):
    """The host. See `Device`."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    @property
    def name(self) -> str:
        return "cpu"

    def make_events(self, num_events: int) -> None:
        pass

    def record_event(self) -> CpuEvent:
        return CpuEvent()

    def synchronize(self) -> None:
        pass

    def memory_counter(self) -> None:
        return None
