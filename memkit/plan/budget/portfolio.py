"""The best plan for a budget of those that several ways find: no way is the best for every step and budget."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import add
from typing import TYPE_CHECKING

from memkit.plan.actions import Action
from memkit.plan.budget.improve import change_single_actions, keep_what_fits, refill_link, trade_places
from memkit.plan.budget.replays import ReplayCosts
from memkit.plan.budget.search import Search
from memkit.plan.segments import Segments
from memkit.plan.timeline import Levels

if TYPE_CHECKING:
    from memkit.plan.budget.problem import Problem
    from memkit.plan.budget.simulated import Simulated

_KEEP, _OFFLOAD, _RECOMPUTE = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE
BOTH = frozenset({_OFFLOAD, _RECOMPUTE})
_SHARES = (1.0, 0.8, 1.06)
"""How full the lane out is."""
_MILD = 1.08
"""Cuts are tried where the step takes longer than so many times the plain one."""
_FINER = 1.5
"""Into how many segments a step is cut: from two on by this factor."""
_MOST_PARTS = 32
_SIMULATED_ALONE = 150
_SIMULATED = 190
"""So many plans are simulated, about, with one mechanism and with both."""
_LARGE = 160
"""Of steps with more values fewer plans are simulated, about in inverse proportion."""
_FEWEST = 24
_NUM_LEAST = 2
"""From so many of the plans that take the fewest bytes on, more is let go to find the least budget."""


def search_plan(
    problem: Problem,
    budget_bytes: int,
    allowed: Collection[Action] = BOTH,
    *,
    starts: Iterable[Simulated] = (),
    handling_s: float = 0.0,
) -> Simulated:
    """Return the best step that was found; above the budget only if none was found that is not.

    Args:
        problem: the step.
        budget_bytes: what it may take.
        allowed: what may be done with values beside keeping them.
        starts: steps that are known to keep to the budget: what is found is no slower.
        handling_s: see `JointPlanner.handling_s`.
    """
    most_simulated = _most_simulated(problem, allowed)
    search = Search(problem, budget_bytes, allowed, most_simulated=most_simulated, handling_s=handling_s)
    if not search.best.over_bytes:
        return search.best
    for start in starts:
        search.consider(start)
    if not search.allows_recompute:
        search.offload_alone()
        if search.best.over_bytes:
            search.grow(search.best.actions)
        return search.best
    _grow_all(search)
    if search.best.over_bytes or search.best.seconds > _MILD * problem.plain_s:
        _cut(search)
    _improve(search)
    return search.best


def search_least(problem: Problem, allowed: Collection[Action] = BOTH) -> Simulated:
    """Return the step that takes the fewest bytes of those that a short search for it looks at.

    Each begins from a plan where all goes that may, or all between some cuts, and lets more go where most is there.
    """
    floor = floor_bytes(problem)
    search = Search(problem, floor, allowed, most_simulated=_SIMULATED_ALONE)
    values = problem.values
    moved = tuple(
        _OFFLOAD if search.can_leave[index] and not held.is_anchor else action
        for index, (held, action) in enumerate(zip(values, problem.plain, strict=True))
    )
    dropped = tuple(_RECOMPUTE if search.can_drop[index] else action for index, action in enumerate(problem.plain))
    tried = [search.simulate(actions) for actions in dict.fromkeys((moved, dropped))]
    if search.allows_recompute:
        for actions in _cut_plans(search):
            tried.append(search.simulate(actions))
            if search.allows_offload:
                leaving = tuple(
                    _OFFLOAD if action is _KEEP and search.can_leave[index] else action for index, action in enumerate(actions)
                )
                tried.append(search.simulate(leaving))
    for start in sorted(tried, key=lambda found: (found.peak_bytes, found.seconds))[:_NUM_LEAST]:
        search.grow(start.actions)
    return search.least


def floor_bytes(problem: Problem) -> int:
    """Return what every plan takes at least: what is there in each slot whatever is done with values."""
    levels = Levels(problem.num_slots)
    for held in problem.values:
        if held.choices == {_KEEP}:
            levels.add(held.made, held.freed, held.num_bytes)
        elif not held.is_anchor:
            gone = max(held.released, held.saved)
            levels.add(held.made, gone, held.num_bytes)
            levels.add(max(held.use, gone), held.freed, held.num_bytes)
    return problem.base_bytes + max(map(add, problem.working_bytes, levels.each()), default=0)


def _most_simulated(problem: Problem, allowed: Collection[Action]) -> int:
    """Return how many plans are simulated: fewer of a large step, of which each takes longer."""
    most = _SIMULATED if set(allowed) >= BOTH else _SIMULATED_ALONE
    return max(_FEWEST, min(most, most * _LARGE // max(len(problem.values), 1)))


def _grow_all(search: Search) -> None:
    problem, plain = search.problem, search.problem.plain
    if not search.allows_offload:
        search.grow(plain)
        return
    costs = ReplayCosts(problem, plain)
    prices = [
        -1.0 if held.is_anchor else price for held, price in zip(problem.values, search.prices(costs, plain), strict=True)
    ]
    for share in _SHARES:
        if search.is_spent:
            return
        search.grow(search.fill_link(plain, prices, share=share))
    if search.is_spent:
        return
    search.grow(plain)
    anchors = [
        index for index, held in enumerate(problem.values) if held.is_anchor and search.best.actions[index] is not _RECOMPUTE
    ]
    if anchors:
        seeded = list(plain)
        for index in anchors:
            seeded[index] = _KEEP
        costs = ReplayCosts(problem, seeded)
        prices = search.prices(costs, seeded)
        for index, held in enumerate(problem.values):
            if held.is_anchor:
                prices[index] = costs.cost(held.value) / held.num_bytes if seeded[index] is _KEEP else -1.0
        search.grow(search.fill_link(seeded, prices))


def _cut(search: Search) -> None:
    """Start from cuts as well: what crosses them stays, and all between is dropped."""
    tried = [search.simulate(actions) for actions in _cut_plans(search)]
    fitting = sorted((found for found in tried if not found.over_bytes), key=lambda found: found.seconds)
    for found in fitting[:2] or sorted(tried, key=lambda found: found.excess_bytes)[:1]:
        if search.allows_offload:
            found = refill_link(search, found)
        found = keep_what_fits(search, found)
        if search.allows_offload:
            keep_what_fits(search, refill_link(search, found))


def _improve(search: Search) -> None:
    found = keep_what_fits(search, search.best)
    if search.allows_offload:
        found = keep_what_fits(search, trade_places(search, found))
    change_single_actions(search, search.best)


def _cut_plans(search: Search) -> list[tuple[Action, ...]]:
    """Return the plans where what crosses some cuts stays, and all between is dropped, for ever more cuts."""
    problem = search.problem
    segments = Segments(problem.trace.step)
    saved = [held for held in problem.values if not held.is_anchor]
    total, parts, plans = sum(held.num_bytes for held in saved), 2.0, dict[tuple[Action, ...], None]()
    while parts <= max(_MOST_PARTS, len(saved) // 5):
        stays = segments.skeleton(total / parts)
        parts *= _FINER
        plans[
            tuple(
                _KEEP if held.value in stays or not (held.is_anchor or search.can_drop[index]) else _RECOMPUTE
                for index, held in enumerate(problem.values)
            )
        ] = None
    return list(plans)
