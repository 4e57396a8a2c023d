"""Free ranges of addresses: which is taken, and that neighbours are one again."""

from __future__ import annotations

import pytest

from memkit.transfer.host_memory import Gaps


@pytest.fixture
def gaps() -> Gaps:
    """Three ranges of 2, 6 and 4 bytes."""
    made = Gaps()
    for byte_range in [(20, 26), (0, 2), (40, 44)]:
        made.free(byte_range)
    return made


def test_lowest_that_is_large_enough_is_taken(gaps: Gaps) -> None:
    assert gaps.take(4) == ((20, 24),)
    assert gaps.ranges == [(0, 2), (24, 26), (40, 44)]


def test_exact_fit_leaves_nothing(gaps: Gaps) -> None:
    assert gaps.take(2) == ((0, 2),)
    assert gaps.ranges == [(20, 26), (40, 44)]


def test_none_is_taken_where_none_is_large_enough(gaps: Gaps) -> None:
    assert gaps.take(7) == ()
    assert gaps.num_bytes == 12


def test_scattered_bytes_are_of_the_largest(gaps: Gaps) -> None:
    assert gaps.take(9, scatters=True) == ((20, 26), (40, 43))
    assert gaps.ranges == [(0, 2), (43, 44)]


def test_neighbours_become_one(gaps: Gaps) -> None:
    gaps.free((26, 40))

    assert gaps.ranges == [(0, 2), (20, 44)]


def test_cut_takes_what_is_free_within_a_range(gaps: Gaps) -> None:
    gaps.cut((1, 42))

    assert gaps.ranges == [(0, 1), (42, 44)]
