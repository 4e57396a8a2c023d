"""A memory plan as what is to be done at each save and at each request: arrays made once for all the steps that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memkit.plan import NO_OP, Action, Lineage, MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a step does that follows a plan. Values are those of the lineage of the step."""

    actions: Mapping[int, Action]
    """For each saved value."""
    retained: frozenset[int]
    """Values that autograd does not save and that are held: anchors, and roots that would be gone."""
    copies: Mapping[int, tuple[int, ...]]
    """By save, the anchors whose copies to the host begin there."""
    lets_go: Mapping[int, tuple[int, ...]]
    """By save, the values whose copies are waited for there; the number of saves stands for the first request."""
    fetches: Mapping[int, tuple[int, ...]]
    """By request, the values whose copies back begin there, what is needed first ahead."""
    releases: Mapping[int, tuple[int, ...]]
    """By request, what no replay from there on reads: it was held for those before."""
    held_until: Mapping[int, int]
    """For each value that replays read, the last request that lets one do so."""
    stays: Mapping[int, frozenset[int]]
    """By the value that is recomputed, what else stays of what is made on the way."""
    num_saves: int
    moving_bytes: int
    """Of all that leaves for host memory."""


def schedule_of(plan: MemoryPlan, lineage: Lineage, roots: Mapping[int, int]) -> Schedule:
    """Return what to do when.

    Args:
        plan: for a step of this lineage.
        roots: values of it that are gone unless they are held, and their bytes.
    """
    copies, lets_go, fetches, releases = (dict[int, list[int]]() for _ in range(4))
    anchors, held_until = set[int](), dict[int, int]()
    for planned in plan.values:
        value = planned.value
        if planned.is_anchor:
            anchors.add(value)
        if planned.held_until >= 0:
            held_until[value] = planned.held_until
        if planned.action is Action.OFFLOAD:
            if planned.is_anchor:
                copies.setdefault(planned.copy_at, []).append(value)
            lets_go.setdefault(planned.let_go_at, []).append(value)
    moved = [planned for planned in plan.values if planned.action is Action.OFFLOAD]
    for planned in sorted(moved, key=lambda planned: planned.needed_at):
        fetches.setdefault(planned.fetch_at, []).append(planned.value)
    read: dict[int, int] = {}
    for replay in plan.replays:
        for op in replay.ops:
            for source in lineage.ins[op]:
                if source in roots and lineage.maker[source] == NO_OP:
                    read[source] = replay.request
    for value, request in (*held_until.items(), *((value, request) for value, request in read.items() if value in anchors)):
        releases.setdefault(request + 1, []).append(value)
    return Schedule(
        actions={planned.value: planned.action for planned in plan.values if not planned.is_anchor},
        retained=frozenset(anchors | read.keys()),
        copies=_frozen(copies),
        lets_go=_frozen(lets_go),
        fetches=_frozen(fetches),
        releases=_frozen(releases),
        held_until=held_until,
        stays={replay.value: frozenset(replay.stays) for replay in plan.replays},
        num_saves=len(plan.step.saves),
        moving_bytes=sum(planned.num_bytes for planned in moved),
    )


def _frozen(found: Mapping[int, list[int]]) -> dict[int, tuple[int, ...]]:
    return {ordinal: tuple(values) for ordinal, values in found.items()}
