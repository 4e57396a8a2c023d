"""When a forward may follow a schedule, and which."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from memkit.activations.offloading.ratio import forecast_of
from memkit.activations.offloading.schedule import Schedule, make_schedule
from memkit.activations.offloading.scheduled import ScheduledForward
from memkit.activations.offloading.scheduled_saves import ScheduledSaves
from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.traces import Trace
from memkit.errors import HostMemoryError


def follow_schedule(
    window: OffloadWindow,
    asked: tuple[Hashable, ...],
    ratio: float,
    window_bytes: int | None,
    counts: Counts,
    take: Callable[[Tensor], Any],
) -> ScheduledSaves | None:
    """Return what takes the saves of a forward that goes as the last one did; None where that is not known, or where another
    is going on.

    The caller holds the lock of the window.

    Args:
        asked: all that the schedule depends on beside the trace.
        ratio: the share that leaves.
        window_bytes: as asked for; None for twice the largest storage.
        take: takes the saves from the first one on that is not that of the schedule.
    """
    window.settle()
    trace = window.traces.latest
    if trace is None or trace.seen is None or trace.requests is None or trace.seen_under != asked or not _is_free(window):
        return None
    window.fit_arena(max(known.plan(ratio, window_bytes).offload_bytes for known in window.traces))
    schedule = _schedule_of(trace, window, (asked, ratio, window_bytes, len(trace.held)), ratio, window_bytes)
    if schedule is None:
        return None
    span = None
    if schedule.host_bytes:
        try:
            span = window.arena.take(schedule.host_bytes)
        except HostMemoryError:
            schedule.finds_no_room = True
            return None
        if span.staging is not None:
            window.arena.give(span)
            return None
        schedule.place(span, window.device, window.lanes)
        for event in span.free_events:
            window.device.wait_event(window.lanes.out, event)
    made = ScheduledForward(schedule, trace, window.device, window.arena, span, window.lock, counts, window.name)
    saves = ScheduledSaves(made, take)
    window.scheduled = made
    return saves


def _is_free(window: OffloadWindow) -> bool:
    """Tell whether no graph may ask for anything, and no others bring anything to the device."""
    is_used = window.scheduled is not None or window.ledger.records or window.is_broken or window.is_retired
    return not (is_used or window.lanes.are_shared(window) or window.device.is_capturing())


def _schedule_of(
    trace: Trace, window: OffloadWindow, key: tuple[Hashable, ...], ratio: float, window_bytes: int | None
) -> Schedule | None:
    """Return the schedule of a trace; None if it is of no use."""
    found = trace.schedule
    if found is None or found[0] != key:
        assert trace.seen is not None
        assert trace.requests is not None
        plan = trace.plan(ratio, window_bytes)
        limit_bytes = max(int(plan.limit_bytes), plan.window_bytes)
        schedule = make_schedule(
            trace.seen,
            plan,
            requests=trace.requests,
            limit_bytes=limit_bytes,
            forecast=forecast_of(trace, plan, limit_bytes=limit_bytes, window_bytes=plan.window_bytes),
            device=window.device,
            paused=trace.paused,
        )
        found = trace.schedule = (key, schedule)
    schedule = found[1]
    return None if schedule.finds_no_room else schedule
