"""Chooses, from a recorded step, the module calls that are recomputed as regions in the next steps, if that takes less time.
Decides when steps need not be recorded any more."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from memkit.activations.recomputing.budget import Decider, RematOptions
from memkit.activations.recomputing.region_calls import RegionSpec
from memkit.activations.recomputing.regions import why_not_region
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.settled import Settled, SizesSeen, TimedWays, Way
from memkit.activations.saved.state import RematState
from memkit.activations.saved.traces import OpTrace, Trace
from memkit.core.sequentials import SpanReference
from memkit.plan import NO_OP, Action, HostCosts, ModuleCall, Plan, RegionChoice, RegionNeeds, RegionPlanner
from memkit.recording.cost import host_costs

_NUM_RECORDED = 3
"""At least this many steps are recorded: the seconds of each op are known from the third."""
_MOST_DEVIATIONS = 3
"""If this many steps had other regions than planned, all later steps of the model are recorded."""

Reference = weakref.ref[nn.Module] | SpanReference
"""Returns a module as long as it is alive, without holding it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    specs: Mapping[Reference, RegionSpec]
    shapes: tuple[tuple[int, ...], ...]
    num_regions: int
    num_ops: int
    num_dropped: int
    needs: RegionNeeds
    plan: Plan
    trial: TimedWays

    def counts(self, budget: int | float, budget_bytes: float) -> Counts:
        plan = self.plan
        return Counts(
            budget=budget,
            budget_bytes=budget_bytes,
            follows_plan=True,
            num_ops=self.num_ops,
            num_saved=len(plan.saves),
            saved_bytes=plan.saved_bytes,
            num_dropped=self.num_dropped,
            dropped_bytes=plan.recompute_bytes,
            peak_bytes=plan.predicted_peak_bytes,
            ops_of_region=round(plan.num_replayed_ops / self.num_regions),
            region_s=plan.predicted_replay_s / self.num_regions,
        )


def plan_regions(
    trace: OpTrace, num_ops: int, of_ops: Plan, torch_device: torch.device, *, against_ops: bool = True
) -> RegionPlan | None:
    """Return the regions of a step; None if none fit the budget, or if single ops certainly take less time, which can be known
    where the host computes. On other devices a trial decides."""
    planner, references = _planner_of(trace, num_ops, torch_device)
    if planner is None:
        return None
    calls, costs = planner.calls, planner.costs
    budget_bytes = of_ops.budget_bytes or 0
    choice = planner.best(budget_bytes)
    if choice is None and of_ops.predicted_peak_bytes > budget_bytes:
        choice = planner.least()  # neither fits: take the fewest bytes
        if choice.peak_bytes > of_ops.predicted_peak_bytes:
            return None
    if choice is None or not choice.chosen:
        return None
    is_open = against_ops and of_ops.predicted_peak_bytes <= max(budget_bytes, choice.peak_bytes)  # else ops need more
    if is_open and costs.is_device and planner.seconds(choice) > _seconds_of_ops(planner, costs, num_ops, of_ops):
        return None
    chosen = dict[Reference, frozenset[int]]()
    for index in choice.chosen:
        chosen[references[index]] = chosen.get(references[index], frozenset()) | {calls[index].number}
    num_calls = dict.fromkeys(chosen, 0)
    for call, reference in zip(calls, references, strict=True):
        if reference() is not None and reference in num_calls:
            num_calls[reference] = max(num_calls[reference], call.number + 1)
    plan = _plan_of(planner, choice, of_ops, budget_bytes)
    return RegionPlan(
        specs={found: RegionSpec(calls=numbers, num_calls=num_calls[found]) for found, numbers in chosen.items()},
        shapes=tuple(shape for index in choice.chosen for shape in calls[index].shapes),
        num_regions=len(choice.chosen),
        num_ops=num_ops,
        num_dropped=len(plan.dropped),
        needs=planner.needs(choice),
        plan=plan,
        trial=TimedWays(is_open=is_open),
    )


def _planner_of(trace: OpTrace, num_ops: int, torch_device: torch.device) -> tuple[RegionPlanner | None, list[Reference]]:
    """Return the planner of a step, None without a possible region, and the module of each call. All budgets share it, since it
    explores the choices once."""
    calls, references = _candidates(trace)
    if all(call.why_not for call in calls):
        return None, references
    costs, planner = host_costs(torch_device), trace.region_planner
    if planner is None or planner.step is not trace.step or planner.calls != calls or planner.costs != costs:
        planner = trace.region_planner = RegionPlanner(trace.step, calls, costs, num_ops=num_ops)
    return planner, references


def _candidates(trace: OpTrace) -> tuple[list[ModuleCall], list[Reference]]:
    """Return the calls of a step in the order in which they begin, each with its module and the reason why it can't be a
    region. Possible spans are among them, within their Sequential's call or another span."""

    @functools.cache
    def why_not_of(module: nn.Module | None) -> str:
        return "it is gone" if module is None else why_not_region(module)

    calls, references = list[ModuleCall](), list[Reference]()
    places = list[int]()
    around: list[list[tuple[int, int]]] = [[] for _ in (*trace.calls, None)]  # of those in each call, and of the outermost
    may_be = (span for span in reversed(trace.spans) if span.reference.find() is not None)
    waiting = [span for span in may_be if not any(why_not_of(child()) for child in span.reference.children)]

    def add(call: ModuleCall, reference: Reference, place: int, why: str) -> int:
        open_spans = around[call.parent]  # where each ends, and its place among all
        while open_spans and open_spans[-1][0] <= place:
            open_spans.pop()
        parent = open_spans[-1][1] if open_spans else -1 if call.parent < 0 else places[call.parent]
        calls.append(replace(call, parent=parent, why_not=why))
        references.append(reference)
        return len(calls) - 1

    for place, (call, reference) in enumerate(zip(trace.calls, trace.modules, strict=True)):
        while waiting and waiting[-1].calls[0] == place:
            span = waiting.pop()
            around[span.call.parent].append((span.calls[1], add(span.call, span.reference, place, "")))
        places.append(add(call, reference, place, call.why_not or why_not_of(reference())))
    return calls, references


def _seconds_of_ops(planner: RegionPlanner, costs: HostCosts, num_ops: int, plan: Plan) -> float:
    num_saves = len(planner.step.saves)
    recorded_s = num_ops * costs.recorded_s + num_saves * costs.saved_s + plan.num_replayed_ops * costs.replayed_s
    return costs.step_s(planner.plain_device_s + plan.predicted_replay_s, planner.plain_host_s + recorded_s)


def _plan_of(planner: RegionPlanner, choice: RegionChoice, of_ops: Plan, budget_bytes: int) -> Plan:
    step, dropped, inside = planner.step, planner.dropped(choice), dict[int, str]()
    for index in choice.chosen:
        call = planner.calls[index]
        inside |= dict.fromkeys(step.saves[slice(*call.saves)], call.name)
    saves = []
    for save in of_ops.saves:
        maker = step.lineage.maker[save.value]
        drops, cost_s = save.value in dropped, 0.0 if maker == NO_OP else step.lineage.seconds[maker]
        action = Action.RECOMPUTE if drops else Action.KEEP
        reason = f"{inside[save.value]} runs again" if drops else step.why_kept.get(save.value, "fits the budget")
        saves.append(replace(save, action=action, cost_s=cost_s, reason=reason))
    return Plan(
        saves=tuple(saves),
        budget_bytes=budget_bytes,
        limit_bytes=float(max(budget_bytes, choice.peak_bytes)),
        predicted_peak_bytes=choice.peak_bytes,
        predicted_replay_s=choice.device_s,
        num_replayed_ops=sum(planner.calls[index].num_ops for index in choice.chosen),
    )


# When steps are not recorded any more


def settle(state: RematState, options: RematOptions, decider: Decider, sizes: SizesSeen | None, is_timed: bool) -> None:
    """Decide whether the next steps drop nothing, have regions, or are recorded, after one was recorded to its end, perhaps
    with each op timed by itself, which takes time."""
    state.num_recorded += 1
    state.settled = None
    if state.num_recorded < _NUM_RECORDED or _has_wishes(state):
        return
    settled = functools.partial(Settled, options=options, budget_bytes=state.counts.budget_bytes)
    if options.keeps_all:
        state.settled = settled()
        return
    trace, plan = decider.follower.trace, decider.plan
    if plan is None or trace is None or trace.ops is None or trace.ops.num_seen < _NUM_RECORDED:
        return
    keeps = plan.predicted_peak_bytes <= (plan.budget_bytes or 0)
    if options.strict and keeps:
        return  # strict must raise ahead: a deviation is only noticed after the step
    if not state.counts.num_dropped and keeps:
        if sizes is not None:  # else another plan was followed at first: the next step tells
            state.settled = settled(sizes=sizes)
    elif trace.ops.is_measured:
        regions = _regions_of(state, trace, plan)
        if regions is not None and not _lacks_ops(state, regions.trial, is_timed=is_timed):
            state.settled = settled(regions=regions)


def bytes_with_regions(state: RematState, options: RematOptions, trace: Trace, least: Plan) -> int | None:
    """Return the bytes of steps like a trace with regions, as far as they are known, beside the plan of single ops with the
    fewest bytes; None if there are to be no regions."""
    regions = None if _has_wishes(state) else _regions_of(state, trace, least)
    return None if regions is None else regions.plan.predicted_peak_bytes


def choices_ahead(trace: Trace, torch_device: torch.device) -> list[RegionNeeds]:
    """Return a step's needs with each choice of regions that `plan_regions` may make, the quickest first."""
    if trace.ops is None or not trace.ops.is_measured or trace.has_marks:
        return []
    planner, _ = _planner_of(trace.ops, len(trace.funcs), torch_device)
    return [] if planner is None else planner.choices()


def settle_ahead(state: RematState, options: RematOptions, trace: Trace) -> bool:
    """Have the next steps recompute regions, by a step recorded under another tag; return whether there are regions that keep
    to the budget, which is one in bytes, or come closest to it."""
    budget_bytes = options.budget
    assert isinstance(budget_bytes, int)
    if trace.ops is None or not trace.ops.is_measured:
        return False
    planner = trace.ops.planner(options.score)
    of_ops = planner.told(planner.walks.walk(trace.ops.step.dropped, math.inf), budget_bytes)  # which drops nothing else
    regions = _regions_of(state, trace, of_ops, against_ops=False)
    if regions is not None:
        state.settled = Settled(options=options, budget_bytes=budget_bytes, regions=regions)
    return regions is not None


def _regions_of(state: RematState, trace: Trace, of_ops: Plan, *, against_ops: bool = True) -> RegionPlan | None:
    if trace.ops is None or trace.has_marks or state.num_left >= _MOST_DEVIATIONS:
        return None
    device = state.costs.device
    torch_device = torch.device("cpu") if device is None else device.torch_device
    plan = functools.partial(plan_regions, trace.ops, len(trace.funcs), of_ops, torch_device, against_ops=against_ops)
    return trace.ops.regions(of_ops, plan)


def _lacks_ops(state: RematState, trial: TimedWays, *, is_timed: bool) -> bool:
    """Tell whether the next step recomputes single ops: to time another one, or since they are faster."""
    device = state.costs.device
    if device is None or device.torch_device.type == "cpu":
        return False  # it is certain by itself
    state.trial = trial
    if not is_timed:
        trial.end_forward(Way.OPS)
    return trial.lacks_ops or trial.prefers_ops()


def _has_wishes(state: RematState) -> bool:
    steps = [trace.ops.step for trace in state.traces if trace.ops is not None]
    return any(step.dropped or step.moved for step in steps)
