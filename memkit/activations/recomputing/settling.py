"""When a step need not be recorded any more, and whether regions can keep to a budget that single ops can't."""

from __future__ import annotations

import functools

import torch

from memkit.activations.recomputing.budget import RematOptions
from memkit.activations.recomputing.decider import Decider
from memkit.activations.recomputing.region_plan import RegionPlan, candidates, plan_regions
from memkit.activations.saved.settled import Settled, SizesSeen, TimedWays, Way
from memkit.activations.saved.state import RematState
from memkit.activations.saved.traces import Trace
from memkit.errors import BudgetInfeasible
from memkit.plan import Plan, RegionNeeds, RegionPlanner
from memkit.recording.cost import host_costs

_NUM_RECORDED = 3
"""At least this many steps are recorded: the seconds of each op are known from the third."""
_MOST_DEVIATIONS = 3
"""If this many steps had other regions than planned, all later steps of the model are recorded."""


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
    calls, _ = candidates(trace.ops)
    if all(call.why_not for call in calls):
        return []
    return RegionPlanner(trace.ops.step, calls, host_costs(torch_device), num_ops=len(trace.funcs)).choices()


def settle_ahead(state: RematState, options: RematOptions, trace: Trace) -> bool:
    """Have the next steps recompute regions, by a step recorded under another tag; return whether there are regions that keep
    to the budget, which is one in bytes, or come closest to it."""
    budget_bytes = options.budget
    assert isinstance(budget_bytes, int)
    if trace.ops is None or not trace.ops.is_measured:
        return False
    try:
        of_ops = trace.ops.plan(budget_bytes, options.score)
    except BudgetInfeasible:
        of_ops = trace.ops.planner(options.score).least(budget_bytes)
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
