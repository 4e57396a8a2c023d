"""What is known of a step under a budget: its plan, what is done at each save and request, and the decider that goes by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memkit.activations.recomputing.decider import Decider
from memkit.activations.saved.traces import Follower, Trace, Traces
from memkit.plan import NO_OP, Action, Lineage, MemoryPlan

if TYPE_CHECKING:
    from memkit.activations.budgeting.meter import Meter
    from memkit.activations.budgeting.observed import Foresight
    from memkit.activations.budgeting.steady_step import SteadyStep
    from memkit.activations.context import Shapes
    from memkit.plan import JointPlanner


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMoments:
    """What a step does that follows a plan. Values are those of the step's lineage."""

    actions: Mapping[int, Action]
    retained: frozenset[int]
    """Values that autograd does not save and that are held: anchors, and roots that would be freed."""
    copies: Mapping[int, tuple[int, ...]]
    """By save, the anchors whose copies to the host begin there."""
    lets_go: Mapping[int, tuple[int, ...]]
    """By save, the values that are freed on the device there, after waiting for their copies; the number of saves stands for
    the first request."""
    fetches: Mapping[int, tuple[int, ...]]
    """By request, the values whose copies back begin there, in the order in which they are needed."""
    releases: Mapping[int, tuple[int, ...]]
    """By request, the values held for replays that no replay from there on reads."""
    held_until: Mapping[int, int]
    """For each value that replays read, the last request whose replay reads it."""
    stays: Mapping[int, frozenset[int]]
    """For each recomputed value, the intermediate values that are kept as well."""
    num_saves: int
    moving_bytes: int


def schedule_of(plan: MemoryPlan, lineage: Lineage, roots: Mapping[int, int]) -> PlannedMoments:
    copies, lets_go, fetches, releases = (dict[int, list[int]]() for _ in range(4))
    anchors, held_until = set[int](), dict[int, int]()
    for planned in plan.values:
        value = planned.value
        if planned.is_anchor:
            anchors.add(value)
        if planned.held_until >= 0:
            held_until[value] = planned.held_until
        if planned.action is Action.OFFLOAD:
            if planned.is_anchor:
                copies.setdefault(planned.copy_at, []).append(value)
            lets_go.setdefault(planned.let_go_at, []).append(value)
    moved = [planned for planned in plan.values if planned.action is Action.OFFLOAD]
    for planned in sorted(moved, key=lambda planned: planned.needed_at):
        fetches.setdefault(planned.fetch_at, []).append(planned.value)
    read: dict[int, int] = {}
    for replay in plan.replays:
        for op in replay.ops:
            for source in lineage.ins[op]:
                if source in roots and lineage.maker[source] == NO_OP:
                    read[source] = replay.request
    for value, request in (*held_until.items(), *((value, request) for value, request in read.items() if value in anchors)):
        releases.setdefault(request + 1, []).append(value)
    return PlannedMoments(
        actions={planned.value: planned.action for planned in plan.values if not planned.is_anchor},
        retained=frozenset(anchors | read.keys()),
        copies=_frozen(copies),
        lets_go=_frozen(lets_go),
        fetches=_frozen(fetches),
        releases=_frozen(releases),
        held_until=held_until,
        stays={replay.value: frozenset(replay.stays) for replay in plan.replays},
        num_saves=len(plan.step.saves),
        moving_bytes=sum(planned.num_bytes for planned in moved),
    )


def _frozen(found: Mapping[int, list[int]]) -> dict[int, tuple[int, ...]]:
    return {ordinal: tuple(values) for ordinal, values in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    plan: MemoryPlan
    schedule: PlannedMoments
    allowed_bytes: int
    """The most bytes that the step may take: the budget without the headroom."""
    headroom_bytes: int = 0
    """The part of the free bytes that is for what steps take beyond the prediction. It is used if there is no plan
    otherwise."""

    @property
    def exceeds_budget(self) -> bool:
        return self.plan.predicted_peak_bytes > self.allowed_bytes + self.headroom_bytes


@dataclass(eq=False, slots=True)
class LearnedStep:
    shown: Foresight | None = None
    meter: Meter | None = None
    planner: JointPlanner | None = None
    measured_s: list[float] = field(default_factory=list)
    plans: dict[int, Planned] = field(default_factory=dict)
    given: Planned | None = None
    over_bytes: int = 0
    """By how many bytes steps exceeded the prediction."""
    num_replans: int = 0
    num_links: int = 0
    """How often the bandwidth turned out to differ from that in the plan."""
    num_judged: int = 0
    rates: list[tuple[float, float]] = field(default_factory=list)
    """Bandwidths in the first steps of a plan, from and to the device, in bytes per second."""
    has_scaled: bool = False
    """Whether the seconds of ops were scaled to the measured seconds of steps."""
    steady: SteadyStep | None = None
    shapes: Shapes | None = None
    noted: Planned | None = None
    """The plan that the last noted step followed, whether or not its notes were of use."""
    num_left: int = 0
    """How many steps began as steady ones and deviated."""
    may_be_quiet: bool = True
    """Whether functions may be followed rather than ops: not after a step that did so has deviated."""
    has_chosen: bool = False
    """Whether it was already decided which ways are to be timed."""


class PlannedDecider(Decider):
    """Decides for each save of one forward, by a plan, or without one by the score and what the device has room for."""

    def __init__(self, traces: Traces, plan_of: Callable[[Trace], Planned | None], limit_bytes: Callable[[], float]) -> None:
        super().__init__(Follower(traces))
        self.planned: Planned | None = None
        self._plan_of, self._limit_bytes = plan_of, limit_bytes
        self._change_plan()

    @property
    def follows_plan(self) -> bool:
        return self.planned is not None

    @property
    def retained(self) -> Collection[int]:
        return () if self.planned is None else self.planned.schedule.retained

    def _change_plan(self) -> None:
        trace = self.follower.trace
        self.planned = None if trace is None else self._plan_of(trace)
        self.grow()

    def leave(self) -> None:
        """Follow no plan from here on, since the step deviates from it."""
        self.follower.give_up()
        self._change_plan()

    def action(self, value: int, held_bytes: int) -> Action | None:
        return None if self.planned is None else self.planned.schedule.actions.get(value)

    def grow(self) -> None:
        self.limit_bytes = self._limit_bytes() if self.planned is None else math.inf
