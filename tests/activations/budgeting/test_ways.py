"""The choice between ways, from given moments and peaks; and the limit for saved values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from memkit.activations.budgeting.ways import Ways
from memkit.activations.recomputing.region_plan import RegionPlan
from memkit.activations.saved.settled import Way
from memkit.plan.regions import Moving
from tests.activations.budgeting.conftest import Moment


def _regions(planned_bytes: int | None) -> RegionPlan | None:
    """Return regions whose plan has this peak; None without one."""
    plan = SimpleNamespace(predicted_peak_bytes=planned_bytes)
    return None if planned_bytes is None else cast(RegionPlan, SimpleNamespace(plan=plan))


class Steps:
    """Steps with given times, whichever way they go."""

    def __init__(self, *, has_copies: bool = False, **seconds: float) -> None:
        self.ways = Ways(1000, 500, moving=Moving(500, 500, 200, 50) if has_copies else None)
        self.seconds = {way: seconds.get(way.name.lower(), 2.0 if way is Way.OPS else 1.0) for way in Way}
        self.now_s = 0.0
        self.reached = True
        self.moments: list[Moment] = []

    def run(
        self, count: int, *, peak_bytes: int | None = None, counts: bool = True, planned_bytes: int | None = None
    ) -> list[Way]:
        """Return the ways of so many steps; each entry gets the peak since the last one."""
        went = []
        for _ in range(count):
            self.moments.append(Moment(self.now_s, self.reached))
            self.ways.begin_step(self.moments[-1], peak_bytes, was_whole=True, regions=_regions(planned_bytes))
            if counts:
                self.ways.count_step()
            went.append(self.ways.way)
            self.now_s += self.seconds[self.ways.way]
        return went

    @property
    def choice(self) -> tuple[Way, bool]:
        return self.ways.way, self.ways.is_decided


@pytest.mark.parametrize(("regions_s", "chosen"), [(1.0, Way.REGIONS), (3.0, Way.OPS), (2.0, Way.OPS)])
def test_three_steps_of_each_are_timed_and_the_faster_is_chosen(regions_s: float, chosen: Way) -> None:
    steps = Steps(regions=regions_s)

    assert steps.run(6) == [Way.OPS] * 3 + [Way.REGIONS] * 3
    assert not steps.ways.is_decided
    assert steps.run(5) == [chosen] * 5
    assert steps.ways.is_decided


def test_the_fastest_step_of_each_counts() -> None:
    steps = Steps()
    steps.run(3)
    for seconds in (9.0, 1.0, 9.0):
        steps.seconds[Way.REGIONS] = seconds
        steps.run(1)

    assert steps.run(1) == [Way.REGIONS]


def test_steps_that_are_not_as_later_ones_do_not_count() -> None:
    steps = Steps()
    steps.run(2)
    steps.run(5, counts=False)

    assert steps.run(2) == [Way.OPS, Way.REGIONS]


def test_nothing_is_decided_until_the_device_has_reached_the_moments() -> None:
    steps = Steps(regions=3.0)
    steps.run(3)
    steps.reached = False
    assert steps.run(6) == [Way.REGIONS] * 6
    for moment in steps.moments:
        moment.reached = True
    steps.reached = True
    steps.run(1)

    assert steps.choice == (Way.OPS, True)


def test_three_ways_are_tried_one_after_the_other() -> None:
    steps = Steps(has_copies=True, regions_and_copies=0.5)

    assert steps.run(12) == [Way.OPS] * 3 + [Way.REGIONS] * 3 + [Way.REGIONS_AND_COPIES] * 6
    assert (steps.ways.limit_bytes, steps.ways.ratio) == (500, 200 / 500)  # until steps show how much that leaves free
    assert not steps.ways.is_decided  # three of its steps decide as they go what leaves
    steps.run(1)
    assert steps.choice == (Way.REGIONS_AND_COPIES, True)


@pytest.mark.parametrize("has_copies", [False, True])
@pytest.mark.parametrize("count", [36, 8])
def test_way_that_no_step_goes_is_given_up_for_the_next(count: int, has_copies: bool) -> None:
    steps = Steps(has_copies=has_copies)
    steps.run(3)
    assert steps.run(count, counts=False) == [Way.REGIONS] * count
    if count < 36:
        steps.ways.give_up()  # as after so many recorded steps
    steps.run(1)
    assert steps.choice == ((Way.REGIONS_AND_COPIES, False) if has_copies else (Way.OPS, True))
    steps.run(6)

    assert steps.choice == (Way.REGIONS_AND_COPIES if has_copies else Way.OPS, True)


def test_copies_alone_are_tried_where_calls_do_not_keep_to_the_budget_without_them() -> None:
    steps = Steps()
    steps.ways = Ways(1000, None, moving=Moving(800, 700, 500, 50))

    assert steps.run(5) == [Way.OPS] * 3 + [Way.REGIONS_AND_COPIES] * 2
    assert (steps.ways.limit_bytes, steps.ways.ratio) == (800, 500 / 700)


# The limit


BEGIN = (4, None, 500)
LOWERED = ((1, 1010, 490), (1, 1010, 480), (1, 1010, 470))


@pytest.mark.parametrize(
    ("has_copies", "runs", "way", "is_decided"),
    [
        (False, [(4, 999, 500), (1, 1050, 450)], Way.REGIONS, False),  # 50 too many
        (False, [(4, 5000, 500), (1, 1000, 500)], Way.REGIONS, False),  # peaks of single ops say nothing
        (False, [BEGIN, (1, 970, 500)], Way.REGIONS, False),  # 3 % are left
        (False, [BEGIN, (1, 900, 550)], Way.REGIONS, False),  # half of what is left
        (False, [BEGIN, (1, 450, 775)], Way.REGIONS, False),
        (False, [BEGIN, (1, 449, 500)], Way.REGIONS, False),  # a counter that does not count saves
        (False, [BEGIN, (1, 5000, 1)], Way.REGIONS, False),
        # calls are recomputed as a whole: a slightly lower limit may change nothing, and be exceeded again
        (False, [BEGIN, (1, 1020, 400, 420), (1, 900, 419, 390)], Way.REGIONS, False),
        (False, [BEGIN, *LOWERED, (2, 1000, 470)], Way.REGIONS, False),  # with another limit, steps are timed anew
        (False, [BEGIN, *LOWERED, (3, 1000, 470)], Way.REGIONS, True),
        (False, [BEGIN, *LOWERED, (1, 1010, 500)], Way.OPS, True),  # three limits are tried
        (True, [BEGIN, LOWERED[0], (3, 1000, 490)], Way.REGIONS_AND_COPIES, False),  # it holds with copies as well
        # the copies follow no schedule at first; the first saves, which are away, are back before the last are recomputed
        (True, [(7, 1000, 500), (1, 700, 500), (1, 1020, 480), (3, 700, 480), (1, 700, 530)], Way.REGIONS_AND_COPIES, False),
        # after the choice by a tenth at most, and three times
        (False, [(7, 1000, 500), (1, 1007, 493), (1, 9000, 444), (1, 1004, 440), (1, 1050, 440)], Way.REGIONS, True),
    ],
)
def test_what_saved_values_may_take_follows_what_steps_took(
    has_copies: bool, runs: list[tuple[int, ...]], way: Way, is_decided: bool
) -> None:
    """A run is a number of steps, their peak, the limit then, and the planned peak, if any."""
    steps = Steps(has_copies=has_copies)
    for count, peak_bytes, limit_bytes, *planned_bytes in runs:
        steps.run(count, peak_bytes=peak_bytes, planned_bytes=planned_bytes[0] if planned_bytes else None)
        assert steps.ways.limit_bytes == limit_bytes or steps.ways.way is Way.OPS

    assert steps.choice == (way, is_decided)


def test_limit_is_not_raised_to_what_was_too_much() -> None:
    """One more recomputed block makes a difference of 100: 400 fit and 500 do not, though 6 % seem to be left."""
    steps = Steps()
    steps.ways = Ways(1000, 480)
    steps.run(4)
    took = []
    while not steps.ways.is_decided:
        planned_bytes = steps.ways.limit_bytes // 100 * 100
        took.append(planned_bytes)
        steps.run(1, peak_bytes=540 + planned_bytes, planned_bytes=planned_bytes)

    assert took[:2] == [400, 500]
    assert set(took[2:]) == {400}
    assert steps.ways.way is Way.REGIONS


def test_steps_that_were_not_whole_say_nothing() -> None:
    steps = Steps()
    ways = steps.ways
    for _ in range(6):
        steps.run(1)
        ways.begin_step(Moment(steps.now_s), 5000, was_whole=False)
    assert ways.way is Way.OPS
    steps.run(8, peak_bytes=1000)
    assert steps.choice == (Way.REGIONS, True)
    steps.run(1, peak_bytes=1000)
    ways.begin_step(Moment(steps.now_s), 5000, was_whole=False)

    assert ways.limit_bytes == 500


# The predicted peak


def test_last_peak_of_a_way_and_a_limit_is_foretold() -> None:
    steps = Steps(has_copies=True)
    steps.run(4)
    assert steps.ways.predicted_bytes(_regions(420)) == 420
    steps.run(1, peak_bytes=990, planned_bytes=420)
    steps.run(2, peak_bytes=980, planned_bytes=420)
    assert steps.ways.way is Way.REGIONS_AND_COPIES
    assert (steps.ways.predicted_bytes(_regions(420)), steps.ways.predicted_bytes(_regions(400))) == (980, 960)
    steps.run(1, peak_bytes=700, planned_bytes=420)

    assert steps.ways.predicted_bytes(_regions(420)) == 700


def test_peak_of_the_chosen_way_is_foretold_by_its_own_steps() -> None:
    """After the choice nobody counts peaks anew, so that they tell nothing."""
    steps = Steps(has_copies=True)
    steps.run(7, peak_bytes=980, planned_bytes=420)
    while not steps.ways.is_decided:
        steps.run(1, peak_bytes=960, planned_bytes=400)
    steps.run(3, planned_bytes=420)

    assert steps.ways.way is Way.REGIONS
    assert steps.ways.predicted_bytes(_regions(420)) == 980
