"""`Ways`: times, for `MemoryBudget`, whether a plan of single ops and copies is fastest, or regions (which cost the host next
to nothing), with copies or without."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memkit.activations.saved.trial import Way
from memkit.plan import fit_copies, fit_regions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memkit.device.base import Event, MemoryCounter
    from memkit.plan import Moving, Problem, RegionNeeds

_LOGGER = logging.getLogger(__name__)

_MISSES = 1.02
"""By so much what steps take may be missed: where no choice keeps to the budget, one that nearly does shows what it takes."""
_NUM_COUNTED = 3
"""So many steps of each way count, the fastest of them."""
_MOST_STEPS = 36
"""So many steps may pass until it is known what a way takes in which calls of modules are recomputed; else it is given up."""
_MOST_CHANGES = 3
"""So often what saved values may take is set anew, by what a step took."""
_NUM_NOTED = 3
"""So many steps it takes until what leaves follows a schedule: twice it begins as an earlier one, and once it is looked at."""
_MOSTLY = 0.9
"""A counter that tells less than so much of what saved values may take does not count them."""
_SLACK = 0.03
"""So much of what is allowed may be left unused."""
_MOST_MORE = 0.05
"""By so much of what is allowed the limit is raised at once where copies leave: late in the backward little is away."""
_OF_CAPACITY = 0.95
"""So much of what the process can have it can use: some is in pieces too small."""
_MOST_LESS = 0.1
"""By so much of itself it is lowered at once, after the choice."""


@dataclass(eq=False, slots=True)
class _Try:
    """What is known of one way."""

    way: Way
    limit_bytes: int = 0
    """What saved values may take where calls of modules are recomputed."""
    pairs: list[tuple[Event, Event]] = field(default_factory=list)
    """When steps that count began and ended."""
    num_steps: int = 0
    num_changes: int = 0
    """How often the limit was set anew, or lowered where no copies leave; it is counted anew from the choice on."""
    too_much_bytes: float = math.inf
    """With so many bytes of saved values a step has taken more than it may: the limit is not raised to that again."""
    num_ahead: int = 0
    """How many whole steps with the same limit are yet to come before one counts."""


class Ways:
    """Times steps of each way, from one entry to the next, on the device's own clock.

    Args:
        allowed_bytes: what a step may take on the device.
        limit_bytes: what saved values may take on the device where calls of modules are recomputed, as a first guess; None if
            that alone is not to be tried.
        moving: what may leave beside; None if that is not to be tried.
    """

    def __init__(self, allowed_bytes: int, limit_bytes: int | None, *, moving: Moving | None = None) -> None:
        self.allowed_bytes = allowed_bytes
        self._moving, self._first_limit_bytes = moving, limit_bytes
        self._tries = [_Try(Way.OPS)]
        if limit_bytes is not None:
            self._tries.append(_Try(Way.REGIONS, limit_bytes))
        if moving is not None:
            self._tries.append(_Try(Way.REGIONS_AND_COPIES, moving.limit_bytes, num_ahead=_NUM_NOTED))
        self.last_peak_bytes: int | None = None
        """What the last whole step has taken in which calls of modules were recomputed."""
        self._besides: dict[tuple[Way, int], int] = {}
        """By way and limit, the most that was not planned to be taken by saved values."""
        self._beside: int | None = None
        """The same of the last step that tells."""
        self.fastest_s: Mapping[Way, float] = {}
        """What the fastest step of each way has taken, once one was chosen."""
        self._place = 0
        self._is_decided = False
        self._begun: Event | None = None
        self._is_steady = False

    @property
    def _now(self) -> _Try:
        return self._tries[self._place]

    @property
    def way(self) -> Way:
        """That of the next step."""
        return self._now.way

    @property
    def limit_bytes(self) -> int:
        """What saved values may take where calls of modules are recomputed, those that leave with them."""
        return self._now.limit_bytes

    @property
    def ratio(self) -> float:
        """The share of what is not dropped that leaves."""
        moving = self._moving
        if moving is None or self.way is not Way.REGIONS_AND_COPIES:
            return 0.0
        kept_bytes = moving.kept_bytes + self.limit_bytes - moving.limit_bytes
        return min(moving.num_bytes / kept_bytes, 1.0) if kept_bytes > 0 else 1.0

    @property
    def window_bytes(self) -> int:
        """What the device may hold at a time of what leaves."""
        return 0 if self._moving is None else self._moving.window_bytes

    @property
    def begun(self) -> Event | None:
        """When the step has begun that goes on; None if it goes none of the ways."""
        return self._begun

    @property
    def is_decided(self) -> bool:
        """Whether one of the ways was chosen."""
        return self._is_decided

    def begin_step(self, now: Event, peak_bytes: int | None, *, was_whole: bool, planned_bytes: int | None = None) -> None:
        """A context is entered again.

        Args:
            now: the moment.
            peak_bytes: what was there at most since the last entry; None if that is not known.
            planned_bytes: what saved values were planned to take where calls of modules are recomputed: less than the limit, by
                as much as one call makes a difference.
            was_whole: whether the last step went to its end as it has begun. Others say nothing of their way.
        """
        over_bytes = 0 if peak_bytes is None or self.way is Way.OPS else peak_bytes - self.allowed_bytes
        if self._begun is not None and self._is_steady and was_whole:
            if self.way is not Way.OPS and peak_bytes is not None and planned_bytes is not None:
                self._note_peak(peak_bytes, planned_bytes)
            if planned_bytes is not None and over_bytes > 0:
                self._now.limit_bytes = min(self._now.limit_bytes, planned_bytes)
            if not self._is_decided:
                self._note(self._begun, now, peak_bytes)
            elif over_bytes > 0:
                self._lower(over_bytes)
        self._begun, self._is_steady = now, False
        if not self._is_decided:
            self._decide()

    def predicted_bytes(self, planned_bytes: int) -> int | None:
        """Return what a step is to take at its peak in which calls of modules are recomputed, by what others have shown; None
        if there was none.

        Args:
            planned_bytes: what saved values are planned to take.
        """
        if self._beside is None:
            return None
        return planned_bytes + self._besides.get((self.way, self.limit_bytes), self._beside)

    def _note_peak(self, peak_bytes: int, planned_bytes: int) -> None:
        if self.way is Way.REGIONS and peak_bytes < planned_bytes:
            return  # somebody else has begun to count peaks anew
        key, beside_bytes = (self.way, self.limit_bytes), peak_bytes - planned_bytes
        self._beside = self._besides[key] = max(beside_bytes, self._besides.get(key, beside_bytes))
        self.last_peak_bytes = peak_bytes

    def skip_step(self) -> None:
        """A step goes none of the ways: nothing is known of the time from one entry to the next."""
        self._begun, self._is_steady = None, False

    def give_up(self) -> None:
        """Steps do not come to go this way, whatever is planned for them."""
        self._now.pairs.clear()
        if self._is_decided or self._place == len(self._tries) - 1:
            self._choose()
        else:
            self._go_on()

    def count_step(self) -> None:
        """Nothing is recorded in the step that has begun, as in later ones."""
        self._is_steady = True

    def _note(self, begun: Event, ended: Event, peak_bytes: int | None) -> None:
        now = self._now
        is_counted, now.num_ahead = now.num_ahead == 0, max(now.num_ahead - 1, 0)
        if now.way is not Way.OPS and peak_bytes is not None:
            left_bytes = self.allowed_bytes - peak_bytes
            staying_bytes = (1 - self.ratio) * now.limit_bytes
            may_change = now.num_changes < _MOST_CHANGES
            if left_bytes < 0 and not may_change:
                self.give_up()
                return
            has_room = is_counted and peak_bytes >= _MOSTLY * staying_bytes and left_bytes > _SLACK * self.allowed_bytes
            if left_bytes < 0 and is_counted:
                now.too_much_bytes = min(now.limit_bytes, now.too_much_bytes)
            if may_change and (left_bytes < 0 or has_room) and self._change(left_bytes):
                return
        if is_counted:
            now.pairs.append((begun, ended))

    def _change(self, by_bytes: int) -> bool:
        """Let saved values take more, or less; tell whether they may."""
        now = self._now
        if by_bytes > 0:
            if now.way is Way.REGIONS_AND_COPIES:
                by_bytes = min(int(0.9 * by_bytes), int(_MOST_MORE * self.allowed_bytes))
            else:  # the second runs of other calls may take more than those of these
                by_bytes //= 2
            by_bytes = int(min(by_bytes, now.too_much_bytes - 1 - now.limit_bytes))
            if by_bytes <= 0:
                return False
        now.num_changes += by_bytes < 0 or now.way is Way.REGIONS_AND_COPIES  # half of what is left is none soon
        now.num_ahead = _NUM_NOTED if now.way is Way.REGIONS_AND_COPIES else 0
        now.limit_bytes = max(now.limit_bytes + by_bytes, 1)
        now.pairs.clear()
        return True

    def _lower(self, by_bytes: int) -> None:
        """A step has taken more than it may, in the way that was chosen."""
        now = self._now
        if now.num_changes < _MOST_CHANGES:
            now.num_changes += 1
            now.limit_bytes = max(now.limit_bytes - min(by_bytes, int(_MOST_LESS * now.limit_bytes)), 1)

    def _decide(self) -> None:
        """Go on with the next way once enough is known of this one; after the last, choose."""
        now, is_last = self._now, self._place == len(self._tries) - 1
        now.num_steps += now.way is not Way.OPS
        if now.num_steps > _MOST_STEPS:
            self.give_up()
        elif len(now.pairs) >= _NUM_COUNTED and not is_last:
            self._go_on()
            self._now.num_steps += 1
        elif len(now.pairs) >= _NUM_COUNTED and all(end.is_reached() for tried in self._tries for _, end in tried.pairs):
            self._choose()

    def _go_on(self) -> None:
        """Try the next way."""
        before, self._place = self._now, self._place + 1
        if before.way is Way.REGIONS and before.pairs and self._first_limit_bytes is not None:  # what was learned of it
            self._now.limit_bytes = max(self._now.limit_bytes + before.limit_bytes - self._first_limit_bytes, 1)

    def _choose(self) -> None:
        """The fastest step of each way says which it is; single ops where nothing does."""
        fastest_s = [
            min((begun.elapsed_s(ended) for begun, ended in tried.pairs if ended.is_reached()), default=math.inf)
            for tried in self._tries
        ]
        if not self._is_decided:
            self.fastest_s = {tried.way: seconds for tried, seconds in zip(self._tries, fastest_s, strict=True)}
        self._place, self._is_decided = fastest_s.index(min(fastest_s)), True
        _LOGGER.debug("MemoryBudget: %s, of %s", self.way, self.fastest_s)
        self._now.num_changes = 0
        for tried in self._tries:
            tried.pairs.clear()


def ways_within(
    problem: Problem,
    choices: Sequence[RegionNeeds],
    allowed_bytes: int,
    headroom_bytes: int,
    bytes_per_s: float | None,
    counter: MemoryCounter | None,
) -> Ways | None:
    """Return what chooses between the ways of a step; None where no choice of calls keeps to what the step may take, or nearly
    does: then what its first steps take tells, which may be a little more.

    Args:
        problem: the step.
        choices: which calls of modules may be recomputed, the quickest choice first.
        allowed_bytes: what the step may take on the device.
        headroom_bytes: so much more it may take where no choice fits without that and without copies.
        bytes_per_s: of the link, both ways at once; None if that is not known.
        counter: the device's, if it has one. Until copies beside calls follow a schedule, a step may take as much more as is to
            leave: they are not tried where that would not fit.
    """
    limit_bytes = fit_regions(problem, choices, allowed_bytes)
    if limit_bytes is None:
        allowed_bytes += headroom_bytes
        limit_bytes = fit_regions(problem, choices, int(_MISSES * allowed_bytes))
    moving = None if bytes_per_s is None else fit_copies(problem, choices, allowed_bytes, bytes_per_s)
    capacity_bytes = None if counter is None else counter.capacity_bytes()
    if moving is not None and capacity_bytes is not None and allowed_bytes + moving.num_bytes > _OF_CAPACITY * capacity_bytes:
        moving = None
    return None if limit_bytes is None and moving is None else Ways(allowed_bytes, limit_bytes, moving=moving)
