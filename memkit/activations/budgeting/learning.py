"""`Learning`: measurements and plans of steps under a tag; also the moments of planned steps, and their decider."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from memkit.activations.budgeting.meter import is_other_link, observed_trace
from memkit.activations.budgeting.ways import Ways
from memkit.activations.recomputing.budget import Decider
from memkit.activations.saved.traces import Follower, Trace, Traces
from memkit.core.sizes import format_bytes
from memkit.errors import BudgetInfeasible, HostMemoryError
from memkit.plan import NO_OP, Action, GpuSpec, JointPlanner, MemoryPlan
from memkit.plan.budget.problem import make_problem
from memkit.plan.regions import fit_copies, fit_regions
from memkit.plan.step import Lineage
from memkit.transfer import Link, measure_link
from memkit.transfer.device_memory import device_memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from memkit.activations.budgeting.limits import Limits, StepPeak
    from memkit.activations.budgeting.meter import Meter
    from memkit.activations.budgeting.steady_step import SteadyStep
    from memkit.activations.context import Shapes
    from memkit.activations.saved.traces import OpTrace
    from memkit.device import Device, Event
    from memkit.plan import RegionNeeds
    from memkit.plan.budget.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and when values are copied, freed and fetched in a step that follows it. Values are numbered by its lineage."""

    plan: MemoryPlan
    allowed_bytes: int
    """The most bytes for the step: the budget without the headroom."""
    headroom_bytes: int
    """Free bytes for steps that exceed the prediction. Without any other plan, the plan uses them."""
    actions: Mapping[int, Action]
    retained: frozenset[int]
    """Values that autograd does not save and that are held: anchors, and roots that would be freed."""
    copies: Mapping[int, Sequence[int]]
    """By save, the anchors whose copies to the host begin there."""
    lets_go: Mapping[int, Sequence[int]]
    """By save, the values that are freed there after their copies; the number of saves is the first request."""
    fetches: Mapping[int, Sequence[int]]
    """By request, the values whose copies back begin there, in the order of need."""
    releases: Mapping[int, Sequence[int]]
    """By request, the values held for replays that no replay from there on reads."""
    held_until: Mapping[int, int]
    """The last request whose replay reads a value."""
    stays: Mapping[int, frozenset[int]]
    """For each recomputed value, the intermediate values that are kept too."""

    @property
    def exceeds_budget(self) -> bool:
        return self.plan.predicted_peak_bytes > self.allowed_bytes + self.headroom_bytes


def planned_of(
    plan: MemoryPlan, lineage: Lineage, roots: Mapping[int, int], *, allowed_bytes: int, headroom_bytes: int = 0
) -> Planned:
    copies, lets_go, fetches, releases = (dict[int, list[int]]() for _ in range(4))
    anchors = {planned.value for planned in plan.values if planned.is_anchor}
    held_until = {planned.value: planned.held_until for planned in plan.values if planned.held_until >= 0}
    moved = [planned for planned in plan.values if planned.action is Action.OFFLOAD]
    for planned in moved:
        if planned.is_anchor:
            copies.setdefault(planned.copy_at, []).append(planned.value)
        lets_go.setdefault(planned.let_go_at, []).append(planned.value)
    for planned in sorted(moved, key=lambda planned: planned.needed_at):
        fetches.setdefault(planned.fetch_at, []).append(planned.value)
    read = {
        source: replay.request
        for replay in plan.replays
        for op in replay.ops
        for source in lineage.ins[op]
        if source in roots and lineage.maker[source] == NO_OP
    }
    for value, request in (*held_until.items(), *((value, request) for value, request in read.items() if value in anchors)):
        releases.setdefault(request + 1, []).append(value)
    return Planned(
        plan=plan,
        allowed_bytes=allowed_bytes,
        headroom_bytes=headroom_bytes,
        actions={planned.value: planned.action for planned in plan.values if not planned.is_anchor},
        retained=frozenset(anchors | read.keys()),
        copies=copies,
        lets_go=lets_go,
        fetches=fetches,
        releases=releases,
        held_until=held_until,
        stays={replay.value: frozenset(replay.stays) for replay in plan.replays},
    )


@dataclass(eq=False, slots=True)
class LearnedStep:
    meter: Meter | None = None
    planner: JointPlanner | None = None
    measured_s: list[float] = field(default_factory=list)
    plans: dict[int, Planned] = field(default_factory=dict)
    given: Planned | None = None
    over_bytes: int = 0
    """The bytes by which steps exceeded the prediction."""
    num_replans: int = 0
    num_links: int = 0
    num_judged: int = 0
    rates: list[tuple[float, float]] = field(default_factory=list)
    """Bandwidths in the first steps of a plan, from and to the device, in bytes per second."""
    has_scaled: bool = False
    steady: SteadyStep | None = None
    shapes: Shapes | None = None
    noted: Planned | None = None
    num_left: int = 0
    has_chosen: bool = False

    def is_ready(self, trace: Trace | None) -> bool:
        meter, ops = self.meter, None if trace is None else trace.ops
        return meter is not None and meter.is_whole and ops is not None and ops.is_measured and ops.has_order

    def wants_measure(self, trace: Trace | None) -> bool:
        return self.planner is None and not self.is_ready(trace)

    def steady_step(self, planned: Planned, shapes: Shapes | None) -> SteadyStep | None:
        """Return the saves of a step under a plan; None if they are unknown or vary. With other shapes a call saves other
        tensors, perhaps not all seen."""
        steady = self.steady
        if steady is None or steady.planned is not planned or self.num_left >= _MOST_LEFT or self.shapes != shapes:
            return None
        if steady.moves is not None and steady.moves[1].requests is None:  # a backward has asked for something else
            steady = self.steady = replace(steady, moves=None)
        return steady

    def wants_notes(self, trace: Trace | None, planned: Planned, shapes: Shapes | None) -> bool:
        is_noted = self.noted is planned and self.shapes == shapes
        return not (is_noted or trace is None or trace.has_marks or planned.plan.is_plain or self.num_left >= _MOST_LEFT)

    def leave_steady(self, num_saves: int) -> None:
        """Note that a step deviated after `num_saves` saves, while nothing was noted."""
        steady = self.steady
        if num_saves == 0 and steady is not None and steady.moves is not None:
            self.steady = replace(steady, moves=None)  # with its ops recorded, such a step is noted from the first
            return
        self.steady = self.noted = None
        self.num_left += 1

    def count_followed(self) -> tuple[bool, bool]:
        """Count a step that follows a plan. Return whether to check it, and whether it is one of the first few. All of these
        are checked, then one in `_JUDGED_EVERY`."""
        self.num_judged += 1
        is_new = self.num_judged <= _STEPS_JUDGED
        return self.given is None and (is_new or self.num_judged % _JUDGED_EVERY == 0), is_new


class PlannedDecider(Decider):
    """Decides for each save by a plan; without one, by the score and the room on the device."""

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
        return () if self.planned is None else self.planned.retained

    def _change_plan(self) -> None:
        trace = self.follower.trace
        self.planned = None if trace is None else self._plan_of(trace)
        self.grow()

    def leave(self) -> None:
        self.follower.give_up()
        self._change_plan()

    def action(self, value: int, held_bytes: int) -> Action | None:
        return None if self.planned is None else self.planned.actions.get(value)

    def grow(self) -> None:
        self.limit_bytes = self._limit_bytes() if self.planned is None else math.inf


_OF_LINK = 0.9
"""Plans use this fraction of the link's measured bandwidth, since other processes may use the link too."""
_PROBED_BYTES = 64 * 2**20
_NO_LINK = Link(d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0)
"""With this link, a plan moves nothing unless there is no other plan."""
_links: WeakKeyDictionary[Device, Link] = WeakKeyDictionary()


_LOGGER = logging.getLogger(__name__)
_MOST_REPLANS = 3
_HEADROOM = 0.01
_IN_STEPS, _MOST_LINKS = 0.98, 8
"""Plans use this fraction of the bandwidth in steps, and correct it at most this often."""
_OTHER_LINK, _QUITE_OTHER_LINK = 0.05, 0.2
"""The bandwidth may differ from the plan's by so much: in the median of a plan's first steps, and in a single step."""
_TOLERANCE = 1.5
"""Each correction multiplies the permitted difference."""
_STEPS_JUDGED = 3
_AS_PREDICTED = 1.03
"""Steps that take at most this many times the predicted seconds are not limited by the host."""
_JUDGED_EVERY = 4
_MOST_LEFT = 2
"""After so many deviating steps, no step is treated as steady: all saves are noted and all ops recorded."""
_HANDLING_S = 1e-4
"""Host seconds for each moved or recomputed value, in plans for steps that the host limits."""
_LESS = 0.97
"""Steps below this fraction of the predicted seconds show that ops were measured too slow."""
_MISSES = 1.02
"""If no choice of regions keeps to the budget, one that exceeds it by at most this factor is tried."""
_OF_CAPACITY = 0.95
"""This fraction of the device's memory is usable despite fragmentation."""
_MORE_BESIDE = 0.005
"""The bytes beside the step may exceed those planned with by this fraction of the budget."""


class Learning:
    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self.link: GpuSpec | None = None
        self.has_host = True
        self.last_peak_bytes: int | None = None
        self._last: Planned | None = None
        self.num_plans = self.num_ended = 0
        self._last_times: list[tuple[Event, Event]] = []

    @property
    def last(self) -> MemoryPlan | None:
        return None if self._last is None else self._last.plan

    def of(self, trace: Trace) -> LearnedStep:
        if trace.learned is None:
            trace.learned = LearnedStep()
        assert isinstance(trace.learned, LearnedStep)
        return trace.learned

    def planned(self, trace: Trace, limits: Limits, device: Device, *, base_bytes: int, coming_bytes: int) -> Planned | None:
        ops, learned = trace.ops, self.of(trace)
        if ops is None or not ops.has_order:
            return None
        if limits.plan is not None:
            if learned.given is None or learned.given.plan is not limits.plan:
                difference, roots = limits.plan.step.difference_of(ops.step), ops.step.retained_bytes
                if difference:
                    raise ValueError(f"this plan is for another step: {difference}. Plan this step anew")
                learned.given = planned_of(limits.plan, ops.step.lineage, roots, allowed_bytes=limits.plan.budget_bytes)
            found = learned.given
        else:
            meter = learned.meter
            if learned.planner is None and meter is not None and learned.is_ready(trace):
                step = replace(ops.step, uses=meter.uses, use_ends=meter.use_ends)
                seen = observed_trace(meter, step, ops.names, target=device.torch_device.type, min_bytes=limits.min_bytes)
                learned.meter, learned.measured_s = None, meter.seconds(step)
                learned.planner = JointPlanner(make_problem(seen, self.gpu(device), measured_s=learned.measured_s))
            if learned.planner is None:
                return None
            if not self.has_host and learned.planner.problem.gpu.is_measured:
                learned.over_bytes = 0  # for steps whose copies found no room
                _plan_anew(learned, self.gpu(device))
            found = self._plan(ops, learned, limits, device, base_bytes, coming_bytes)
        self._last = found
        return found

    def budget_bytes(self, trace: Trace | None, limits: Limits) -> int | None:
        planner = None if trace is None else self.of(trace).planner
        return limits.budget_bytes(None if planner is None else planner.problem.plain_peak_bytes)

    def gpu(self, device: Device) -> GpuSpec:
        if self.link is None:
            if device.has_own_memory and self.has_host and device not in _links:
                try:
                    _links[device] = measure_link(device, num_bytes=_PROBED_BYTES)
                except HostMemoryError as error:
                    self.note_no_host(error)
            link = _links[device] if device.has_own_memory and self.has_host else _NO_LINK  # copies free nothing
            counter = device.memory_counter()
            capacity_bytes = None if counter is None else counter.capacity_bytes()
            self.link = GpuSpec(
                name=device.name,
                memory_bytes=capacity_bytes or 2**62,
                bytes_per_s=1.0,
                flops_per_s={},
                d2h_bytes_per_s=_OF_LINK * link.d2h_bytes_per_s,
                h2d_bytes_per_s=_OF_LINK * link.h2d_bytes_per_s,
                both_bytes_per_s=_OF_LINK * min(link.d2h_bytes_per_s, link.h2d_bytes_per_s),
                copy_latency_s=link.latency_s,
                source="measured in this process",
                is_measured=link is not _NO_LINK,
            )
        return self.link

    def note_no_host(self, error: HostMemoryError) -> None:
        """Warn that a saved tensor found no host memory. Later plans move none, so that they keep to the budget."""
        self._warn("host", f"saved tensors stay on the device, since there is no host memory for them: {error}")
        self.has_host, self.link = False, None

    def _plan(
        self, ops: OpTrace, learned: LearnedStep, limits: Limits, device: Device, base_bytes: int, coming_bytes: int
    ) -> Planned:
        planner = learned.planner
        assert planner is not None
        problem = planner.problem
        budget_bytes = limits.budget_bytes(problem.plain_peak_bytes)
        assert budget_bytes is not None
        more_bytes = max(base_bytes + coming_bytes - problem.base_bytes, 0)
        unit_bytes = max(int(_MORE_BESIDE * budget_bytes), 1)
        more_bytes = -(-more_bytes // unit_bytes) * unit_bytes if more_bytes > unit_bytes else 0
        whole_bytes = limits.allocated_bytes(budget_bytes)
        headroom_bytes = 0 if whole_bytes >= problem.plain_peak_bytes else int(_HEADROOM * whole_bytes)
        allowed_bytes = max(whole_bytes - headroom_bytes - learned.over_bytes - more_bytes, 1)
        found = learned.plans.get(allowed_bytes)
        if found is None:
            is_roomy = planner.least().peak_bytes <= allowed_bytes
            try:
                plan = planner.plan(allowed_bytes if is_roomy else allowed_bytes + headroom_bytes)
            except BudgetInfeasible as error:
                free_bytes = budget_bytes - allowed_bytes - headroom_bytes
                told, held = str(error), device_memory_of(device).describe()
                if free_bytes:
                    asked = f"of a budget of {format_bytes(budget_bytes)}, {format_bytes(free_bytes)}"
                    told = f"{asked} are left free, or are there beside the step: {error}"
                if coming_bytes and (limits.optimizer is None or limits.optimizer() is None):
                    guess = f"{format_bytes(coming_bytes)} are reserved for optimizer states"
                    told = f"{guess}; pass optimizer= if it keeps less: {told}"
                if held:
                    told = f"{told}. Of what is there, {held}"
                if limits.raises:
                    raise BudgetInfeasible(told, error.smallest_bytes + free_bytes) from None
                self._warn(f"budget {budget_bytes}", f"{told}. It is exceeded by as little as can be.")
                plan = planner.plan(planner.least().peak_bytes)
            found = learned.plans[allowed_bytes] = planned_of(
                replace(plan, budget_bytes=budget_bytes),
                problem.lineage,
                ops.step.retained_bytes,
                allowed_bytes=allowed_bytes,
                headroom_bytes=headroom_bytes,
            )
            learned.num_judged = 0
            learned.rates.clear()
            self.num_plans += 1
            _LOGGER.debug("MemoryBudget: for %d bytes, by %s: %s", allowed_bytes, problem.gpu, plan)
        return found

    def note_link(self, trace: Trace, out_bytes_per_s: float | None, back_bytes_per_s: float | None) -> None:
        """Note the bandwidth of a step. Plan anew if the plan's differs, as when others use the link as well."""
        learned, link = self.of(trace), self.link
        if link is None or not link.is_measured or learned.planner is None:
            return
        if out_bytes_per_s is None or back_bytes_per_s is None:
            return
        found = _IN_STEPS * out_bytes_per_s, _IN_STEPS * back_bytes_per_s
        tolerance = _TOLERANCE**learned.num_links  # if others use the link as well, no plan lasts
        least = _QUITE_OTHER_LINK * tolerance
        if len(learned.rates) < _STEPS_JUDGED:
            learned.rates.append(found)
            if len(learned.rates) == _STEPS_JUDGED and not is_other_link(link, found, least):
                out, back = zip(*learned.rates, strict=True)
                found, least = (median(out), median(back)), _OTHER_LINK * tolerance
        is_other = is_other_link(link, found, least)
        if is_other and learned.num_links < _MOST_LINKS:
            link = self.link = replace(link, d2h_bytes_per_s=found[0], h2d_bytes_per_s=found[1], both_bytes_per_s=min(found))
            _plan_anew(learned, link)
            learned.num_links += 1

    def judge(self, trace: Trace, planned: Planned, peak_bytes: int | None, limits: Limits) -> bool:
        """Plan anew if a step's peak exceeded the budget. Return whether it did after the last permitted plan."""
        learned, plan = self.of(trace), planned.plan
        self._scale(learned, plan)
        budget_bytes = self.budget_bytes(trace, limits)
        if peak_bytes is None:
            return False
        self.last_peak_bytes = peak_bytes
        if budget_bytes is None or learned.planner is None:
            return False
        over_bytes = peak_bytes - max(limits.allocated_bytes(budget_bytes), plan.predicted_peak_bytes)
        if learned.num_replans >= _MOST_REPLANS:
            return over_bytes > 0
        if over_bytes > 0 and plan.predicted_peak_bytes > learned.planner.least().peak_bytes:
            learned.over_bytes += over_bytes
            learned.num_replans += 1
        return False

    def takes_less(self, trace: Trace, needs: RegionNeeds) -> bool:
        planner, planned = self.of(trace).planner, self._last
        if planner is None or planned is None:
            return True
        most_bytes = max(planned.plan.predicted_peak_bytes, self.last_peak_bytes or 0)
        return fit_regions(planner.problem, [needs], most_bytes - 1) is not None

    def ways_of(
        self, trace: Trace | None, device: Device | None, choices_of: Callable[[Trace, torch.device], Sequence[RegionNeeds]]
    ) -> Ways | None:
        """Return the timer of ways; None without a choice or a gain: a plan's time is known where the host computes."""
        learned = None if trace is None else self.of(trace)
        if learned is None or learned.planner is None or not learned.has_scaled or learned.has_chosen:
            return None
        if learned.num_judged < _STEPS_JUDGED or trace is None or trace.ops is None:
            return None
        planned, problem, step_s = self._last, learned.planner.problem, self.fastest_step_s()
        if learned.given is not None or planned is None or planned.plan.is_plain or step_s is None:
            return None
        learned.has_chosen = True
        plan, allowed_bytes = planned.plan, planned.allowed_bytes
        lacks_ops = any(problem.lineage.maker[value.value] == NO_OP for value in problem.values)
        is_as_known = step_s <= _AS_PREDICTED * plan.predicted_s and not _has_own_clock(problem)
        if not lacks_ops and (is_as_known or planned.exceeds_budget):
            return None
        choices = choices_of(trace, torch.device("cpu") if device is None else device.torch_device)
        limit_bytes = fit_regions(problem, choices, allowed_bytes)
        if limit_bytes is None:  # one that nearly keeps to the budget: its first steps may exceed it a little
            allowed_bytes += planned.headroom_bytes
            limit_bytes = fit_regions(problem, choices, int(_MISSES * allowed_bytes))
        moving = None if self.link is None else fit_copies(problem, choices, allowed_bytes, self.link.both_bytes_per_s)
        counter = None if device is None else device.memory_counter()
        usable_bytes = math.inf if counter is None else _OF_CAPACITY * (counter.capacity_bytes() or math.inf)
        if moving is not None and allowed_bytes + moving.num_bytes > usable_bytes:
            moving = None
        if limit_bytes is None and moving is None:
            return None
        return Ways(allowed_bytes, limit_bytes, moving=moving, problem=problem)

    def _scale(self, learned: LearnedStep, plan: MemoryPlan) -> None:
        """Scale the seconds of ops to those of steps. If steps took less than the sum of their ops, the device waited for the
        host during the measurement. If they took more, it waits for the host in each step, and plans should handle fewer
        values."""
        step_s = self.fastest_step_s()
        if learned.has_scaled or learned.planner is None or step_s is None or learned.num_judged < _STEPS_JUDGED:
            return
        learned.has_scaled = True
        share, problem = step_s / plan.predicted_s, learned.planner.problem
        if share < _LESS:
            learned.measured_s = [share * seconds for seconds in learned.measured_s]
            _plan_anew(learned, problem.gpu)
        elif share > _AS_PREDICTED and not plan.is_plain and _has_own_clock(problem):
            learned.planner.handling_s = _HANDLING_S
            learned.plans.clear()

    def note_end(self, begun: Event, device: Device, peak: StepPeak | None) -> None:
        self.num_ended += 1
        self._last_times = [*self._last_times[-2:], (begun, device.record_event())]
        if peak is not None:
            peak.end_backward()

    def fastest_step_s(self) -> float | None:
        return min((begun.elapsed_s(ended) for begun, ended in self._last_times if ended.is_reached()), default=None)

    def last_step_s(self) -> float | None:
        return next((begun.elapsed_s(ended) for begun, ended in reversed(self._last_times) if ended.is_reached()), None)


def _plan_anew(learned: LearnedStep, gpu: GpuSpec) -> None:
    before = learned.planner
    assert before is not None
    learned.planner = JointPlanner(make_problem(before.problem.trace, gpu, measured_s=learned.measured_s))
    learned.planner.handling_s = before.handling_s
    learned.plans.clear()


def _has_own_clock(problem: Problem) -> bool:
    return problem.trace.target != "cpu"
