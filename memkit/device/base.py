"""The contract of a device. The docstrings here are the specification; `cuda.py` and `cpu.py` only fulfil it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class MemoryCounter(ABC):
    """Counts the bytes of live storages on one device.

    `allocated` means bytes handed out to tensors, as in `torch.cuda.memory_stats`. It does not tell what can still be
    allocated: fragmentation, and memory held by libraries and other processes, are not in it.
    """

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Return the bytes that are allocated now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes that were allocated at once since the last `reset_peak`."""

    @abstractmethod
    def peak_reserved_bytes(self) -> int | None:
        """Return the most bytes that the allocator held from the device since the last `reset_peak`; None without one."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start the peaks again from what is allocated and reserved now."""


class Event(ABC):
    """A moment in a device's work."""

    @abstractmethod
    def elapsed_s(self, end: Event) -> float:
        """Return the seconds from this event to `end`, of the same device, which must have been synchronized since."""


class Device(ABC):
    """One place where tensors live and kernels run."""

    torch_device: torch.device

    @property
    @abstractmethod
    def name(self) -> str:
        """What a person would call it: "NVIDIA H200", "cpu"."""

    @abstractmethod
    def make_events(self, num_events: int) -> None:
        """Make events ahead of need: recording one of these costs the host less than making one on the way."""

    @abstractmethod
    def record_event(self) -> Event:
        """Mark the point that the work enqueued so far on the current stream will reach. Does not wait for it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work on the device is done."""

    @abstractmethod
    def memory_counter(self) -> MemoryCounter | None:
        """Return the allocator's own counter, or None where the allocator keeps none (the CPU's)."""
