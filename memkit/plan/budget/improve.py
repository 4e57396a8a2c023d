"""Improves a plan: keep what fits, offload what is expensive to recompute rather than what is cheap, change single actions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memkit.plan.actions import Action
from memkit.plan.budget.replays import ReplayCosts, dropped_of
from memkit.plan.budget.simulate import simulate

if TYPE_CHECKING:
    from memkit.plan.budget.problem import Problem
    from memkit.plan.budget.search import Search
    from memkit.plan.budget.simulated import Simulated

_KEEP, _OFFLOAD, _RECOMPUTE = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE
_LESS_S = 1e-9
"""A plan is better if it takes so much less."""
_NUM_SINGLE = 6
"""If what fits by itself does not fit together, so many of the most expensive are tried alone."""
_TRADED = (1.0, 0.5, 0.25)
_NUM_PAIRED = 12
_NUM_MOVES = 150
_NUM_SPARED = 40
"""So many steps are looked at to move less."""


def is_better(found: Simulated, than: Simulated) -> bool:
    """Tell whether a step is nearer to its budget than another, or as near and faster."""
    return (found.excess_bytes, found.seconds) < (than.excess_bytes, than.seconds - _LESS_S)


def keep_what_fits(search: Search, found: Simulated) -> Simulated:
    """Return the step where dropped values stay for which there is room all along, the most expensive first."""
    problem, values = search.problem, search.problem.values
    limit_bytes = search.budget_bytes - problem.base_bytes
    while not search.is_spent and not found.over_bytes:
        actions = list(found.actions)
        costs = ReplayCosts(problem, actions)
        levels, back = list(found.levels), list[int]()
        gains = [(-costs.gain(values[index].value), index) for index in dropped_of(problem, actions) if search.can_keep[index]]
        for gain, index in sorted(gains):
            if gain >= 0:
                break
            held = values[index]
            begin = bisect_right(problem.points, held.released) - 1
            end = problem.point_of(held.use)
            if begin >= end or max(levels[begin:end]) + held.num_bytes <= limit_bytes:
                levels[begin:end] = [level + held.num_bytes for level in levels[begin:end]]
                back.append(index)
        kept = _with(search, found, [(index, _KEEP) for index in back]) if back else found
        if not is_better(kept, found):
            kept = found
            for index in back[:_NUM_SINGLE]:
                one = _with(search, kept, [(index, _KEEP)])
                kept = one if is_better(one, kept) else kept
        if kept is found:
            break
        found = kept
    return without_idle_anchors(search, found)


def without_idle_anchors(search: Search, found: Simulated) -> Simulated:
    """Return the step without anchors that nothing is made sooner from."""
    problem, actions = search.problem, list(found.actions)
    costs = ReplayCosts(problem, actions)
    idle: list[tuple[int, Action]] = []
    for index, held in enumerate(problem.values):
        if held.is_anchor and actions[index] is not _RECOMPUTE and costs.cost(held.value) <= _LESS_S:
            costs.drop(held.value)
            idle.append((index, _RECOMPUTE))
    if not idle:
        return found
    without = _with(search, found, idle)
    return without if without.rank <= found.rank else found


def refill_link(search: Search, found: Simulated) -> Simulated:
    """Return the step where the link is filled anew, with the most expensive of what is dropped and of what leaves by now."""
    problem, values = search.problem, search.problem.values
    dropped = [
        _RECOMPUTE if action is _OFFLOAD and search.can_drop[index] else _KEEP if action is _OFFLOAD else action
        for index, action in enumerate(found.actions)
    ]
    costs = ReplayCosts(problem, dropped)
    prices = [-1.0] * len(values)
    for index, action in enumerate(dropped):
        held = values[index]
        if action is _RECOMPUTE and not held.is_anchor:
            prices[index] = costs.gain(held.value) / held.num_bytes
        elif action is _KEEP and search.can_leave[index]:
            price = search.price(costs, index, dropped)[0] if search.can_drop[index] else 0.0
            prices[index] = 1e-3 * price  # it need not leave: what is dropped gains more
    filled = search.simulate(search.fill_link(dropped, prices))
    return filled if is_better(filled, found) else found


def trade_places(search: Search, found: Simulated) -> Simulated:
    """Return the step where expensive dropped values take the places of cheap ones on the link."""
    problem, values = search.problem, search.problem.values
    for share in _TRADED:
        if search.is_spent:
            break
        actions = list(found.actions)
        costs = ReplayCosts(problem, actions)
        expensive = sorted(
            (-costs.gain(values[index].value) / values[index].num_bytes, index)
            for index in dropped_of(problem, actions)
            if search.can_leave[index]
        )
        leaving = [index for index, action in enumerate(actions) if action is _OFFLOAD and search.can_drop[index]]
        cheap = sorted((search.price(costs, index, actions)[0], index) for index in leaving)
        room, position, changes = 0, 0, list[tuple[int, Action]]()
        for gain, index in expensive:
            while room < values[index].num_bytes and position < len(cheap) and cheap[position][0] < -0.9 * gain:
                room += values[cheap[position][1]].num_bytes
                changes.append((cheap[position][1], _RECOMPUTE))
                position += 1
            if room < values[index].num_bytes or position > share * len(cheap):
                break
            room -= values[index].num_bytes
            changes.append((index, _OFFLOAD))
        if changes:
            traded = _with(search, found, changes)
            found = traded if is_better(traded, found) else found
    return found


def change_single_actions(search: Search, found: Simulated) -> Simulated:
    """Return the step where single actions, and pairs, were changed as long as that helps: what promises most first."""
    problem, values = search.problem, search.problem.values
    while not search.is_spent:
        actions = found.actions
        costs = ReplayCosts(problem, actions)
        moves: list[tuple[float, list[tuple[int, Action]]]] = []
        expensive: list[tuple[float, tuple[int, Action]]] = []
        for index, held in enumerate(values):
            action = actions[index]
            if action is _OFFLOAD and search.can_keep[index]:
                moves.append((0.0, [(index, _KEEP)]))
            elif action is _RECOMPUTE and (search.can_keep[index] or search.can_leave[index]):
                gain_s = costs.gain(held.value)
                if gain_s <= 0:
                    continue
                if search.can_keep[index]:
                    moves.append((-gain_s, [(index, _KEEP)]))
                    expensive.append((-gain_s, (index, _KEEP)))
                if search.can_leave[index] and not held.is_anchor:
                    moves.append((-gain_s, [(index, _OFFLOAD)]))
                    expensive.append((-gain_s, (index, _OFFLOAD)))
        kept = [index for index, action in enumerate(actions) if action is _KEEP and search.can_drop[index]]
        cheap = sorted((costs.cost(values[index].value) / values[index].num_bytes, index) for index in kept)[:_NUM_PAIRED]
        for gain, change in sorted(expensive)[:_NUM_PAIRED]:
            for price, index in cheap:
                if gain + price * values[index].num_bytes < 0:
                    moves.append((gain + price * values[index].num_bytes, [change, (index, _RECOMPUTE)]))
        moves.sort(key=lambda move: move[0])
        better = found
        for _, changes in moves[:_NUM_MOVES]:
            if search.is_spent:
                break
            better = _with(search, found, changes)
            if is_better(better, found):
                break
        if not is_better(better, found):
            break
        found = better
    return found


def _with(search: Search, found: Simulated, changes: Sequence[tuple[int, Action]]) -> Simulated:
    actions = list(found.actions)
    for index, action in changes:
        actions[index] = action
    return search.simulate(actions)


def without_needless_moves(problem: Problem, found: Simulated, budget_bytes: int) -> Simulated:
    """Return a step that is as fast, and moves less where it can: copies that hide behind the computation are not free, since
    they take of the memory's speed."""
    moved = sorted((move.index for move in found.moves), key=lambda index: -problem.values[index].num_bytes)
    place, size = 0, len(moved)
    for _ in range(_NUM_SPARED):
        if place >= len(moved):
            break
        actions = list(found.actions)
        for index in moved[place : place + size]:
            actions[index] = Action.KEEP
        tried = simulate(problem, actions, budget_bytes)
        if tried.excess_bytes <= found.excess_bytes and tried.seconds <= found.seconds:
            found, place, size = tried, place + size, 2 * size
        elif size > 1:
            size //= 2
        else:
            place += 1
    return found
