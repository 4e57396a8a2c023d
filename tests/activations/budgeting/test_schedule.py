"""From a plan to a step's actions at each save and request, by hand: no tensor is touched."""

from __future__ import annotations

from memkit.activations.budgeting.learning import schedule_of
from memkit.plan import Action, GrowingLineage, Lineage, MemoryPlan
from memkit.plan.plans import PlannedReplay, PlannedStep, PlannedValue


def _lineage() -> Lineage:
    """Value 0 is an input; op 0 makes 1, op 1 makes 2 from that, op 2 makes 3 from 2 and 0, and op 3 makes 4."""
    lineage = GrowingLineage()
    lineage.add_root(8)
    for ins, num_bytes in (([0], 16), ([1], 32), ([2, 0], 64), ([3], 128)):
        lineage.add_op(ins, [num_bytes], 1.0)
    return lineage.frozen()


LINEAGE = _lineage()


def _plan(values: tuple[PlannedValue, ...], replays: tuple[PlannedReplay, ...] = (), num_saves: int = 4) -> MemoryPlan:
    return MemoryPlan(
        budget_bytes=1000,
        predicted_s=1.0,
        plain_s=1.0,
        predicted_peak_bytes=900,
        plain_peak_bytes=1200,
        min_budget_bytes=100,
        replayed_s=0.0,
        stall_s=0.0,
        moved_bytes=0,
        gpu="reference",
        is_measured=True,
        step=PlannedStep(
            model="",
            inputs="",
            target="cpu",
            num_forward_ops=4,
            num_ops=9,
            saves=tuple((value, LINEAGE.num_bytes[value]) for value in range(1, 1 + num_saves)),
            uses=(4, 3, 2, 1),
            ops_digest="",
        ),
        values=values,
        replays=replays,
    )


def _value(value: int, action: Action, **moments: int | bool) -> PlannedValue:
    return PlannedValue(value=value, action=action, num_bytes=LINEAGE.num_bytes[value], **moments)


def test_where_all_stays_nothing_is_done() -> None:
    schedule = schedule_of(_plan(tuple(_value(value, Action.KEEP) for value in (1, 2, 3, 4))), LINEAGE, {})

    assert schedule.actions == dict.fromkeys((1, 2, 3, 4), Action.KEEP)
    assert not any((schedule.retained, schedule.copies, schedule.lets_go, schedule.fetches, schedule.releases))
    assert (schedule.num_saves, schedule.moving_bytes) == (4, 0)


def test_what_leaves_is_let_go_and_fetched_at_its_moments_what_is_needed_first_ahead() -> None:
    plan = _plan(
        (
            _value(1, Action.OFFLOAD, copy_at=0, let_go_at=1, fetch_at=1, needed_at=3),
            _value(2, Action.OFFLOAD, copy_at=1, let_go_at=1, fetch_at=1, needed_at=2),
            _value(3, Action.OFFLOAD, copy_at=2, let_go_at=4, fetch_at=0, needed_at=1),
            _value(4, Action.KEEP),
        )
    )
    schedule = schedule_of(plan, LINEAGE, {})

    assert schedule.lets_go == {1: (1, 2), 4: (3,)}
    assert schedule.fetches == {0: (3,), 1: (2, 1)}
    assert schedule.copies == {}  # what autograd saves leaves at its save
    assert schedule.moving_bytes == 16 + 32 + 64


def test_anchors_are_held_until_nothing_is_made_from_them_and_copied_where_told() -> None:
    plan = _plan(
        (
            _value(4, Action.KEEP),
            _value(3, Action.RECOMPUTE),
            _value(2, Action.OFFLOAD, copy_at=1, let_go_at=2, fetch_at=0, needed_at=1, held_until=1, is_anchor=True),
            _value(1, Action.KEEP, held_until=2, is_anchor=True),
        ),
        (PlannedReplay(request=1, value=3, ops=(2,), stays=()),),
    )
    schedule = schedule_of(plan, LINEAGE, {})

    assert schedule.actions == {4: Action.KEEP, 3: Action.RECOMPUTE}
    assert schedule.retained == {1, 2}
    assert schedule.copies == {1: (2,)}
    assert (schedule.lets_go, schedule.fetches) == ({2: (2,)}, {0: (2,)})
    assert schedule.releases == {2: (2,), 3: (1,)}
    assert schedule.held_until == {2: 1, 1: 2}
    assert schedule.stays == {3: frozenset()}


def test_saved_values_that_replays_read_are_held_as_well() -> None:
    plan = _plan(
        (_value(2, Action.KEEP, held_until=3), _value(3, Action.RECOMPUTE), _value(4, Action.RECOMPUTE)),
        (
            PlannedReplay(request=0, value=4, ops=(2, 3), stays=(3,)),
            PlannedReplay(request=3, value=3, ops=(2,), stays=()),
        ),
    )
    schedule = schedule_of(plan, LINEAGE, {})

    assert schedule.retained == frozenset()
    assert schedule.held_until == {2: 3}
    assert schedule.releases == {4: (2,)}
    assert schedule.stays == {4: frozenset({3}), 3: frozenset()}


def test_roots_that_would_be_gone_are_retained_where_a_replay_reads_them() -> None:
    plan = _plan((_value(3, Action.RECOMPUTE), _value(4, Action.KEEP)), (PlannedReplay(request=1, value=3, ops=(0, 1, 2)),))

    assert schedule_of(plan, LINEAGE, {0: 8}).retained == {0}
    assert schedule_of(plan, LINEAGE, {}).retained == frozenset()
    assert schedule_of(_plan((_value(3, Action.KEEP),)), LINEAGE, {0: 8}).retained == frozenset()
