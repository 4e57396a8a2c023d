"""`memkit.schedules`: the ratios they give, what may be a schedule, and that `fit_memory` finds what fits."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkit import schedules
from memkit.plan.schedules import call_schedule, takes_peak

GIB = 2**30
NUM_ITERATIONS = 200
SETTLED_AFTER = 60

Peak = Callable[[float], float]
"""Bytes at the peak of an iteration, by its ratio."""


class Unsigned:
    """What `inspect.signature` cannot make sense of."""

    __signature__ = "none"

    def __call__(self, iteration: int) -> float:
        return iteration / 10


def run(schedule: schedules.Schedule, peak: Peak, num_iterations: int = NUM_ITERATIONS) -> tuple[list[float], list[int]]:
    """Return the ratios of some iterations, and their peaks."""
    ratios: list[float] = []
    peaks: list[int] = []
    for iteration in range(num_iterations):
        ratios.append(schedule(iteration, peaks[-1] if peaks else None))
        peaks.append(round(peak(ratios[-1])))
    return ratios, peaks


def smallest_that_fits(peak: Peak, target_bytes: int) -> float:
    """Try every thousandth."""
    return next(ratio for ratio in (step / 1000 for step in range(1001)) if round(peak(ratio)) <= target_bytes)


def linear(ratio: float) -> float:
    return 4 * GIB + 16 * GIB * (1 - ratio)


def floor_then_linear(ratio: float) -> float:
    return 4 * GIB + 16 * GIB * max(0.0, 0.8 - ratio)


_EARLY = 0.2 + 0.8 * (1 - math.sqrt(3) / 2) / 2


@pytest.mark.parametrize(
    ("schedule", "ratios"),
    [
        (schedules.linear(0.9, 0.1, num_iterations=6), [0.9, 23 / 30, 19 / 30, 0.5, 11 / 30, 7 / 30, 0.1, 0.1]),
        (schedules.cosine(0.2, 1, num_iterations=6), [0.2, _EARLY, 0.4, 0.6, 0.8, 1.2 - _EARLY, 1.0, 1.0]),
        (schedules.piecewise({3: 0.5, 0: 0, 5: 1}), [0, 0, 0, 0.5, 0.5, 1, 1, 1]),
    ],
)
def test_ratios_by_hand(schedule: schedules.Schedule, ratios: list[float]) -> None:
    assert [schedule(iteration) for iteration in (*range(7), 10**6)] == pytest.approx(ratios)


@settings(max_examples=50)
@given(st.sampled_from([schedules.linear, schedules.cosine]), st.floats(0, 1), st.floats(0, 1), st.integers(1, 50))
def test_ramps_never_turn_nor_leave_their_ends(
    ramp: Callable[..., schedules.Schedule], start: float, end: float, num_iterations: int
) -> None:
    schedule = ramp(start, end, num_iterations=num_iterations)

    ratios = [call_schedule(schedule, iteration, None) for iteration in range(num_iterations + 2)]

    rounding = 1e-12
    assert (ratios[0], ratios[num_iterations:]) == (start, [end, end])
    assert all(min(start, end) - rounding <= ratio <= max(start, end) + rounding for ratio in ratios)
    steps = [(later - earlier) * (1 if end >= start else -1) for earlier, later in itertools.pairwise(ratios)]
    assert min(steps) >= -rounding


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: schedules.constant(1.5), ValueError, "ratio must be from 0 (move nothing) to 1 (move everything); found 1.5"),
        (lambda: schedules.linear(-1, 1, num_iterations=2), ValueError, "start must be from 0 (move nothing) to 1"),
        (lambda: schedules.cosine(0, math.nan, num_iterations=2), ValueError, "end must be from 0 (move nothing) to 1"),
        *(
            (
                functools.partial(ramp, 0, 1, num_iterations=number),
                ValueError,
                f"num_iterations must be an integer of at least 1; found {number}",
            )
            for ramp, number in ((schedules.linear, 0), (schedules.cosine, True), (schedules.cosine, 2.0))
        ),
        (lambda: schedules.piecewise({}), ValueError, "the first piece must begin at iteration 0; found []"),
        (lambda: schedules.piecewise({7: 0.5, 2: 1}), ValueError, "the first piece must begin at iteration 0; found [2, 7]"),
        *(
            (
                functools.partial(schedules.piecewise, {0: 0.5, first: 1}),
                ValueError,
                f"the pieces begin at iterations, integers from 0 on; found {first}",
            )
            for first in (-1, 2.5, True)
        ),
        (lambda: schedules.piecewise({0: 0.5, 7: 2}), ValueError, "the piece at 7 must be from 0 (move nothing) to 1"),
        (lambda: schedules.piecewise({0: "all"}), TypeError, "the piece at 0 must be a number from 0 to 1; found 'all' (str)"),  # type: ignore[dict-item]
        (lambda: schedules.fit_memory(0), ValueError, "target_bytes must be more than 0 bytes; found 0"),
        (lambda: schedules.fit_memory("much"), ValueError, 'target_bytes is a number of bytes, or text such as "8GiB"'),
        (
            lambda: schedules.fit_memory(None),
            TypeError,
            'target_bytes is a number of bytes, or text such as "8GiB"; found None',
        ),  # type: ignore[arg-type]
    ],
)
def test_bad_values_are_refused(make: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        make()


@pytest.mark.parametrize(
    ("schedule", "wants_peak", "ratio"),
    [
        (lambda iteration: iteration / 10, False, 0.4),
        (lambda iteration, last_peak_bytes: iteration / 10 + last_peak_bytes / 2, True, 0.9),
        (lambda iteration, /, last_peak_bytes=None: last_peak_bytes / 2, True, 0.5),
        (lambda *args: len(args) / 2, True, 1.0),
        (lambda iteration, *rest: len(rest) / 2, True, 0.5),
        (lambda iteration, *, rate=1.0: rate, False, 1.0),
        (Unsigned(), False, 0.4),
        ([0.0, 0.1, 0.2, 0.3, 0.7].__getitem__, False, 0.7),
        (functools.partial(lambda rate, iteration: rate * iteration, 0.1), False, 0.4),
        (schedules.constant(0.5), False, 0.5),
        (schedules.fit_memory("1B"), True, 0.9),
    ],
)
def test_schedule_is_called_with_what_it_takes(schedule: schedules.Schedule, wants_peak: bool, ratio: float) -> None:
    assert takes_peak(schedule) is wants_peak
    assert call_schedule(schedule, 4, 1) == ratio


@pytest.mark.parametrize("ratio", [math.nan, -0.25, 1.25])
def test_bad_ratio_names_the_iteration(ratio: float) -> None:
    of_17 = rf"^the ratio that the schedule gives for iteration 17 must be from 0 \(.*\) to 1 \(.*\); found {ratio}$"
    with pytest.raises(ValueError, match=of_17):
        call_schedule(lambda iteration: ratio if iteration == 17 else 0.5, 17, None)


@settings(max_examples=75)
@given(
    levels=st.lists(st.integers(1, 1000), min_size=2, max_size=12),
    places=st.lists(st.integers(1, 999), max_size=10, unique=True),
    target=st.integers(1, 1000),
    is_in_steps=st.booleans(),
)
def test_fit_memory_finds_it_whatever_the_shape(levels: list[int], places: list[int], target: int, is_in_steps: bool) -> None:
    heights = sorted(levels, reverse=True)
    corners = [0.0, *(place / 1000 for place in sorted(places)[: len(heights) - 2]), 1.0]
    heights = heights[: len(corners) - 1] + heights[-1:]

    def peak(ratio: float) -> float:
        piece = max(index for index, corner in enumerate(corners) if corner <= ratio)
        if is_in_steps or piece == len(corners) - 1:
            return GIB * heights[piece]
        share = (ratio - corners[piece]) / (corners[piece + 1] - corners[piece])
        return GIB * (heights[piece] + share * (heights[piece + 1] - heights[piece]))

    target_bytes = GIB * max(target, heights[-1])

    ratios, peaks = run(schedules.fit_memory(target_bytes), peak)

    assert ratios[0] == 1.0
    assert max(earlier - later for earlier, later in itertools.pairwise(ratios)) <= 0.1 + 1e-9
    assert peaks[-1] <= target_bytes
    assert ratios[-1] <= smallest_that_fits(peak, target_bytes) + 0.05
    assert len(set(ratios[SETTLED_AFTER:])) == 1
    over = [iteration for iteration, peak_bytes in enumerate(peaks) if peak_bytes > target_bytes]
    assert len(over) <= 3  # halving a tenth
    assert not over or over[-1] - over[0] <= 3


def test_fit_memory_is_not_misled_by_memory_that_comes_late() -> None:
    """What an optimizer allocates in its first step is there from the second iteration on."""
    late_bytes, target_bytes, num_calls = 6 * GIB, 18 * GIB, 0

    def peak(ratio: float) -> float:
        nonlocal num_calls
        num_calls += 1
        return linear(ratio) + (late_bytes if num_calls > 1 else 0)

    ratios, peaks = run(schedules.fit_memory(target_bytes), peak)

    smallest = smallest_that_fits(linear, target_bytes - late_bytes)
    assert smallest <= ratios[-1] <= smallest + 0.05
    assert peaks[-1] <= target_bytes


@pytest.mark.parametrize("seed", range(3))
def test_fit_memory_bears_noise(seed: int) -> None:
    source, target_bytes = random.Random(seed), 10 * GIB

    def peak(ratio: float) -> float:
        return floor_then_linear(ratio) * source.uniform(0.995, 1.005)

    ratios, peaks = run(schedules.fit_memory(target_bytes), peak, num_iterations=400)

    smallest = smallest_that_fits(lambda ratio: floor_then_linear(ratio) * 0.995, target_bytes)
    assert smallest <= ratios[-1] <= smallest + 0.1
    assert len(set(ratios[200:])) == 1
    assert sum(peak_bytes > target_bytes for peak_bytes in peaks) <= 5


def test_fit_memory_waits_where_nothing_was_measured() -> None:
    schedule = schedules.fit_memory("8GiB")

    assert [schedule(iteration, None) for iteration in range(5)] == [1.0] * 5
    assert schedule(5, GIB) == pytest.approx(0.9)
    assert schedule(6, None) == pytest.approx(0.9)


def test_fit_memory_goes_up_from_0_and_stays_up_where_the_peak_falls_again() -> None:
    schedule = schedules.fit_memory("20GiB")
    run(schedule, linear)

    ratios, _ = run(schedule, lambda ratio: linear(ratio) + 1 * GIB)
    after, _ = run(schedule, floor_then_linear)

    assert ratios[:4] == pytest.approx([0.0, 0.05, 0.1, 0.1])
    assert set(after) == {ratios[-1]}


def test_fit_memory_goes_up_where_the_peak_grows() -> None:
    target_bytes = 10 * GIB
    schedule = schedules.fit_memory(target_bytes)
    before, _ = run(schedule, linear)

    after, peaks = run(schedule, lambda ratio: linear(ratio) + 4 * GIB)

    smallest = smallest_that_fits(lambda ratio: linear(ratio) + 4 * GIB, target_bytes)
    assert after[0] == before[-1]
    assert after == sorted(after)
    assert smallest <= after[-1] <= smallest + 0.05
    assert sum(peak_bytes > target_bytes for peak_bytes in peaks) <= math.ceil((smallest - before[-1]) / 0.05)


@pytest.mark.parametrize(("target_gib", "late_gib"), [(2, 0), (10, 10)])
def test_fit_memory_warns_once_where_nothing_fits_or_nothing_fits_any_more(target_gib: int, late_gib: int) -> None:
    schedule = schedules.fit_memory(f"{target_gib}GiB")
    if late_gib:
        run(schedule, linear)  # a warning is an error

    with pytest.warns(UserWarning, match="^fit_memory") as caught:
        ratios, _ = run(schedule, lambda ratio: linear(ratio) + late_gib * GIB)

    assert [str(warning.message) for warning in caught] == [
        f"fit_memory: the peak is {1024 * (4 + late_gib)}.00 MiB even with everything offloaded; the target was "
        f"{1024 * target_gib}.00 MiB. Use a smaller batch, or checkpointing beside the offload"
    ]
    assert ratios[-1] == 1.0
    assert late_gib or set(ratios) == {1.0}
