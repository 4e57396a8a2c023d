"""Plans a step under a budget of the whole device, or explains why no plan keeps to it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from memkit.core.sizes import format_bytes
from memkit.errors import BudgetInfeasible
from memkit.plan.budget.bound import Bound, find_bound, why_no_bound
from memkit.plan.budget.problem import HeldValue, Problem
from memkit.plan.budget.search import BOTH, floor_bytes, search_least, search_plan, without_needless_moves
from memkit.plan.budget.simulate import Move, Simulated, simulate
from memkit.plan.eviction import DTRScore
from memkit.plan.plans import Action, MemoryPlan, PlannedReplay, PlannedStep, PlannedValue
from memkit.plan.remat import Outcome, Walks

_FEW_RUNGS = 4  # after so many budgets the bound is computed anew, and without one no more are looked at


class JointPlanner:
    """Plans one step for one budget after the other. A plan for a smaller budget also serves a larger one."""

    def __init__(self, problem: Problem, actions: Collection[Action] = BOTH) -> None:
        self.problem, self.actions = problem, frozenset(actions) & BOTH
        self.handling_s = 0.0  # the host's seconds for a value that goes: with them fewer, larger values are chosen
        self.alone = (
            {action: JointPlanner(problem, {action}) for action in sorted(self.actions)} if self.actions == BOTH else {}
        )
        self._found: dict[int, Simulated] = {}
        self._rungs: dict[int, Simulated] = {}  # the same, found without the plans for other budgets
        self._bounds: dict[int, Bound | None] = {}
        self._spared: dict[int, Simulated] = {}  # by budget, the choice that spares the host
        self._least: Simulated | None = None
        self._walks: Walks | None = None

    def _seeds(self, budget_bytes: int) -> list[Outcome]:
        """Where room is short, return the drops of `Walk`s: with them a step takes up to 3 % less."""
        problem, step = self.problem, self.problem.trace.step
        limit_bytes = step.saved_bytes - problem.plain_peak_bytes + budget_bytes
        if self.actions != {Action.RECOMPUTE} or limit_bytes > 0.5 * step.saved_bytes:
            return []
        if self._walks is None:
            timed = replace(step, lineage=step.lineage.with_seconds(problem.op_s))
            self._walks = Walks(timed, DTRScore())
        return self._walks.seeds(limit_bytes)

    def least(self) -> Simulated:
        if self._least is None:
            found = [search_least(self.problem, self.actions), *(planner.least() for planner in self.alone.values())]
            self._least = min(found, key=lambda step: (step.peak_bytes, step.seconds))
        return self._least

    def best(self, budget_bytes: int) -> Simulated:
        found = self._fastest(budget_bytes)
        if self.handling_s and budget_bytes not in self._spared:
            fewer = search_plan(self.problem, budget_bytes, self.actions, handling_s=self.handling_s)
            # the device waits for only a part of the time that the host saves
            spared_s = 0.2 * self.handling_s * (found.num_handled - fewer.num_handled)
            is_worse = bool(fewer.over_bytes) or fewer.seconds > found.seconds + spared_s
            self._spared[budget_bytes] = found if is_worse else without_needless_moves(self.problem, fewer, budget_bytes)
        return self._spared[budget_bytes] if self.handling_s else found

    def _fastest(self, budget_bytes: int) -> Simulated:
        if budget_bytes >= self.problem.plain_peak_bytes:
            return simulate(self.problem, self.problem.plain, budget_bytes)
        self._check(budget_bytes)
        known = [found for found in self._found.values() if found.peak_bytes <= budget_bytes]
        if budget_bytes not in self._found:
            starts = [*known, *(planner.best(budget_bytes) for planner in self._alone_within(budget_bytes))]
            self._found[budget_bytes] = self._search(budget_bytes, starts)
            return self._found[budget_bytes]
        return min(map(_without_excess, known), key=lambda start: start.rank)  # under others since may be better

    def _check(self, budget_bytes: int) -> None:
        if self.least().peak_bytes > budget_bytes:
            raise self._infeasible(budget_bytes, self.least())

    def _alone_within(self, budget_bytes: int) -> list[JointPlanner]:
        return [planner for planner in self.alone.values() if planner.least().peak_bytes <= budget_bytes]

    def _search(self, budget_bytes: int, starts: list[Simulated]) -> Simulated:
        starts = [_without_excess(start) for start in (self.least(), *starts)]
        found = search_plan(self.problem, budget_bytes, self.actions, starts=starts, seeds=self._seeds(budget_bytes))
        return without_needless_moves(self.problem, found, budget_bytes)

    def steady(self, budget_bytes: int) -> Simulated:
        """Return the fastest step found for a budget or for smaller ones: never slower than that for a smaller one."""
        problem = self.problem
        if budget_bytes >= problem.plain_peak_bytes:
            return simulate(problem, problem.plain, budget_bytes)
        self._check(budget_bytes)
        least_bytes = self.least().peak_bytes
        shares = [problem.plain_peak_bytes * number // 60 - 2**12 for number in range(60, 0, -1)]  # shares may be rounded down
        rungs = [*(rung for rung in shares if least_bytes < rung <= budget_bytes), least_bytes]
        best, bound = self._rung(rungs[0]), self.bound(budget_bytes)
        for number, rung in enumerate(rungs[1:], 1):
            if bound is None and number >= _FEW_RUNGS:
                break
            if bound is not None and bound.under(rung) < best.seconds and number % _FEW_RUNGS == 0:
                bound = self.bound(rung) or bound
            if bound is not None and bound.under(rung) >= best.seconds:
                break
            best = min(best, self._rung(rung), key=lambda found: (found.seconds, found.moved_bytes))
        return best

    def bound(self, budget_bytes: int) -> Bound | None:
        if budget_bytes not in self._bounds:
            self._bounds[budget_bytes] = find_bound(self.problem, budget_bytes, allowed=self.actions)
        return self._bounds[budget_bytes]

    def _rung(self, budget_bytes: int) -> Simulated:
        if budget_bytes not in self._rungs:
            starts = [planner._rung(budget_bytes) for planner in self._alone_within(budget_bytes)]
            self._rungs[budget_bytes] = _without_excess(self._search(budget_bytes, starts))
        return self._rungs[budget_bytes]

    def plan(self, budget_bytes: int, *, with_bound: bool = False, is_steady: bool = False) -> MemoryPlan:
        """Return the plan for a budget. Raises BudgetInfeasible if none was found: it names the least budget of those found."""
        found = self.steady(budget_bytes) if is_steady else self.best(budget_bytes)
        plan = self.told(found, budget_bytes, self.least().peak_bytes)
        if not with_bound:
            return plan
        bound = self.bound(budget_bytes)
        missing = () if bound is not None else (why_no_bound() or "no lower bound: its solver gave up",)
        return replace(plan, bound_s=None if bound is None else bound.seconds, notes=(*plan.notes, *missing))

    def told(self, found: Simulated, budget_bytes: int, least_bytes: int) -> MemoryPlan:
        problem, gpu = self.problem, self.problem.gpu
        moves = {move.index: move for move in found.moves}
        replays_s = {replay.index: sum(problem.op_s[op] for op in replay.ops) for replay in found.replays}
        values = tuple(
            self._planned(held, found.actions[index], moves.get(index), replays_s.get(index, 0.0), found)
            for index, held in enumerate(problem.values)
            if not (held.is_anchor and found.actions[index] is Action.RECOMPUTE)
        )
        replays = tuple(
            PlannedReplay(
                request=problem.request_at[problem.points[replay.point]],
                value=problem.values[replay.index].value,
                ops=replay.ops,
                stays=tuple(problem.values[index].value for index in replay.stays),
            )
            for replay in found.replays
        )
        return MemoryPlan(
            budget_bytes=budget_bytes,
            predicted_s=found.seconds,
            plain_s=problem.plain_s,
            predicted_peak_bytes=found.peak_bytes,
            plain_peak_bytes=problem.plain_peak_bytes,
            min_budget_bytes=least_bytes,
            replayed_s=found.replayed_s,
            stall_s=found.stall_s,
            moved_bytes=found.moved_bytes,
            gpu=gpu.name,
            is_measured=gpu.is_measured,
            step=PlannedStep.of(problem.trace),
            values=values,
            replays=replays,
            notes=tuple(unsure(problem)),
        )

    def _planned(self, held: HeldValue, action: Action, move: Move | None, cost_s: float, found: Simulated) -> PlannedValue:
        problem, gpu = self.problem, self.problem.gpu
        op, module = problem.trace.names.get(held.value, ("", ""))
        read = found.held_until.get(held.value)
        planned = PlannedValue(
            value=held.value,
            action=action,
            num_bytes=held.num_bytes,
            cost_s=cost_s,
            module=module,
            op=op,
            reason=self._reason(held, action),
            held_until=-1 if read is None or action is Action.RECOMPUTE else problem.request_at[read],
            is_anchor=held.is_anchor,
        )
        if move is None:
            return planned
        link_s = 2 * gpu.copy_latency_s + held.num_bytes * (1 / gpu.d2h_bytes_per_s + 1 / gpu.h2d_bytes_per_s)
        return replace(
            planned,
            link_s=link_s,
            copy_at=problem.save_at[problem.points[move.copy]],
            let_go_at=(
                problem.save_at[problem.points[move.let_go]]
                if move.let_go < problem.num_forward_points
                else len(problem.trace.step.saves)
            ),
            fetch_at=problem.request_at[problem.points[move.fetch]],
            needed_at=problem.request_at[problem.points[move.need]],
        )

    def _reason(self, held: HeldValue, action: Action) -> str:
        if held.is_anchor:
            return "smaller than what is made from it"
        if held.choices == {Action.KEEP}:
            step = self.problem.trace.step
            return step.why_kept.get(held.value, "asked for" if held.value in step.fixed else "held by others until it is used")
        if held.choices == {Action.RECOMPUTE}:
            return "asked for"
        if action is Action.KEEP:
            return "fits the budget"
        if action is Action.RECOMPUTE:
            return "cheap for its bytes"
        return "expensive to recompute" if Action.RECOMPUTE in held.choices else "no op can recompute it"

    def _infeasible(self, budget_bytes: int, least: Simulated) -> BudgetInfeasible:
        problem, slot = self.problem, least.worst_slot
        module, op = problem.module_at(slot)
        working = problem.working_bytes[slot]
        held = max(least.peak_bytes - problem.base_bytes - working, 0)
        name = module or problem.trace.model
        where = (f"in {name}, " if name else "") + (f"while {op} runs" if op else "")
        where = where.removesuffix(", ")
        return BudgetInfeasible(
            f"a budget of {format_bytes(budget_bytes)} cannot be kept to: the smallest that a plan was found for is "
            f"{format_bytes(least.peak_bytes)}, and none takes less than {format_bytes(floor_bytes(problem))}. "
            f"Most is there {where}: {format_bytes(working)} of gradients and temporaries, {format_bytes(held)} of saved "
            f"values and what is recomputed, {format_bytes(problem.base_bytes)} that is there all along",
            least.peak_bytes,
        )


def unsure(problem: Problem) -> Iterator[str]:
    modules = [name or problem.trace.model for name in problem.trace.backend_dependent]
    if modules:
        yield f"only the backend knows what runs in {', '.join(modules)}, and what it saves: bytes and time are guesses there"


def _without_excess(start: Simulated) -> Simulated:
    return replace(start, over_bytes=0, excess_bytes=0) if start.excess_bytes else start
