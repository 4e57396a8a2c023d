"""From a byte budget to what is kept and what is recomputed.

A trace is planned once. A greedy walk finds one *drop order*: at each point of the step where the ledger is fullest, the value
whose making again costs least for the bytes it frees there goes next. Each prefix of that order is a plan, and so is what
dynamic tensor rematerialization would drop by itself. Plans are simulated by the walk that also runs them (`Walk`); a
budget takes the cheapest that fits of all that were found.

Each stage of the search says what it brings: how much longer a step takes without it at the worst, in shares of the plain
step: of the models of the benches, at 80 to 15 % of their saved bytes and near the least that can be kept to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import chain, combinations, islice

from memkit.plan.actions import Action, Plan, PlannedSave, infeasible, tell_kept
from memkit.plan.drop_order import drop_order
from memkit.plan.eviction import DTRScore
from memkit.plan.lineage import NO_OP, Step
from memkit.plan.segments import Segments
from memkit.plan.simulation import MOST_REPLAYS, Outcome, simulate

_STEP_DOWN = 0.75
_SMALL = 100
"""In a step with no more ops, saves and requests it is looked for by exchange as well: up to 4 % fewer bytes."""
_FORWARDS = 4_000
"""The smallest step runs no more again than so many forwards, over the number of ops, saves and requests, or than one."""
_MOST_WORK = 100_000
"""It is looked for ever lower until nothing smaller is found, or so many ops, saves and requests were simulated."""
_MOST_PARTS = 32
_FINER = 1.4
"""Into how many segments a step is cut: from two on by this factor, up to `_MOST_PARTS`, or a fifth of its saved values. By a
factor of 2: up to 28 %."""
_NUM_HELD = 3
_HELD = 0.5
"""Anchors are held if they take no more than this share of the limit: of these sets the largest few. Without anchors: up to
72 %, with one set up to 11 %, with two 1.5 %."""
_ROOMS = (1.0, 0.94)
"""Prefixes of a drop order are looked at that should keep to these shares of the limit. Without prefixes: up to 23 %."""
_LARGE = 4_000
"""For a step with more ops, saves and requests, fewer plans are simulated: one takes a tenth of a second and more."""
_MOST_EXCHANGED = 3
"""So many values are exchanged at once: without any exchange up to 4 %, in small steps with nothing but single ones more."""
_MOST_MOVES = 120
_EXCHANGED = 30_000
"""So many ops, saves and requests are simulated again to see what the exchange of single values brings."""


class RematPlanner:
    """The plans of one step, simulated as they are asked for.

    Args:
        step: the step.
        score: who goes when room is short.
        describe: the op and the module that a value is made by, both "" where that is not known.
    """

    def __init__(
        self, step: Step, score: DTRScore, describe: Callable[[int], tuple[str, str]] = lambda value: ("", "")
    ) -> None:
        self.step = step
        self.score = score
        self._describe = describe
        self._saved_bytes = step.saved_bytes
        self._asked = frozenset(step.saves).intersection(step.dropped) - step.fixed - step.moved
        self._num_events = len(step.lineage.ins) + len(step.saves) + len(step.uses)
        self._most_s = math.inf
        """Steps whose replays take longer are not looked at."""
        self._work = 0
        """Ops, saves and requests that were simulated."""
        self._is_large = self._num_events > _LARGE
        self._num_exchanges = 0 if self._is_large else min(_MOST_MOVES, _EXCHANGED // (self._num_events + 1))
        self._held = self._anchor_sets()
        self._orders: dict[frozenset[int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._explored = set[float]()
        self._found: list[Outcome] = []
        self._smallest: Outcome | None = None
        self._everything = self._try(step.dropped, math.inf, frozenset())

    def _anchor_sets(self) -> dict[frozenset[int], int]:
        """Return what may be held that autograd did not save, the least first, and how many bytes that takes."""
        segments, saved, parts = Segments(self.step), frozenset(self.step.saves), 2.0
        sizes, found = self.step.lineage.num_bytes, {frozenset[int](): 0}
        while parts <= max(_MOST_PARTS, len(saved) // 5):
            anchors = segments.skeleton(self._saved_bytes / parts) - self._asked
            found[anchors] = sum(sizes[value] for value in anchors - saved)
            parts *= _FINER
        return found

    def _try(
        self, dropped: Collection[int], limit_bytes: float, anchors: frozenset[int], *, most_s: float = math.inf
    ) -> Outcome:
        """Simulate a step, and remember what it takes."""
        found = simulate(
            self.step,
            dropped,
            limit_bytes=limit_bytes,
            score=self.score,
            anchors=anchors.difference(self.step.saves),
            most_s=min(most_s, self._most_s),
        )
        self._work += self._num_events
        if found.replayed_s < math.inf:
            self._work += found.num_replayed_ops
            self._found.append(found)
        else:
            self._work += MOST_REPLAYS * len(self.step.lineage.ins)
        return found

    def smallest(self) -> Outcome:
        """Return the step that takes the fewest bytes, without thrashing, of those that a search for it looks at.

        It is the same for each planner of the step, whatever budgets it was asked for.
        """
        if self._smallest is None:
            fresh = RematPlanner(self.step, self.score)
            forwards = max(1.0, _FORWARDS / (self._num_events + 1))
            fresh._most_s = forwards * sum(self.step.lineage.seconds) or math.inf
            self._smallest = fresh._search_smallest()
            self._found.append(self._smallest)
        return self._smallest

    def least_found(self) -> Outcome:
        """Return the step that takes the fewest bytes of all that were looked at, for whatever budget."""
        self.smallest()
        return self._least()

    def _search_smallest(self) -> Outcome:
        step_down = _STEP_DOWN**2 if self._is_large else _STEP_DOWN
        limit_bytes = self._saved_bytes * step_down
        while self._least().peak_bytes <= limit_bytes / step_down and limit_bytes >= 1:
            for anchors in self._held_within(limit_bytes)[-2 if self._is_large else 0 :]:
                self._try(self.step.dropped, limit_bytes, anchors)
            limit_bytes *= step_down
        most_work, found = self._work + _MOST_WORK, math.inf
        search = self._search if self._num_events <= _SMALL else self._explore
        while self._least().peak_bytes < found and self._work < most_work:  # without it the smallest takes up to 4 % more
            found = self._least().peak_bytes
            search(found - 1)
        return self._least()

    def _least(self) -> Outcome:
        """Return what takes the fewest bytes of all that was found."""
        return min(self._found, key=lambda outcome: (outcome.peak_bytes, outcome.replayed_s))

    def best(self, budget_bytes: float) -> Outcome | None:
        """Return the cheapest step that fits a budget, None if none was found.

        It is the cheapest of all that were found, also for other budgets.
        """
        if self._everything.peak_bytes <= budget_bytes and not self._everything.replayed_s:
            return self._everything
        self._search(budget_bytes)
        found = self._cheapest(budget_bytes)
        if found is None and self.smallest().peak_bytes <= budget_bytes:
            found = self._cheapest(budget_bytes)
        return found

    def _search(self, budget_bytes: float) -> None:
        """Look for steps that fit a budget."""
        if budget_bytes <= 0 or budget_bytes in self._explored:
            return
        self._explore(budget_bytes)
        self._exchange(budget_bytes)

    def _cheapest(self, budget_bytes: float) -> Outcome | None:
        fitting = (outcome for outcome in self._found if outcome.peak_bytes <= budget_bytes)
        return min(fitting, key=lambda outcome: (outcome.replayed_s, outcome.peak_bytes), default=None)

    def _explore(self, limit_bytes: float) -> None:
        """Simulate several plans that are held to a limit."""
        if limit_bytes in self._explored:
            return
        self._explored.add(limit_bytes)
        for anchors in self._held_within(limit_bytes):
            if anchors or not self._is_large:
                order, peaks = self._drop_order(anchors)
                for length in self._lengths(peaks, limit_bytes):
                    self._try_cheaper(order[:length], limit_bytes, anchors)
            if not (anchors and self._is_large):  # without: up to 7 %
                self._try_cheaper(self.step.dropped, limit_bytes, anchors)

    def _held_within(self, limit_bytes: float) -> list[frozenset[int]]:
        """Return the sets of anchors that leave enough room to be worth a look; the last is none at all."""
        fitting = [anchors for anchors, num_bytes in self._held.items() if anchors and num_bytes <= _HELD * limit_bytes]
        return [*reversed(fitting[-_NUM_HELD:]), frozenset()]

    def _drop_order(self, anchors: frozenset[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if anchors not in self._orders:
            self._orders[anchors] = drop_order(self.step, anchors)
        return self._orders[anchors]

    def _lengths(self, peaks: Sequence[int], limit_bytes: float) -> list[int]:
        """Return which prefixes of a drop order to try."""
        lengths = set[int]()
        for room in (1.0,) if self._is_large else _ROOMS:
            fits = next((length for length, peak in enumerate(peaks) if peak <= room * limit_bytes), None)
            lengths |= {min(range(len(peaks)), key=peaks.__getitem__), len(peaks) - 1} if fits is None else {fits}
        return sorted({max(length, len(self._asked)) for length in lengths})

    def _try_cheaper(self, dropped: Collection[int], limit_bytes: float, anchors: frozenset[int]) -> None:
        """Simulate a step, but give up as soon as it takes longer than what was found."""
        best = self._cheapest(limit_bytes)
        self._try(dropped, limit_bytes, anchors, most_s=math.inf if best is None else best.replayed_s)

    def _exchange(self, limit_bytes: float) -> None:
        """Drop a value more, or one less, or a few at once, where that helps; what takes longest to make first."""

        def rank(outcome: Outcome) -> tuple[float, float]:
            return max(outcome.peak_bytes, limit_bytes), outcome.replayed_s

        lineage, fixed = self.step.lineage, self.step.fixed | self.step.moved | self._asked
        free = [value for value in dict.fromkeys(self.step.saves) if value not in fixed]
        free.sort(key=lambda value: -lineage.seconds[lineage.maker[value]] * lineage.num_bytes[value])
        best = min(self._found, key=rank)
        dropped = best.dropped
        moves = chain.from_iterable(combinations(free, num_values) for num_values in range(1, _MOST_EXCHANGED + 1))
        for move in islice(moves, self._num_exchanges):
            most_s = best.replayed_s if best.peak_bytes <= limit_bytes else 2 * best.replayed_s
            found = self._try(dropped.symmetric_difference(move), limit_bytes, best.anchors, most_s=most_s)
            if rank(found) < rank(best):
                best, dropped = found, dropped.symmetric_difference(move)

    def plan(self, budget_bytes: int, outcome: Outcome | None = None) -> Plan:
        """Return the plan for a budget.

        Args:
            budget_bytes: what saved values and replay temporaries may take.
            outcome: the simulated step to follow, by default the best.

        Raises:
            BudgetInfeasible: none fits.
        """
        found = self.best(budget_bytes) if outcome is None else outcome
        if found is None:
            smallest = self.smallest().peak_bytes
            raise infeasible(budget_bytes, smallest, tell_kept(self._kept_bytes()))
        lineage, traced = self.step.lineage, set[int]()
        roots = {root for value in found.dropped for root in lineage.roots_of(value, traced)}
        kept = found.anchors.union(self.step.saves) - found.dropped
        retained = (roots & self.step.retained_bytes.keys()) | found.anchors
        limit_bytes = found.limit_bytes
        if limit_bytes < math.inf:  # its walk is the same under any limit that its peak keeps to
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

    def _kept_bytes(self) -> dict[str, int]:
        """Return what stays that no op recomputes, by reason, where a user may wonder."""
        step, found = self.step, dict[str, int]()
        for value in dict.fromkeys(step.saves):
            if value in step.why_kept:
                found[step.why_kept[value]] = found.get(step.why_kept[value], 0) + step.lineage.num_bytes[value]
        return found

    def _planned(self, index: int, value: int, dropped: Collection[int], kept: Collection[int]) -> PlannedSave:
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
        return PlannedSave(
            index=index,
            value=value,
            num_bytes=lineage.num_bytes[value],
            action=action,
            op=op,
            module=module,
            cost_s=sum(lineage.seconds[op] for op in lineage.ops_to(value, kept)),
            reason=reason,
        )
