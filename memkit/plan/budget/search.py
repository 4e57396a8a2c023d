"""Searches for a plan, in several ways, since none is the best for every step, and improves the best by single changes."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from operator import add

from memkit.plan.budget.problem import Problem
from memkit.plan.budget.simulate import ReplayCosts, Simulated, simulate
from memkit.plan.plans import Action
from memkit.plan.remat import CutPlaces, Outcome
from memkit.plan.step import NO_OP
from memkit.plan.timeline import Levels

_KEEP, _OFFLOAD, _RECOMPUTE = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE
_MOST_STALE = 5  # so many rounds in a row may bring nothing


class Search:
    def __init__(
        self, problem: Problem, budget_bytes: int, allowed: Collection[Action], *, most_simulated: int, handling_s: float = 0.0
    ) -> None:
        self.problem, self.budget_bytes, self.most_simulated = problem, budget_bytes, most_simulated
        self.handling_s = handling_s
        self.allows_offload, self.allows_recompute = _OFFLOAD in allowed, _RECOMPUTE in allowed
        values = problem.values
        self.can_drop = [self.allows_recompute and not held.is_anchor and _RECOMPUTE in held.choices for held in values]
        self.can_keep = [_KEEP in held.choices for held in values]
        self.can_leave = [self.allows_offload and _OFFLOAD in held.choices for held in values]
        self.near_anchors = nearest_anchors(problem) if self.allows_recompute else [()] * len(values)
        self.num_simulated = 1
        self.best = self.least = simulate(problem, problem.plain, budget_bytes)

    @property
    def is_spent(self) -> bool:
        return self.num_simulated >= self.most_simulated

    def simulate(self, actions: Sequence[Action]) -> Simulated:
        plain_s = self.problem.plain_s
        most_s = 4.0 * plain_s  # longer replays are given up
        if not self.best.over_bytes:  # less expensive plans may yet be improved
            most_s = min(most_s, max(3.0 * (self.best.seconds - plain_s), 0.5 * plain_s))
        found = simulate(self.problem, actions, self.budget_bytes, most_replayed_s=most_s)
        self.num_simulated += 1
        self.consider(found)
        return found

    def consider(self, found: Simulated) -> None:
        if found.rank < self.best.rank:
            self.best = found
        if (found.peak_bytes, found.seconds) < (self.least.peak_bytes, self.least.seconds):
            self.least = found

    def price(self, costs: ReplayCosts, index: int, actions: Sequence[Action]) -> tuple[float, int]:
        """Return the least seconds per byte of dropping a value, and the anchor that is then held for it, or -1."""
        held = self.problem.values[index]
        best, with_anchor = (costs.cost(held.value) + self.handling_s) / held.num_bytes, -1
        for place in self.near_anchors[index]:
            anchor = self.problem.values[place]
            if actions[place] is _RECOMPUTE:
                cost_s = max(costs.cost_beside(held.value, anchor.value), 0.0)
                if cost_s / (held.num_bytes - anchor.num_bytes) < best:
                    best, with_anchor = cost_s / (held.num_bytes - anchor.num_bytes), place
        return best, with_anchor

    def fill_link(self, actions: Sequence[Action], prices: Sequence[float], *, share: float = 1.0) -> list[Action]:
        """Put the most expensive value on the lane out whenever it is idle; one with a negative price stays."""
        problem, gpu, values, starts_s = self.problem, self.problem.gpu, self.problem.values, self.problem.starts_s
        if problem.num_forward_points >= len(problem.points):
            return list(actions)
        end_s = starts_s[problem.points[problem.num_forward_points]] * share
        filled, waiting, now_s, position = list(actions), list[tuple[float, int, int]](), 0.0, 0
        leaving = sorted(
            (values[index].saved, index)
            for index, action in enumerate(actions)
            if self.can_leave[index] and action is not _OFFLOAD and prices[index] >= 0
        )
        while position < len(leaving) or waiting:
            while position < len(leaving) and starts_s[leaving[position][0]] <= now_s + 1e-12:
                index = leaving[position][1]
                price = prices[index] - 3 * self.handling_s / values[index].num_bytes
                heapq.heappush(waiting, (-price, -values[index].num_bytes, index))
                position += 1
            if not waiting:
                now_s = starts_s[leaving[position][0]]
                continue
            index = heapq.heappop(waiting)[-1]
            held = values[index]
            over_s = now_s + gpu.copy_latency_s + held.num_bytes / gpu.d2h_bytes_per_s
            if max(over_s, starts_s[held.released]) > end_s:
                continue  # a smaller one may do
            if not held.is_anchor and starts_s[held.use] - over_s < 2 * held.num_bytes / gpu.h2d_bytes_per_s:
                continue  # it would have to be back at once
            now_s, filled[index] = over_s, _OFFLOAD
        return filled

    def grow(self, actions: Sequence[Action]) -> Simulated | None:
        """Drop the cheapest value for its bytes at the worst slot until the step fits; None if it never does."""
        problem, values, current = self.problem, self.problem.values, list(actions)
        costs = ReplayCosts(problem, current)
        known = [0.0] * len(values)  # the price of each value as of the last look; it is looked at again before it is dropped
        stale, least = 0, math.inf
        for _ in range(80):
            found = self.simulate(current)
            if not found.over_bytes:
                return found
            if found.seconds == math.inf:
                return None  # replays already take longer than a known plan, and more has to be dropped
            stale, least = (stale + 1, least) if found.excess_bytes >= least else (0, found.excess_bytes)
            if stale > _MOST_STALE or not self.allows_recompute:
                break
            worst = found.worst_slot
            cheapest = [
                (known[index], index)
                for index, held in enumerate(values)
                if self.can_drop[index] and current[index] is _KEEP and held.released <= worst < held.use
            ]
            if not cheapest:
                break
            heapq.heapify(cheapest)
            # dropping moves the worst slot: of many bytes a part is dropped, then the step is simulated again
            wanted = found.over_bytes * (0.6 if found.over_bytes > 256 * 2**20 else 1.0)
            while cheapest and wanted > 0:
                index = heapq.heappop(cheapest)[1]
                price, anchor = self.price(costs, index, current)
                known[index] = price
                if cheapest and price > cheapest[0][0]:
                    heapq.heappush(cheapest, (price, index))
                    if cheapest[0][1] != index:
                        continue
                    heapq.heappop(cheapest)
                if anchor >= 0:
                    current[anchor] = _KEEP
                    costs.hold(values[anchor].value)
                    wanted += values[anchor].num_bytes
                current[index] = _RECOMPUTE
                for op in costs.drop(values[index].value):
                    for made in problem.lineage.outs[op]:
                        if made in problem.index:
                            known[problem.index[made]] = 0.0
                wanted -= values[index].num_bytes
        return self._force_out(current) if self.allows_offload else None

    def _force_out(self, actions: Sequence[Action]) -> Simulated | None:
        """Move values at the worst slot too, though compute has to wait for the copies; None if the step still doesn't fit."""
        values, current, last = self.problem.values, list(actions), self.problem.points[self.problem.num_forward_points - 1]
        for _ in range(_MOST_STALE * 4):
            found = self.simulate(current)
            worst = found.worst_slot
            staying = sorted(
                (held.saved, index)
                for index, held in enumerate(values)
                if current[index] is _KEEP and self.can_leave[index] and held.released <= worst < held.use and held.saved < last
            )
            if not found.over_bytes or not staying:
                break
            wanted = found.over_bytes
            for _, index in staying:
                if wanted <= 0:
                    break
                current[index] = _OFFLOAD
                wanted -= values[index].num_bytes
        return None if found.over_bytes else found

    def offload_alone(self) -> None:
        order = [index for index, held in enumerate(self.problem.values) if self.can_leave[index] and not held.is_anchor]

        def first(number: int) -> list[Action]:
            actions = list(self.problem.plain)
            for index in order[:number]:
                actions[index] = _OFFLOAD
            return actions

        too_few, enough = 0, len(order)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            too_few, enough = (middle, enough) if self.simulate(first(middle)).over_bytes else (too_few, middle)
        self.simulate(first(enough))


def nearest_anchors(problem: Problem) -> list[tuple[int, ...]]:
    """Return for each value the nearest smaller anchors that it is made from, as places in `Problem.values`."""
    lineage, index_of, values = problem.lineage, problem.index, problem.values
    found: list[tuple[int, ...]] = []
    for held in values:
        anchors = set[int]()
        if not held.is_anchor:
            seen, pending = set[int](), [held.value]
            while pending and len(seen) < 60:
                op = lineage.maker[pending.pop()]
                if op == NO_OP or op in seen:
                    continue
                seen.add(op)
                for source in lineage.ins[op]:
                    place = index_of.get(source)
                    if place is None:
                        pending.append(source)
                    elif values[place].is_anchor:
                        pending.append(source)
                        if values[place].num_bytes <= 0.76 * held.num_bytes:
                            anchors.add(place)
        found.append(tuple(sorted(anchors, key=lambda place: -values[place].made)[:3]))
    return found


_NUM_PAIRED = 12


def is_better(found: Simulated, than: Simulated) -> bool:
    return (found.excess_bytes, found.seconds) < (than.excess_bytes, than.seconds - 1e-9)


def keep_what_fits(search: Search, found: Simulated) -> Simulated:
    """Return the step where dropped values stay for which there is room all along, the most expensive first."""
    problem, values = search.problem, search.problem.values
    limit_bytes = search.budget_bytes - problem.base_bytes
    while not search.is_spent and not found.over_bytes:
        actions = list(found.actions)
        costs = ReplayCosts(problem, actions)
        levels, back = list(found.levels), list[int]()
        gains = [
            (-costs.gain(held.value), index)
            for index, (held, action) in enumerate(zip(values, actions, strict=True))
            if action is _RECOMPUTE and not held.is_anchor and search.can_keep[index]
        ]
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
            break
        found = kept
    return found


def refill_link(search: Search, found: Simulated) -> Simulated:
    """Return the step with the link filled anew, by the most expensive values that are dropped or moved."""
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
            prices[index] = 1e-3 * price  # it need not leave: dropped values gain more
    filled = search.simulate(search.fill_link(dropped, prices))
    return filled if is_better(filled, found) else found


def change_single_actions(search: Search, found: Simulated) -> None:
    problem, values = search.problem, search.problem.values
    while not search.is_spent:
        actions = found.actions
        costs = ReplayCosts(problem, actions)
        moves: list[tuple[float, list[tuple[int, Action]]]] = []
        expensive: list[tuple[float, tuple[int, Action]]] = []
        for index, held in enumerate(values):
            others = [_KEEP] * search.can_keep[index] + [_OFFLOAD] * (search.can_leave[index] and not held.is_anchor)
            if actions[index] is _OFFLOAD and search.can_keep[index]:
                moves.append((0.0, [(index, _KEEP)]))
            elif actions[index] is _RECOMPUTE and others and (gain_s := costs.gain(held.value)) > 0:
                expensive += [(-gain_s, (index, action)) for action in others]
        moves += [(gain, [change]) for gain, change in expensive]
        kept = [index for index, action in enumerate(actions) if action is _KEEP and search.can_drop[index]]
        cheap = sorted((costs.cost(values[index].value) / values[index].num_bytes, index) for index in kept)[:_NUM_PAIRED]
        for gain, change in sorted(expensive)[:_NUM_PAIRED]:
            for price, index in cheap:
                if gain + price * values[index].num_bytes < 0:
                    moves.append((gain + price * values[index].num_bytes, [change, (index, _RECOMPUTE)]))
        moves.sort(key=lambda move: move[0])
        for _, changes in moves[:150]:
            if search.is_spent:
                return
            better = _with(search, found, changes)
            if is_better(better, found):
                found = better
                break
        else:
            return


def _with(search: Search, found: Simulated, changes: Sequence[tuple[int, Action]]) -> Simulated:
    actions = list(found.actions)
    for index, action in changes:
        actions[index] = action
    return search.simulate(actions)


def without_needless_moves(problem: Problem, found: Simulated, budget_bytes: int) -> Simulated:
    """Return a step that is as fast and moves less: copies take of the memory's speed even if they hide."""
    moved = sorted((move.index for move in found.moves), key=lambda index: -problem.values[index].num_bytes)
    place, size = 0, len(moved)
    for _ in range(40):
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


BOTH = frozenset({_OFFLOAD, _RECOMPUTE})
_SIMULATED_ALONE = 150


def search_plan(
    problem: Problem,
    budget_bytes: int,
    allowed: Collection[Action] = BOTH,
    *,
    starts: Iterable[Simulated] = (),
    seeds: Iterable[Outcome] = (),
    handling_s: float = 0.0,
) -> Simulated:
    """Return the best step that was found; above the budget only if none was found that is not."""
    most = 190 if set(allowed) >= BOTH else _SIMULATED_ALONE
    most_simulated = max(24, min(most, most * 160 // max(len(problem.values), 1)))  # fewer for more than 160 values
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
    for seed in seeds:
        actions = [
            _RECOMPUTE if held.value in seed.dropped or (held.is_anchor and held.value not in seed.anchors) else _KEEP
            for held in problem.values
        ]
        found = search.simulate(actions)
        if not found.over_bytes:
            keep_what_fits(search, found)
    if search.best.over_bytes or search.best.seconds > 1.08 * problem.plain_s:
        tried = [search.simulate(actions) for actions in _cut_plans(search)]
        fitting = sorted((found for found in tried if not found.over_bytes), key=lambda found: found.seconds)
        for found in fitting[:2] or sorted(tried, key=lambda found: found.excess_bytes)[:1]:
            if search.allows_offload:
                found = refill_link(search, found)
            found = keep_what_fits(search, found)
            if search.allows_offload:
                keep_what_fits(search, refill_link(search, found))
    keep_what_fits(search, search.best)
    change_single_actions(search, search.best)
    return search.best


def search_least(problem: Problem, allowed: Collection[Action] = BOTH) -> Simulated:
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
    for start in sorted(tried, key=lambda found: (found.peak_bytes, found.seconds))[:2]:  # more is let go from the two least
        search.grow(start.actions)
    return search.least


def floor_bytes(problem: Problem) -> int:
    """Return a lower bound of any plan's bytes: those that no action frees, at the worst slot."""
    levels = Levels(problem.num_slots)
    for held in problem.values:
        if held.choices == {_KEEP}:
            levels.add(held.made, held.freed, held.num_bytes)
        elif not held.is_anchor:
            gone = max(held.released, held.saved)
            levels.add(held.made, gone, held.num_bytes)
            levels.add(max(held.use, gone), held.freed, held.num_bytes)
    return problem.base_bytes + max(map(add, problem.working_bytes, levels.each()), default=0)


def _grow_all(search: Search) -> None:
    problem, plain = search.problem, search.problem.plain
    if not search.allows_offload:
        search.grow(plain)
        return
    costs = ReplayCosts(problem, plain)
    prices = [
        -1.0
        if held.is_anchor
        else search.price(costs, index, plain)[0]
        if search.can_drop[index] and plain[index] is not _RECOMPUTE
        else math.inf
        for index, held in enumerate(problem.values)
    ]
    for share in (1.0, 0.8, 1.06):  # how full the lane out is
        if search.is_spent:
            return
        search.grow(search.fill_link(plain, prices, share=share))
    if not search.is_spent:
        search.grow(plain)


def _cut_plans(search: Search) -> list[tuple[Action, ...]]:
    """Return plans that keep the values across some cuts and drop all between, for ever more cuts."""
    plans = (
        tuple(
            _KEEP if held.value in stays or not (held.is_anchor or search.can_drop[index]) else _RECOMPUTE
            for index, held in enumerate(search.problem.values)
        )
        for stays in CutPlaces(search.problem.trace.step).skeletons()
    )
    return list(dict.fromkeys(plans))
