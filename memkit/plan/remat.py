"""From a byte budget to what is kept and what is made again.

A trace is planned once. A greedy walk finds one *drop order*: at each point of the step where the ledger is fullest, the value
whose making again costs least for the bytes it frees there goes next. Each prefix of that order is a plan, and so is what
dynamic tensor rematerialization would drop by itself. Plans are simulated by the walk that also runs them (`Residents`), at a
fixed series of limits; a budget takes the cheapest that fits, so that more budget never costs more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import accumulate, chain, combinations, islice

from tabulate import tabulate

from memkit.errors import BudgetInfeasible
from memkit.plan.actions import Action
from memkit.plan.eviction import DTRScore, Residents
from memkit.plan.lineage import NO_OP, Lineage, Step
from memkit.plan.segments import Segments
from memkit.sizes import format_mib

_LEVEL = 0.94
"""Besides the budget, the next lower limit of a fixed series is looked at: the saved bytes times a power of this."""
_NO_END = 1 << 62
_MOST_REPLAYS = 8
"""A step that runs each op again so often, on average, is none to plan with."""
_STEP_DOWN = 0.75
_MOST_LOOKS = 150_000
"""Values are picked for the drop order one by one, or several at once where that would mean more looks at a value."""
_MOST_PARTS = 32
_FINER = 1.4
"""Into how many segments a step is cut: from two on by this factor, up to `_MOST_PARTS`, or a fifth of its saved values."""
_NUM_HELD = 3
_HELD = 0.5
"""Anchors are held if they take no more than this share of the limit: of these sets the largest few."""
_ROOMS = (1.0, 0.94)
"""Prefixes of a drop order are looked at that should keep to these shares of the limit."""
_LARGE = 4_000
"""For a step with more ops, saves and requests, fewer plans are simulated: one takes a tenth of a second and more."""
_MOST_EXCHANGED = 3
_MOST_MOVES = 120
_EXCHANGED = 30_000
"""So many ops, saves and requests are simulated again to see what the exchange of single values brings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated step takes."""

    peak_bytes: int
    """The most bytes of saved values and replay temporaries at once."""
    replayed_s: float
    num_replayed_ops: int
    dropped: frozenset[int]
    """The values that are dropped in the forward."""
    limit_bytes: float
    """The limit that the replays keep to."""
    anchors: frozenset[int] = frozenset()
    """Values that autograd did not save, and that are held so that others can be made from them."""


class _GiveUpError(Exception):
    """Ops are run again so often that nobody would want it."""


class _Simulation(Residents):
    """A step without its tensors."""

    def __init__(self, step: Step, score: DTRScore, limit_bytes: float, anchors: frozenset[int], most_s: float) -> None:
        super().__init__(step.lineage, score, limit_bytes)
        self._most_s = most_s
        self._step = step
        self._anchors = anchors
        self._anchors_to_come = sorted(anchors, reverse=True)
        self._anchors_held: list[int] = []
        self._live_bytes = 0
        self._present = set[int]()
        self._held_roots = set[int]()
        self._traced = set[int]()
        self._places: dict[int, list[int]] = {}
        for place, value in enumerate(step.uses):
            self._places.setdefault(value, []).append(place)
        self._saved_at: dict[int, int] = {}
        self._now: int | None = None
        self._num_saved = 0
        self._most_ops = _MOST_REPLAYS * len(step.lineage.ins)

    @property
    def live_bytes(self) -> int:
        return self._live_bytes

    def is_available(self, value: int) -> bool:
        return value in self._present or self.lineage.maker[value] == NO_OP

    def is_wanted(self, value: int) -> bool:
        places = self._places.get(value)
        return places is not None and value in self._saved_at and places[-1] >= (self._now or 0)

    def distance(self, value: int) -> int:
        if self._now is None:
            return self._num_saved - self._saved_at[value]
        places = self._places.get(value, ())
        index = bisect_left(places, self._now)
        return places[index] - self._now + 1 if index < len(places) else len(self._step.uses)

    def _drop(self, value: int) -> bool:
        self._present.discard(value)
        self._live_bytes -= self.lineage.num_bytes[value]
        for root in roots_of(self.lineage, value, self._traced):
            if root not in self._held_roots and root not in self._saved_at:
                self._held_roots.add(root)
                self._live_bytes += self._step.retained_bytes.get(root, 0)
        return True

    def _run(self, op: int, in_place: Collection[int]) -> None:
        if self.num_replayed_ops > self._most_ops or self.replayed_s > self._most_s:
            raise _GiveUpError

    def _keep(self, value: int) -> None:
        self._present.add(value)
        self._live_bytes += self.lineage.num_bytes[value]

    def _forget(self, value: int) -> None:
        pass

    def run(self, dropped: Collection[int], *, online: bool) -> Outcome:
        """Simulate the step; with `online`, also drop in the forward whatever the limit asks for."""
        step, lineage = self._step, self.lineage
        for index, value in enumerate(step.saves):
            is_new = value not in self._saved_at
            while self._anchors_to_come and self._anchors_to_come[-1] <= value:
                anchor = self._anchors_to_come.pop()
                self._anchors_held.append(anchor)
                self._keep(anchor)
            self._saved_at[value], self._num_saved = index, index + 1
            self.clock += 1
            if not is_new:
                continue
            self._keep(value)
            if value not in step.fixed and lineage.maker[value] != NO_OP:
                self.admit(value)
                if value in dropped:
                    self.drop(value)
            if online:
                self.make_room(0)
            self.note_peak()
        gone = self._saved_at.keys() - self._present
        latest = sorted(self._saved_at)
        self._backward(latest)
        return Outcome(
            peak_bytes=self.peak_bytes,
            replayed_s=self.replayed_s,
            num_replayed_ops=self.num_replayed_ops,
            dropped=frozenset(gone),
            limit_bytes=self.limit_bytes,
            anchors=self._anchors,
        )

    def _backward(self, latest: list[int]) -> None:
        uses, used = self._step.uses, -1
        for place, value in enumerate(uses):
            while latest and latest[-1] in self._places and self._places[latest[-1]][-1] < place:
                latest.pop()
            while self._anchors_held and (not latest or self._anchors_held[-1] > latest[-1]):
                anchor = self._anchors_held.pop()  # nothing that is made from it will be asked for
                self._present.discard(anchor)
                self._live_bytes -= self.lineage.num_bytes[anchor]
            if used >= 0 and self._places[used][-1] < place and used in self._present:
                self._present.discard(used)
                self.evictable.pop(used, None)
                self._live_bytes -= self.lineage.num_bytes[used]
            self._now = place
            self.clock += 1
            used = value
            if value not in self._present and value in self._saved_at:
                self.rebuild(value)
                self.note_peak()


def roots_of(lineage: Lineage, value: int, traced: set[int]) -> Iterator[int]:
    """Yield the roots that a value is made from, by all that is between; not what was `traced` before."""
    pending = [value]
    while pending:
        value = pending.pop()
        if value in traced:
            continue
        traced.add(value)
        maker = lineage.maker[value]
        if maker == NO_OP:
            yield value
        else:
            pending.extend(lineage.ins[maker])


def simulate(
    step: Step,
    dropped: Collection[int],
    *,
    limit_bytes: float,
    score: DTRScore,
    online: bool = False,
    anchors: frozenset[int] = frozenset(),
    most_s: float = math.inf,
) -> Outcome:
    """Return what a step takes that drops some of its saved values.

    Args:
        step: the step.
        dropped: the values that are dropped as soon as they are saved.
        limit_bytes: what saved values and replays may take; where that is not enough, more is dropped.
        score: who goes then.
        online: decide in the forward as well, as dynamic tensor rematerialization does.
        anchors: values that were not saved, and that are held for as long as anything saved later is needed.
        most_s: a step whose replays take longer, or run each op many times, is given up: it takes for ever then.
    """
    try:
        return _Simulation(step, score, limit_bytes, anchors, most_s).run(dropped, online=online)
    except _GiveUpError:
        return Outcome(
            peak_bytes=_NO_END, replayed_s=math.inf, num_replayed_ops=_NO_END, dropped=frozenset(), limit_bytes=limit_bytes
        )


class _DropOrder:
    """The greedy walk that finds the drop order of a step.

    It takes a replay for what it is while room suffices: each op of a run of dropped values once, when the first of them is
    asked for, and all that it makes stays until it is used. What is kept is on the device from its save to its last use.
    """

    def __init__(self, step: Step, anchors: Collection[int]) -> None:
        self._step = step
        lineage = self._lineage = step.lineage
        first_saved: dict[int, int] = {}
        for index, value in enumerate(step.saves):
            first_saved.setdefault(value, index)
        latest_saved = list(accumulate(step.saves, max))
        num_saves = len(step.saves)
        first_use: dict[int, int] = {}
        last_use: dict[int, int] = {}
        for place, value in enumerate(step.uses):
            first_use.setdefault(value, num_saves + place)
            last_use[value] = num_saves + place
        end = num_saves + len(step.uses)
        self._since = first_saved
        self._until = {value: last_use.get(value, end - 1) for value in first_saved}
        self._back = {value: first_use.get(value, end) for value in first_saved}
        """When a dropped value is on the device again: with its first use, or with that of one made from it."""
        self._changes = [0] * (end + 2)
        """By how much the ledger grows at each save and request."""
        for value in first_saved:
            self._add(self._since[value], self._until[value] + 1, lineage.num_bytes[value])
        self._dropped = set[int]()
        self._replayed = set[int]()
        self._open = dict.fromkeys(value for value in first_saved if value not in step.fixed and value not in anchors)
        for anchor in anchors:
            if anchor not in first_saved:
                first_saved[anchor] = bisect_left(latest_saved, anchor)
                self._add(first_saved[anchor], end, lineage.num_bytes[anchor])
        self._kept = set(first_saved)
        self.order: list[int] = []
        self.peaks_bytes: list[int] = [max(accumulate(self._changes))]
        """The peak before any drop, and after each: after those that were picked together, for each of them the last."""

    def _add(self, start: int, end: int, num_bytes: int) -> None:
        if start < end:
            self._changes[start] += num_bytes
            self._changes[end] -= num_bytes

    def _new_ops(self, value: int) -> set[int]:
        """Return the ops that making a value again adds to those that run again anyway."""
        maker, ins, kept, replayed = self._lineage.maker, self._lineage.ins, self._kept, self._replayed
        ops, pending = set[int](), [value]
        while pending:
            op = maker[pending.pop()]
            if op == NO_OP or op in ops or op in replayed:
                continue
            ops.add(op)
            for source in ins[op]:
                if source not in kept:
                    pending.append(source)
        return ops

    def walk(self) -> None:
        """Find the whole order."""
        batch = max(1, len(self._open) ** 2 // _MOST_LOOKS)
        self._take([value for value in self._step.dropped if value in self._open])
        while picked := self._pick(batch):
            self._take(picked)
        sizes, rest = self._lineage.num_bytes, {value: self._new_cost_s(value) for value in self._open}
        self._take(sorted(rest, key=lambda value: rest[value] / (sizes[value] + 1)))

    def _new_cost_s(self, value: int) -> float:
        seconds = self._lineage.seconds
        return sum(seconds[op] for op in self._new_ops(value))

    def _pick(self, num_picked: int) -> list[int]:
        """Return the values that lower the peak at least cost, the best first; none if nothing lowers it."""
        level = list(accumulate(self._changes))
        peak = max(level)
        over = peak - max(1, peak // 64)
        counts = [0, *accumulate(bytes_here > over for bytes_here in level)]
        num_bytes = self._lineage.num_bytes
        found = []
        for value in self._open:
            covered = counts[self._back[value]] - counts[self._since[value]]
            if covered > 0 and num_bytes[value] > 0:
                found.append(((self._new_cost_s(value) + 1e-9) / (covered * num_bytes[value]), value))
        return [value for _, value in nsmallest(num_picked, found)]

    def _take(self, values: Sequence[int]) -> None:
        """Drop some values."""
        for value in values:
            self._replayed |= self._new_ops(value)
            del self._open[value]
            self._dropped.add(value)
            self._kept.discard(value)
            # On the device again when the first is that is made from it, through values that are made again as well.
            back = min((self._back[later] for later in self._made_from(value)), default=self._back[value])
            back = min(back, self._back[value])
            self._add(self._since[value], min(back, self._until[value] + 1), -self._lineage.num_bytes[value])
            self._back[value] = back
            self._bring_forward(value, back)
        self.order += values
        self.peaks_bytes += [max(accumulate(self._changes))] * len(values)

    def _made_from(self, value: int) -> Iterator[int]:
        """Yield the dropped values that are made from a value without a kept one between."""
        lineage, pending, seen = self._lineage, [value], {value}
        lineage.link()
        while pending:
            for op in lineage.users[pending.pop()]:
                if op not in self._replayed:
                    continue
                for made in lineage.outs[op]:
                    if made in seen:
                        continue
                    seen.add(made)
                    if made in self._dropped:
                        yield made
                    elif made not in self._since:
                        pending.append(made)

    def _bring_forward(self, value: int, back: int) -> None:
        """Have the dropped values that a value is made from on the device when it is made."""
        maker, ins, pending = self._lineage.maker, self._lineage.ins, [value]
        seen = set[int]()
        while pending:
            op = maker[pending.pop()]
            if op == NO_OP or op in seen:
                continue
            seen.add(op)
            for source in ins[op]:
                if source in self._dropped:
                    if self._back[source] > back:
                        self._add(back, min(self._back[source], self._until[source] + 1), self._lineage.num_bytes[source])
                        self._back[source] = back
                        pending.append(source)
                elif source not in self._since:
                    pending.append(source)


def drop_order(step: Step, anchors: Collection[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return in which order the saved values of a step are dropped as the budget falls, and the ledger's peak before the first
    and after each, as far as room suffices to make each value again once."""
    walk = _DropOrder(step, anchors)
    walk.walk()
    return tuple(walk.order), tuple(walk.peaks_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedValue:
    """What is to happen to one saved value."""

    value: int
    """Its number in the step."""
    num_bytes: int
    action: Action
    op: str
    """The op that makes it."""
    module: str
    """The module in which that ran, "" where it is not known."""
    cost_s: float
    """What it takes to run its op, and the ops between it and what is kept, again."""
    reason: str

    def __str__(self) -> str:
        return f"{self.action.value} {self.op}: {format_mib(self.num_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RematPlan:
    """What is kept and what is made again, for one sequence of saves.

    It can be edited (`with_action`) and given to `Rematerialize` as `plan=`. It is for the step that it was made from: a step
    that saves anything else does not follow it.
    """

    values: tuple[PlannedValue, ...]
    """The distinct saved values, in the order of first saves."""
    budget_bytes: int
    limit_bytes: float
    """What replays keep to; at most the budget."""
    predicted_peak_bytes: int
    """The most bytes of saved values and replay temporaries at once."""
    predicted_replay_s: float
    num_replayed_ops: int
    retained: frozenset[int]
    """Values that are held on purpose, because something is made from them: roots, and others that autograd did not save."""

    @property
    def dropped(self) -> frozenset[int]:
        """The values that are made again."""
        return frozenset(planned.value for planned in self.values if planned.action is Action.RECOMPUTE)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the values that stay."""
        return sum(planned.num_bytes for planned in self.values if planned.action is Action.KEEP)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all values."""
        return sum(planned.num_bytes for planned in self.values)

    def with_action(self, index: int, action: Action) -> RematPlan:
        """Return the plan with another action for one of its values. What it predicts is not computed anew.

        Raises:
            ValueError: the action is neither KEEP nor RECOMPUTE, or nothing can make the value again.
            IndexError: there is no such value.
        """
        if action not in (Action.KEEP, Action.RECOMPUTE):
            raise ValueError(f"a plan of Rematerialize knows KEEP and RECOMPUTE; found {action}")
        planned = self.values[index]
        if action is Action.RECOMPUTE and not planned.op:
            raise ValueError(f"value {index} cannot be made again: {planned.reason}")
        values = list(self.values)
        values[index] = replace(planned, action=action, reason="asked for")
        return replace(self, values=tuple(values))

    def explain(self) -> str:
        """Return the plan as a table: for each module and op what is kept, what is made again, and why."""
        groups: dict[tuple[str, str, Action, str], list[PlannedValue]] = {}
        for planned in self.values:
            groups.setdefault((planned.module, planned.op, planned.action, planned.reason), []).append(planned)
        rows = [
            (
                module or "-",
                op or "-",
                action.value,
                len(group),
                format_mib(sum(planned.num_bytes for planned in group)),
                f"{1e3 * sum(planned.cost_s for planned in group):.3f}",
                reason,
            )
            for (module, op, action, reason), group in groups.items()
        ]
        table = tabulate(
            rows,
            headers=("module", "op", "action", "values", "size", "cost (ms)", "why"),
            colalign=("left", "left", "left", "right", "right", "right", "left"),
            disable_numparse=True,
        )
        return "\n".join(
            (
                table,
                f"saved: {format_mib(self.saved_bytes)}",
                f"kept: {format_mib(self.kept_bytes)}",
                f"budget: {format_mib(self.budget_bytes)}, predicted peak {format_mib(self.predicted_peak_bytes)}",
                f"predicted replays: {self.num_replayed_ops} ops, {1e3 * self.predicted_replay_s:.2f} ms",
            )
        )


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
        self._asked = frozenset(step.saves).intersection(step.dropped) - step.fixed
        num_events = len(step.lineage.ins) + len(step.saves) + len(step.uses)
        self._is_large = num_events > _LARGE
        self._num_exchanges = 0 if self._is_large else min(_MOST_MOVES, _EXCHANGED // (num_events + 1))
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
            anchors = segments.skeleton(self._saved_bytes / parts).anchors - self._asked
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
            online=True,
            anchors=anchors.difference(self.step.saves),
            most_s=most_s,
        )
        if found.replayed_s < math.inf:
            self._found.append(found)
        return found

    def dtr(self, budget_bytes: float) -> Outcome:
        """Return what dynamic tensor rematerialization would do by itself."""
        return self._try(self.step.dropped, budget_bytes, frozenset())

    def smallest(self) -> Outcome:
        """Return the step that takes the fewest bytes, without thrashing."""
        if self._smallest is None:
            found, limit_bytes = [self._everything], self._saved_bytes * _STEP_DOWN
            while min(outcome.peak_bytes for outcome in found) <= limit_bytes / _STEP_DOWN and limit_bytes >= 1:
                found += [self._try(self.step.dropped, limit_bytes, anchors) for anchors in self._held_within(limit_bytes)]
                limit_bytes *= _STEP_DOWN
            self._smallest = min(found, key=lambda outcome: (outcome.peak_bytes, outcome.replayed_s))
        return self._smallest

    def best(self, budget_bytes: float) -> Outcome | None:
        """Return the cheapest step that fits a budget, None if none was found.

        It is the cheapest of all that were found, also for other budgets.
        """
        if self._everything.peak_bytes <= budget_bytes and not self._everything.replayed_s:
            return self._everything
        if budget_bytes > 0 and budget_bytes not in self._explored:
            self._explore(budget_bytes)
            if not self._is_large and self._saved_bytes:  # where the choice is greedy, a lower limit may be cheaper
                level = math.ceil(math.log(budget_bytes / self._saved_bytes) / math.log(_LEVEL) - 1e-9)
                self._explore(self._saved_bytes * _LEVEL ** max(level, 0))
                self._exchange(budget_bytes)
        found = self._cheapest(budget_bytes)
        if found is None and self.smallest().peak_bytes <= budget_bytes:
            found = self._cheapest(budget_bytes)
        return found

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
            if not (anchors and self._is_large):
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
        """Simulate a step, but give up as soon as it is dearer than what was found."""
        best = self._cheapest(limit_bytes)
        self._try(dropped, limit_bytes, anchors, most_s=math.inf if best is None else best.replayed_s)

    def _exchange(self, limit_bytes: float) -> None:
        """Drop a value more, or one less, or a few at once, where that helps; what takes longest to make first."""

        def rank(outcome: Outcome) -> tuple[float, float]:
            return max(outcome.peak_bytes, limit_bytes), outcome.replayed_s

        lineage, fixed = self.step.lineage, self.step.fixed | self._asked
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

    def plan(self, budget_bytes: int, outcome: Outcome | None = None) -> RematPlan:
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
            raise BudgetInfeasible(
                f"a budget of {format_mib(budget_bytes)} cannot be kept to: the smallest is {format_mib(smallest)}", smallest
            )
        lineage, traced = self.step.lineage, set[int]()
        roots = {root for value in found.dropped for root in roots_of(lineage, value, traced)}
        kept = found.anchors.union(self.step.saves) - found.dropped
        retained = (roots & self.step.retained_bytes.keys()) | found.anchors
        return RematPlan(
            values=tuple(self._planned(value, found.dropped, kept) for value in dict.fromkeys(self.step.saves)),
            budget_bytes=budget_bytes,
            limit_bytes=found.limit_bytes,
            predicted_peak_bytes=found.peak_bytes,
            predicted_replay_s=found.replayed_s,
            num_replayed_ops=found.num_replayed_ops,
            retained=frozenset(retained),
        )

    def _planned(self, value: int, dropped: Collection[int], kept: Collection[int]) -> PlannedValue:
        step, lineage = self.step, self.step.lineage
        op, module = self._describe(value)
        is_dropped = value in dropped
        if lineage.maker[value] == NO_OP:
            reason = "no op can make it again"
        elif value in step.fixed or value in step.dropped:
            reason = "asked for"
        else:
            reason = "cheap for its bytes" if is_dropped else "fits the budget"
        return PlannedValue(
            value=value,
            num_bytes=lineage.num_bytes[value],
            action=Action.RECOMPUTE if is_dropped else Action.KEEP,
            op=op,
            module=module,
            cost_s=self._cost_s(value, kept),
            reason=reason,
        )

    def _cost_s(self, value: int, kept: Collection[int]) -> float:
        lineage = self.step.lineage
        ops, pending = set[int](), [value]
        while pending:
            op = lineage.maker[pending.pop()]
            if op != NO_OP and op not in ops:
                ops.add(op)
                pending.extend(source for source in lineage.ins[op] if source not in kept)
        return sum(lineage.seconds[op] for op in ops)
