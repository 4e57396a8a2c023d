"""Narrow places of a forward, as checkpointing has them between layers.

Where little is alive between two ops, a *cut* may be put: its *anchors*, the values that are made before and read after, are
held, whether autograd saved them or not. Then making a value again takes no more than the ops behind the cut before it.
Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from memkit.plan.lineage import NO_OP, Step
from memkit.plan.timeline import Levels


class Segments:
    """The narrow places of a step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        lineage = step.lineage
        lineage.link()
        self._saved = dict.fromkeys(step.saves)
        self._made_at = {value: lineage.maker[value] for value in self._saved}
        self._last_read = [max(ops, default=NO_OP) for ops in lineage.users]
        widths = self._widths()
        self._num_bytes_at = widths
        is_written_over = self._are_written_over()
        self._narrow: list[int] = []
        wider = widths[0]
        for op in range(1, len(widths) - 1):  # of several ops in a row with the same width, each will do
            if widths[op] != widths[op - 1]:
                wider = widths[op - 1]
            if widths[op] < wider and widths[op] <= widths[op + 1] and not is_written_over[op]:
                self._narrow.append(op)

    def skeleton(self, target_bytes: float) -> frozenset[int]:
        """Return the anchors of cuts between which about so many bytes are saved."""
        return self._anchors(self.cuts(target_bytes))

    def cuts(self, target_bytes: float) -> list[int]:
        """Return the ops behind which cuts are that have about so many saved bytes between them, each at the narrowest place
        nearby."""
        sizes, saved_after = self._step.lineage.num_bytes, [0] * (len(self._num_bytes_at) + 1)
        for value, op in self._made_at.items():
            saved_after[op if op != NO_OP else 0] += sizes[value]
        reached = list(accumulate(saved_after))
        total = reached[-1]
        cuts: list[int] = []
        start_bytes = 0
        position = 0
        while True:
            first = bisect_left(reached, start_bytes + 0.6 * target_bytes, position)
            last = bisect_left(reached, start_bytes + 1.2 * target_bytes, position)
            choices = self._narrow[bisect_left(self._narrow, first) : bisect_left(self._narrow, last + 1)]
            if not choices:
                later = bisect_left(self._narrow, last + 1)
                choices = self._narrow[later : later + 1]
            if not choices or total - reached[choices[0]] < 0.3 * target_bytes:
                break
            cut = min(choices, key=lambda op: (self._num_bytes_at[op], -op))
            cuts.append(cut)
            start_bytes, position = reached[cut], cut + 1
        return cuts

    def _anchors(self, cuts: Sequence[int]) -> frozenset[int]:
        """Return the values that are made before a cut, and read after it."""
        found = set[int]()
        for value, maker in enumerate(self._step.lineage.maker):
            index = bisect_left(cuts, maker)
            if maker != NO_OP and index < len(cuts) and cuts[index] < self._last_read[value]:
                found.add(value)
        return frozenset(found)

    def _widths(self) -> list[int]:
        """Return for each op the bytes of what is made up to it and read after it."""
        lineage = self._step.lineage
        levels = Levels(len(lineage.ins))
        for value, maker in enumerate(lineage.maker):
            if maker != NO_OP:
                levels.add(maker, self._last_read[value], lineage.num_bytes[value])
        return levels.each()

    def _are_written_over(self) -> list[bool]:
        """Tell for each op whether something that is made up to it and read after it is written over, then or later."""
        lineage = self._step.lineage
        counts = Levels(len(lineage.ins))
        for pairs in lineage.taken.values():
            for over, _ in pairs:
                if lineage.maker[over] != NO_OP:
                    counts.add(lineage.maker[over], self._last_read[over], 1)
        return [number > 0 for number in counts.each()]
