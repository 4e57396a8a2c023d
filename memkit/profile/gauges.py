"""Gauges, which are read whenever a module's call begins or ends: memory in one run, time in another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from memkit.device.base import Device, Event, MemoryCounter

CUDA_ROUNDING_BYTES = 512
"""CUDA's caching allocator rounds each size up to a multiple of this."""


class Gauge(Protocol):
    """Something that is read whenever another module begins to run."""

    def open(self, index: int) -> None:
        """A call of the module at `index` begins."""

    def close(self, index: int) -> None:
        """The innermost call, one of the module at `index`, ends."""

    def start_backward_of(self, index: int | None) -> None:
        """The backward goes on with operations of the module at `index`; None when it ends."""


class MemoryGauge(Gauge, Protocol):
    """A gauge that reads memory; its figures are None if it can't be counted."""

    before_bytes: int | None
    highest_reserved_bytes: int | None
    forward_peaks: Mapping[int, int]
    backward_peaks: Mapping[int, int]

    def take_highest(self) -> int | None:
        """Return the peak of allocated bytes since the last `take_highest`, and start again."""


class NoGauge:
    """Reads nothing: for warm-up runs, and if memory can't be counted."""

    def __init__(self) -> None:
        self.before_bytes: int | None = None
        self.highest_reserved_bytes: int | None = None
        self.forward_peaks: Mapping[int, int] = {}
        self.backward_peaks: Mapping[int, int] = {}

    def open(self, index: int) -> None:
        pass

    def close(self, index: int) -> None:
        pass

    def start_backward_of(self, index: int | None) -> None:
        pass

    def take_highest(self) -> None:
        return None


class PeakGauge:
    """The most bytes allocated during each module's calls, above what was allocated when the call began.

    The allocator has one peak counter: at each beginning and end of a call, its value is added to every open call, and it is
    reset.
    """

    def __init__(self, counter: MemoryCounter) -> None:
        self._counter = counter
        self._calls: list[list[int]] = []  # [bytes at entry, highest bytes so far] of each open call
        self._backward_of: int | None = None
        counter.reset_peak()
        self._before_bytes = self._highest_bytes = counter.allocated_bytes()
        self.before_bytes: int | None = self._before_bytes
        self.highest_reserved_bytes: int | None = counter.peak_reserved_bytes()
        self._forward_peaks: dict[int, int] = {}
        self._backward_peaks: dict[int, int] = {}
        self.forward_peaks: Mapping[int, int] = self._forward_peaks
        self.backward_peaks: Mapping[int, int] = self._backward_peaks

    def open(self, index: int) -> None:
        self._fold()
        current = self._counter.allocated_bytes()
        self._calls.append([current, current])

    def close(self, index: int) -> None:
        self._fold()
        entry_bytes, highest_bytes = self._calls.pop()
        self._forward_peaks[index] = max(self._forward_peaks.get(index, 0), highest_bytes - entry_bytes)

    def start_backward_of(self, index: int | None) -> None:
        highest = self._fold()
        if self._backward_of is not None:
            above = highest - self._before_bytes
            self._backward_peaks[self._backward_of] = max(self._backward_peaks.get(self._backward_of, 0), above)
        self._backward_of = index

    def _fold(self) -> int:
        highest = self._counter.peak_bytes()
        reserved = self._counter.peak_reserved_bytes()
        for call in self._calls:
            call[1] = max(call[1], highest)
        self._highest_bytes = max(self._highest_bytes, highest)
        if reserved is not None:
            self.highest_reserved_bytes = max(self.highest_reserved_bytes or 0, reserved)
        self._counter.reset_peak()
        return highest

    def take_highest(self) -> int:
        """Return the peak of allocated bytes since the last `take_highest`, and start again."""
        self._fold()
        highest, self._highest_bytes = self._highest_bytes, self._counter.allocated_bytes()
        return highest


class TimeGauge:
    """The time of each module's calls, from events on the device: nothing waits until `read`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._calls: list[Event] = []
        self._depths: Counter[int] = Counter()
        self._forward_spans: list[tuple[int, Event, Event]] = []
        self._backward_marks: list[tuple[int | None, Event]] = []

    def open(self, index: int) -> None:
        self._depths[index] += 1
        self._calls.append(self._device.record_event())

    def close(self, index: int) -> None:
        start = self._calls.pop()
        self._depths[index] -= 1
        if not self._depths[index]:  # a module that calls itself is already in the outer call's time
            self._forward_spans.append((index, start, self._device.record_event()))

    def start_backward_of(self, index: int | None) -> None:
        self._backward_marks.append((index, self._device.record_event()))

    def read(self) -> tuple[dict[int, float], dict[int, float]]:
        """Wait for the device; return seconds per module: forward (with the modules it called) and backward (its own)."""
        self._device.synchronize()
        forward: dict[int, float] = {}
        for index, start, end in self._forward_spans:
            forward[index] = forward.get(index, 0.0) + start.elapsed_s(end)
        backward: dict[int, float] = {}
        for (index_or_none, start), (_, end) in zip(self._backward_marks, self._backward_marks[1:], strict=False):
            if index_or_none is not None:
                backward[index_or_none] = backward.get(index_or_none, 0.0) + start.elapsed_s(end)
        return forward, backward
