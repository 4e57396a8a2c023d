"""`Ways` times plans of single ops and copies, and regions (cheap for the host) with copies or without."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memkit.activations.saved.settled import Way
from memkit.plan.regions import peak_with_regions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memkit.activations.recomputing.region_plan import RegionPlan
    from memkit.device.base import Event
    from memkit.plan.budget.problem import Problem
    from memkit.plan.regions import Moving

_LOGGER = logging.getLogger(__name__)

_NUM_COUNTED = 3
_MOST_STEPS = 36
"""After so many steps without a result, a way with regions is given up."""
_MOST_CHANGES = 3
_NUM_NOTED = 3
"""Copies follow a schedule after so many steps: two to see that steps are alike, one that is noted."""
_MOSTLY = 0.9
"""A peak below this fraction of the saved values' bytes shows that the counter doesn't count them."""
_SLACK = 0.03
_MOST_MORE = 0.05
"""With copies, the limit rises by at most this fraction of the allowed bytes: late, few values are away."""
_MOST_LESS = 0.1
"""After the choice, the limit falls by at most this fraction of itself at once."""


@dataclass(eq=False, slots=True)
class _Try:
    way: Way
    limit_bytes: int = 0
    pairs: list[tuple[Event, Event]] = field(default_factory=list)
    num_steps: int = 0
    num_changes: int = 0
    """How often the limit was adjusted, without raises where nothing moves; counted anew after the choice."""
    too_much_bytes: float = math.inf
    """The smallest limit whose step exceeded the allowed bytes: the limit stays below it."""
    num_ahead: int = 0
    """How many more complete steps with the same limit must pass before one counts."""


class Ways:
    """Times steps of each way by the device's events, from one entry to the next, and chooses the fastest."""

    def __init__(
        self, allowed_bytes: int, limit_bytes: int | None, *, moving: Moving | None = None, problem: Problem | None = None
    ) -> None:
        self.allowed_bytes, self._problem = allowed_bytes, problem
        self._moving, self._first_limit_bytes = moving, limit_bytes
        self._tries = [_Try(Way.OPS)]
        if limit_bytes is not None:
            self._tries.append(_Try(Way.REGIONS, limit_bytes))
        if moving is not None:
            self._tries.append(_Try(Way.REGIONS_AND_COPIES, moving.limit_bytes, num_ahead=_NUM_NOTED))
        self._besides: dict[tuple[Way, int], int] = {}
        self._beside_bytes = 0
        self._simulated: tuple[RegionPlan, float, int] | None = None
        """The last simulated peak, with its regions and the share that moves."""
        self.fastest_s: Mapping[Way, float] = {}
        self._now = self._tries[0]
        self.is_decided = False
        self.begun: Event | None = None
        self._is_steady = False

    @property
    def way(self) -> Way:
        return self._now.way

    @property
    def limit_bytes(self) -> int:
        return self._now.limit_bytes

    @property
    def ratio(self) -> float:
        moving = self._moving
        if moving is None or self.way is not Way.REGIONS_AND_COPIES:
            return 0.0
        kept_bytes = moving.kept_bytes + self.limit_bytes - moving.limit_bytes
        return min(moving.num_bytes / kept_bytes, 1.0) if kept_bytes > 0 else 1.0

    @property
    def window_bytes(self) -> int:
        return 0 if self._moving is None else self._moving.window_bytes

    @property
    def is_learning(self) -> bool:
        """The peak of the next step is still needed, to choose a way or for another limit."""
        return not self.is_decided or (self.way, self.limit_bytes) not in self._besides

    def begin_step(self, now: Event, peak_bytes: int | None, *, was_whole: bool, regions: RegionPlan | None = None) -> None:
        over_bytes = 0 if peak_bytes is None or self.way is Way.OPS else peak_bytes - self.allowed_bytes
        if self.begun is not None and self._is_steady and was_whole:
            if peak_bytes is not None and regions is not None:
                self._beside_bytes = peak_bytes - self._simulated_bytes(regions)
                self._besides[self.way, self.limit_bytes] = self._beside_bytes
            if regions is not None and over_bytes > 0:  # they take up to one region less than the limit
                self._now.limit_bytes = min(self._now.limit_bytes, regions.plan.predicted_peak_bytes)
            if not self.is_decided:
                self._note(self.begun, now, peak_bytes)
            elif over_bytes > 0:
                self._lower(over_bytes)
        self.begun, self._is_steady = now, False
        if not self.is_decided:
            self._decide()

    def predicted_bytes(self, regions: RegionPlan) -> int:
        beside_bytes = self._besides.get((self.way, self.limit_bytes), self._beside_bytes)
        return max(self._simulated_bytes(regions) + beside_bytes, 0)

    def _simulated_bytes(self, regions: RegionPlan) -> int:
        found, ratio = self._simulated, self.ratio
        if found is None or found[0] is not regions or found[1] != ratio:
            problem, num_bytes = self._problem, regions.plan.predicted_peak_bytes
            if problem is not None:
                num_bytes = peak_with_regions(problem, regions.needs, ratio, self.window_bytes)
            found = self._simulated = regions, ratio, num_bytes
        return found[2]

    def give_up(self) -> None:
        self._now.pairs.clear()
        if self.is_decided or self._now is self._tries[-1]:
            self._choose()
        else:
            self._go_on()

    def count_step(self) -> None:
        """Note that the current step records nothing, as later ones will, so that it counts."""
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
        now = self._now
        if by_bytes > 0:
            if now.way is Way.REGIONS_AND_COPIES:
                by_bytes = min(int(0.9 * by_bytes), int(_MOST_MORE * self.allowed_bytes))
            else:  # replays of other calls may take more than those of these
                by_bytes //= 2
            by_bytes = int(min(by_bytes, now.too_much_bytes - 1 - now.limit_bytes))
            if by_bytes <= 0:
                return False
        now.num_changes += by_bytes < 0 or now.way is Way.REGIONS_AND_COPIES  # halving soon leaves none
        now.num_ahead = _NUM_NOTED if now.way is Way.REGIONS_AND_COPIES else 0
        now.limit_bytes = max(now.limit_bytes + by_bytes, 1)
        now.pairs.clear()
        return True

    def _lower(self, by_bytes: int) -> None:
        now = self._now
        if now.num_changes < _MOST_CHANGES:
            now.num_changes += 1
            now.limit_bytes = max(now.limit_bytes - min(by_bytes, int(_MOST_LESS * now.limit_bytes)), 1)

    def _decide(self) -> None:
        now, is_last = self._now, self._now is self._tries[-1]
        now.num_steps += now.way is not Way.OPS
        if now.num_steps > _MOST_STEPS:
            self.give_up()
        elif len(now.pairs) >= _NUM_COUNTED and not is_last:
            self._go_on()
            self._now.num_steps += 1
        elif len(now.pairs) >= _NUM_COUNTED and all(end.is_reached() for tried in self._tries for _, end in tried.pairs):
            self._choose()

    def _go_on(self) -> None:
        before, self._now = self._now, self._tries[self._tries.index(self._now) + 1]
        if before.way is Way.REGIONS and before.pairs and self._first_limit_bytes is not None:  # its learned figures
            self._now.limit_bytes = max(self._now.limit_bytes + before.limit_bytes - self._first_limit_bytes, 1)

    def _choose(self) -> None:
        fastest_s = [
            min((begun.elapsed_s(ended) for begun, ended in tried.pairs if ended.is_reached()), default=math.inf)
            for tried in self._tries
        ]
        if not self.is_decided:
            self.fastest_s = {tried.way: seconds for tried, seconds in zip(self._tries, fastest_s, strict=True)}
        self._now, self.is_decided = self._tries[fastest_s.index(min(fastest_s))], True
        _LOGGER.debug("MemoryBudget: %s, of %s", self.way, self.fastest_s)
        self._now.num_changes = 0
        for tried in self._tries:
            tried.pairs.clear()
