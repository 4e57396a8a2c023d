"""Chooses, from a recorded step, the module calls that are recomputed as regions in the next steps, if that takes less time."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from memkit.activations.recomputing.region_calls import RegionSpec
from memkit.activations.recomputing.regions import why_not_region
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.settled import TimedWays
from memkit.activations.saved.traces import OpTrace
from memkit.core.sequentials import SpanReference
from memkit.plan import NO_OP, Action, HostCosts, ModuleCall, Plan, RegionChoice, RegionNeeds, RegionPlanner
from memkit.recording.cost import host_costs

Reference = weakref.ref[nn.Module] | SpanReference
"""Returns a module as long as it is alive, without holding it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    specs: Mapping[Reference, RegionSpec]
    shapes: tuple[tuple[int, ...], ...]
    num_regions: int
    num_ops: int
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
            num_dropped=len(plan.dropped),
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
    calls, references = candidates(trace)
    if all(call.why_not for call in calls):
        return None
    costs = host_costs(torch_device)
    planner = RegionPlanner(trace.step, calls, costs, num_ops=num_ops)
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
    return RegionPlan(
        specs={found: RegionSpec(calls=numbers, num_calls=num_calls[found]) for found, numbers in chosen.items()},
        shapes=tuple(shape for index in choice.chosen for shape in calls[index].shapes),
        num_regions=len(choice.chosen),
        num_ops=num_ops,
        needs=planner.needs(choice),
        plan=_plan_of(planner, choice, of_ops, budget_bytes),
        trial=TimedWays(is_open=is_open),
    )


def candidates(trace: OpTrace) -> tuple[list[ModuleCall], list[Reference]]:
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
