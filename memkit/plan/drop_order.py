"""In which order the saved values of a step are dropped as its budget falls: a greedy walk over the ledger's peaks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from heapq import nsmallest
from itertools import accumulate

from memkit.plan.lineage import NO_OP, Step
from memkit.plan.timeline import Levels

_MOST_LOOKS = 150_000
"""Values are picked for the drop order one by one, or several at once where that would mean more looks at a value."""


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
            last_use[value] = num_saves + step.use_end(place) - 1
        end = num_saves + len(step.uses)
        self._since = first_saved
        self._until = {value: last_use.get(value, end - 1) for value in first_saved}
        self._back = {value: first_use.get(value, end) for value in first_saved}
        """When a dropped value is on the device again: with its first use, or with that of one made from it."""
        self._levels = Levels(end + 1)
        """The ledger at each save and request."""
        for value in first_saved:
            if value not in step.moved:
                self._levels.add(self._since[value], self._until[value] + 1, lineage.num_bytes[value])
        self._dropped = set[int]()
        self._replayed = set[int]()
        stays = step.fixed.union(step.moved, anchors)
        self._open = dict.fromkeys(value for value in first_saved if value not in stays)
        for anchor in anchors:
            if anchor not in first_saved:
                first_saved[anchor] = bisect_left(latest_saved, anchor)
                self._levels.add(first_saved[anchor], end, lineage.num_bytes[anchor])
        self._kept = set(first_saved)
        self.order: list[int] = []
        self.peaks_bytes: list[int] = [self._levels.peak_bytes]
        """The peak before any drop, and after each: after those that were picked together, for each of them the last."""

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
        level = self._levels.each()
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
            # On the device again when the first is that is made from it, through values that are recomputed as well.
            back = min((self._back[later] for later in self._made_from(value)), default=self._back[value])
            back = min(back, self._back[value])
            self._levels.add(self._since[value], min(back, self._until[value] + 1), -self._lineage.num_bytes[value])
            self._back[value] = back
            self._bring_forward(value, back)
        self.order += values
        self.peaks_bytes += [self._levels.peak_bytes] * len(values)

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
                        self._levels.add(
                            back, min(self._back[source], self._until[source] + 1), self._lineage.num_bytes[source]
                        )
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
