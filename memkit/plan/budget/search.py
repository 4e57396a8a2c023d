"""Searches for a plan: offload what is expensive to recompute while the link has time, then drop the cheapest per byte until it
fits."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from memkit.plan.actions import Action
from memkit.plan.budget.replays import ReplayCosts
from memkit.plan.budget.simulate import simulate
from memkit.plan.lineage import NO_OP

if TYPE_CHECKING:
    from memkit.plan.budget.problem import Problem
    from memkit.plan.budget.simulated import Simulated

_KEEP, _OFFLOAD, _RECOMPUTE = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE
_NUM_ANCHORS = 3
"""Of the anchors that a value is made from so many of the nearest are looked at."""
_MOST_OPS_UP = 60
"""They are looked for among so many ops before it."""
_ANCHOR_SHARE = 0.76
"""An anchor takes the place of a value if it has no more than this share of its bytes."""
_AT_ONCE = 0.6
"""Of what is above the budget this share is dropped before the step is simulated again: dropping moves the worst slot."""
_FEW_BYTES = 256 * 2**20
"""Of no more than so much all is dropped at once."""
_MOST_ROUNDS = 80
_SLACK = 3.0
_LITTLE = 0.5
"""Once a plan fits, nor are those whose replays take so many times longer than what it costs, and this share of the plain step:
less expensive ones may yet be improved."""
_MOVED = 3
_MOST_REPLAYED = 4.0
"""Plans whose replays take longer than so many plain steps are not looked at."""
_MOST_STALE = 5
"""So many rounds in a row may bring nothing."""


class Search:
    """Simulates plans of one problem under one budget, and knows the best so far.

    Args:
        problem: the step.
        budget_bytes: what it may take, with the base.
        allowed: what may be done with values beside keeping them.
        most_simulated: so many plans are simulated before stages that could go on stop.
        handling_s: what the host takes for a value that is dropped. It is in the prices of values, and thrice in those of what
            moves: the higher it is, the larger and the fewer are those that go.
    """

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        allowed: Collection[Action],
        *,
        most_simulated: int,
        handling_s: float = 0.0,
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
        """Whether as many plans were simulated as may be."""
        return self.num_simulated >= self.most_simulated

    def simulate(self, actions: Sequence[Action]) -> Simulated:
        """Simulate a step, and remember it if it is the best so far."""
        most_s = _MOST_REPLAYED * self.problem.plain_s
        if not self.best.over_bytes:
            beside_s = self.best.seconds - self.problem.plain_s
            most_s = min(most_s, max(_SLACK * beside_s, _LITTLE * self.problem.plain_s))
        found = simulate(self.problem, actions, self.budget_bytes, most_replayed_s=most_s)
        self.num_simulated += 1
        self.consider(found)
        return found

    def consider(self, found: Simulated) -> None:
        """Remember a step if it is the best so far, or takes the fewest bytes."""
        if found.rank < self.best.rank:
            self.best = found
        if (found.peak_bytes, found.seconds) < (self.least.peak_bytes, self.least.seconds):
            self.least = found

    def price(self, costs: ReplayCosts, index: int, actions: Sequence[Action]) -> tuple[float, int]:
        """Return the least seconds for each byte that dropping a value takes: alone, or with an anchor held for it; and that
        anchor, -1 where alone is cheaper."""
        held = self.problem.values[index]
        best, with_anchor = (costs.cost(held.value) + self.handling_s) / held.num_bytes, -1
        for place in self.near_anchors[index]:
            anchor = self.problem.values[place]
            if actions[place] is _RECOMPUTE:
                cost_s = max(costs.cost_beside(held.value, anchor.value), 0.0)
                if cost_s / (held.num_bytes - anchor.num_bytes) < best:
                    best, with_anchor = cost_s / (held.num_bytes - anchor.num_bytes), place
        return best, with_anchor

    def prices(self, costs: ReplayCosts, actions: Sequence[Action]) -> list[float]:
        """Return for each value what dropping it takes for each byte; what cannot be dropped is the most expensive."""
        return [
            self.price(costs, index, actions)[0] if self.can_drop[index] and actions[index] is not _RECOMPUTE else math.inf
            for index in range(len(actions))
        ]

    def fill_link(self, actions: Sequence[Action], prices: Sequence[float], *, share: float = 1.0) -> list[Action]:
        """Return the plan where, whenever the lane out is idle in the forward, the most expensive value there is put on it.

        Args:
            actions: what is done otherwise. What is dropped may leave as well, if it has a price.
            prices: seconds for each byte that it takes if a value does not leave, negative if it is not to.
            share: the lane is over after this share of the forward.
        """
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
                price = prices[index] - _MOVED * self.handling_s / values[index].num_bytes
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
        """Drop what is cheapest for its bytes at the worst slot, again and again, until the step fits; None if it does not."""
        problem, values, current = self.problem, self.problem.values, list(actions)
        costs = ReplayCosts(problem, current)
        known = [0.0] * len(values)
        """The price that each value had when it was looked at last: it is looked at again before it is dropped."""
        stale, least = 0, math.inf
        for _ in range(_MOST_ROUNDS):
            found = self.simulate(current)
            if not found.over_bytes:
                return found
            if found.seconds == math.inf:
                return None  # replays take longer than what was found, and more is still to be dropped
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
            wanted = found.over_bytes * (_AT_ONCE if found.over_bytes > _FEW_BYTES else 1.0)
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
                for op in costs.drop_telling(values[index].value):
                    for made in problem.lineage.outs[op]:
                        if made in problem.index:
                            known[problem.index[made]] = 0.0
                wanted -= values[index].num_bytes
        return self._force_out(current) if self.allows_offload else None

    def _force_out(self, actions: Sequence[Action]) -> Simulated | None:
        """Let what stays at the worst slot leave as well, though compute has to wait for the lane; None if that does not do."""
        values, current, turn = self.problem.values, list(actions), self.problem.num_forward_points
        for _ in range(_MOST_STALE * 4):
            found = self.simulate(current)
            worst = found.worst_slot
            staying = sorted(
                (held.saved, index)
                for index, held in enumerate(values)
                if current[index] is _KEEP
                and self.can_leave[index]
                and held.released <= worst
                and (held.use > worst)
                and held.saved < self.problem.points[turn - 1]
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
        """Let as few of the first saves leave as do."""
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
    """Return for each value the anchors that it is made from, of those that are smaller, the last made first; as places in
    `Problem.values`."""
    lineage, index_of, values = problem.lineage, problem.index, problem.values
    found: list[tuple[int, ...]] = []
    for held in values:
        anchors = set[int]()
        if not held.is_anchor:
            seen, pending = set[int](), [held.value]
            while pending and len(seen) < _MOST_OPS_UP:
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
                        if values[place].num_bytes <= _ANCHOR_SHARE * held.num_bytes:
                            anchors.add(place)
        found.append(tuple(sorted(anchors, key=lambda place: -values[place].made)[:_NUM_ANCHORS]))
    return found
