"""What comes beside saved values, from save to save and from request to request: counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memkit.activations.budgeting.observed import Foresight
from tests.plan.budget.steps import MIB, make_trace

# MiB     op 0  op 1  op 2 | op 3  op 4  op 5
# extra      1     2     3 |    4     5     6
# value 1    4     4     4 |    4     4     4   saved as op 0 is over, asked for ahead of op 5
# value 2          2     2 |                    not saved
# value 3                8 |    8               saved as op 2 is over, asked for ahead of op 3
# beside     5     4    13 |    4     5     6   what is not saved yet counts as well
TRACE = make_trace([((0,), 4, 1.0), ((1,), 2, 1.0), ((2,), 8, 1.0)], [1, 3], extra=[1, 2, 3, 4, 5, 6])


def test_places_are_as_drawn() -> None:
    assert (TRACE.save_places, TRACE.use_places) == ((1, 3), (3, 5))
    assert [level // MIB for level in TRACE.live_bytes] == [5, 8, 17, 16, 9, 10]


@pytest.mark.parametrize(("num_saves", "mib"), [(0, 13), (1, 13), (2, 4), (3, 4), (99, 4)])
def test_after_saves(num_saves: int, mib: int) -> None:
    assert Foresight(TRACE).after_save(num_saves) == mib * MIB


@pytest.mark.parametrize(("num_requests", "mib"), [(0, 5), (1, 5), (2, 6), (99, 6)])
def test_after_requests(num_requests: int, mib: int) -> None:
    assert Foresight(TRACE).after_request(num_requests) == mib * MIB


def test_step_of_larger_sizes_takes_as_much_more() -> None:
    """By the save that shows the most of it; what is saved smaller is of it as well."""
    scaled = Foresight(TRACE).scaled(0, 8 * MIB)

    assert scaled is not None
    assert not scaled.is_whole
    assert (scaled.after_save(1), scaled.after_request(2)) == (26 * MIB, 12 * MIB)
    assert scaled.is_of(1, 16 * MIB)
    assert scaled.is_of(1, 3 * MIB)
    assert not scaled.is_of(1, 17 * MIB)
    assert not scaled.is_of(2, MIB)
    assert scaled.scaled(2, MIB) is None
    more = scaled.scaled(1, 24 * MIB)
    assert more is not None
    assert more.after_save(1) == 39 * MIB


def test_step_of_smaller_sizes_takes_no_less() -> None:
    scaled = Foresight(TRACE).scaled(0, MIB)

    assert scaled is not None
    assert (scaled.after_save(1), scaled.after_request(2)) == (13 * MIB, 6 * MIB)


def test_saved_twice_counts_once() -> None:
    step = replace(TRACE.step, saves=(1, 1, 3))
    twice = Foresight(replace(TRACE, step=step, save_places=(1, 2, 3)))

    assert [twice.after_save(number) // MIB for number in (1, 2, 3)] == [4, 13, 4]


def test_step_that_saves_nothing() -> None:
    nothing = Foresight(make_trace([((0,), 4, 1.0)], []))

    assert (nothing.after_save(1), nothing.after_request(1)) == (0, 0)
