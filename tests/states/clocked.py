"""A clock for the order in which `Stepping` gives out work: what each lane, the device and the thread do when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from memkit.plan import StatePiece, StatePlan, StateRates, Update, interleaved
from memkit.states.stepping import Stepping


@dataclass(eq=False)
class Part:
    """A piece of a plan, and when what is under way of it is over."""

    plan: StatePiece
    out_s: float = 0.0
    stepped_s: float = 0.0
    is_last: bool = False


@dataclass
class Slot:
    """When the last copy from or to it is over, and which piece has it."""

    busy_s: float = 0.0
    part: Part | None = None


@dataclass
class Clock:
    """When each of what works side by side has done what it was given, in order."""

    rates: StateRates
    device_numel_per_s: float = math.inf
    """Elements that the device steps."""
    host_s: float = 0.0
    """The thread that gives out work: it only waits where it joins."""
    down_s: float = 0.0
    up_s: float = 0.0
    compute_s: float = 0.0
    thread_s: float = 0.0
    idle_s: float = 0.0
    """How long the thread that steps had nothing to do, since it began."""
    slots: dict[int, Slot] = field(default_factory=dict)

    def slot(self, part: Part) -> Slot:
        return self.slots.setdefault(part.plan.slot, Slot())

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / self.rates.link_bytes_per_s

    def is_free_for(self, part: Part) -> bool:
        return part.plan.is_resident or self.slot(part).part is None

    @property
    def end_s(self) -> float:
        return max(self.host_s, self.down_s, self.up_s, self.compute_s, self.thread_s)


class OnDevice:
    """Stands for `DeviceSteps`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.is_free_for = clock, clock.is_free_for

    def read_ahead(self, *_: Any) -> None:
        """There is no disk."""

    def begin(self, part: Part) -> None:
        clock, slot = self._clock, self._clock.slot(part)
        if part.plan.is_resident:
            return
        slot.part = part
        clock.up_s = part.out_s = max(clock.host_s, clock.up_s, slot.busy_s) + clock.copy_s(part.plan.state_bytes)

    def step(self, part: Part, _: Any) -> None:
        clock, slot = self._clock, self._clock.slot(part)
        begin_s = max(clock.host_s, clock.compute_s, part.out_s)
        clock.compute_s = begin_s + part.plan.numel / clock.device_numel_per_s
        if part.plan.is_resident:
            return
        clock.down_s = slot.busy_s = max(clock.compute_s, clock.down_s) + clock.copy_s(part.plan.state_bytes)
        slot.part = None


class OnHost:
    """Stands for `HostSteps`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.is_free_for = clock, clock.is_free_for

    def begin(self, part: Part) -> None:
        clock, slot = self._clock, self._clock.slot(part)
        slot.part = part
        clock.compute_s = max(clock.host_s, clock.compute_s, slot.busy_s)
        clock.down_s = part.out_s = max(clock.compute_s, clock.down_s) + clock.copy_s(part.plan.sent_bytes)

    def start(self, part: Part, _: Any) -> None:
        clock = self._clock
        begin_s = max(clock.thread_s, part.out_s)
        clock.idle_s += begin_s - clock.thread_s if clock.thread_s else 0.0
        clock.thread_s = part.stepped_s = begin_s + part.plan.numel / clock.rates.host_numel_per_s

    def is_over(self, part: Part) -> bool:
        return part.stepped_s <= self._clock.host_s

    def join(self, part: Part) -> None:
        clock, slot = self._clock, self._clock.slot(part)
        clock.host_s = max(clock.host_s, part.stepped_s)
        clock.up_s = slot.busy_s = max(clock.host_s, clock.up_s) + clock.copy_s(part.plan.gradient_bytes)
        clock.compute_s = max(clock.compute_s, clock.up_s)
        slot.part = None


def clocked(plan: StatePlan, rates: StateRates, *, device_numel_per_s: float = math.inf, in_order: bool = True) -> Clock:
    """Return when all is over of a step in which `Stepping` gives out the pieces of a plan."""
    clock = Clock(rates, device_numel_per_s)
    on_device: Any = OnDevice(clock)
    on_host: Any = OnHost(clock)
    nothing: Any = None
    plans = [part for piece in plan.pieces for part in piece.parts]
    parts: Any = [Part(plans[index]) for index in (range(len(plans)) if in_order else interleaved(plans))]
    Stepping(nothing, nothing, on_device, on_host)._run(parts, nothing)
    return clock


def bound_s(plan: StatePlan, rates: StateRates) -> tuple[float, float]:
    """Return what the busier direction of the link takes by itself, and what the thread does."""
    moving = [piece for piece in plan.pieces if not piece.is_resident]
    streamed = sum(piece.state_bytes for piece in moving if piece.update is Update.DEVICE)
    sent = sum(piece.sent_bytes for piece in moving if piece.update is Update.HOST)
    numel = sum(piece.numel for piece in moving if piece.update is Update.HOST)
    return (streamed + sent) / rates.link_bytes_per_s, numel / rates.host_numel_per_s
