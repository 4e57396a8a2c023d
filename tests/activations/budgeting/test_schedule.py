"""From a plan to a step's actions at each save and request, by hand: no tensor is touched."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields

from memkit.activations.budgeting.learning import Planned, planned_of
from memkit.plan import Action, GrowingLineage, MemoryPlan
from memkit.plan.plans import PlannedReplay, PlannedStep, PlannedValue
from memkit.plan.step import Lineage


def _lineage() -> Lineage:
    """Value 0 is an input; op 0 makes 1, op 1 makes 2 from that, op 2 makes 3 from 2 and 0, and op 3 makes 4."""
    lineage = GrowingLineage()
    lineage.add_root(8)
    for ins, num_bytes in (([0], 16), ([1], 32), ([2, 0], 64), ([3], 128)):
        lineage.add_op(ins, [num_bytes], 1.0)
    return lineage.frozen()


LINEAGE = _lineage()


def _plan(values: tuple[PlannedValue, ...], replays: tuple[PlannedReplay, ...] = ()) -> MemoryPlan:
    figures = [item.name for item in fields(MemoryPlan) if item.default is MISSING and item.default_factory is MISSING]
    saves = tuple((value, 0) for value in (1, 2, 3, 4))
    texts = {"model": "", "inputs": "", "target": "cpu", "ops_digest": ""}
    step = PlannedStep(**texts, num_forward_ops=4, num_ops=9, saves=saves, uses=(4, 3, 2, 1))
    return MemoryPlan(**{**dict.fromkeys(figures, 0), "step": step, "values": values}, replays=replays)


def _value(value: int, action: Action, **moments: int | bool) -> PlannedValue:
    return PlannedValue(value=value, action=action, num_bytes=LINEAGE.num_bytes[value], **moments)


def _planned(plan: MemoryPlan, roots: Collection[int] = ()) -> Planned:
    return planned_of(plan, LINEAGE, dict.fromkeys(roots, 8), allowed_bytes=900)


def test_where_all_stays_nothing_is_done() -> None:
    found = _planned(_plan(tuple(_value(value, Action.KEEP) for value in (1, 2, 3, 4))), roots=[0])

    assert found.actions == dict.fromkeys((1, 2, 3, 4), Action.KEEP)
    assert not any((found.retained, found.copies, found.lets_go, found.fetches, found.releases))


def test_what_leaves_is_let_go_and_fetched_at_its_moments_what_is_needed_first_ahead() -> None:
    plan = _plan(
        (
            _value(1, Action.OFFLOAD, copy_at=0, let_go_at=1, fetch_at=1, needed_at=3),
            _value(2, Action.OFFLOAD, copy_at=1, let_go_at=1, fetch_at=1, needed_at=2),
            _value(3, Action.OFFLOAD, copy_at=2, let_go_at=4, fetch_at=0, needed_at=1),
        )
    )
    found = _planned(plan)

    assert (found.lets_go, found.fetches) == ({1: [1, 2], 4: [3]}, {0: [3], 1: [2, 1]})
    assert found.copies == {}  # what autograd saves leaves at its save


def test_what_replays_read_is_held_until_the_last_one_and_anchors_are_copied_where_told() -> None:
    values = (
        _value(4, Action.RECOMPUTE),
        _value(3, Action.RECOMPUTE),
        _value(2, Action.OFFLOAD, copy_at=1, let_go_at=2, fetch_at=0, needed_at=1, held_until=1, is_anchor=True),
        _value(1, Action.KEEP, held_until=2),
    )
    replays = (PlannedReplay(request=0, value=4, ops=(2, 3), stays=(3,)), PlannedReplay(request=1, value=3, ops=(0, 2)))
    found = _planned(_plan(values, replays))

    assert found.actions == {4: Action.RECOMPUTE, 3: Action.RECOMPUTE, 1: Action.KEEP}
    assert found.retained == {2}
    assert _planned(_plan(values, replays), roots=[0]).retained == {0, 2}  # a root that would be gone
    assert (found.copies, found.lets_go, found.fetches) == ({1: [2]}, {2: [2]}, {0: [2]})
    assert (found.held_until, found.releases) == ({2: 1, 1: 2}, {2: [2], 3: [1]})
    assert found.stays == {4: frozenset({3}), 3: frozenset()}
