"""`memkit.plan.step`: how ops and values are numbered, and what is known of them."""

from __future__ import annotations

import pytest
from hypothesis import given

from memkit.plan import NO_OP, DTRScore, GrowingLineage, RematPlanner, Step
from tests.plan.reference import chain, steps


def test_ops_and_values_are_numbered_as_they_come() -> None:
    lineage = GrowingLineage()
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
    lineage = GrowingLineage()
    first, second = lineage.add_root(10), lineage.add_root(20)

    lineage.add_op([first, second], [5, 20, 10], taken=[second, first])

    assert lineage.taken == {0: ((1, 3), (0, 4))}


def test_link_knows_users_of_later_ops_too() -> None:
    lineage = GrowingLineage()
    root = lineage.add_root(1)
    (value,) = lineage.add_op([root], [1])
    lineage.link()
    lineage.link()

    lineage.add_op([value, root], [1])
    lineage.link()

    assert lineage.users == [[0, 1], [1], []]


def test_more_written_values_than_outputs_are_refused() -> None:
    lineage = GrowingLineage()
    root = lineage.add_root(1)

    with pytest.raises(ValueError):
        lineage.add_op([root, root], [1], taken=[root, root])


def test_saved_bytes_count_a_value_once() -> None:
    lineage = GrowingLineage()
    values = lineage.add_op([lineage.add_root(1)], [10, 20])

    step = Step(lineage=lineage, saves=(*values, *values, 0), uses=())

    assert step.saved_bytes == 31


def test_roots_of_passes_over_what_was_traced() -> None:
    lineage = GrowingLineage()
    left, right = lineage.add_root(1), lineage.add_root(1)
    (value,) = lineage.add_op([left, right], [1])
    (other,) = lineage.add_op([value, right], [1])
    traced = {right}

    assert list(lineage.roots_of(other, traced)) == [left]
    assert list(lineage.roots_of(value, traced)) == []
    assert list(lineage.roots_of(left, set())) == [left]


def test_step_stays_as_it_was_planned_while_its_recording_goes_on() -> None:
    lineage, why_kept, retained_bytes = GrowingLineage(), {0: "it is an input"}, {0: 5}
    root = lineage.add_root(5)
    (value,) = lineage.add_op([root], [10], 1.0, taken=[root])
    step = Step(lineage=lineage, saves=(value,), uses=(value,), why_kept=why_kept, retained_bytes=retained_bytes)
    plan = RematPlanner(step, DTRScore()).plan(10)

    lineage.add_root(7)
    lineage.add_op([value], [20], 9.0, taken=[value])
    lineage.num_bytes[value] = 1000
    lineage.seconds[:] = [3.0, 3.0]
    why_kept.clear()
    retained_bytes.clear()

    known = step.lineage
    assert (known.num_bytes, known.maker, known.ins, known.outs) == ((5, 10), (NO_OP, 0), ((root,),), ((value,),))
    assert (known.seconds, known.taken) == ((1.0,), {0: ((root, value),)})
    assert (step.why_kept, step.retained_bytes) == ({0: "it is an input"}, {0: 5})
    assert RematPlanner(step, DTRScore()).plan(10) == plan


def test_times_are_learned_in_another_lineage() -> None:
    known = chain(2).lineage

    timed = known.with_seconds([7.0, 8.0])

    assert (known.seconds, timed.seconds) == ((1.0, 1.0), (7.0, 8.0))
    assert (timed.maker, timed.ins, timed.outs) == (known.maker, known.ins, known.outs)
    assert known.frozen() is known


@given(step=steps())
def test_numbers_agree_with_each_other(step: Step) -> None:
    lineage = step.lineage
    lineage.link()

    assert all(lineage.maker[value] == op for op, outs in enumerate(lineage.outs) for value in outs)
    assert all(max(ins, default=-1) < min(outs) for ins, outs in zip(lineage.ins, lineage.outs, strict=True) if outs)
    for value, users in enumerate(lineage.users):
        assert users == [op for op, ins in enumerate(lineage.ins) for source in ins if source == value]
