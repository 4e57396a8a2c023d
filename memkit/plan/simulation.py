"""What a step takes under a plan, told without its tensors: the walk of `eviction.py` over numbers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

from memkit.plan.eviction import DTRScore, Walk
from memkit.plan.lineage import NO_OP, Step
from memkit.plan.timeline import Timeline

_NO_END = 1 << 62
MOST_REPLAYS = 8
"""A step that runs each op again so often, on average, is none to plan with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated step takes."""

    peak_bytes: int
    """The most bytes of saved values and replay temporaries at once."""
    replayed_s: float
    """Seconds of ops that run again."""
    num_replayed_ops: int
    """How many ops run again."""
    dropped: frozenset[int]
    """The values that are dropped in the forward."""
    limit_bytes: float
    """The limit that the replays keep to."""
    anchors: frozenset[int] = frozenset()
    """Values that autograd did not save, and that are held so that others can be made from them."""


class _GiveUpError(Exception):
    """Ops are run again too often for a plan."""


class _Simulation(Timeline):
    """A step without its tensors: the store of its walk. Compute is late by what is run again."""

    def __init__(self, step: Step, score: DTRScore, limit_bytes: float, anchors: frozenset[int], most_s: float) -> None:
        super().__init__()
        self._walk = Walk(step.lineage, score, limit_bytes, self)
        self._most_s = most_s
        self._step = step
        self._lineage = step.lineage
        self._anchors = anchors
        self._anchors_to_come = sorted(anchors, reverse=True)
        self._anchors_held: list[int] = []
        self._present = set[int]()
        self._moved = set[int]()
        self._held_roots = set[int]()
        self._traced = set[int]()
        self._places: dict[int, list[int]] = {}
        for place, value in enumerate(step.uses):
            self._places.setdefault(value, []).append(place)
        self._saved_at: dict[int, int] = {}
        self._now: int | None = None
        self._num_saved = 0
        self._most_ops = MOST_REPLAYS * len(step.lineage.ins)

    def is_available(self, value: int) -> bool:
        return value in self._present or self._lineage.maker[value] == NO_OP or value in self._moved

    def is_wanted(self, value: int) -> bool:
        places = self._places.get(value)
        return places is not None and value in self._saved_at and places[-1] >= (self._now or 0)

    def distance(self, value: int) -> int:
        if self._now is None:
            return self._num_saved - self._saved_at[value]
        places = self._places.get(value, ())
        index = bisect_left(places, self._now)
        return places[index] - self._now + 1 if index < len(places) else len(self._step.uses)

    def drop(self, value: int) -> bool:
        self._present.discard(value)
        self.live_bytes -= self._lineage.num_bytes[value]
        for root in self._lineage.roots_of(value, self._traced):
            if root not in self._held_roots:
                self._held_roots.add(root)
                if root not in self._present:
                    self.live_bytes += self._step.retained_bytes.get(root, 0)
        return True

    def run(self, op: int, in_place: Collection[int]) -> None:
        if self._walk.num_replayed_ops > self._most_ops or self.late_s > self._most_s:
            raise _GiveUpError
        self.late_s += self._lineage.seconds[op]

    def keep(self, value: int) -> None:
        self._present.add(value)
        self.live_bytes += self._lineage.num_bytes[value]

    def forget(self, value: int) -> None:
        pass

    def go(self, dropped: Collection[int]) -> Outcome:
        """Simulate the step."""
        step, lineage, walk = self._step, self._lineage, self._walk
        for index, value in enumerate(step.saves):
            is_new = value not in self._saved_at
            while self._anchors_to_come and self._anchors_to_come[-1] <= value:
                anchor = self._anchors_to_come.pop()
                self._anchors_held.append(anchor)
                self.keep(anchor)
            self._saved_at[value], self._num_saved = index, index + 1
            walk.clock += 1
            if not is_new:
                continue
            if value in step.moved:
                self._moved.add(value)
                continue
            if value not in self._held_roots:
                self.keep(value)
            if value not in step.fixed and lineage.maker[value] != NO_OP:
                walk.admit(value)
                if value in dropped:
                    walk.drop(value)
            walk.make_room(0)
            walk.note_peak()
        gone = self._saved_at.keys() - self._present - self._held_roots - step.moved
        latest = sorted(self._saved_at)
        self._backward(latest)
        return Outcome(
            peak_bytes=walk.peak_bytes,
            replayed_s=self.late_s,
            num_replayed_ops=walk.num_replayed_ops,
            dropped=frozenset(gone),
            limit_bytes=walk.limit_bytes,
            anchors=self._anchors,
        )

    def _backward(self, latest: list[int]) -> None:
        step, walk, places, given, end = self._step, self._walk, self._places, list[int](), 0
        for place, value in enumerate(step.uses):
            while latest and latest[-1] in places and places[latest[-1]][-1] < place:
                latest.pop()
            while self._anchors_held and (not latest or self._anchors_held[-1] > latest[-1]):
                self._free(self._anchors_held.pop())  # nothing that is made from it will be asked for
            if place >= end:  # the node before is done, and what is not asked for again goes
                for used in given:
                    if places[used][-1] < place and used in self._present and used not in self._held_roots:
                        self._free(used)
                given, end = [], step.use_end(place)
            self._now = place
            walk.note_request(value, end)
            if value not in self._saved_at or value in self._held_roots or value in self._moved:
                continue
            if value not in self._present:
                walk.rebuild(value)
            if value in self._present:
                given.append(value)
                if places[value][-1] == place or value not in walk.num_replays:
                    walk.evictable.pop(value, None)  # the node has it; a copy that others wait for may go
            walk.note_peak()

    def _free(self, value: int) -> None:
        self._present.discard(value)
        self._walk.evictable.pop(value, None)
        self.live_bytes -= self._lineage.num_bytes[value]


def simulate(
    step: Step,
    dropped: Collection[int],
    *,
    limit_bytes: float,
    score: DTRScore,
    anchors: frozenset[int] = frozenset(),
    most_s: float = math.inf,
) -> Outcome:
    """Return what a step takes that drops some of its saved values.

    Args:
        step: the step.
        dropped: the values that are dropped as soon as they are saved.
        limit_bytes: what saved values and replays may take; where that is not enough, in the forward or later, more is dropped.
        score: who goes then.
        anchors: values that were not saved, and that are held for as long as anything saved later is needed.
        most_s: a step whose replays take longer, or run each op many times, is given up: it takes for ever then.
    """
    try:
        return _Simulation(step, score, limit_bytes, anchors, most_s).go(dropped)
    except _GiveUpError:
        return Outcome(
            peak_bytes=_NO_END, replayed_s=math.inf, num_replayed_ops=_NO_END, dropped=frozenset(), limit_bytes=limit_bytes
        )
