"""`memkit.plan.ratio`: seconds of copies, worked by hand, and what holds for any step."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import memkit
from memkit.plan import Action, TimedSave, auto_ratio, plan_ratio, roofline_s, simulate_lanes
from memkit.plan import ratio as costs
from memkit.plan.ratio import StepTime
from memkit.profile import MemoryReport, SavedCategory, timed_saves
from memkit.transfer import Link

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


def simulated(saves: list[TimedSave], offloaded: set[int], link: Link, limit_bytes: int | None = None) -> tuple[float, float]:
    time = simulate_lanes(saves, offloaded, forward_s=FORWARD_S, backward_s=BACKWARD_S, link=link, limit_bytes=limit_bytes)
    return time.forward_s, time.backward_s


@st.composite
def steps(draw: st.DrawFn, *, turn: bool = False) -> list[TimedSave]:
    """Draw the saves of a step; the backward of most, or with `turn` of all, asks for them in reverse."""
    sizes = draw(st.lists(st.integers(0, 100), max_size=8))
    saved = sorted(draw(st.floats(0, FORWARD_S)) for _ in sizes)
    needed = [draw(st.floats(0, BACKWARD_S)) for _ in sizes]
    if turn or draw(st.integers(0, 3)):
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
choices = st.sets(st.integers(0, 7))
limits = st.none() | st.integers(0, 500)


def moved_bytes(saves: list[TimedSave], offloaded: set[int], limit_bytes: int | None) -> int:
    """Return the bytes that have left when the forward ends: at each save the oldest, for as long as it is too much."""
    waiting: list[int] = []
    live = moved = 0
    for index, item in enumerate(saves):
        if not item.is_held:
            live += item.num_bytes
            waiting += [item.num_bytes] if index in offloaded else []
        while waiting and (limit_bytes is None or live > limit_bytes):
            live -= waiting[0]
            moved += waiting.pop(0)
    return moved


def test_roofline_is_the_longer_of_work_and_copies_in_each_half() -> None:
    link = Link(d2h_bytes_per_s=50, h2d_bytes_per_s=25, latency_s=9)

    assert roofline_s(forward_s=4, backward_s=8, out_bytes=100, back_bytes=100, link=link) == 4 + 8
    assert roofline_s(forward_s=4, backward_s=8, out_bytes=300, back_bytes=100, link=link) == 6 + 8
    assert roofline_s(forward_s=4, backward_s=8, out_bytes=100, back_bytes=300, link=link) == 4 + 12
    assert roofline_s(forward_s=4, backward_s=8, out_bytes=300, back_bytes=300, link=link) == 6 + 12


def test_step_is_forward_and_backward() -> None:
    assert StepTime(forward_s=1.5, backward_s=2.25).step_s == 3.75


def test_step_without_offload_takes_its_plain_time() -> None:
    assert simulated(chain(5), set(), SLOW, 0) == (FORWARD_S, BACKWARD_S)
    assert simulated([], {0}, SLOW, 0) == (FORWARD_S, BACKWARD_S)


@pytest.mark.parametrize("limit_bytes", [None, 0, 150, 10**6])
def test_infinite_link_costs_nothing(limit_bytes: int | None) -> None:
    assert simulated(chain(5), set(range(5)), FAST, limit_bytes) == (FORWARD_S, BACKWARD_S)


def test_forward_waits_for_room() -> None:
    # 0 is copied from 1 to 3. At 2, when 1 is saved, there is room for one: the forward waits from 2 to 3.
    saves = [save(100, 1, 15), save(100, 2, 0)]

    forward_s, _ = simulated(saves, {0}, SLOW, 100)

    assert forward_s == FORWARD_S + 1


def test_forward_that_waited_stays_late() -> None:
    saves = [save(100, 1, 15), save(100, 2, 0), save(0, 9, 0)]

    forward_s, _ = simulated(saves, {0}, SLOW, 100)

    assert forward_s == FORWARD_S + 1


def test_save_larger_than_the_limit_leaves_at_once_and_is_back_for_its_use() -> None:
    assert simulated([save(100, 1, 5)], {0}, SLOW, 50) == (FORWARD_S + 2, BACKWARD_S + 4)


def test_waits_of_the_forward_add_up() -> None:
    # Copies of 2 s, saves 1 s apart. 0 is copied from 0 to 2, 1 from 2 to 4, and 2 from 4 to 6: 1 is saved at 1 and waits until
    # 2; 2, saved at 3 then, waits until 4; 3, saved at 5, until 6. 3 itself stays.
    saves = [save(100, index, 19 - index) for index in range(4)]

    forward_s, _ = simulated(saves, {0, 1, 2, 3}, Link(d2h_bytes_per_s=50, h2d_bytes_per_s=math.inf), 100)

    assert forward_s == FORWARD_S + 3


def test_backward_waits_for_what_comes_late() -> None:
    # Copies back take 4 s. There is no room for 0 beside 1, which is used at 3; at 5, when 0 is needed, its copy begins.
    saves = [save(100, 1, 5), save(100, 9, 3)]

    assert simulated(saves, {0}, SLOW, 100) == (FORWARD_S, BACKWARD_S + 4)


def test_what_came_back_fills_the_device_until_it_was_used() -> None:
    # 1 is fetched at 2, when 2 is done with, and 0 not before it is needed: at 9, and 4 s late by then.
    saves = [save(100, 0, 9), save(100, 3, 2), save(100, 9, 0)]

    assert simulated(saves, {0, 1}, SLOW, 100) == (FORWARD_S, BACKWARD_S + 4 + 4)


def test_copies_back_are_in_the_order_of_need() -> None:
    # 0 is back at 4, 3 s late, and 1 at 8.
    assert simulated([save(100, 0, 1), save(100, 5, 15)], {0, 1}, SLOW, None) == (FORWARD_S, BACKWARD_S + 3)


def test_backward_fetches_ahead_where_there_is_room() -> None:
    # As above, and 2 makes room: 0 is fetched from 3, when 1 is needed and 2 is done with, to 7, which is 2 s late.
    saves = [save(100, 1, 5), save(100, 8, 3), save(100, 9, 1)]

    assert simulated(saves, {0}, SLOW, 200) == (FORWARD_S, BACKWARD_S + 2)


def test_copies_back_are_one_after_the_other() -> None:
    # With a limit there is room for 0 and 1 from 3 on, when 1 is needed and 2 is done with: 1 is back at 7, 4 s late, and 0,
    # now needed at 8, at 11, 3 s late. Without, copies begin at 0: 1 is back at 4, 1 s late, and 0, now needed at 5, at 8.
    saves = [save(100, 0, 4), save(100, 3, 3), save(300, 9, 2)]

    assert simulated(saves, {0, 1}, SLOW, 300) == (FORWARD_S, BACKWARD_S + 4 + 3)
    assert simulated(saves, {0, 1}, SLOW, None) == (FORWARD_S, BACKWARD_S + 1 + 3)


def test_without_a_limit_fetching_begins_with_the_backward() -> None:
    assert simulated([save(100, 1, 5)], {0}, SLOW, None) == (FORWARD_S, BACKWARD_S)
    assert simulated([save(100, 1, 3)], {0}, SLOW, None) == (FORWARD_S, BACKWARD_S + 1)


def test_without_a_limit_the_forward_ends_with_the_last_copy() -> None:
    assert simulated([save(100, 8, 15)], {0}, SLOW, None) == (FORWARD_S, BACKWARD_S)
    assert simulated([save(100, 9, 15)], {0}, SLOW, None) == (FORWARD_S + 1, BACKWARD_S)
    assert simulated([save(100, 9, 15), save(100, 9, 12)], {0, 1}, SLOW, None) == (FORWARD_S + 3, BACKWARD_S)


def test_what_fits_the_limit_never_moves() -> None:
    assert simulated(chain(5), {0, 1, 2, 3, 4}, SLOW, 500) == (FORWARD_S, BACKWARD_S)
    assert simulated(chain(5), {0, 1, 2, 3, 4}, LIMP, 500) == (FORWARD_S, BACKWARD_S)
    assert simulated(chain(5), {0, 1, 2, 3, 4}, LIMP, 499) == (FORWARD_S + 2, BACKWARD_S)  # 0 is out at 10, 4 is saved at 8


def test_copies_of_the_last_saves_may_go_on_in_the_backward() -> None:
    assert simulated([save(1000, 9, 0)], {0}, SLOW, 1000) == (FORWARD_S, BACKWARD_S)


def test_each_copy_takes_its_latency() -> None:
    link = Link(d2h_bytes_per_s=math.inf, h2d_bytes_per_s=math.inf, latency_s=2)

    assert simulated([save(1, 9, 0)], {0}, link, None) == (FORWARD_S + 1, BACKWARD_S + 2)
    assert simulated([save(1, 9, 0), save(1, 9, 0)], {0, 1}, link, None) == (FORWARD_S + 3, BACKWARD_S + 4)


def test_directions_have_their_own_speeds() -> None:
    saves = [save(100, 10, 0)]

    assert simulated(saves, {0}, Link(d2h_bytes_per_s=50, h2d_bytes_per_s=math.inf), None) == (FORWARD_S + 2, BACKWARD_S)
    assert simulated(saves, {0}, Link(d2h_bytes_per_s=math.inf, h2d_bytes_per_s=50), None) == (FORWARD_S, BACKWARD_S + 2)


def test_held_saves_neither_move_nor_fill_the_device() -> None:
    held = [save(1000, 0, 19, is_held=True), save(1000, 9, 0, is_held=True)]

    assert simulated(held, {0, 1}, SLOW, 0) == (FORWARD_S, BACKWARD_S)
    assert simulated([held[0], save(100, 1, 15), held[1]], {0, 1, 2}, SLOW, 100) == (FORWARD_S, BACKWARD_S)


def test_use_of_a_held_save_makes_no_room() -> None:
    saves = [save(100, 1, 5), save(100, 9, 3), save(100, 9, 1, is_held=True)]

    assert simulated(saves, {0}, SLOW, 100) == simulated(saves[:2], {0}, SLOW, 100) == (FORWARD_S, BACKWARD_S + 4)


@settings(max_examples=75)
@given(steps(), choices, links, limits)
def test_copies_never_make_a_step_faster(
    saves: list[TimedSave], offloaded: set[int], link: Link, limit_bytes: int | None
) -> None:
    forward_s, backward_s = simulated(saves, offloaded, link, limit_bytes)

    assert forward_s >= FORWARD_S
    assert backward_s >= BACKWARD_S


@settings(max_examples=75)
@given(steps(), choices, links, limits)
def test_no_step_is_faster_than_the_roofline(
    saves: list[TimedSave], offloaded: set[int], link: Link, limit_bytes: int | None
) -> None:
    moved = moved_bytes(saves, offloaded, limit_bytes)

    time = sum(simulated(saves, offloaded, link, limit_bytes))

    roofline = roofline_s(forward_s=FORWARD_S, backward_s=BACKWARD_S, out_bytes=moved, back_bytes=moved, link=link)
    assert time >= roofline * (1 - 1e-9)


@settings(max_examples=75)
@given(steps(), choices, links, limits, st.floats(1, 10), st.floats(1, 10), st.floats(0, 1))
def test_faster_link_never_costs_time(
    saves: list[TimedSave],
    offloaded: set[int],
    link: Link,
    limit_bytes: int | None,
    out_speedup: float,
    back_speedup: float,
    latency_share: float,
) -> None:
    faster = Link(
        d2h_bytes_per_s=link.d2h_bytes_per_s * out_speedup,
        h2d_bytes_per_s=link.h2d_bytes_per_s * back_speedup,
        latency_s=link.latency_s * latency_share,
    )

    slow, fast = (simulated(saves, offloaded, speed, limit_bytes) for speed in (link, faster))

    assert fast[0] <= slow[0] * (1 + 1e-9)
    assert fast[1] <= slow[1] * (1 + 1e-9)


@settings(max_examples=75)
@given(steps(turn=True), st.integers(0, 8), links, st.integers(0, 500), st.integers(0, 500))
def test_more_room_never_costs_time(saves: list[TimedSave], num_leaving: int, link: Link, first: int, second: int) -> None:
    less, more = sorted((first, second))

    tight, roomy = (simulated(saves, set(range(num_leaving)), link, limit_bytes) for limit_bytes in (less, more))

    assert roomy[0] <= tight[0] * (1 + 1e-9)
    assert sum(roomy) <= sum(tight) * (1 + 1e-9)


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    """A report with three saves of 16 KiB, of which the first is the input, and without times."""
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()), torch.empty(64, 64)
    return memkit.profile_memory(model, batch, print_table=False)


def with_times(report: MemoryReport, *, backward_s: float | None = 2.0) -> MemoryReport:
    saved = tuple(
        dataclasses.replace(record, saved_at_s=0.25 * index, needed_at_s=1.5 - 0.25 * index)
        for index, record in enumerate(report.saved)
    )
    root = dataclasses.replace(report.modules[0], forward_s=1.0, backward_s=backward_s)
    return dataclasses.replace(report, saved=saved, modules=(root, *report.modules[1:]))


def test_timed_saves_are_those_of_the_report(report: MemoryReport) -> None:
    saves = timed_saves(with_times(report), 0)

    assert saves == [
        save(16384, 0.0, 1.5, is_held=True),  # the input: the caller holds it
        save(16384, 0.25, 1.25),
        save(16384, 0.5, 1.0),
        save(16384, 0.75, 0.75),
    ]


def test_timed_saves_leave_out_what_is_small(report: MemoryReport) -> None:
    timed = with_times(report)
    saved = (timed.saved[0], dataclasses.replace(timed.saved[1], storage_bytes=16385), *timed.saved[2:])

    assert [item.num_bytes for item in timed_saves(dataclasses.replace(timed, saved=saved), 16385)] == [16385]
    assert len(timed_saves(timed, 16384)) == len(timed.saved)


def test_timed_saves_leave_out_parameters_in_another_dtype(report: MemoryReport) -> None:
    timed = with_times(report)
    cast = dataclasses.replace(timed.saved[1], category=SavedCategory.PARAM_CAST)

    saves = timed_saves(dataclasses.replace(timed, saved=(timed.saved[0], cast, *timed.saved[2:])), 0)

    assert [item.saved_at_s for item in saves] == [0.0, 0.5, 0.75]


def test_save_that_the_backward_never_asked_for_is_needed_at_its_end(report: MemoryReport) -> None:
    timed = with_times(report)
    unasked = dataclasses.replace(timed.saved[1], needed_at_s=None)

    saves = timed_saves(dataclasses.replace(timed, saved=(timed.saved[0], unasked)), 0)

    assert [item.needed_at_s for item in saves] == [1.5, 2.0]


def test_report_without_times_is_refused(report: MemoryReport) -> None:
    with pytest.raises(ValueError, match=r"^the report has no times: profile on a GPU, with backward=True"):
        timed_saves(report, 0)


def test_report_without_a_backward_is_refused(report: MemoryReport) -> None:
    timed = with_times(report, backward_s=None)
    saved = tuple(dataclasses.replace(record, needed_at_s=None) for record in timed.saved)

    with pytest.raises(ValueError, match=r"^the report has no backward: profile with backward=True$"):
        timed_saves(dataclasses.replace(timed, saved=saved), 0)


def auto(saves: list[TimedSave], link: Link, *, window_bytes: int | None = None, tolerance: float = 0.01) -> float:
    with mock.patch.object(costs, "HIDDEN", 1 + tolerance):
        return auto_ratio(saves, forward_s=FORWARD_S, backward_s=BACKWARD_S, link=link, window_bytes=window_bytes)


def time_at(saves: list[TimedSave], ratio: float, link: Link, window_bytes: int) -> float:
    """Return the seconds of a step at a ratio, over the plain ones."""
    held = frozenset(index for index, item in enumerate(saves) if item.is_held)
    plan = plan_ratio([item.num_bytes for item in saves], ratio, window_bytes=window_bytes, held=held)
    offloaded = {index for index, action in enumerate(plan.actions) if action is Action.OFFLOAD}
    return sum(simulated(saves, offloaded, link, plan.limit_bytes)) / (FORWARD_S + BACKWARD_S)


def test_auto_ratio_is_0_where_nothing_can_move() -> None:
    assert auto([], FAST) == 0.0
    assert auto([save(100, 0, 0, is_held=True)], FAST) == 0.0
    assert auto([save(0, 0, 0), save(0, 1, 0)], FAST) == 0.0


def test_auto_ratio_is_1_with_an_infinite_link() -> None:
    assert auto(chain(7), FAST, window_bytes=0) == 1.0
    assert auto([*chain(7), save(100, 10, 0, is_held=True)], FAST) == 1.0


def test_auto_ratio_is_0_with_no_link_to_speak_of() -> None:
    assert auto(chain(7), Link(d2h_bytes_per_s=1e-3, h2d_bytes_per_s=1e-3), window_bytes=0) == 0.0


def test_auto_ratio_by_hand() -> None:
    # Ten saves of 100 bytes, 1 s apart in the forward and 2 s in the backward; copies of 1.5 s, which hide in the latter. When
    # the last is saved, at 9 s, all that leave have to be gone: six are, seven would be at 10.5. A window of 400 bytes has room
    # for four in any case, so that never more than six leave.
    link = Link(d2h_bytes_per_s=100 / 1.5, h2d_bytes_per_s=100 / 1.5)

    assert auto(chain(10), link, window_bytes=100) == 0.6
    assert auto(chain(10), link, window_bytes=100, tolerance=0.06) == 0.7  # 1.5 s of 30
    assert auto(chain(10), link, window_bytes=400) == 1.0


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


@settings(max_examples=50)
@given(steps(), links, st.integers(0, 300), st.floats(1, 10))
def test_auto_ratio_never_falls_with_a_faster_link(
    saves: list[TimedSave], link: Link, window_bytes: int, speedup: float
) -> None:
    faster = dataclasses.replace(
        link, d2h_bytes_per_s=link.d2h_bytes_per_s * speedup, h2d_bytes_per_s=link.h2d_bytes_per_s * speedup
    )

    assert auto(saves, faster, window_bytes=window_bytes) >= auto(saves, link, window_bytes=window_bytes)
