"""Steps that are not recorded any more: their actions, their saved bytes, and whether single ops or regions are faster."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memkit.core import backwards, torch_private
from memkit.device import Device, Event

if TYPE_CHECKING:
    from memkit.activations.recomputing.budget import RematOptions
    from memkit.activations.recomputing.region_plan import RegionPlan


_NUM_COUNTED = 2
"""So many steps of each way count, the fastest of them. The first one of regions does not: the allocator finds its places."""


class Way(Enum):
    """How a step keeps to its budget. `MemoryBudget` moves tensors beside single ops, and times regions with copies as well."""

    OPS = "single ops"
    REGIONS = "regions"
    REGIONS_AND_COPIES = "regions and copies"


class TimedWays:
    """Times a few steps of either way with events, from the entry to the end of the backward, and compares the fastest ones;
    the host waits for none. Unless both ways are possible, regions are used, and nothing is timed."""

    def __init__(self, *, is_open: bool = True) -> None:
        self._pairs: dict[Way, list[tuple[Event, Event]]] = {way: [] for way in Way}
        self._device: Device | None = None
        self._start: Event | None = None
        self._way: Way | None = None
        self._prefers_ops = None if is_open else False

    @property
    def lacks_ops(self) -> bool:
        return self._prefers_ops is None and len(self._pairs[Way.OPS]) + (self._way is Way.OPS) < _NUM_COUNTED

    def begin_step(self, device: Device) -> None:
        if self._prefers_ops is None:
            self._device, self._start, self._way = device, device.record_event(), None

    def end_forward(self, way: Way) -> None:
        if self._start is not None:  # else its begin is unknown
            self._way = way

    def begin_backward(self) -> None:
        if self._start is not None and self._way is not None:
            backwards.on_end(functools.partial(self._end_backward, self._start, self._way))
            self._start = self._way = None

    def _end_backward(self, start: Event, way: Way, has_failed: bool) -> None:
        if not has_failed and self._device is not None:
            self._pairs[way].append((start, self._device.record_event()))

    def prefers_ops(self) -> bool:
        if self._prefers_ops is None:
            ops, regions = self._pairs[Way.OPS], self._pairs[Way.REGIONS][1:]
            pairs = [*ops, *regions]
            if len(regions) >= _NUM_COUNTED and ops and all(end.is_reached() for _, end in pairs):
                fastest = [min(start.elapsed_s(end) for start, end in found) for found in (ops, regions)]
                self._prefers_ops = fastest[0] < fastest[1]
                self._pairs = {way: [] for way in Way}
        return self._prefers_ops is True


_Parameter = nn.Parameter


class SizesSeen:
    """Adds up what a step saves, each storage once, as far as that shows without its ops: parameters are left out."""

    __slots__ = ("_min_bytes", "made_bytes", "other_bytes", "seen")

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes
        self.seen = set[int]()
        """By address: saved storages live on, so addresses stay their own."""
        self.made_bytes = 0
        self.other_bytes = 0

    def note(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        address = torch_private.storage_address(storage)
        if address in self.seen:
            return
        self.seen.add(address)
        num_bytes = storage.nbytes()
        if num_bytes < self._min_bytes or type(tensor) is _Parameter or type(torch_private.base_of(tensor)) is _Parameter:
            return
        if tensor.grad_fn is None:
            self.other_bytes += num_bytes
        else:
            self.made_bytes += num_bytes

    def exceed(self, budget_bytes: int, known: SizesSeen) -> bool:
        """Tell whether this may be more than a budget allows, given that it allows `known`."""
        is_more = self.made_bytes > known.made_bytes or self.other_bytes > known.other_bytes
        return is_more and self.made_bytes + self.other_bytes > budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    options: RematOptions
    budget_bytes: float
    sizes: SizesSeen | None = None
    regions: RegionPlan | None = None
    """The calls of modules that are recomputed as a whole; None if nothing is dropped."""
