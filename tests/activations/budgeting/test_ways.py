"""The choice between two ways, from given moments and peaks; and the limit for saved values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from memkit.activations.budgeting.ways import Ways
from memkit.activations.recomputing.region_plan import RegionPlan
from memkit.activations.saved.settled import Way
from memkit.plan import Moving
from tests.activations.budgeting.conftest import Moment


def _regions(planned_bytes: int | None) -> RegionPlan | None:
    """Return regions whose plan has this peak; None without one."""
    plan = SimpleNamespace(predicted_peak_bytes=planned_bytes)
    return None if planned_bytes is None else cast(RegionPlan, SimpleNamespace(plan=plan))


class Steps:
    """Steps with given times, whichever way they go."""

    def __init__(self, ways: Ways, *, ops_s: float = 2.0, regions_s: float = 1.0) -> None:
        self.ways = ways
        self.seconds = {Way.OPS: ops_s, Way.REGIONS: regions_s, Way.REGIONS_AND_COPIES: regions_s}
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


@pytest.mark.parametrize(("regions_s", "chosen"), [(1.0, Way.REGIONS), (3.0, Way.OPS), (2.0, Way.OPS)])
def test_three_steps_of_each_are_timed_and_the_faster_is_chosen(regions_s: float, chosen: Way) -> None:
    steps = Steps(Ways(100, 50), regions_s=regions_s)

    assert steps.run(6) == [Way.OPS] * 3 + [Way.REGIONS] * 3
    assert not steps.ways.is_decided
    assert steps.run(5) == [chosen] * 5
    assert steps.ways.is_decided


def test_the_fastest_step_of_each_counts() -> None:
    steps = Steps(Ways(100, 50), ops_s=2.0, regions_s=9.0)
    steps.run(3)
    for seconds in (9.0, 1.0, 9.0):
        steps.seconds[Way.REGIONS] = seconds
        steps.run(1)
    steps.run(1)

    assert steps.ways.way is Way.REGIONS


def test_steps_that_are_not_as_later_ones_do_not_count() -> None:
    steps = Steps(Ways(100, 50))
    steps.run(2)
    steps.run(5, counts=False)

    assert steps.run(2) == [Way.OPS, Way.REGIONS]


def test_nothing_is_decided_until_the_device_has_reached_the_moments() -> None:
    steps = Steps(Ways(100, 50), regions_s=3.0)
    steps.run(3)
    steps.reached = False
    assert steps.run(6) == [Way.REGIONS] * 6
    for moment in steps.moments:
        moment.reached = True
    steps.reached = True

    assert steps.run(1) == [Way.OPS]
    assert steps.ways.is_decided


def test_single_ops_are_chosen_where_no_step_recomputes_regions_as_planned() -> None:
    steps = Steps(Ways(100, 50))
    steps.run(3)
    went = steps.run(38, counts=False)

    assert went == [Way.REGIONS] * 36 + [Way.OPS] * 2
    assert steps.ways.is_decided


def test_limit_is_lowered_from_what_was_planned_and_not_from_what_was_allowed() -> None:
    """Calls are recomputed as a whole: a slightly lower limit may change nothing, and be exceeded again."""
    steps = Steps(Ways(1000, 500))
    steps.run(4)
    steps.run(1, peak_bytes=1020, planned_bytes=420)

    assert steps.ways.limit_bytes == 400
    steps.run(1, peak_bytes=900, planned_bytes=390)
    assert steps.ways.limit_bytes == 419  # with 420 it was too much


def test_last_peak_of_a_way_and_a_limit_is_foretold() -> None:
    steps = Steps(Ways(1000, 500))
    steps.run(4)
    assert steps.ways.predicted_bytes(_regions(420)) == 420
    steps.run(1, peak_bytes=990, planned_bytes=420)
    steps.run(1, peak_bytes=980, planned_bytes=420)

    assert steps.ways.predicted_bytes(_regions(420)) == 980
    assert steps.ways.predicted_bytes(_regions(400)) == 960


def test_peak_is_foretold_by_steps_of_the_same_way() -> None:
    steps = Steps(Ways(1000, 500, moving=Moving(500, 500, 200, 50)))
    steps.run(7, peak_bytes=980, planned_bytes=420)
    assert steps.ways.way is Way.REGIONS_AND_COPIES
    assert steps.ways.predicted_bytes(_regions(420)) == 980
    steps.run(1, peak_bytes=700, planned_bytes=420)

    assert steps.ways.predicted_bytes(_regions(420)) == 700


def test_peak_of_the_chosen_way_is_foretold_by_its_own_steps() -> None:
    """After the choice nobody counts peaks anew, so that they tell nothing."""
    steps = Steps(Ways(1000, 500, moving=Moving(500, 500, 200, 50)))
    steps.run(7, peak_bytes=980, planned_bytes=420)
    while not steps.ways.is_decided:
        steps.run(1, peak_bytes=960, planned_bytes=400)
    steps.run(3, planned_bytes=420)

    assert steps.ways.way is Way.REGIONS
    assert steps.ways.predicted_bytes(_regions(420)) == 980


def test_given_up() -> None:
    steps = Steps(Ways(100, 50))
    assert steps.run(4)[-1] is Way.REGIONS
    steps.ways.give_up()

    assert (steps.ways.way, steps.ways.is_decided) == (Way.OPS, True)


@pytest.mark.parametrize(
    ("peak_bytes", "limit_bytes"),
    [
        (1050, 450),  # 50 too many
        (1000, 500),
        (970, 500),  # 3 % are left
        (900, 550),  # half of what is left
        (450, 775),
        (449, 500),  # a counter that does not count saves
        (5000, 1),
    ],
)
def test_what_saved_values_may_take_follows_what_a_step_took(peak_bytes: int, limit_bytes: int) -> None:
    steps = Steps(Ways(1000, 500))
    steps.run(4, peak_bytes=999)  # of steps of single ops, which say nothing of it
    assert steps.ways.limit_bytes == 500
    steps.run(1, peak_bytes=peak_bytes)

    assert steps.ways.limit_bytes == limit_bytes


def test_steps_with_another_limit_are_timed_anew_and_three_are_tried() -> None:
    steps = Steps(Ways(1000, 500))
    steps.run(4)
    for limit_bytes in (490, 480, 470):
        steps.run(1, peak_bytes=1010)
        assert steps.ways.limit_bytes == limit_bytes
    steps.run(2, peak_bytes=1000)
    assert not steps.ways.is_decided
    steps.run(1, peak_bytes=1000)

    assert steps.ways.limit_bytes == 470
    assert (steps.ways.way, steps.ways.is_decided) == (Way.REGIONS, True)


def test_limit_is_not_raised_to_what_was_too_much() -> None:
    """One more recomputed block makes a difference of 100: 400 fit and 500 do not, though 6 % seem to be left."""
    steps = Steps(Ways(1000, 480))
    steps.run(4)
    took = []
    while not steps.ways.is_decided:
        planned_bytes = steps.ways.limit_bytes // 100 * 100
        took.append(planned_bytes)
        steps.run(1, peak_bytes=540 + planned_bytes, planned_bytes=planned_bytes)

    assert took[:2] == [400, 500]
    assert set(took[2:]) == {400}
    assert steps.ways.way is Way.REGIONS


def test_way_whose_steps_take_too_much_time_and_again_is_given_up() -> None:
    steps = Steps(Ways(1000, 500))
    steps.run(7, peak_bytes=1010)
    steps.run(1, peak_bytes=1010)

    assert (steps.ways.way, steps.ways.is_decided) == (Way.OPS, True)


def test_limit_is_raised_by_little_where_copies_leave() -> None:
    """The first saves, which are away, are back before the last values are recomputed."""
    steps = Steps(Ways(1000, 500, moving=Moving(500, 500, 200, 50)))
    steps.run(7, peak_bytes=1000)
    steps.run(1, peak_bytes=700)
    assert steps.ways.limit_bytes == 500  # the copies do not follow a schedule yet
    steps.run(1, peak_bytes=1020)
    assert steps.ways.limit_bytes == 480  # which does not matter to what is too much
    steps.run(3, peak_bytes=700)
    assert steps.ways.limit_bytes == 480
    steps.run(1, peak_bytes=700)
    assert steps.ways.limit_bytes == 530


def test_steps_that_were_not_whole_say_nothing() -> None:
    ways = Ways(1000, 500)
    steps = Steps(ways)
    for _ in range(6):
        steps.run(1)
        ways.begin_step(Moment(steps.now_s), 5000, was_whole=False)
    assert ways.way is Way.OPS
    steps.run(8, peak_bytes=1000)
    assert (ways.way, ways.is_decided) == (Way.REGIONS, True)
    steps.run(1, peak_bytes=1000)
    ways.begin_step(Moment(steps.now_s), 5000, was_whole=False)
    assert ways.limit_bytes == 500


def test_limit_is_lowered_after_the_choice_as_well() -> None:
    steps = Steps(Ways(1000, 500))
    steps.run(7, peak_bytes=1000)
    assert steps.ways.is_decided
    for peak_bytes, limit_bytes in [(1007, 493), (9000, 444), (1004, 440), (1050, 440)]:
        steps.run(1, peak_bytes=peak_bytes)
        assert steps.ways.limit_bytes == limit_bytes  # by a tenth at most, and three times
    assert steps.ways.way is Way.REGIONS


# Three ways


def test_three_ways_are_tried_one_after_the_other() -> None:
    ways = Ways(1000, 500, moving=Moving(500, 500, 200, 50))
    steps = Steps(ways)
    steps.seconds[Way.REGIONS_AND_COPIES] = 0.5

    assert steps.run(12) == [Way.OPS] * 3 + [Way.REGIONS] * 3 + [Way.REGIONS_AND_COPIES] * 6
    assert ways.limit_bytes == 500  # until steps show how much that leaves free
    assert ways.ratio == 200 / 500
    assert not ways.is_decided  # three of its steps decide as they go what leaves
    assert steps.run(1) == [Way.REGIONS_AND_COPIES]
    assert ways.is_decided


def test_what_was_learned_of_the_limit_holds_with_copies_as_well() -> None:
    ways = Ways(1000, 500, moving=Moving(500, 500, 200, 50))
    steps = Steps(ways)
    steps.run(4)
    steps.run(1, peak_bytes=1010)
    steps.run(3, peak_bytes=1000)

    assert ways.way is Way.REGIONS_AND_COPIES
    assert ways.limit_bytes == 490


@pytest.mark.parametrize("count", [36, 8])
def test_way_that_no_step_goes_is_given_up_for_the_next(count: int) -> None:
    ways = Ways(1000, 500, moving=Moving(500, 500, 200, 50))
    steps = Steps(ways)
    steps.run(3)
    went = steps.run(count, counts=False)
    if count < 36:
        ways.give_up()  # as after so many recorded steps
    assert went == [Way.REGIONS] * count
    assert steps.run(1) == [Way.REGIONS_AND_COPIES]
    assert not ways.is_decided
    steps.run(6)
    assert (ways.way, ways.is_decided) == (Way.REGIONS_AND_COPIES, True)


def test_copies_alone_are_tried_where_calls_do_not_keep_to_the_budget_without_them() -> None:
    ways = Ways(1000, None, moving=Moving(800, 700, 500, 50))
    steps = Steps(ways)

    assert steps.run(5) == [Way.OPS] * 3 + [Way.REGIONS_AND_COPIES] * 2
    assert (ways.limit_bytes, ways.ratio) == (800, 500 / 700)
