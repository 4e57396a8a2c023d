"""The CPU: work is done when a call returns, the clock is the host's, and no allocator keeps count."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from memkit.device.base import Device, Event, Stream


class CpuStream(Stream):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return hash(CpuStream)


class CpuEvent(Event):
    __slots__ = ("_at_s",)

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def elapsed_s(self, end: Event) -> float:
        end = end.recorded()
        assert isinstance(end, CpuEvent)
        return end._at_s - self._at_s

    def is_reached(self) -> bool:
        return True


class CpuDevice(Device):
    """The host, also for tensors without data (of torch's "meta" device). See `Device`."""

    has_own_memory = False
    name = "cpu"

    def __init__(self, torch_device: torch.device = torch.device("cpu")) -> None:  # noqa: B008  # immutable
        self.torch_device = torch_device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuDevice) and self.torch_device == other.torch_device

    def __hash__(self) -> int:
        return hash(self.torch_device)

    def current_stream(self) -> CpuStream:
        return CpuStream()

    def new_stream(self, name: str) -> CpuStream:
        return CpuStream()

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def record_event(self, stream: Stream | None = None, *, timed: bool = True) -> CpuEvent:
        return CpuEvent()

    def wait_event(self, stream: Stream, event: Event) -> None:
        event.recorded()

    def synchronize(self, event: Event | None = None) -> None:
        if event is not None:
            event.recorded()

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(num_bytes)

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        destination.copy_(source)

    copy_pageable = copy

    def pin(self, host: Tensor) -> None:
        pass

    def unpin(self, host: Tensor) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def memory_counter(self) -> None:
        return None
