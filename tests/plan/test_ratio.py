"""`memkit.plan.ratio`: which saves leave, the seconds of copies, and the bytes of a backward."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import memkit
from memkit.plan import Action, Plan, plan_ratio
from memkit.plan import ratio as costs
from memkit.plan.plans import limit_of
from memkit.plan.ratio import Forecast, RatioSoFar, TimedSave, auto_ratio, check_ratio, step_with_copies_s
from memkit.profile import MemoryReport, SavedCategory, SavedTensorRecord, timed_saves
from memkit.transfer import Link

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
@given(sizes_of_saves, percents, held_saves)
def test_weights_spread_what_leaves_over_the_share_of_each_beginning(
    sizes: list[int], percent: int, held: frozenset[int]
) -> None:
    plan = plan_ratio(sizes, percent / 100, window_bytes=0, held=held, weights=[float(size) for size in sizes])

    seen = moved = largest = 0
    for index in sorted(set(range(len(sizes))) - held):
        seen, largest = seen + sizes[index], max(largest, sizes[index])
        moved += sizes[index] if index in leaving(plan) else 0
        assert percent * seen <= 100 * moved <= percent * seen + 100 * largest
    assert leaving(plan).isdisjoint(held)


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


def test_explain_tells_what_leaves_and_why() -> None:
    plan = plan_ratio([3 * MIB, MIB // 2, 12 * MIB, 100 * MIB], 0.2, window_bytes=MIB, held=frozenset({3}))

    rows = [line.split(maxsplit=6) for line in plan.explain().splitlines()]
    assert rows[2][2:] == ["offload", "2", "3.50", "MiB", "saved early: the ratio moves it"]
    assert rows[3][2:] == ["keep", "1", "12.00", "MiB", "saved late: the ratio or the window keeps it"]
    assert rows[4][2:] == ["keep", "1", "100.00", "MiB", "something else keeps it alive"]
    assert plan.explain().splitlines()[5:] == ["kept: 12.00 MiB, offloaded: 3.50 MiB, recomputed: 0 bytes"]
    assert [str(save) for save in plan.saves[:2]] == ["offload save 0: 3.00 MiB", "offload save 1: 512.00 KiB"]
    assert str(plan) == "keep 12.00 MiB, offload 3.50 MiB of 15.50 MiB, in 4 storages"


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

    assert so_far.window_bytes == so_far.limit_bytes == 60


def test_plan_that_is_taken_up_late_is_followed_in_its_share() -> None:
    """Three saves have left by no plan; the plan lets four leave."""
    so_far, plan = RatioSoFar(1.0), plan_ratio([10] * 8, 0.5, window_bytes=0)
    for _ in range(3):
        so_far.decide(10)
    so_far.follow(plan, is_late=True)

    assert [so_far.decide(10, place) for place in range(3, 8)] == [Action.OFFLOAD, *[Action.KEEP] * 4]


# Ratios


@pytest.mark.parametrize("ratio", [0, 1, 0.25, Fraction(1, 4), np.float64(0.25), np.float32(0.25), np.int64(1)], ids=type)
def test_any_real_number_is_a_ratio(ratio: float) -> None:
    checked = check_ratio(ratio, where="offload_ratio")

    assert (type(checked), checked) == (float, ratio)


@pytest.mark.parametrize(
    ("ratio", "kind", "message"),
    [
        *((ratio, TypeError, f"0 to 1; found {ratio!r} ({type(ratio).__name__})") for ratio in (True, "0.5", None, 0.5j)),
        *(
            (ratio, ValueError, f"0 (move nothing) to 1 (move everything); found {float(ratio)}")
            for ratio in (math.nan, -0.1, 1.1, math.inf, -math.inf, 2, np.float64(7))
        ),
    ],
)
def test_other_ratios_are_refused(ratio: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        check_ratio(ratio, where="offload_ratio")

    assert str(error.value) == f"offload_ratio must be {'a number ' * (kind is TypeError)}from {message}"


FAST = Link(d2h_bytes_per_s=math.inf, h2d_bytes_per_s=math.inf)
SLOW = Link(d2h_bytes_per_s=50, h2d_bytes_per_s=25)
LIMP = Link(d2h_bytes_per_s=10, h2d_bytes_per_s=10)
FORWARD_S, BACKWARD_S = 10.0, 20.0


def save(num_bytes: int, saved_at_s: float, needed_at_s: float, *, is_held: bool = False) -> TimedSave:
    return TimedSave(num_bytes=num_bytes, saved_at_s=saved_at_s, needed_at_s=needed_at_s, is_held=is_held)


def chain(num_saves: int, num_bytes: int = 100) -> list[TimedSave]:
    """Saves at even distances, needed in reverse order."""
    forward_s, backward_s = FORWARD_S / num_saves, BACKWARD_S / num_saves
    return [save(num_bytes, index * forward_s, (num_saves - 1 - index) * backward_s) for index in range(num_saves)]


def late_s(saves: list[TimedSave], leaving: set[int], link: Link, limit_bytes: float) -> float:
    step_s = step_with_copies_s(saves, leaving, forward_s=FORWARD_S, backward_s=BACKWARD_S, link=link, limit_bytes=limit_bytes)
    return step_s - FORWARD_S - BACKWARD_S


@st.composite
def steps(draw: st.DrawFn) -> list[TimedSave]:
    """Draw the saves of a step; the backward of most asks for them in reverse."""
    sizes = draw(st.lists(st.integers(0, 100), max_size=8))
    saved = sorted(draw(st.floats(0, FORWARD_S)) for _ in sizes)
    needed = [draw(st.floats(0, BACKWARD_S)) for _ in sizes]
    if draw(st.integers(0, 3)):
        needed.sort(reverse=True)
    return [
        save(size, saved_at_s, needed_at_s, is_held=draw(st.integers(0, 5)) == 0)
        for size, saved_at_s, needed_at_s in zip(sizes, saved, needed, strict=True)
    ]


links = st.builds(
    Link,
    d2h_bytes_per_s=st.floats(1, 1000),
    h2d_bytes_per_s=st.floats(1, 1000),
    latency_s=st.sampled_from([0.0, 0.1, 2.0]),
)


def moved_bytes(saves: list[TimedSave], leaving: set[int], limit_bytes: int) -> int:
    """Return the bytes that have left when the forward ends: at each save the oldest, for as long as it is too much."""
    waiting: list[int] = []
    live = moved = 0
    for index, item in enumerate(saves):
        if not item.is_held:
            live += item.num_bytes
            waiting += [item.num_bytes] if index in leaving else []
        while waiting and live > limit_bytes:
            live -= waiting[0]
            moved += waiting.pop(0)
    return moved


OUT_ONLY, BACK_ONLY = (Link(d2h_bytes_per_s=50, h2d_bytes_per_s=math.inf), Link(d2h_bytes_per_s=math.inf, h2d_bytes_per_s=50))
LATE = Link(d2h_bytes_per_s=math.inf, h2d_bytes_per_s=math.inf, latency_s=2)
HELD = [save(1000, 0, 19, is_held=True), save(1000, 9, 0, is_held=True)]
ALL = {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("saves", "leaving", "link", "limit_bytes", "late"),
    [
        (chain(5), set(), SLOW, 0, 0),
        (chain(5), ALL, FAST, 150, 0),
        # 0 is copied from 1 to 3. At 2, when 1 is saved, there is room for one: the forward waits from 2 to 3. Copies back take
        # 4 s.
        ([save(100, 1, 15), save(100, 2, 0)], {0}, SLOW, 100, 1 + 4),
        ([save(100, 1, 5)], {0}, SLOW, 50, 2 + 4),  # larger than the limit: it leaves at once
        # Copies of 2 s, saves 1 s apart: each save waits for the copy of the one before, and 3 itself stays.
        ([save(100, index, 19 - index) for index in range(4)], ALL, OUT_ONLY, 100, 3),
        # There is no room for 0 beside 1, which is used at 3; at 5, when 0 is needed, its copy begins.
        ([save(100, 1, 5), save(100, 9, 3)], {0}, SLOW, 100, 4),
        # 1 is fetched at 2, when 2 is done with, and 0 not before it is needed: at 9, and 4 s late by then.
        ([save(100, 0, 9), save(100, 3, 2), save(100, 9, 0)], {0, 1}, SLOW, 100, 8),
        # 0 is fetched from 3, when 1 is needed and 2 is done with, to 7, which is 2 s late.
        ([save(100, 1, 5), save(100, 8, 3), save(100, 9, 1)], {0}, SLOW, 200, 2),
        # There is room for 0 and 1 from 3 on: 1 is back at 7, 4 s late, and 0, now needed at 8, at 11, 3 s late.
        ([save(100, 0, 4), save(100, 3, 3), save(300, 9, 2)], {0, 1}, SLOW, 300, 7),
        (chain(5), ALL, LIMP, 500, 0),  # what fits never moves
        (chain(5), ALL, LIMP, 499, 2),  # 0 is out at 10, 4 is saved at 8
        ([save(1000, 9, 0)], {0}, SLOW, 1000, 0),  # the last copies may go on in the backward
        ([save(1, 1, 15), save(1, 5, 10)], {0, 1}, LATE, 0, 4 + 4),  # each copy takes its latency
        ([save(100, 1, 5)], {0}, BACK_ONLY, 50, 2),
        ([HELD[0], save(100, 1, 15), HELD[1]], {0, 1, 2}, SLOW, 100, 0),  # what is held neither moves nor fills
    ],
)
def test_copies_by_hand(saves: list[TimedSave], leaving: set[int], link: Link, limit_bytes: int, late: int) -> None:
    assert late_s(saves, leaving, link, limit_bytes) == late


@settings(max_examples=75)
@given(steps(), st.sets(st.integers(0, 7)), links, st.integers(0, 500))
def test_no_step_is_faster_than_its_computation_and_its_copies(
    saves: list[TimedSave], leaving: set[int], link: Link, limit_bytes: int
) -> None:
    moved = moved_bytes(saves, leaving, limit_bytes)
    least_s = max(FORWARD_S, moved / link.d2h_bytes_per_s) + max(BACKWARD_S, moved / link.h2d_bytes_per_s)

    step_s = FORWARD_S + BACKWARD_S + late_s(saves, leaving, link, limit_bytes)

    assert step_s >= least_s * (1 - 1e-9)


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    """A report with three saves of 16 KiB, of which the first is the input, and without times."""
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()), torch.empty(64, 64)
    return memkit.profile_memory(model, batch, print_table=False)


def with_times(report: MemoryReport) -> MemoryReport:
    saved = tuple(
        dataclasses.replace(record, saved_at_s=0.25 * index, needed_at_s=1.5 - 0.25 * index)
        for index, record in enumerate(report.saved)
    )
    root = dataclasses.replace(report.modules[0], forward_s=1.0, backward_s=2.0)
    return dataclasses.replace(report, saved=saved, modules=(root, *report.modules[1:]))


def test_timed_saves_are_those_of_the_report(report: MemoryReport) -> None:
    timed = with_times(report)
    first, second, *rest = timed.saved

    def of(*saved: SavedTensorRecord, min_bytes: int = 0) -> list[TimedSave]:
        return timed_saves(dataclasses.replace(timed, saved=saved), min_bytes)

    assert of(*timed.saved) == [
        save(16384, 0.0, 1.5, is_held=True),  # the input: the caller holds it
        *(save(16384, 0.25 * index, 1.5 - 0.25 * index) for index in (1, 2, 3)),
    ]
    larger = dataclasses.replace(second, storage_bytes=16385)
    assert [item.num_bytes for item in of(first, larger, *rest, min_bytes=16385)] == [16385]  # what is small is left out
    cast = dataclasses.replace(second, category=SavedCategory.PARAM_CAST)
    assert [item.saved_at_s for item in of(first, cast, *rest)] == [0.0, 0.5, 0.75]  # and parameters in another dtype
    unasked = dataclasses.replace(second, needed_at_s=None)
    assert [item.needed_at_s for item in of(first, unasked)] == [1.5, 2.0]  # what is never asked for, at the end
    with pytest.raises(ValueError, match=r"^the report has no times: profile on a GPU, with backward=True"):
        timed_saves(report, 0)


def auto(saves: list[TimedSave], link: Link, *, window_bytes: int | None = None, tolerance: float = 0.01) -> float:
    with mock.patch.object(costs, "HIDDEN", 1 + tolerance):
        return auto_ratio(saves, forward_s=FORWARD_S, backward_s=BACKWARD_S, link=link, window_bytes=window_bytes)


def time_at(saves: list[TimedSave], ratio: float, link: Link, window_bytes: int) -> float:
    """Return the seconds of a step at a ratio, over the plain ones."""
    held = frozenset(index for index, item in enumerate(saves) if item.is_held)
    plan = plan_ratio([item.num_bytes for item in saves], ratio, window_bytes=window_bytes, held=held)
    return 1 + late_s(saves, leaving(plan), link, plan.limit_bytes) / (FORWARD_S + BACKWARD_S)


def test_auto_ratio_by_hand() -> None:
    # Ten saves of 100 bytes, 1 s apart in the forward and 2 s in the backward; copies of 1.5 s, which hide in the latter. When
    # the last is saved, at 9 s, all that leave have to be gone: six are, seven would be at 10.5. A window of 400 bytes has room
    # for four in any case, so that never more than six leave.
    link = Link(d2h_bytes_per_s=100 / 1.5, h2d_bytes_per_s=100 / 1.5)

    assert auto(chain(10), link, window_bytes=100) == 0.6
    assert auto(chain(10), link, window_bytes=100, tolerance=0.06) == 0.7  # 1.5 s of 30
    assert auto(chain(10), link, window_bytes=400) == 1.0
    for saves in ([], [save(100, 0, 0, is_held=True)], [save(0, 0, 0), save(0, 1, 0)]):  # nothing can move
        assert auto(saves, FAST) == 0.0


def test_window_is_twice_the_largest_that_may_move_by_default() -> None:
    saves = [save(100, 0, 20), *chain(200, num_bytes=10), save(5000, 10, 0, is_held=True)]
    link = Link(d2h_bytes_per_s=100, h2d_bytes_per_s=100)

    ratio = auto(saves, link)

    assert ratio == auto(saves, link, window_bytes=200)
    assert auto(saves, link, window_bytes=100) < ratio < auto(saves, link, window_bytes=300)


@settings(max_examples=50)
@given(steps(), links, st.integers(0, 300), st.sampled_from([0.0, 0.01, 0.2]))
def test_auto_ratio_is_the_last_that_is_within_the_tolerance(
    saves: list[TimedSave], link: Link, window_bytes: int, tolerance: float
) -> None:
    movable = [item.num_bytes for item in saves if not item.is_held]
    assume(sum(movable) > 0)
    ratios = [sum(movable[: count + 1]) / sum(movable) for count in range(len(movable))]

    ratio = auto(saves, link, window_bytes=window_bytes, tolerance=tolerance)

    assert time_at(saves, ratio, link, window_bytes) <= 1 + tolerance + 1e-12
    larger = [choice for choice in ratios if choice > ratio]
    assert ratio == 1.0 or time_at(saves, larger[0], link, window_bytes) > 1 + tolerance - 1e-12


records = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 200), st.booleans()), min_size=1, max_size=12)


def _forecast(backward: list[tuple[int, int, bool]], *, limit_bytes: int = 0) -> Forecast:
    sizes, working, stays = zip(*backward, strict=True)
    return Forecast(sizes, working, stays, limit_bytes=limit_bytes)


def _played(backward: list[tuple[int, int, bool]]) -> int:
    """Return the peak of a backward that fetches each record when it is asked for: each operator makes as much as it reads."""
    live = {place for place, (_, _, stays) in enumerate(backward) if stays}
    peak = 0
    for place, (size, working, _) in enumerate(backward):
        live.add(place)
        peak = max(peak, working + size + sum(backward[other][0] for other in live))
        live.discard(place)
    return peak


@given(records, st.integers(0, 500))
def test_peak_has_room_for_what_the_backward_begins_with(backward: list[tuple[int, int, bool]], limit_bytes: int) -> None:
    found = _forecast(backward, limit_bytes=limit_bytes).peak_bytes

    assert found == max(limit_bytes + backward[0][1], _played(backward))


@given(records, st.data())
def test_level_is_the_most_on_the_way(backward: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    now = data.draw(st.integers(0, len(backward) - 1))
    until = data.draw(st.integers(0, len(backward) + 2))
    live_bytes = data.draw(st.integers(0, 600)) + sum(size for size, _, _ in backward[now : until + 1])

    found = _forecast(backward).level_bytes(now, until, live_bytes)

    wanted = live_bytes
    levels = []
    for place in range(now + 1, min(until, len(backward) - 1) + 1):
        if place >= now + 2:  # what was asked for two places ago is free
            wanted -= backward[place - 2][0]
        levels.append(wanted + backward[place][0] + backward[place][1])
    assert found == max(levels, default=live_bytes)
