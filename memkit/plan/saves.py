"""Plans for a budget of saved tensors alone: what is kept and what is recomputed. A `Walk` simulates the plans of the joint
search, and drops more where room is short, so it fits budgets for which no plan alone is found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import accumulate

from memkit.plan.budget.problem import Problem, make_problem
from memkit.plan.budget.search import search_plan
from memkit.plan.eviction import DTRScore
from memkit.plan.gpu import GPUS
from memkit.plan.plans import Action, Plan, PlannedValue, infeasible, tell_kept
from memkit.plan.remat import Outcome, Walks
from memkit.plan.step import NO_OP, Lifetime, OpKind, OpWork, Step, StepTrace
from memkit.plan.timeline import Levels


def problem_of_saves(step: Step) -> Problem:
    """Return the problem of a step where only saved tensors take bytes, and nothing can move."""
    lineage, num_ops, num_uses = step.lineage, len(step.lineage.ins), len(step.uses)
    save_places = tuple(accumulate((max(lineage.maker[value], 0) + 1 for value in step.saves), max))
    end = num_ops + num_uses
    first_save, freed = dict[int, int](), dict[int, int]()
    for value, place in zip(step.saves, save_places, strict=True):
        first_save.setdefault(value, place)
    for place, value in enumerate(step.uses):
        freed[value] = num_ops + step.use_end(place)
    lineage.link()
    lifetimes, levels = dict[int, Lifetime](), Levels(end)
    for value, maker in enumerate(lineage.maker):
        if not lineage.num_bytes[value]:
            continue  # values without bytes gain nothing
        if value in first_save:
            made, gone = first_save[value] - 1, min(max(freed.get(value, end), first_save[value]), end)
            lifetimes[value] = Lifetime(made_at=made, released_at=min(made + 1, num_ops), freed_at=gone)
            levels.add(made, gone, lineage.num_bytes[value])
        elif maker != NO_OP:
            read = max((*lineage.users[value], maker)) + 1
            lifetimes[value] = Lifetime(made_at=maker, released_at=read, freed_at=read)
    idle = OpWork(name="", kind=OpKind.POINTWISE, flops=0.0, num_bytes=0, dtype="")
    trace = StepTrace(
        ops=(idle,) * end,
        num_forward_ops=num_ops,
        step=step,
        op_places=tuple(range(num_ops)),
        save_places=save_places,
        use_places=tuple(range(num_ops, end)),
        lifetimes=lifetimes,
        live_bytes=tuple(levels.each()[:end]),
    )
    backward_s = 2 * sum(lineage.seconds) / max(num_uses, 1)  # a backward takes about two forwards
    return make_problem(trace, GPUS["H200"], measured_s=[*lineage.seconds, *[backward_s] * num_uses])


class RematPlanner:
    """The plans of one step for its saved tensors alone, as a `Walk` runs them: those of the joint search, and its seeds."""

    def __init__(
        self, step: Step, score: DTRScore, describe: Callable[[int], tuple[str, str]] = lambda value: ("", "")
    ) -> None:
        self.step, self.score, self._describe = step, score, describe
        self.walks = Walks(step, score)
        self._everything = self.walks.walk(step.dropped, math.inf)
        self._problem: Problem | None = None
        self._searched = set[int]()

    def best(self, budget_bytes: int) -> Outcome | None:
        walks = self.walks
        if self._everything.peak_bytes <= budget_bytes and not self._everything.replayed_s:
            return self._everything
        seeds = walks.seeds(budget_bytes)
        if not walks.is_large and budget_bytes not in self._searched:
            self._search(budget_bytes, seeds)
            self._searched.add(budget_bytes)
        if walks.cheapest(budget_bytes) is None:
            walks.smallest()
        return walks.cheapest(budget_bytes)

    def _search(self, budget_bytes: int, seeds: list[Outcome]) -> None:
        if self._problem is None:
            self._problem = problem_of_saves(replace(self.step, fixed=self.step.fixed | self.step.moved))
        values = self._problem.values
        moved_bytes = sum(self.step.lineage.num_bytes[value] for value in self.step.moved.intersection(self.step.saves))
        found = search_plan(self._problem, budget_bytes + moved_bytes, {Action.RECOMPUTE}, seeds=seeds)
        gone = {held.value for held, action in zip(values, found.actions, strict=True) if action is Action.RECOMPUTE}
        dropped = gone.intersection(self.step.saves) | self.walks.asked
        anchors = frozenset(held.value for held in values if held.is_anchor and held.value not in gone)
        self.walks.walk(frozenset(dropped), budget_bytes, anchors)
        self.walks.exchange(budget_bytes)

    def plan(self, budget_bytes: int) -> Plan:
        """Return the plan for a budget of saved values and replay temporaries. Raises BudgetInfeasible if none fits."""
        found = self.best(budget_bytes)
        if found is None:
            step, kept_bytes = self.step, Counter[str]()
            for value in dict.fromkeys(value for value in step.saves if value in step.why_kept):
                kept_bytes[step.why_kept[value]] += step.lineage.num_bytes[value]
            raise infeasible(budget_bytes, self.walks.smallest().peak_bytes, tell_kept(kept_bytes))
        return self.told(found, budget_bytes)

    def least(self, budget_bytes: int) -> Plan:
        self.walks.smallest()
        return self.told(self.walks.least(), budget_bytes)

    def told(self, found: Outcome, budget_bytes: int) -> Plan:
        lineage, traced = self.step.lineage, set[int]()
        roots = {root for value in found.dropped for root in lineage.roots_of(value, traced)}
        kept = found.anchors.union(self.step.saves) - found.dropped
        retained = (roots & self.step.retained_bytes.keys()) | found.anchors
        limit_bytes = found.limit_bytes
        if limit_bytes < math.inf:  # its walk is the same under any limit above its peak
            limit_bytes = min(limit_bytes, max(budget_bytes, found.peak_bytes))
        values = enumerate(dict.fromkeys(self.step.saves))
        return Plan(
            saves=tuple(self._planned(index, value, found.dropped, kept) for index, value in values),
            budget_bytes=budget_bytes,
            limit_bytes=limit_bytes,
            predicted_peak_bytes=found.peak_bytes,
            predicted_replay_s=found.replayed_s,
            num_replayed_ops=found.num_replayed_ops,
            retained=frozenset(retained),
        )

    def _planned(self, index: int, value: int, dropped: Collection[int], kept: Collection[int]) -> PlannedValue:
        step, lineage = self.step, self.step.lineage
        op, module = self._describe(value)
        action = Action.RECOMPUTE if value in dropped else Action.OFFLOAD if value in step.moved else Action.KEEP
        if value in step.moved:
            reason = "asked for"
        elif lineage.maker[value] == NO_OP:
            reason = step.why_kept.get(value, "no op can recompute it")
        elif value in step.fixed or value in step.dropped:
            reason = "asked for"
        else:
            reason = "cheap for its bytes" if action is Action.RECOMPUTE else "fits the budget"
        return PlannedValue(
            index=index,
            value=value,
            num_bytes=lineage.num_bytes[value],
            action=action,
            op=op,
            module=module,
            cost_s=sum(lineage.seconds[op] for op in lineage.ops_to(value, kept)),
            reason=reason,
        )
