"""Regions, module calls that are recomputed as a whole: which to choose, and the room left for other saved values."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from operator import add
from typing import NamedTuple

from memkit.plan.budget.problem import HeldValue, Problem
from memkit.plan.plans import Action
from memkit.plan.step import NO_OP, Step
from memkit.plan.timeline import Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    name: str
    number: int  # earlier calls of the same module
    parent: int  # index of the enclosing call, -1 for an outermost one
    saves: tuple[int, int]  # its first save, and the first after it
    ops: tuple[int, int]  # its first op that may run again, and the first op after its last save
    num_ops: int  # ops of any kind up to that end
    inputs: tuple[int, ...]  # values that it reads and that were made earlier in the step
    shapes: tuple[tuple[int, ...], ...] = ()
    why_not: str = ""
    device_s: float = 0.0  # device seconds if it runs compiled, so that its ops are unseen
    is_span: bool = False  # whether it stands for neighboring children of a `Sequential`, as if they were in a module


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """The seconds that the host spends."""

    op_s: float  # on an op, with everything else that it costs in a module
    recorded_s: float  # on recording an op, beyond that
    saved_s: float  # on a save, and its request, while ops are recorded
    replayed_s: float  # on an op that is replayed from the record
    region_s: float  # on a region, beyond the ops that run again
    is_device: bool = False  # then nothing overlaps

    def step_s(self, device_s: float, host_s: float) -> float:
        return device_s + host_s if self.is_device else max(device_s, host_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionChoice:
    chosen: tuple[int, ...]
    peak_bytes: int
    device_s: float
    host_s: float


class RegionBytes(NamedTuple):
    dropped: frozenset[int]
    inputs: tuple[int, ...]  # values held for it, saved or not
    peak_bytes: int  # peak of what its second run has made and still holds


class RegionNeeds(NamedTuple):
    peak_bytes: int
    regions: tuple[RegionBytes, ...]


_Span = tuple[int, int]


def find_spans(kinds: Sequence[Hashable], is_joined: Sequence[bool]) -> list[_Span]:
    """Return spans of a row of members, disjoint or nested, outer ones first; a block that repeats is not cut across."""
    if not kinds:
        return []
    starts = [place for place in range(len(kinds)) if not place or not is_joined[place]]
    units = list(zip(starts, [*starts[1:], len(kinds)], strict=True))
    first, period, count = _repetition([tuple(kinds[slice(*unit)]) for unit in units])
    stop = first + period * count
    blocks = [units[place : place + period] for place in range(first, stop, max(1, period))]
    found = {*_joined(units[:first]), *_joined(units[stop:])}
    found.update(_joined([(block[0][0], block[-1][1]) for block in blocks]))
    for block in blocks:
        if block[-1][1] - block[0][0] > 4:
            found.update(_joined(block))
    return sorted((span for span in found if span[1] - span[0] > 1), key=lambda span: (span[0], -span[1]))


def _repetition(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """Return the start, the shortest period and the number of repetitions of the longest repeating stretch; zeros if none."""
    found, longest = (0, 0, 0), 0
    for period in range(2, min(64, len(kinds) // 2) + 1):
        first = 0
        for place in range(len(kinds) - period + 1):
            if place < len(kinds) - period and kinds[place] == kinds[place + period]:
                continue
            length = place - first + period
            if length >= 2 * period and length > longest:
                found, longest = (first, period, length // period), length
            first = place + 1
    return found


def _joined(row: Sequence[_Span]) -> list[_Span]:
    """Return the spans of a row, pairs of them, pairs of pairs, and so on up to the whole row."""
    found = list(row)
    while len(row) > 1:
        pairs = [(row[place][0], row[place + 1][1]) for place in range(0, len(row) - 1, 2)]
        row = [*pairs, *row[2 * len(pairs) :]]
        found += pairs
    return found


_DIGITS = re.compile(r"\d+")
_MOST_WORK = 2_000_000  # saves and regions to walk in all simulations of a step: a few seconds
_MOST_LISTED = 512  # up to this many choices, all are simulated
_LESS, _FAR_LESS = 0.99, 0.9  # a group of layers is added if the peak falls so far; far enough, it replaces nested ones
_MOST_SWAPPED = 24


class RegionPlanner:
    """The choices of regions for one step, found once for all budgets: a larger budget never takes longer."""

    def __init__(self, step: Step, calls: Sequence[ModuleCall], costs: HostCosts, *, num_ops: int) -> None:
        self.step, self.calls, self.costs = step, calls, costs
        lineage = step.lineage
        self.plain_device_s = 3 * (sum(lineage.seconds) + sum(call.device_s for call in calls))  # a backward takes two forwards
        self.plain_host_s = 2 * costs.op_s * num_ops
        self._num_ops = num_ops
        self._bytes = lineage.num_bytes
        self._counted = frozenset(step.saves)
        self._inputs = [tuple(value for value in call.inputs if self._is_held(value)) for call in calls]
        self._saved = [frozenset(step.saves[slice(*call.saves)]) for call in calls]
        self._device_s = self._device_seconds()
        self._host_s = [costs.region_s + costs.op_s * call.num_ops for call in calls]
        self._peaks = [self._peak_of(index) if not call.why_not else 0 for index, call in enumerate(calls)]
        first, last = dict[int, int](), dict[int, int]()
        for index, value in enumerate(step.saves):
            first.setdefault(value, index)
            last[value] = index
        self._freed: list[int] = []  # the bytes that each call alone as a region frees in the forward
        for call, saved, inputs in zip(calls, self._saved, self._inputs, strict=True):
            start, stop = call.saves
            gone = [value for value in saved.difference(inputs) if start <= first[value] and last[value] < stop]
            more = [value for value in {*inputs} if value not in self._counted]
            self._freed.append(sum(self._bytes[value] for value in gone) - sum(self._bytes[value] for value in more))
        self._eligible = [not call.why_not and self._freed[index] > 0 for index, call in enumerate(calls)]
        self._children: list[list[int]] = [[] for _ in calls]
        self._ends = [index + 1 for index in range(len(calls))]
        for index in reversed(range(len(calls))):
            parent = calls[index].parent
            if parent >= 0:
                self._children[parent].append(index)
                self._ends[parent] = max(self._ends[parent], self._ends[index])
        self._work = 0
        self._is_explored = False
        self._found: dict[tuple[int, ...], RegionChoice] = {}

    def _is_held(self, value: int) -> bool:
        """Tell whether holding a value takes bytes that the budget counts."""
        return self.step.lineage.maker[value] != NO_OP or value in self.step.retained_bytes or value in self._counted

    def _device_seconds(self) -> list[float]:
        """Return for each call the seconds of running it again: ops, and compiled calls that begin before its last save."""
        found = [sum(self.step.lineage.seconds[slice(*call.ops)]) for call in self.calls]
        for index, compiled in enumerate(self.calls):
            while compiled.device_s and index >= 0:
                around = self.calls[index]
                if compiled.saves[0] < around.saves[1]:
                    found[index] += compiled.device_s
                index = around.parent
        return found

    def _peak_of(self, index: int) -> int:
        """Return the peak of the values that a region's second run has made and still holds."""
        lineage, saved = self.step.lineage, self._saved[index]
        start, stop = self.calls[index].ops
        last = dict[int, int]()
        for op in range(start, stop):
            for value in (*lineage.ins[op], *lineage.outs[op]):
                last[value] = op
        ending: dict[int, list[int]] = {}
        for value, op in last.items():
            if value not in saved and start <= lineage.maker[value] < stop:
                ending.setdefault(op, []).append(value)
        live = peak = 0
        for op in range(start, stop):
            live += sum(self._bytes[value] for value in lineage.outs[op])
            live -= sum(self._bytes[old] for old, _ in lineage.taken.get(op, ()) if start <= lineage.maker[old] < stop)
            peak = max(peak, live)
            taken = {old for old, _ in lineage.taken.get(op, ())}
            live -= sum(self._bytes[value] for value in ending.get(op, ()) if value not in taken)
        return max(peak, sum(self._bytes[value] for value in saved.difference(self._inputs[index])))

    # One choice

    def simulate(self, chosen: Iterable[int]) -> RegionChoice:
        key = tuple(chosen)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = RegionChoice(
                chosen=key,
                peak_bytes=self._peak_bytes(key),
                device_s=sum(self._device_s[index] for index in key),
                host_s=sum(self._host_s[index] for index in key),
            )
        return found

    def _peak_bytes(self, chosen: Sequence[int]) -> int:
        """Return the peak: at the end of the forward, or while the backward is in a region. It frees the last saves first."""
        saves, num_bytes, held = self.step.saves, self._bytes, set[int]()
        live = peak = position = 0
        for index in chosen:
            start, stop = self.calls[index].saves
            for value in (*saves[position:start], *self._inputs[index]):
                if value not in held:
                    held.add(value)
                    live += num_bytes[value]
            peak = max(peak, live + self._peaks[index])
            position = stop
        for value in saves[position:]:
            if value not in held:
                held.add(value)
                live += num_bytes[value]
        self._work += len(saves) + 3 * len(chosen)
        return max(peak, live)

    def seconds(self, choice: RegionChoice) -> float:
        return self.costs.step_s(self.plain_device_s + choice.device_s, self.plain_host_s + choice.host_s)

    def needs(self, choice: RegionChoice) -> RegionNeeds:
        gone = self.dropped(choice)
        regions = (RegionBytes(self._saved[index] & gone, self._inputs[index], self._peaks[index]) for index in choice.chosen)
        return RegionNeeds(choice.peak_bytes, tuple(regions))

    def dropped(self, choice: RegionChoice) -> frozenset[int]:
        held, position = set[int](), 0
        for index in choice.chosen:
            start, stop = self.calls[index].saves
            held.update(self.step.saves[position:start], self._inputs[index])
            position = stop
        held.update(self.step.saves[position:])
        return self._counted - held

    # The choice for a budget

    def best(self, budget_bytes: float) -> RegionChoice | None:
        fitting = [choice for choice in self._explored() if choice.peak_bytes <= budget_bytes]
        return min(fitting, key=self._rank, default=None)

    def least(self) -> RegionChoice:
        return min(self._explored(), key=lambda choice: (choice.peak_bytes, self._rank(choice)))

    def choices(self) -> list[RegionNeeds]:
        return [self.needs(choice) for choice in sorted(self._explored(), key=self._rank)]

    def layers(self) -> RegionChoice:
        """Return the choice with the lowest peak of those that take whole groups of similar calls, such as all layers."""
        best = self.simulate(())
        for group in self._groups():
            rest = [one for one in best.chosen if not any(self._are_nested(one, other) for other in group)]
            found = self.simulate(sorted((*rest, *group)))
            less = _LESS if len(rest) == len(best.chosen) else _FAR_LESS
            if len(group) > 1 and found.peak_bytes < less * best.peak_bytes:
                best = found
        return best

    def _rank(self, choice: RegionChoice) -> tuple[float, float, int]:
        return self.seconds(choice), choice.device_s + choice.host_s, choice.peak_bytes

    def _explored(self) -> list[RegionChoice]:
        if not self._is_explored:
            self._is_explored = True
            self.simulate(())
            self._take_up_without_spans()
            everything = self._all_choices(_MOST_LISTED)
            if len(everything) <= _MOST_LISTED:
                for chosen in everything:
                    self.simulate(chosen)
            else:
                self._try_alike()
                self._try_weighted()
                self._improve()
            front: list[RegionChoice] = []
            for choice in sorted(self._found.values(), key=lambda choice: (choice.peak_bytes, self._rank(choice))):
                if not front or self._rank(choice) < self._rank(front[-1]):
                    front.append(choice)
            self._found = {choice.chosen: choice for choice in front}
        return list(self._found.values())

    def _take_up_without_spans(self) -> None:
        """Add the choices without spans: spans may only improve the result."""
        modules = [index for index, call in enumerate(self.calls) if not call.is_span]
        if len(modules) == len(self.calls):
            return
        places = {index: place for place, index in enumerate(modules)}
        parents = [next((places[around] for around in self._around(index) if around in places), -1) for index in modules]
        calls = [replace(self.calls[index], parent=parent) for index, parent in zip(modules, parents, strict=True)]
        for choice in RegionPlanner(self.step, calls, self.costs, num_ops=self._num_ops)._explored():
            chosen = tuple(modules[place] for place in choice.chosen)
            self._found[chosen] = replace(choice, chosen=chosen)

    def _all_choices(self, most: int) -> list[tuple[int, ...]]:
        def of(index: int) -> list[tuple[int, ...]]:
            inside = product_of(self._children[index][::-1])
            return [*inside, (index,)] if self._eligible[index] else inside

        def product_of(indices: Sequence[int]) -> list[tuple[int, ...]]:
            found: list[tuple[int, ...]] = [()]
            for index in indices:
                found = [(*one, *other) for one in found for other in of(index)]
                if len(found) > most:
                    break
            return found

        return product_of([index for index, call in enumerate(self.calls) if call.parent < 0])

    def _groups(self) -> list[list[int]]:
        groups: dict[tuple[int, str], list[int]] = {}
        depths: list[int] = []
        for index, call in enumerate(self.calls):
            depths.append(0 if call.parent < 0 else depths[call.parent] + 1)
            if self._eligible[index]:
                groups.setdefault((depths[index], _DIGITS.sub("*", call.name)), []).append(index)
        return sorted(groups.values(), key=lambda group: -sum(self._freed[index] for index in group))

    def _try_alike(self) -> None:
        for group in self._groups():
            size = len(group)
            for count in sorted({*range(1, size + 1, max(1, size // 400)), size}):
                if self._work > _MOST_WORK // 3:
                    return
                self.simulate([group[place * size // count] for place in range(count)])
                self.simulate(group[:count])

    def _try_weighted(self) -> None:
        """Choose calls by their seconds per freed byte, for several prices of a byte."""
        peaks = sorted({self._peaks[index] for index in range(len(self.calls)) if self._eligible[index]})
        for cap in [float(peaks[len(peaks) - 1 - place * len(peaks) // 6]) for place in range(min(6, len(peaks)))]:
            for device_weight, host_weight in [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]:
                costs = [
                    device_weight * device_s + host_weight * host_s
                    for device_s, host_s in zip(self._device_s, self._host_s, strict=True)
                ]
                self._sweep(costs, cap)

    def _sweep(self, costs: Sequence[float], cap: float) -> None:
        may_be = [index for index in range(len(self.calls)) if self._eligible[index] and self._peaks[index] <= cap]
        rates = [costs[index] / self._freed[index] for index in may_be]
        low, high = max(min(rates), 1e-30) / 2, max(max(rates), 1e-30) * 2
        before: tuple[int, ...] = ()
        for place in range(29):  # ever higher prices of a byte
            chosen = self._dearest(costs, cap, low * (high / low) ** (place / 28))
            if chosen != before:
                self._go(before, chosen, costs)
                before = chosen
            if self._work > 2 * _MOST_WORK // 3:
                return

    def _dearest(self, costs: Sequence[float], cap: float, rate: float) -> tuple[int, ...]:
        """Return the regions of highest gain if a byte is worth `rate` seconds."""
        gains, takes = [0.0] * len(self.calls), [False] * len(self.calls)
        for index in reversed(range(len(self.calls))):
            inside = sum(gains[child] for child in self._children[index])
            own = rate * self._freed[index] - costs[index] if self._eligible[index] and self._peaks[index] <= cap else 0.0
            takes[index] = own > inside and own > 0
            gains[index] = own if takes[index] else inside
        found, index = [], 0
        while index < len(self.calls):
            if takes[index]:
                found.append(index)
            index = self._ends[index] if takes[index] else index + 1
        return tuple(found)

    def _go(self, start: tuple[int, ...], end: tuple[int, ...], costs: Sequence[float]) -> None:
        """Simulate the choices between two others; calls that are cheapest per byte are added first."""
        self.simulate(end)
        added = sorted(set(end) - set(start), key=lambda index: (round(costs[index] / self._freed[index], 15), index))
        here, stride = set(start), max(1, len(added) * len(self.step.saves) // (_MOST_WORK // 60))
        for count, index in enumerate(added):
            here.difference_update(start[bisect_left(start, index) : bisect_left(start, self._ends[index])])
            here.difference_update(self._around(index))
            here.add(index)
            if count % stride == 0:
                self.simulate(sorted(here))

    def _around(self, index: int) -> Iterator[int]:
        while (index := self.calls[index].parent) >= 0:
            yield index

    def _improve(self) -> None:
        """Leave out or exchange regions for ever lower limits, as long as the step fits and becomes quicker."""
        limit_bytes = float(self.simulate(()).peak_bytes)
        least = min(choice.peak_bytes for choice in self._found.values())
        while limit_bytes >= least and self._work < _MOST_WORK:
            limit_bytes *= 0.96
            fitting = [choice for choice in self._found.values() if choice.peak_bytes <= limit_bytes]
            best = min(fitting, key=self._rank, default=None)
            while best is not None and self._work < _MOST_WORK:
                better = min(self._near(best, limit_bytes), key=self._rank, default=best)
                if self._rank(better) >= self._rank(best):
                    break
                best = better

    def _near(self, choice: RegionChoice, limit_bytes: float) -> Iterator[RegionChoice]:
        chosen = choice.chosen
        dearest = sorted(chosen, key=lambda index: (-max(self._device_s[index], self._host_s[index]), -index))[:_MOST_SWAPPED]
        for index in dearest:
            rest = [other for other in chosen if other != index]
            inside = [child for child in range(index + 1, self._ends[index]) if self._eligible[child]]
            nearby = range(max(0, index - _MOST_SWAPPED), min(len(self.calls), self._ends[index] + _MOST_SWAPPED))
            others = [other for other in nearby if other != index and self._eligible[other]]
            others = [other for other in others if not any(self._are_nested(one, other) for one in rest)]
            for more in ((), *((child,) for child in inside[:_MOST_SWAPPED]), *((other,) for other in others)):
                found = self.simulate(sorted((*rest, *more)))
                if found.peak_bytes <= limit_bytes:
                    yield found
        for one, other in combinations(dearest[:6], 2):
            found = self.simulate([index for index in chosen if index not in (one, other)])
            if found.peak_bytes <= limit_bytes:
                yield found

    def _are_nested(self, one: int, other: int) -> bool:
        return one <= other < self._ends[one] or other <= one < self._ends[other]


class Moving(NamedTuple):
    limit_bytes: int  # limit for saved values, the offloaded ones included
    kept_bytes: int  # bytes of saved values that are not dropped
    num_bytes: int  # of these, the bytes that leave: their copies hide behind the computation
    window_bytes: int  # of these, the bytes in transfer that the device may hold at a time


def fit_regions(problem: Problem, choices: Sequence[RegionNeeds], allowed_bytes: int) -> int | None:
    """Return the limit for saved values if nothing leaves; None if no choice fits in `allowed_bytes`."""
    fitting = (choice for choice in choices if choice.regions and _peak_bytes(problem, choice) <= allowed_bytes)
    return next((choice.peak_bytes for choice in fitting), None)


def fit_copies(problem: Problem, choices: Sequence[RegionNeeds], allowed_bytes: int, bytes_per_s: float) -> Moving | None:
    """Return what may leave with the quickest choice that then fits in `allowed_bytes`; None if none does."""
    if problem.num_forward_points >= len(problem.points):
        return None
    hidden_bytes = int(0.9 * problem.starts_s[problem.points[problem.num_forward_points]] * bytes_per_s)
    for choice in (choice for choice in choices if choice.regions):
        kept = list(_kept(problem, choice))
        leaving: list[HeldValue] = []
        num_bytes = 0
        for held in kept:  # the first saves leave
            if num_bytes + held.num_bytes > hidden_bytes:
                break
            if Action.OFFLOAD in held.choices:
                leaving.append(held)
                num_bytes += held.num_bytes
        window_bytes = 2 * max((held.num_bytes for held in leaving), default=0)
        if num_bytes <= window_bytes:
            continue  # the copies in transfer would take as much
        if _peak_bytes(problem, choice, leaving, window_bytes) <= allowed_bytes:
            kept_bytes = sum(held.num_bytes for held in kept)
            return Moving(choice.peak_bytes, kept_bytes, num_bytes, window_bytes)
    return None


def peak_with_regions(problem: Problem, choice: RegionNeeds, ratio: float, window_bytes: int) -> int:
    kept = list(_kept(problem, choice))
    most_bytes = ratio * sum(held.num_bytes for held in kept)
    reached = accumulate(held.num_bytes for held in kept)
    leaving = [held for held, num_bytes in zip(kept, reached, strict=True) if num_bytes <= most_bytes]
    return _peak_bytes(problem, choice, leaving, window_bytes)


def _kept(problem: Problem, choice: RegionNeeds) -> Iterator[HeldValue]:
    dropped = set[int]().union(*(region.dropped for region in choice.regions))
    return (held for held in problem.values if not held.is_anchor and held.value not in dropped)


def _second_run_bytes(problem: Problem, region: RegionBytes, inside: Sequence[HeldValue]) -> int:
    most_bytes, made_bytes = region.peak_bytes, 0
    in_order = sorted(inside, key=lambda held: held.made)
    for held, until in zip(in_order, [*(after.made for after in in_order[1:]), 0], strict=True):
        made_bytes += held.num_bytes
        beside = problem.working_bytes[held.made : max(until, held.made + 1)]
        most_bytes = max(most_bytes, made_bytes + max(beside, default=0))
    return most_bytes


def _peak_bytes(problem: Problem, choice: RegionNeeds, leaving: Sequence[HeldValue] = (), window_bytes: int = 0) -> int:
    """Return the step's peak with some regions, where `leaving` is in host memory except for `window_bytes` in transfer."""
    values, num_slots = problem.values, problem.num_slots
    levels, away = Levels(num_slots), Levels(num_slots)
    for held in _kept(problem, choice):
        levels.add(held.made, held.freed, held.num_bytes)
    held_until: dict[int, int] = {}
    for region in choice.regions:
        inside = [values[problem.index[value]] for value in region.dropped if value in problem.index]
        begin = min((held.use for held in inside), default=num_slots)
        for held in inside:
            levels.add(held.made, held.released, held.num_bytes)
            levels.add(max(begin, held.released), held.freed, held.num_bytes)
        more_bytes = _second_run_bytes(problem, region, inside) - sum(held.num_bytes for held in inside)
        end = min(begin + 1, num_slots)  # of the second run
        levels.add(begin, end, max(more_bytes, 0))
        held_until |= {value: max(end, held_until.get(value, 0)) for value in region.inputs}
    for value, end in held_until.items():
        place = problem.index.get(value)
        if place is not None:
            held = values[place]
            levels.add(held.released if held.is_anchor else held.freed, end, held.num_bytes)
        elif value in problem.retained:
            released, num_bytes = problem.retained[value]
            levels.add(released, end, num_bytes)
    for held in leaving:
        away.add(held.released, held.use, held.num_bytes)
    beside = map(add, problem.working_bytes, levels.each())
    return problem.base_bytes + max(
        (full - max(gone - window_bytes, 0) for full, gone in zip(beside, away.each(), strict=False)), default=0
    )
