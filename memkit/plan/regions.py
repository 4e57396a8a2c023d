"""Calls of modules that are recomputed as a whole: the seconds and bytes of a step with them, which calls are chosen, and the
room that they leave for other saved values."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from memkit.plan.plans import Action
from memkit.plan.step import NO_OP, Step
from memkit.plan.timeline import Levels

if TYPE_CHECKING:
    from memkit.plan.budget.problem import HeldValue, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module in a step that was recorded."""

    name: str
    number: int
    """How many calls of the same module were before it."""
    parent: int
    """The call that it is in, by its place among all, -1 for an outermost one."""
    saves: tuple[int, int]
    """Its first save, and the first after it."""
    ops: tuple[int, int]
    """Its first op that may be run again, and the first after its last save: there the second run of a region ends."""
    num_ops: int
    """How many ops of any kind it runs until then."""
    inputs: tuple[int, ...]
    """Values that it reads, and that were made before it in the step."""
    shapes: tuple[tuple[int, ...], ...] = ()
    why_not: str = ""
    device_s: float = 0.0
    """What the device takes for it, where it runs compiled, so that none of its ops is seen."""
    is_span: bool = False
    """Whether it is that of neighboring children of a `Sequential`, as if they were in a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What the host spends: seconds."""

    op_s: float
    """On an op, with all that belongs to it in a module."""
    recorded_s: float
    """On recording it, beyond that."""
    saved_s: float
    """On a save, and its request, where ops are recorded."""
    replayed_s: float
    """On an op that is run again from the record."""
    region_s: float
    """On a region, beyond the ops that are run again."""
    is_device: bool = False
    """Whether the host computes as well, so that nothing runs beside anything else."""

    def step_s(self, device_s: float, host_s: float) -> float:
        """Return what a step takes: what the device takes or the host, whichever is longer."""
        return device_s + host_s if self.is_device else max(device_s, host_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionChoice:
    """What a step takes in which some calls are regions."""

    chosen: tuple[int, ...]
    peak_bytes: int
    """The most bytes of saved values and replay temporaries at once."""
    device_s: float
    host_s: float


class RegionBytes(NamedTuple):
    """What one call takes that is recomputed."""

    dropped: frozenset[int]
    inputs: tuple[int, ...]
    """What is held for it, saved or not."""
    peak_bytes: int
    """The most bytes that its second run has made and still holds at once."""


class RegionNeeds(NamedTuple):
    """What a step takes in which some calls are recomputed."""

    peak_bytes: int
    """The most bytes of saved values and replay temporaries at once."""
    regions: tuple[RegionBytes, ...]


_LONGEST_PERIOD = 64
_SMALL = 4
"""A block of more members has spans of its own."""

_Span = tuple[int, int]
"""The place of its first member, and of the one behind its last."""


def find_spans(kinds: Sequence[Hashable], is_joined: Sequence[bool]) -> list[_Span]:
    """Return spans of a row, of which none overlaps another, unless it is in it: those around others first.

    Where the row repeats, as that of the layers of blocks without a module for each, spans begin as blocks do. These are joined
    two by two, up to all that repeats. So are the single members of what does not, and of large blocks.

    Args:
        kinds: of each member: where these repeat, the row does.
        is_joined: whether each is to be in a span with the one ahead of it, as an activation that writes to its input.
    """
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
        if block[-1][1] - block[0][0] > _SMALL:
            found.update(_joined(block))
    return sorted((span for span in found if span[1] - span[0] > 1), key=lambda span: (span[0], -span[1]))


def _repetition(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """Return where the longest stretch begins that repeats, after how many members, and how often it has them.

    Of stretches that are as long it is the one of the shortest period. Zeros if none repeats.
    """
    found, longest = (0, 0, 0), 0
    for period in range(2, min(_LONGEST_PERIOD, len(kinds) // 2) + 1):
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
    """Return the members of a row of spans, two by two of them, two by two of these, and so on up to all."""
    found = list(row)
    while len(row) > 1:
        pairs = [(row[place][0], row[place + 1][1]) for place in range(0, len(row) - 1, 2)]
        row = [*pairs, *row[2 * len(pairs) :]]
        found += pairs
    return found


_DIGITS = re.compile(r"\d+")
_MOST_WORK = 6_000_000
"""So many saves and regions are walked at most in all simulations of a step, and as many again with spans: a few seconds."""
_MOST_LISTED = 512
"""All choices are looked at where there are no more than so many."""
_STEP_DOWN = 0.96
"""From one limit to the next for which a choice is improved."""
_NUM_WEIGHTS = 28
_LESS, _FAR_LESS = 0.99, 0.9
"""More layers are recomputed if the step takes less than this fraction of its bytes then. Below the second one, they are
recomputed in place of those that they are in, or that are in them."""
_MOST_SWAPPED = 24


class RegionPlanner:
    """The choices of regions for one step. All that are looked at are found once: so a larger budget never takes longer."""

    def __init__(self, step: Step, calls: Sequence[ModuleCall], costs: HostCosts, *, num_ops: int) -> None:
        self.step, self.calls, self.costs = step, calls, costs
        lineage = step.lineage
        self.plain_device_s = 3 * (sum(lineage.seconds) + sum(call.device_s for call in calls))
        """Of the whole step without regions: a backward takes about as long as two forwards."""
        self.plain_host_s = 2 * costs.op_s * num_ops
        self._num_ops = num_ops
        self._bytes = lineage.num_bytes
        self._counted = frozenset(step.saves)
        self._inputs = [tuple(value for value in call.inputs if self._is_held(value)) for call in calls]
        self._saved = [frozenset(step.saves[slice(*call.saves)]) for call in calls]
        self._device_s = self._device_seconds()
        self._host_s = [costs.region_s + costs.op_s * call.num_ops for call in calls]
        self._peaks = [self._peak_of(index) if not call.why_not else 0 for index, call in enumerate(calls)]
        self._freed = self._freed_bytes()
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
        """Tell whether to hold a value takes bytes that the budget counts."""
        return self.step.lineage.maker[value] != NO_OP or value in self.step.retained_bytes or value in self._counted

    def _device_seconds(self) -> list[float]:
        """Return for each call what the device spends on running it again: ops, and compiled calls that have begun by its
        last save."""
        found = [sum(self.step.lineage.seconds[slice(*call.ops)]) for call in self.calls]
        for index, compiled in enumerate(self.calls):
            while compiled.device_s and index >= 0:
                around = self.calls[index]
                if compiled.saves[0] < around.saves[1]:
                    found[index] += compiled.device_s
                index = around.parent
        return found

    def _freed_bytes(self) -> list[int]:
        """Return for each call the bytes that are gone in the forward if it alone is a region."""
        first, last = dict[int, int](), dict[int, int]()
        for index, value in enumerate(self.step.saves):
            first.setdefault(value, index)
            last[value] = index
        found = []
        for index, call in enumerate(self.calls):
            start, stop = call.saves
            inputs = frozenset(self._inputs[index])
            gone = [value for value in self._saved[index] - inputs if start <= first[value] and last[value] < stop]
            more = [value for value in inputs if value not in self._counted]
            found.append(sum(self._bytes[value] for value in gone) - sum(self._bytes[value] for value in more))
        return found

    def _peak_of(self, index: int) -> int:
        """Return the most bytes that the second run of a region has made and still holds at once."""
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
        """Return what a step takes with these regions."""
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
        """Return the most bytes at once: at the end of the forward, or while the backward is in a region.

        The backward lets go of values in the reverse order in which they came to be held.
        """
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
        """Return what a step takes."""
        return self.costs.step_s(self.plain_device_s + choice.device_s, self.plain_host_s + choice.host_s)

    def needs(self, choice: RegionChoice) -> RegionNeeds:
        """Return what a step takes, call by call."""
        dropped = self.dropped(choice)
        regions = (
            RegionBytes(self._saved[index] & dropped, self._inputs[index], self._peaks[index]) for index in choice.chosen
        )
        return RegionNeeds(choice.peak_bytes, tuple(regions))

    def dropped(self, choice: RegionChoice) -> frozenset[int]:
        """Return the saved values that are gone after the forward."""
        held, position = set[int](), 0
        for index in choice.chosen:
            start, stop = self.calls[index].saves
            held.update(self.step.saves[position:start], self._inputs[index])
            position = stop
        held.update(self.step.saves[position:])
        return self._counted - held

    # The choice for a budget

    def best(self, budget_bytes: float) -> RegionChoice | None:
        """Return the quickest choice of all that were found that fits a budget, None if none does."""
        fitting = [choice for choice in self._explored() if choice.peak_bytes <= budget_bytes]
        return min(fitting, key=self._rank, default=None)

    def least(self) -> RegionChoice:
        """Return the choice that takes the fewest bytes of all that were found."""
        return min(self._explored(), key=lambda choice: (choice.peak_bytes, self._rank(choice)))

    def choices(self) -> list[RegionNeeds]:
        """Return what steps take by the choices than which none is quicker and takes fewer bytes (their Pareto front), the
        quickest first."""
        return [self.needs(choice) for choice in sorted(self._explored(), key=self._rank)]

    def layers(self) -> RegionChoice:
        """Return the choice of calls that are alike, as those of the layers of a model, all or none of them, that takes the
        fewest bytes."""
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
            everything = list(self._all_choices(_MOST_LISTED))
            if len(everything) <= _MOST_LISTED:
                for chosen in everything:
                    self.simulate(chosen)
            else:
                self._try_alike()
                self._try_weighted()
                self._improve()
            self._found = {choice.chosen: choice for choice in self._front()}
        return list(self._found.values())

    def _take_up_without_spans(self) -> None:
        """Find what is found if there are no spans: with them it can only become better."""
        modules = [index for index, call in enumerate(self.calls) if not call.is_span]
        if len(modules) == len(self.calls):
            return
        places = {index: place for place, index in enumerate(modules)}
        parents = [next((places[around] for around in self._around(index) if around in places), -1) for index in modules]
        calls = [replace(self.calls[index], parent=parent) for index, parent in zip(modules, parents, strict=True)]
        for choice in RegionPlanner(self.step, calls, self.costs, num_ops=self._num_ops)._explored():
            chosen = tuple(modules[place] for place in choice.chosen)
            self._found[chosen] = replace(choice, chosen=chosen)

    def _front(self) -> list[RegionChoice]:
        front: list[RegionChoice] = []
        for choice in sorted(self._found.values(), key=lambda choice: (choice.peak_bytes, self._rank(choice))):
            if not front or self._rank(choice) < self._rank(front[-1]):
                front.append(choice)
        return front

    def _all_choices(self, most: int) -> Iterator[tuple[int, ...]]:
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

        yield from product_of([index for index, call in enumerate(self.calls) if call.parent < 0])

    def _groups(self) -> list[list[int]]:
        """Return calls that are alike, as the blocks of a model are, and of which none is in another."""
        groups: dict[tuple[int, str], list[int]] = {}
        depths: list[int] = []
        for index, call in enumerate(self.calls):
            depths.append(0 if call.parent < 0 else depths[call.parent] + 1)
            if self._eligible[index]:
                groups.setdefault((depths[index], _DIGITS.sub("*", call.name)), []).append(index)
        return sorted(groups.values(), key=lambda group: -sum(self._freed[index] for index in group))

    def _try_alike(self) -> None:
        """Of calls that are alike, choose some: evenly spaced, or all but the last ones."""
        for group in self._groups():
            size = len(group)
            for count in _counts(size):
                if self._work > _MOST_WORK // 3:
                    return
                self.simulate([group[place * size // count] for place in range(count)])
                self.simulate(group[:count])

    def _try_weighted(self) -> None:
        """Choose what frees most for what it takes, for several prices of a byte; between two choices, go step by step."""
        binds = [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]
        for cap in self._caps():
            for device_weight, host_weight in binds:
                costs = [
                    device_weight * device_s + host_weight * host_s
                    for device_s, host_s in zip(self._device_s, self._host_s, strict=True)
                ]
                self._sweep(costs, cap)

    def _caps(self) -> list[float]:
        """Return limits for what the second run of one region may take."""
        peaks = sorted({self._peaks[index] for index in range(len(self.calls)) if self._eligible[index]})
        if not peaks:
            return []
        places = range(min(6, len(peaks)))
        return [float(peaks[len(peaks) - 1 - place * len(peaks) // 6]) for place in places]

    def _sweep(self, costs: Sequence[float], cap: float) -> None:
        rates = [
            costs[index] / self._freed[index]
            for index in range(len(self.calls))
            if self._eligible[index] and self._peaks[index] <= cap
        ]
        if not rates:
            return
        low, high = max(min(rates), 1e-30) / 2, max(max(rates), 1e-30) * 2
        before: tuple[int, ...] = ()
        for place in range(_NUM_WEIGHTS + 1):
            chosen = self._dearest(costs, cap, low * (high / low) ** (place / _NUM_WEIGHTS))
            if chosen != before:
                self._go(before, chosen, costs)
                before = chosen
            if self._work > 2 * _MOST_WORK // 3:
                return

    def _dearest(self, costs: Sequence[float], cap: float, rate: float) -> tuple[int, ...]:
        """Return the regions that bring most if a byte is worth so many seconds."""
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
        """Simulate what is between two choices: the cheapest for its bytes is added first, and of equals the first."""
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
        """For each of a row of limits, leave out regions, or exchange one, as long as that fits and takes less time."""
        limit_bytes = float(self.simulate(()).peak_bytes)
        least = min(choice.peak_bytes for choice in self._found.values())
        while limit_bytes >= least and self._work < _MOST_WORK:
            limit_bytes *= _STEP_DOWN
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
            others = [other for other in self._neighbors(index) if not any(self._are_nested(one, other) for one in rest)]
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

    def _neighbors(self, index: int) -> list[int]:
        nearby = range(max(0, index - _MOST_SWAPPED), min(len(self.calls), self._ends[index] + _MOST_SWAPPED))
        return [other for other in nearby if other != index and self._eligible[other]]


def _counts(size: int) -> list[int]:
    """Return how many of so many calls to choose: any number, where there are not too many."""
    if size <= 400:
        return list(range(1, size + 1))
    found, count = [], 1.0
    while count < size:
        found.append(round(count))
        count = max(count + 1, count * 1.02)
    return [*found, size]


_HIDDEN = 0.9
"""For so much of the forward copies are on the link beside calls of modules that are recomputed."""


class Moving(NamedTuple):
    """What leaves beside calls of modules that are recomputed."""

    limit_bytes: int
    """What saved values may take, those that leave with them."""
    kept_bytes: int
    """So much of that is not dropped."""
    num_bytes: int
    """So much of what is not dropped leaves: it hides behind the computation."""
    window_bytes: int
    """So much of it the device may hold at a time: what is on its way."""


def fit_regions(problem: Problem, choices: Sequence[RegionNeeds], allowed_bytes: int) -> int | None:
    """Return what saved values may take where nothing leaves; None if no choice keeps to what the step may take."""
    fitting = (choice for choice in choices if choice.regions and _peak_bytes(problem, choice) <= allowed_bytes)
    return next((choice.peak_bytes for choice in fitting), None)


def fit_copies(problem: Problem, choices: Sequence[RegionNeeds], allowed_bytes: int, bytes_per_s: float) -> Moving | None:
    """Return what may leave, for the quickest choice that keeps to what the step may take then; None if none does."""
    if problem.num_forward_points >= len(problem.points):
        return None
    hidden_bytes = int(_HIDDEN * problem.starts_s[problem.points[problem.num_forward_points]] * bytes_per_s)
    for choice in choices:
        if not choice.regions:
            continue  # that is no such choice
        kept = list(_kept(problem, choice))
        leaving: list[HeldValue] = []
        num_bytes = 0
        for held in kept:  # what is saved first leaves
            if num_bytes + held.num_bytes > hidden_bytes:
                break
            if Action.OFFLOAD in held.choices:
                leaving.append(held)
                num_bytes += held.num_bytes
        window_bytes = 2 * max((held.num_bytes for held in leaving), default=0)
        if num_bytes <= window_bytes:
            continue  # what is on its way takes as much
        if _peak_bytes(problem, choice, leaving, window_bytes) <= allowed_bytes:
            kept_bytes = sum(held.num_bytes for held in kept)
            return Moving(choice.peak_bytes, kept_bytes, num_bytes, window_bytes)
    return None


def peak_with_regions(problem: Problem, choice: RegionNeeds, ratio: float, window_bytes: int) -> int:
    """Return the most bytes that a step takes on the device."""
    kept = list(_kept(problem, choice))
    most_bytes = ratio * sum(held.num_bytes for held in kept)
    reached = accumulate(held.num_bytes for held in kept)
    leaving = [held for held, num_bytes in zip(kept, reached, strict=True) if num_bytes <= most_bytes]
    return _peak_bytes(problem, choice, leaving, window_bytes)


def _kept(problem: Problem, choice: RegionNeeds) -> Iterator[HeldValue]:
    dropped = set[int]().union(*(region.dropped for region in choice.regions))
    return (held for held in problem.values if not held.is_anchor and held.value not in dropped)


def _second_run_bytes(problem: Problem, region: RegionBytes, inside: Sequence[HeldValue]) -> int:
    """Return the most bytes that a second run takes: what it makes, and what was there beside as the forward made that, such as
    the workspaces of convolutions."""
    most_bytes, made_bytes = region.peak_bytes, 0
    in_order = sorted(inside, key=lambda held: held.made)
    for held, until in zip(in_order, [*(after.made for after in in_order[1:]), 0], strict=True):
        made_bytes += held.num_bytes
        beside = problem.working_bytes[held.made : max(until, held.made + 1)]
        most_bytes = max(most_bytes, made_bytes + max(beside, default=0))
    return most_bytes


def _peak_bytes(problem: Problem, choice: RegionNeeds, leaving: Sequence[HeldValue] = (), window_bytes: int = 0) -> int:
    """Return the most bytes on the device at once, with some calls recomputed, and what leaves in host memory, but for
    `window_bytes` of it that are on their way."""
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
