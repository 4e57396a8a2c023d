"""`Schedule`: a memory plan as what to do at each save and each request, made once for all steps that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memkit.plan import NO_OP, Action, Lineage, MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a step does that follows a plan. Values are those of the step's lineage."""

    actions: Mapping[int, Action]
    """The action for each saved value."""
    retained: frozenset[int]
    """Values that autograd does not save and that are held: anchors, and roots that would be freed."""
    copies: Mapping[int, tuple[int, ...]]
    """By save, the anchors whose copies to the host begin there."""
    lets_go: Mapping[int, tuple[int, ...]]
    """By save, the values that are freed on the device there, after waiting for their copies; the number of saves stands for
    the first request."""
    fetches: Mapping[int, tuple[int, ...]]
    """By request, the values whose copies back begin there, in the order in which they are needed."""
    releases: Mapping[int, tuple[int, ...]]
    """By request, the values held for replays that no replay from there on reads."""
    held_until: Mapping[int, int]
    """For each value that replays read, the last request whose replay reads it."""
    stays: Mapping[int, frozenset[int]]
    """For each recomputed value, the intermediate values that are kept as well."""
    num_saves: int
    moving_bytes: int
    """Bytes of all values that move to host memory."""


def schedule_of(plan: MemoryPlan, lineage: Lineage, roots: Mapping[int, int]) -> Schedule:
    """Return the schedule of a plan.

    Args:
        plan: for a step of this lineage.
        roots: bytes of the roots that would be freed unless they are held.
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
