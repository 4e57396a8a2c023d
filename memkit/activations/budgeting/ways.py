"""Which of two ways to keep to a budget is faster, as measured: a memory plan of single ops and copies, for which each op is
recorded, or calls of modules that are recomputed as a whole, which costs the host next to nothing."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.device.base import Event
    from memkit.plan import Problem

_NUM_COUNTED = 3
"""So many steps of each way count, the fastest of them."""
_MOST_STEPS = 24
"""So many steps may pass until calls of modules are recomputed as planned; then single ops it is."""
_MOST_RECORDED = 8
"""So many steps in a row it takes at most until calls of modules are recomputed, if they are to be."""
_MOST_CHANGES = 3
"""So often what saved values may take is set anew, by what a step took."""
_MOSTLY = 0.9
"""A counter that tells less than so much of what saved values may take does not count them."""
_SLACK = 0.03
"""So much of what is allowed may be left unused."""


class Way(Enum):
    """How steps keep to a budget."""

    OPS = "single ops are run again, and copies leave"
    REGIONS = "calls of modules are run again"


class Ways:
    """Times steps of either way, from one entry to the next, on the device's own clock.

    Args:
        allowed_bytes: what a step may take on the device.
        limit_bytes: what saved values may take where calls of modules are recomputed, as a first guess.
    """

    def __init__(self, allowed_bytes: int, limit_bytes: int) -> None:
        self.way = Way.OPS
        """That of the next step."""
        self.limit_bytes = limit_bytes
        self.allowed_bytes = allowed_bytes
        self._pairs: dict[Way, list[tuple[Event, Event]]] = {way: [] for way in Way}
        self._is_decided = False
        self._num_steps = self._num_changes = self._num_recorded = 0
        self._begun: Event | None = None
        self._is_counted = False

    @property
    def is_decided(self) -> bool:
        """Whether one of the ways was chosen."""
        return self._is_decided

    def begin_step(self, now: Event, peak_bytes: int | None) -> None:
        """A context is entered again.

        Args:
            now: the moment.
            peak_bytes: what was there at most since the last entry; None if that is not known.
        """
        if self._begun is not None and self._is_counted and not self._is_decided:
            self._note(self._begun, now, peak_bytes)
        elif self._is_decided and self.way is Way.REGIONS and peak_bytes is not None and peak_bytes > self.allowed_bytes:
            self._change(self.allowed_bytes - peak_bytes)
        self._begun, self._is_counted = now, False
        self._decide()

    def note_recorded(self) -> bool:
        """Calls of modules are to be recomputed, and the step that begins is recorded: tell whether that may go on."""
        self._num_recorded += 1
        return self._num_recorded <= _MOST_RECORDED

    def give_up(self) -> None:
        """Calls of modules are not recomputed as a whole, whatever is planned for them."""
        self.way, self._is_decided = Way.OPS, True

    def count_step(self) -> None:
        """The step that has begun goes as later ones will."""
        self._is_counted, self._num_recorded = True, 0

    def _note(self, begun: Event, ended: Event, peak_bytes: int | None) -> None:
        if self.way is Way.REGIONS and peak_bytes is not None and self._num_changes < _MOST_CHANGES:
            left_bytes = self.allowed_bytes - peak_bytes
            counts_all = peak_bytes >= _MOSTLY * self.limit_bytes
            if left_bytes < 0 or (counts_all and left_bytes > _SLACK * self.allowed_bytes):
                self._change(left_bytes)
                return
        self._pairs[self.way].append((begun, ended))

    def _change(self, by_bytes: int) -> None:
        """Let saved values take more, or less."""
        self._num_changes += 1
        self.limit_bytes = max(self.limit_bytes + (by_bytes if by_bytes < 0 else int(0.9 * by_bytes)), 1)
        self._pairs[Way.REGIONS].clear()

    def _decide(self) -> None:
        ops, regions = self._pairs[Way.OPS], self._pairs[Way.REGIONS]
        if self._is_decided:
            return
        if self.way is Way.OPS and len(ops) >= _NUM_COUNTED:
            self.way = Way.REGIONS
        self._num_steps += self.way is Way.REGIONS
        if self._num_steps > _MOST_STEPS:
            self.way, self._is_decided = Way.OPS, True
        elif len(regions) >= _NUM_COUNTED and all(end.is_reached() for _, end in (*ops, *regions)):
            of_ops, of_regions = (min(begin.elapsed_s(end) for begin, end in pairs) for pairs in (ops, regions))
            self.way, self._is_decided = (Way.REGIONS if of_regions < of_ops else Way.OPS), True
            self._pairs = {way: [] for way in Way}


def limit_of_saved(problem: Problem, allowed_bytes: int) -> int:
    """Return how many bytes saved values may take at any moment, so that the step keeps to what it may take in all, whichever
    of them are dropped.

    Args:
        problem: the step.
        allowed_bytes: what it may take on the device.
    """
    held = [0] * problem.num_slots
    for value in problem.values:
        if not value.is_anchor:
            for slot in range(value.made, min(value.freed, problem.num_slots)):
                held[slot] += value.num_bytes
    room = [allowed_bytes - problem.base_bytes - working for working in problem.working_bytes]
    return max(min((left for left, full in zip(room, held, strict=True) if left < full), default=sum(held)), 1)
