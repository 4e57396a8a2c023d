"""`memkit.plan.ratio` and `memkit.plan.plans`: which saves leave, and what a plan says of itself."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkit.plan import Action, Plan, RatioSoFar, check_ratio, plan_ratio
from memkit.plan.plans import limit_of

MIB = 2**20

sizes_of_saves = st.lists(st.integers(0, 60), max_size=12)
percents = st.integers(0, 100)
windows = st.integers(0, 200)
held_saves = st.frozensets(st.integers(0, 11))
units = st.sampled_from([1, 1000, MIB])


def leaving(plan: Plan) -> set[int]:
    return {index for index, action in enumerate(plan.actions) if action is Action.OFFLOAD}


def expected_to_leave(sizes: list[int], percent: int, window: int, held: frozenset[int]) -> set[int]:
    """Try every beginning of the saves that may move, in exact integers."""
    movable = [index for index in range(len(sizes)) if index not in held]
    seen = sum(sizes[index] for index in movable)
    beginnings = [movable[:length] for length in range(len(movable) + 1)]
    enough = next(part for part in beginnings if 100 * sum(sizes[index] for index in part) >= percent * seen)
    fits_window = next(part for part in beginnings if seen - sum(sizes[index] for index in part) <= window)
    return set(enough if len(enough) < len(fits_window) else fits_window)


@settings(max_examples=100)
@given(sizes_of_saves, percents, windows, held_saves, units)
def test_leaves_what_brute_force_finds(sizes: list[int], percent: int, window: int, held: frozenset[int], unit: int) -> None:
    plan = plan_ratio([unit * size for size in sizes], percent / 100, window_bytes=unit * window, held=held)

    assert leaving(plan) == expected_to_leave(sizes, percent, window, held)


@settings(max_examples=50)
@given(sizes_of_saves, percents, windows, held_saves)
def test_totals_are_those_of_the_actions(sizes: list[int], percent: int, window: int, held: frozenset[int]) -> None:
    plan = plan_ratio(sizes, percent / 100, window_bytes=window, held=held)

    movable = set(range(len(sizes))) - held
    assert leaving(plan) <= movable
    assert plan.saved_bytes == sum(sizes[index] for index in movable)
    assert plan.offload_bytes == sum(sizes[index] for index in leaving(plan))
    assert plan.kept_bytes == sum(sizes[index] for index in movable - leaving(plan))
    assert [(save.index, save.num_bytes) for save in plan.saves] == list(enumerate(sizes))
    assert {save.index for save in plan.saves if save.is_held} == held & set(range(len(sizes)))
    assert plan.window_bytes == window
    assert plan.predicted_peak_bytes == min(plan.saved_bytes, plan.limit_bytes)
    assert plan.ratio == percent / 100


@settings(max_examples=50)
@given(sizes_of_saves, percents, windows, held_saves)
def test_what_stays_fits_the_limit(sizes: list[int], percent: int, window: int, held: frozenset[int]) -> None:
    plan = plan_ratio(sizes, percent / 100, window_bytes=window, held=held)

    assert plan.kept_bytes <= plan.limit_bytes


@settings(max_examples=50)
@given(sizes_of_saves, st.floats(0, 1), st.floats(0, 1), windows, held_saves)
def test_larger_ratio_never_moves_less(
    sizes: list[int], first: float, second: float, window: int, held: frozenset[int]
) -> None:
    less, more = (plan_ratio(sizes, ratio, window_bytes=window, held=held) for ratio in sorted((first, second)))

    assert leaving(less) <= leaving(more)


def test_shortest_beginning_that_reaches_the_share_leaves() -> None:
    assert leaving(plan_ratio([30, 20, 10, 40], 0.5, window_bytes=0)) == {0, 1}
    assert leaving(plan_ratio([30, 20, 10, 40], 0.51, window_bytes=0)) == {0, 1, 2}


@pytest.mark.parametrize("num_saves", [10, 100, pytest.param(1000, marks=pytest.mark.full)])
def test_rounding_of_the_ratio_chooses_nothing_more(num_saves: int) -> None:
    sizes = [7 * MIB] * num_saves

    chosen = [len(leaving(plan_ratio(sizes, count / num_saves, window_bytes=0))) for count in range(num_saves + 1)]

    assert chosen == list(range(num_saves + 1))


def test_latest_saves_stay_as_many_as_the_window_holds() -> None:
    assert leaving(plan_ratio([30] * 5, 1.0, window_bytes=60)) == {0, 1, 2}
    assert leaving(plan_ratio([30] * 5, 1.0, window_bytes=59)) == {0, 1, 2, 3}


def test_window_holds_what_is_kept_as_well() -> None:
    assert leaving(plan_ratio([30] * 5, 0.8, window_bytes=60)) == {0, 1, 2}
    assert leaving(plan_ratio([30] * 5, 0.6, window_bytes=60)) == {0, 1, 2}
    assert leaving(plan_ratio([30] * 5, 0.4, window_bytes=60)) == {0, 1}


def test_held_saves_neither_leave_nor_count() -> None:
    plan = plan_ratio([500, 10, 10, 500, 10, 10], 0.5, window_bytes=0, held=frozenset({0, 3}))

    assert leaving(plan) == {1, 2}
    assert (plan.saved_bytes, plan.offload_bytes, plan.kept_bytes, plan.limit_bytes) == (40, 20, 20, 20)


@pytest.mark.parametrize("window_bytes", [0, 25, 1000])
def test_ratio_0_moves_nothing(window_bytes: int) -> None:
    assert leaving(plan_ratio([10, 20, 30], 0.0, window_bytes=window_bytes)) == set()


def test_ratio_1_without_a_window_moves_everything() -> None:
    plan = plan_ratio([10, 20, 30], 1.0, window_bytes=0)

    assert leaving(plan) == {0, 1, 2}
    assert (plan.offload_bytes, plan.kept_bytes, plan.limit_bytes) == (60, 0, 0)


def test_nothing_saved_is_a_plan() -> None:
    plan = plan_ratio([], 0.5, window_bytes=100)

    assert (plan.actions, plan.saved_bytes, plan.offload_bytes) == ((), 0, 0)


@pytest.mark.parametrize(
    ("ratio", "window_bytes", "limit_bytes"),
    [
        (0.0, 200, 1050),  # all, and a quarter of the window
        (0.3, 200, 750),
        (0.3, 203, 750),  # a quarter is rounded down
        (0.9, 100, 125),  # nine tenths of 1000 are 900, whatever floats say
        (0.85, 200, 200),  # 150 and 50: just the window
        (0.9, 200, 200),  # the window is more than 100 and 50
        (0.3, 40, 715),  # a 64th of what is saved is more than a quarter of the window
        (0.3, 12, 712),  # and more than the window
        (1.0, 203, 203),
        (1.0, 0, 0),
    ],
)
def test_limit_is_what_the_ratio_keeps_and_a_part_of_the_window(ratio: float, window_bytes: int, limit_bytes: int) -> None:
    assert limit_of(1000, ratio, window_bytes) == limit_bytes
    assert plan_ratio([100] * 10, ratio, window_bytes=window_bytes).limit_bytes == limit_bytes


def test_explain_lists_every_save_and_the_totals() -> None:
    plan = plan_ratio([3 * MIB, MIB // 2, 12 * MIB, 100 * MIB], 0.2, window_bytes=MIB, held=frozenset({3}))

    assert plan.explain() == (
        "  save        size  action\n"
        "------  ----------  --------\n"
        "     0    3.00 MiB  offload\n"
        "     1    0.50 MiB  offload\n"
        "     2   12.00 MiB  keep\n"
        "     3  100.00 MiB  held\n"
        "saved: 15.50 MiB\n"
        "kept: 12.00 MiB\n"
        "offloaded: 3.50 MiB"
    )


def test_each_save_says_why() -> None:
    plan = plan_ratio([30, 20, 40, 10], 0.5, window_bytes=0, held=frozenset({3}))

    reasons = {save.index: save.reason for save in plan.saves}
    assert reasons[3] == "something else keeps it alive"
    assert len({reasons[0], reasons[2], reasons[3]}) == 3
    assert [str(save) for save in plan.saves[:2]] == ["offload save 0: 30 bytes", "offload save 1: 20 bytes"]
    assert str(plan) == "keep 40 bytes, offload 50 bytes of 90 bytes, in 4 storages"


def test_plan_of_a_ratio_can_be_edited_but_for_what_was_not_recorded() -> None:
    plan = plan_ratio([30, 20, 10], 0.5, window_bytes=0)

    edited = plan.with_action(0, Action.KEEP).with_action(2, Action.OFFLOAD)

    assert edited.actions == (Action.KEEP, Action.KEEP, Action.OFFLOAD)
    assert (edited.kept_bytes, edited.offload_bytes, edited.saved_bytes) == (50, 10, 60)
    assert [save.reason for save in edited.saves][::2] == ["asked for", "asked for"]
    with pytest.raises(ValueError, match="save 1 cannot be recomputed: no op was recorded"):
        plan.with_action(1, Action.RECOMPUTE)


# Save by save


asked_actions = st.sampled_from([None, Action.KEEP, Action.OFFLOAD])
saves_and_words = st.lists(st.tuples(st.integers(0, 60), asked_actions), max_size=12)


@settings(max_examples=50)
@given(saves_and_words, percents, windows)
def test_ratio_is_kept_so_far(saves: list[tuple[int, Action | None]], percent: int, window: int) -> None:
    so_far, moved = RatioSoFar(percent / 100, window), 0
    for index, (size, asked) in enumerate(saves):
        seen = sum(earlier for earlier, _ in saves[: index + 1])
        action = so_far.decide(size, None, asked)

        assert action is (asked or (Action.OFFLOAD if moved < percent / 100 * seen else Action.KEEP))
        moved += size if action is Action.OFFLOAD else 0
        assert so_far.offload_bytes == moved
        assert so_far.kept_bytes == seen - moved + so_far.stays_more_bytes
        assert so_far.limit_bytes == max(limit_of(seen, percent / 100, window) + so_far.stays_more_bytes, window)


@settings(max_examples=50)
@given(sizes_of_saves, percents, windows, st.lists(asked_actions, min_size=12, max_size=12))
def test_plan_is_followed_save_by_save(sizes: list[int], percent: int, window: int, words: list[Action | None]) -> None:
    plan = plan_ratio(sizes, percent / 100, window_bytes=window)
    so_far = RatioSoFar(percent / 100)
    so_far.follow(plan)

    actions = [so_far.decide(size, place, words[place]) for place, size in enumerate(sizes)]

    assert actions == [asked or action for asked, action in zip(words, plan.actions, strict=False)]
    kept = sum(size for size, action in zip(sizes, actions, strict=True) if action is Action.KEEP)
    assert so_far.kept_bytes == kept
    assert so_far.offload_bytes == plan.offload_bytes
    assert so_far.window_bytes == window
    assert so_far.limit_bytes == max(plan.limit_bytes + kept - plan.kept_bytes, window)


def test_window_without_a_plan_is_twice_the_largest() -> None:
    so_far = RatioSoFar(0.5)
    for size in (10, 30, 20):
        so_far.decide(size)

    assert so_far.window_bytes == 60
    assert so_far.limit_bytes == 60


def test_plan_that_is_taken_up_late_is_followed_in_its_share() -> None:
    """Three saves have left by no plan; the plan lets four leave."""
    so_far, plan = RatioSoFar(1.0), plan_ratio([10] * 8, 0.5, window_bytes=0)
    for _ in range(3):
        so_far.decide(10)
    so_far.follow(plan, is_late=True)

    assert [so_far.decide(10, place) for place in range(3, 8)] == [Action.OFFLOAD, *[Action.KEEP] * 4]


# Ratios


@pytest.mark.parametrize(
    "ratio",
    [0, 1, 0.25, Fraction(1, 4), np.float64(0.25), np.float32(0.25), np.int64(1)],
    ids=lambda ratio: type(ratio).__name__,
)
def test_any_real_number_is_a_ratio(ratio: float) -> None:
    checked = check_ratio(ratio, where="offload_ratio")

    assert type(checked) is float
    assert checked == ratio


@pytest.mark.parametrize(
    ("ratio", "found"),
    [
        (True, "True (bool)"),
        (False, "False (bool)"),
        ("0.5", "'0.5' (str)"),
        (None, "None (NoneType)"),
        (0.5j, "0.5j (complex)"),
        ([0.5], "[0.5] (list)"),
    ],
)
def test_ratio_of_another_type_is_refused(ratio: object, found: str) -> None:
    with pytest.raises(TypeError) as error:
        check_ratio(ratio, where="the first ratio")

    assert str(error.value) == f"the first ratio must be a number from 0 to 1; found {found}"


@pytest.mark.parametrize(
    ("ratio", "found"),
    [
        (math.nan, "nan"),
        (-0.1, "-0.1"),
        (1.1, "1.1"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (2, "2.0"),
        (np.float64(7), "7.0"),
    ],
)
def test_ratio_out_of_range_is_refused(ratio: float, found: str) -> None:
    with pytest.raises(ValueError) as error:
        check_ratio(ratio, where="offload_ratio")

    assert str(error.value) == f"offload_ratio must be from 0 (move nothing) to 1 (move everything); found {found}"
