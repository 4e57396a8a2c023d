"""What saved values may take where calls of modules are recomputed, against what is on the device beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from memkit.plan import Action, Moving, Problem, RegionNeeds, fit_copies, fit_regions
from memkit.plan.regions import RegionBytes

# Two blocks, of 30 and 40 bytes inside and inputs of 10 bytes, and a loss: saved in the slots 0 to 4, asked for in 5 to 9.
_SIZES = {0: (10, 0, 9), 1: (30, 1, 8), 2: (10, 2, 7), 3: (40, 3, 6), 4: (20, 4, 5)}


def _problem(
    working_bytes: Sequence[int] = (0,) * 10, sizes: Mapping[int, tuple[int, int, int]] = _SIZES, *, forward_s: float = 1.0
) -> Problem:
    """Return a step with a base of 1000 bytes, and values of which each has a number, bytes, a first save and a request. The
    fifth of the first ones can neither leave nor be made again."""
    num_slots = 2 * len(sizes)
    held = [
        SimpleNamespace(
            value=value,
            num_bytes=num_bytes,
            made=made,
            released=made + 1,
            use=use,
            freed=min(use + 1, num_slots),
            is_anchor=False,
            choices=frozenset({Action.KEEP}) if value == 4 and sizes is _SIZES else frozenset(Action),
        )
        for value, (num_bytes, made, use) in sizes.items()
    ]
    made: Any = SimpleNamespace(
        num_slots=num_slots,
        values=held,
        index={each.value: place for place, each in enumerate(held)},
        base_bytes=1000,
        working_bytes=tuple(working_bytes),
        points=tuple(range(num_slots)),
        num_forward_points=len(sizes),
        starts_s=tuple(forward_s * slot / len(sizes) for slot in range(num_slots + 1)),
        retained={9: (2, 5)},
    )
    return made  # type: ignore[no-any-return]


def _block(value: int, given: int, more_bytes: int = 0) -> RegionBytes:
    return RegionBytes(frozenset({value}), (given,), _SIZES[value][0] + more_bytes)


_NONE = RegionNeeds(110, ())
_FIRST = RegionNeeds(85, (_block(1, 0),))
_BOTH = RegionNeeds(65, (_block(1, 0), _block(3, 2)))
_CHOICES = [_NONE, _FIRST, _BOTH]


@pytest.mark.parametrize(
    ("working", "allowed_bytes", "limit_bytes"),
    [
        ({}, 1110, 85),  # 80 at the turn
        ({}, 1080, 85),
        ({}, 1079, 65),  # the second block, and the inputs of both, beside the loss: its backward is over by then
        ({}, 1060, 65),
        ({}, 1059, None),
        ({4: 500}, 1609, 85),  # the loss needs much, and the blocks are away
        ({4: 500}, 1540, 65),
        ({4: 500}, 1539, None),
        ({8: 100}, 1139, None),  # late in the backward, as the first block is back
        ({8: 100}, 1140, 85),
    ],
)
def test_quickest_choice_that_keeps_to_the_budget_in_each_slot(
    working: dict[int, int], allowed_bytes: int, limit_bytes: int | None
) -> None:
    problem = _problem([working.get(slot, 0) for slot in range(10)])

    assert fit_regions(problem, _CHOICES, allowed_bytes) == limit_bytes


def test_what_a_second_run_makes_on_its_way_counts_while_it_runs() -> None:
    needs = RegionNeeds(65, (_block(1, 0, more_bytes=25), _block(3, 2)))

    assert fit_regions(_problem(), [needs], 1065) == 65  # 10 and 55, and 10 yet of what the block gives
    assert fit_regions(_problem(), [needs], 1064) is None


def test_what_was_beside_in_the_forward_counts_in_a_second_run_as_well() -> None:
    """As the workspace of a convolution that makes the second block's value: 80 beside 60, and 5 of the backward."""
    problem = _problem([{3: 80, 6: 5}.get(slot, 0) for slot in range(10)])

    assert fit_regions(problem, [_BOTH], 1145) == 65
    assert fit_regions(problem, [_BOTH], 1144) is None


def test_what_is_held_for_a_region_and_not_saved_counts() -> None:
    needs = RegionNeeds(70, (_block(1, 0), RegionBytes(frozenset({3}), (9,), 40)))

    assert fit_regions(_problem(), [needs], 1065) == 70
    assert fit_regions(_problem(), [needs], 1064) is None


def test_what_is_held_for_several_regions_counts_once_and_as_long_as_the_last_runs() -> None:
    shared = (RegionBytes(frozenset({1}), (9,), 30), RegionBytes(frozenset({3}), (9,), 40))
    assert fit_regions(_problem(), [RegionNeeds(70, shared)], 1065) == 70
    assert fit_regions(_problem(), [RegionNeeds(70, shared)], 1064) is None

    late = (RegionBytes(frozenset({1}), (9,), 30 + 50), shared[1])
    assert fit_regions(_problem(), [RegionNeeds(70, late)], 1095) == 70  # 10, 80 and 5
    assert fit_regions(_problem(), [RegionNeeds(70, late)], 1094) is None


def test_to_recompute_nothing_is_no_choice() -> None:
    assert fit_regions(_problem(), [_NONE], 2000) is None
    assert fit_copies(_problem(), [_NONE], 2000, 1000.0) is None


def test_call_of_which_nothing_is_asked_for_is_not_run_again() -> None:
    problem = _problem(sizes={**_SIZES, 3: (40, 3, 10)})

    assert fit_regions(problem, [RegionNeeds(90, (_block(3, 2, more_bytes=100),))], 1090) == 90


def test_what_leaves_makes_room_for_calls_of_which_the_inputs_alone_are_too_many() -> None:
    """Six blocks of 40 bytes with inputs of 10: the first that is run again stands beside all of these, or beside two."""
    sizes = {value: (40 if value % 2 else 10, value, 23 - value) for value in range(12)}
    blocks = (RegionBytes(frozenset({value + 1}), (value,), 40) for value in range(0, 12, 2))
    problem, needs = _problem([0] * 24, sizes), RegionNeeds(100, tuple(blocks))

    assert fit_regions(problem, [needs], 1100) == 100
    assert fit_regions(problem, [needs], 1099) is None
    assert fit_copies(problem, [needs], 1060, 1000.0) == Moving(100, 60, 60, 20)
    assert fit_copies(problem, [needs], 1059, 1000.0) is None
    assert fit_copies(problem, [needs], 1060, 20.0) is None  # no more leaves than may be on its way
    assert fit_copies(problem, [needs], 1100, 50.0) == Moving(100, 60, 40, 20)  # what would pass the 45 that hide stays


def test_input_that_is_free_before_its_call_is_run_again_is_held_for_it() -> None:
    """It is saved behind the call as well, and asked for before."""
    sizes = {0: (50, 0, 5), 1: (20, 1, 8), 2: (5, 2, 6), 3: (1, 3, 9), 4: (1, 4, 7)}
    problem = _problem([25 if slot == 8 else 0 for slot in range(10)], sizes)
    needs = RegionNeeds(56, (RegionBytes(frozenset({1}), (0,), 20),))

    assert fit_regions(problem, [needs], 1096) == 56  # the input, 20, 25 and 1
    assert fit_regions(problem, [needs], 1095) is None


def test_what_leaves_is_back_from_the_moment_it_is_asked_for() -> None:
    """Though it is free only later, as what several have read."""
    sizes = {value: (40 if value % 2 else 10, value, 23 - value) for value in range(12)}
    blocks = (RegionBytes(frozenset({value + 1}), (value,), 40) for value in range(0, 12, 2))
    problem, needs = _problem([0] * 24, sizes), RegionNeeds(100, tuple(blocks))
    for held in problem.values:
        held.freed = 24  # type: ignore[misc]

    assert fit_copies(problem, [needs], 1300, 1000.0) is not None
    assert fit_copies(problem, [needs], 1299, 1000.0) is None


def test_nothing_leaves_beside_what_has_no_backward() -> None:
    made: Any = SimpleNamespace(points=(0, 1), num_forward_points=2)

    assert fit_copies(made, _CHOICES, 10**9, 1000.0) is None
