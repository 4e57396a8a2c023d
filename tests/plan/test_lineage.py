"""`memkit.plan.lineage`: how ops and values are numbered, and what is known of them."""

from __future__ import annotations

import pytest
from hypothesis import given

from memkit.plan import NO_OP, Lineage, Step
from tests.plan.reference import steps


def test_ops_and_values_are_numbered_as_they_come() -> None:
    lineage = Lineage()
    root = lineage.add_root(10)

    first = lineage.add_op([root], [20, 30], 1.5)
    second = lineage.add_op(first, [40], 2.5)

    assert (root, first, second) == (0, (1, 2), (3,))
    assert lineage.num_bytes == [10, 20, 30, 40]
    assert lineage.maker == [NO_OP, 0, 0, 1]
    assert lineage.ins == [(0,), (1, 2)]
    assert lineage.outs == [(1, 2), (3,)]
    assert lineage.seconds == [1.5, 2.5]
    assert lineage.taken == {}


def test_last_outputs_are_what_written_values_become() -> None:
    lineage = Lineage()
    first, second = lineage.add_root(10), lineage.add_root(20)

    lineage.add_op([first, second], [5, 20, 10], taken=[second, first])

    assert lineage.taken == {0: ((1, 3), (0, 4))}


def test_link_knows_users_of_later_ops_too() -> None:
    lineage = Lineage()
    root = lineage.add_root(1)
    (value,) = lineage.add_op([root], [1])
    lineage.link()
    lineage.link()

    lineage.add_op([value, root], [1])
    lineage.link()

    assert lineage.users == [[0, 1], [1], []]


def test_more_written_values_than_outputs_are_refused() -> None:
    lineage = Lineage()
    root = lineage.add_root(1)

    with pytest.raises(ValueError):
        lineage.add_op([root, root], [1], taken=[root, root])


def test_saved_bytes_count_a_value_once() -> None:
    lineage = Lineage()
    values = lineage.add_op([lineage.add_root(1)], [10, 20])

    step = Step(lineage=lineage, saves=(*values, *values, 0), uses=())

    assert step.saved_bytes == 31


def test_roots_of_passes_over_what_was_traced() -> None:
    lineage = Lineage()
    left, right = lineage.add_root(1), lineage.add_root(1)
    (value,) = lineage.add_op([left, right], [1])
    (other,) = lineage.add_op([value, right], [1])
    traced = {right}

    assert list(lineage.roots_of(other, traced)) == [left]
    assert list(lineage.roots_of(value, traced)) == []
    assert list(lineage.roots_of(left, set())) == [left]


@given(step=steps())
def test_numbers_agree_with_each_other(step: Step) -> None:
    lineage = step.lineage
    lineage.link()

    assert all(lineage.maker[value] == op for op, outs in enumerate(lineage.outs) for value in outs)
    assert all(max(ins, default=-1) < min(outs) for ins, outs in zip(lineage.ins, lineage.outs, strict=True) if outs)
    for value, users in enumerate(lineage.users):
        assert users == [op for op, ins in enumerate(lineage.ins) for source in ins if source == value]
