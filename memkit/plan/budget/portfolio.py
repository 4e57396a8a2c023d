"""The best plan for a budget of those that several ways find: no way is the best for every step and budget."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from memkit.plan.actions import Action
from memkit.plan.budget.improve import change_single_actions, keep_what_fits, refill_link, trade_places
from memkit.plan.budget.replays import ReplayCosts
from memkit.plan.budget.search import Search
from memkit.plan.segments import Segments

if TYPE_CHECKING:
    from memkit.plan.budget.problem import Problem
    from memkit.plan.budget.simulate import Simulated

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
_SIMULATED = 250
"""So many plans are simulated, about, with one mechanism and with both."""


def search_plan(
    problem: Problem, budget_bytes: int, allowed: Collection[Action] = BOTH, *, starts: Iterable[Simulated] = ()
) -> Simulated:
    """Return the best step that was found; above the budget only if none was found that is not.

    Args:
        problem: the step.
        budget_bytes: what it may take.
        allowed: what may be done with values beside keeping them.
        starts: plans to begin from as well.
    """
    both = set(allowed) >= BOTH
    search = Search(problem, budget_bytes, allowed, most_simulated=_SIMULATED if both else _SIMULATED_ALONE)
    if not search.best.over_bytes:
        return search.best
    if both:
        for start in (
            search_plan(problem, budget_bytes, {_OFFLOAD}),
            search_plan(problem, budget_bytes, {_RECOMPUTE}),
            *starts,
        ):
            again = search.simulate(start.actions)
            if is_nearer(start, again, budget_bytes) and start.rank < search.best.rank:
                search.best = start
    else:
        for start in starts:
            search.simulate(start.actions)
    if search.allows_offload:
        search.offload_alone() if not search.allows_recompute else None
    if search.allows_recompute:
        _grow_all(search)
        if search.best.over_bytes or search.best.seconds > _MILD * problem.plain_s:
            _cut(search)
        _improve(search)
    elif search.best.over_bytes:
        search.grow(search.best.actions)
    return search.best


def is_nearer(start: Simulated, again: Simulated, budget_bytes: int) -> bool:
    """Tell whether a plan that was made elsewhere is better as it was than simulated anew."""
    return start.peak_bytes <= budget_bytes and start.rank < again.rank


def _grow_all(search: Search) -> None:
    problem, plain = search.problem, search.problem.plain
    if not search.allows_offload:
        search.grow(plain)
        return
    costs = ReplayCosts(problem, plain)
    prices = [-1.0 if held.is_anchor else price for held, price in zip(problem.values, search.prices(costs, plain), strict=True)]
    for share in _SHARES:
        search.grow(search.fill_link(plain, prices, share=share))
    search.grow(plain)
    anchors = [index for index, held in enumerate(problem.values) if held.is_anchor and search.best.actions[index] is not _RECOMPUTE]
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
    problem = search.problem
    segments = Segments(problem.trace.step)
    saved = [held for held in problem.values if not held.is_anchor]
    total, parts, tried, seen = sum(held.num_bytes for held in saved), 2.0, list["Simulated"](), set[tuple[Action, ...]]()
    while parts <= max(_MOST_PARTS, len(saved) // 5):
        held_there = segments.skeleton(total / parts)
        parts *= _FINER
        actions = tuple(
            _KEEP if held.value in held_there or not (held.is_anchor or search.can_drop[index]) else _RECOMPUTE
            for index, held in enumerate(problem.values)
        )
        if actions not in seen:
            seen.add(actions)
            tried.append(search.simulate(actions))
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
