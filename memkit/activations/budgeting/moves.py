"""Turns a plan that recomputes nothing into a schedule of copies, which steps follow as those of `CPUOffload` do."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from memkit.activations.offloading.schedule import Schedule, ready_at
from memkit.activations.saved.seen import NO_VALUE
from memkit.plan import Action, CopySchedule, Plan, PlannedSave

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memkit.activations.saved.seen import SeenSave
    from memkit.device import Device
    from memkit.plan import MemoryPlan
    from memkit.plan.plans import PlannedValue


def schedule_of_moves(
    plan: MemoryPlan, seen: Sequence[SeenSave], numbers: Mapping[int, int], places: Sequence[int], device: Device
) -> Schedule | None:
    """Return the schedule of a plan; None if the plan recomputes something, or has no fixed order of copies back.

    Args:
        plan: what moves, and when.
        seen: all tensors that the hooks see in such a step.
        numbers: for each value of the plan, its number among the values in `seen` that count.
        places: for each save that counts, its index in `seen`.
        device: the device of the step.
    """
    moved = [planned for planned in plan.values if planned.action is Action.OFFLOAD]
    if plan.replays or any(planned.is_anchor or planned.value not in numbers for planned in plan.values):
        return None
    uses = [numbers[value] for value in plan.step.uses]
    copies = _copies_of(moved, seen, numbers, places, uses)
    if copies is None:
        return None
    actions = {numbers[planned.value]: planned.action for planned in plan.values}
    sizes_bytes = {save.value: save.num_bytes for save in seen if save.value != NO_VALUE}
    saves = tuple(
        PlannedSave(index=index, num_bytes=sizes_bytes[index], action=actions.get(index, Action.KEEP), reason="as planned")
        for index in range(len(sizes_bytes))
    )
    told = Plan(saves=saves, limit_bytes=float(plan.budget_bytes), predicted_peak_bytes=plan.predicted_peak_bytes)
    return Schedule(seen, told, [copies], device, len(saves), [uses], ())


def _copies_of(
    moved: Sequence[PlannedValue],
    seen: Sequence[SeenSave],
    numbers: Mapping[int, int],
    places: Sequence[int],
    uses: Sequence[int],
) -> CopySchedule | None:
    """Return when each moved value is copied, freed and fetched; None if no order of copies keeps to the plan."""
    num_saves = len(seen)
    first_saves: dict[int, int] = {}
    for place, save in enumerate(seen):
        first_saves.setdefault(save.value, place)
    ready = first_saves | ready_at(seen)
    leaving = sorted(moved, key=lambda planned: ready[numbers[planned.value]])
    sent = [ready[numbers[planned.value]] for planned in leaving]
    at_request = num_saves + 1  # what is let go of once the backward asks for anything
    gone = [places[planned.let_go_at] if planned.let_go_at < len(places) else at_request for planned in leaving]
    gone = list(accumulate(reversed(gone), min))[::-1]  # where a later copy is waited for, those before it are done as well
    gone = [max(gone_at, sent_at) for gone_at, sent_at in zip(gone, sent, strict=True)]
    first: dict[int, int] = {}
    for ordinal, value in enumerate(uses):
        first.setdefault(value, ordinal)
    ordinals = sorted(first.values())
    coming = sorted(moved, key=lambda planned: (planned.fetch_at, planned.needed_at))
    if any(numbers[planned.value] not in first or planned.fetch_at > ordinals[-1] for planned in moved):
        return None
    fetched = [ordinals[bisect_left(ordinals, planned.fetch_at)] for planned in coming]
    late = any(at > first[numbers[planned.value]] for at, planned in zip(fetched, coming, strict=True))
    if late or fetched != sorted(fetched):
        return None
    visible = {numbers[planned.value] for planned in moved} | {uses[ordinal] for ordinal in fetched}
    requests = [value for value in first if value in visible]
    sizes_bytes = {save.value: save.num_bytes for save in seen if save.value != NO_VALUE}
    return CopySchedule(
        out=tuple((numbers[planned.value],) for planned in leaving),
        num_sent=tuple(_counts(sent, num_saves + 1)),
        num_released=tuple(_counts(gone, num_saves + 1)),
        back=tuple((numbers[planned.value],) for planned in coming),
        requests=tuple(requests),
        num_fetched=tuple(bisect_right(fetched, first[value]) for value in requests),
        peak_bytes=max(accumulate(_changes(seen, leaving, gone, numbers, sizes_bytes)), default=0),
        num_released_at_request=len(leaving),
    )


def _counts(moments: Sequence[int], num_places: int) -> list[int]:
    """Return for each place how many of the sorted `moments` are before it or at it."""
    due = [0] * num_places
    for moment in moments:
        if moment < num_places:
            due[moment] += 1
    return list(accumulate(due))


def _changes(
    seen: Sequence[SeenSave],
    leaving: Sequence[PlannedValue],
    gone: Sequence[int],
    numbers: Mapping[int, int],
    sizes_bytes: Mapping[int, int],
) -> list[int]:
    """Return the change in bytes on the device at each save."""
    changes, known = [0] * (len(seen) + 2), set[int]()
    for place, save in enumerate(seen):
        if save.value != NO_VALUE and save.value not in known:
            known.add(save.value)
            changes[place] += save.num_bytes
    for planned, place in zip(leaving, gone, strict=True):
        changes[place] -= sizes_bytes[numbers[planned.value]]
    return changes
