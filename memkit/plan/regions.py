"""Which calls of modules are recomputed as a whole to keep to a budget.

A *region* is a call of a module of which autograd keeps only the inputs: its forward runs again when the backward comes to it.
Which calls may be one was seen while a step was recorded. Chosen are calls of which none is in another.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from memkit.plan.region_step import RegionChoice, RegionNeeds, RegionStep

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


class RegionPlanner(RegionStep):
    """The choices of regions for one step.

    All that are looked at are found once, whatever the budget: so a larger one never takes longer.
    """

    _is_explored = False

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
        """Return the choices than which none is quicker and takes fewer bytes."""
        front: list[RegionChoice] = []
        for choice in sorted(self._found.values(), key=lambda choice: (choice.peak_bytes, self._rank(choice))):
            if not front or self._rank(choice) < self._rank(front[-1]):
                front.append(choice)
        return front

    def _all_choices(self, most: int) -> Iterator[tuple[int, ...]]:
        """Yield all choices, but not many more than so many."""

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
        """Yield the calls that a call is in."""
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
        """Yield choices like one that fit a limit."""
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
        """Return calls next to one, that it may be exchanged for."""
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
