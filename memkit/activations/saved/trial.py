"""`Trial`: times whether recomputing single ops or regions is faster, for `Rematerialize`."""

from __future__ import annotations

import functools
from enum import Enum

from memkit import backwards
from memkit.device import Device, Event

_NUM_COUNTED = 2
"""So many steps of each way count, the fastest of them; the first one of regions does not: the allocator finds its places."""


class Way(Enum):
    """How a step keeps to its budget. `MemoryBudget` moves tensors beside single ops, and times regions with copies as well."""

    OPS = "single ops"
    REGIONS = "regions"
    REGIONS_AND_COPIES = "regions and copies"


class Trial:
    """Times a few steps of either way with events, from the entry to the end of the backward; the host waits for none of them.
    The fastest steps are compared, since noise only adds time.

    Args:
        is_open: whether both ways are possible; otherwise regions are used, and nothing is timed.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        self._pairs: dict[Way, list[tuple[Event, Event]]] = {way: [] for way in Way}
        self._device: Device | None = None
        self._start: Event | None = None
        self._way: Way | None = None
        self._prefers_ops = None if is_open else False

    @property
    def lacks_ops(self) -> bool:
        """Whether another step of single ops is to be timed."""
        return self._prefers_ops is None and len(self._pairs[Way.OPS]) + (self._way is Way.OPS) < _NUM_COUNTED

    def begin_step(self, device: Device) -> None:
        """Begin to time a step: a context is entered."""
        if self._prefers_ops is None:
            self._device, self._start, self._way = device, device.record_event(), None

    def end_forward(self, way: Way) -> None:
        """Note which way the forward went."""
        if self._start is not None:  # else it is not known when it began
            self._way = way

    def begin_backward(self) -> None:
        """Called when a backward requests a value of the step."""
        if self._start is not None and self._way is not None:
            backwards.on_end(functools.partial(self._end_backward, self._start, self._way))
            self._start = self._way = None

    def _end_backward(self, start: Event, way: Way, has_failed: bool) -> None:
        if not has_failed and self._device is not None:
            self._pairs[way].append((start, self._device.record_event()))

    def prefers_ops(self) -> bool:
        """Tell whether single ops are known to be faster. Does not wait for what is not known yet."""
        if self._prefers_ops is None:
            ops, regions = self._pairs[Way.OPS], self._pairs[Way.REGIONS][1:]
            pairs = [*ops, *regions]
            if len(regions) >= _NUM_COUNTED and ops and all(end.is_reached() for _, end in pairs):
                fastest = [min(start.elapsed_s(end) for start, end in found) for found in (ops, regions)]
                self._prefers_ops = fastest[0] < fastest[1]
                self._pairs = {way: [] for way in Way}
        return self._prefers_ops is True
