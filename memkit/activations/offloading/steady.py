"""When a forward may follow a schedule, and which one."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.activations.offloading.ratio import RatioDecider, forecast_of
from memkit.activations.offloading.schedule import Schedule, make_schedule
from memkit.activations.offloading.scheduled import ScheduledForward
from memkit.activations.offloading.scheduled_saves import ScheduledSaves
from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.saved.capture import Capture
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.entry import Stage
from memkit.activations.saved.forward import Forward
from memkit.activations.saved.seen import NO_VALUE
from memkit.activations.saved.traces import Trace
from memkit.device.base import Device
from memkit.errors import HostMemoryError
from memkit.interrupts import Blocks
from memkit.transfer.host_memory import Span

if TYPE_CHECKING:
    from memkit.activations.saved.state import OffloadState

paused = Blocks()
"""The `no_offload` regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """The arguments of a `CPUOffload`. A stage holds these rather than the context, which may be dead before its graphs."""

    min_bytes: int
    window_bytes: int | None
    host_limit_bytes: int | None
    device: Device | None


class SteadyStage(Stage):
    """The half of a `MovingStage` that has forwards follow schedules: while one does, tensors come to `ScheduledSaves`.

    Args:
        state: what is known under the tag.
        options: what was asked for.
        ratio: the share that leaves.
        resident: storages that the caller holds in any case, by their keys (`storages.storage_key`).
    """

    def __init__(
        self,
        state: OffloadState,
        options: OffloadOptions,
        ratio: float,
        resident: Mapping[int, weakref.ref[torch.UntypedStorage]],
    ) -> None:
        self.counts = Counts(ratio)
        self._state = state
        self._options = options
        self._resident = resident
        self._forwards: dict[Device, tuple[OffloadWindow, Forward]] = {}
        self._devices: dict[torch.device, Device | None] = {}
        self._capture: Capture | None = None if paused.are_any() else Capture()
        """Notes all that the hooks are given, as long as that may be of use."""
        self._saves: ScheduledSaves | None = None
        """Takes what follows a schedule, if anything may."""
        self._scheduled: ScheduledForward | None = None
        self._may_follow = True
        """Whether the next save may be the first of a forward that follows a schedule, or the first that goes another way."""
        self._left: Trace | None = None
        """What was followed up to where the forward has gone another way."""
        self._saw_device = False
        self._is_alone = True
        """Whether no one but autograd has said what is saved, and what is to become of it."""

    @abstractmethod
    def _backward_has_begun(self) -> bool:
        """Tell whether a backward has requested anything since the last save: the next save begins another forward then."""

    @property
    def _asked(self) -> tuple[Hashable, ...]:
        """The options that what is seen of a forward depends on."""
        return self._options.min_bytes, self._options.host_limit_bytes, bool(self._resident)

    def note_pause(self) -> None:
        """Note that a region of `no_offload` begins or ends here."""
        if self._capture is not None:
            self._capture.paused.append(len(self._capture.saves))
        if self._scheduled is not None and not self._scheduled.note_pause():
            self._scheduled.stop()

    def follow_schedules(self, take: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return a pack hook for forwards that go like earlier ones.

        Args:
            take: the pack hook for all other tensors.
        """
        self._saves = ScheduledSaves(take)
        return self._saves.pack

    def _follow(self, tensor: Tensor) -> ScheduledForward | None:
        """Let a forward follow a schedule from this save on, if one is known that begins with it."""
        self._may_follow, behind = False, self._scheduled
        if self._backward_has_begun():
            self._end_part()
            behind = None
        if self._forwards or self._saves is None or not self._is_alone:
            return None
        capture = self._capture
        if behind is None and capture is None:
            return None  # it began in a region of `no_offload`
        if behind is not None and behind.num_saves == 0:
            self._capture = Capture()
            self._capture.paused = [0] * behind.num_pauses
        if behind is not None and not behind.is_untouched:
            return None
        state, options, windows = self._state, self._options, self._state.windows()
        if len(windows) != 1 or options.device not in (None, windows[0].device) or windows[0].traces.has_report():
            return None
        (window,), asked = windows, (self._asked, self.counts.ratio, options.window_bytes)
        noted = () if capture is None else tuple(capture.paused)
        if behind is not None:
            noted = behind.trace.paused[: behind.num_pauses]
        with state.lock:
            if window.is_broken:
                window.mend()
            try:
                window.arena.limit_bytes = options.host_limit_bytes
                forward = follow_schedule(window, *asked, self.counts, tensor, noted, behind)
                if forward is not None:
                    self._saves.follow(forward)
            except BaseException:  # as `mended` does
                window.is_broken = True
                raise
        if forward is not None:
            self._scheduled, self._capture, self._may_follow = forward, None, True
            self._devices[window.device.torch_device] = window.device
        return forward

    def _end_part(self) -> None:
        """End a forward, since another one begins."""
        if self._scheduled is not None:
            self._end_scheduled(self._scheduled)
        self._file_seen()
        self._forwards.clear()
        self._saw_device = True
        self._capture = None if paused.are_any() or not self._is_alone else Capture()

    def _is_captured(self, capture: Capture, forward: Forward) -> bool:
        """Tell whether all that a forward has saved was noted, and nothing else."""
        values = {save.value for save in capture.saves}
        is_all = values - {NO_VALUE} == set(forward.by_number)
        return is_all and capture.is_whole and len(self._forwards) == 1 and not (forward.marks or forward.is_broken)

    def _file_seen(self) -> None:
        """File all saves of a forward that went save by save, so that later ones can be compared with it."""
        capture, left = self._capture, self._left
        for _, forward in self._forwards.values():
            trace = forward.share.trace
            if left is not None and trace is left:
                left.seen_under = None  # what it did not have as it was shows the next time
            elif left is not None and trace is not None:
                trace.await_whole()
            if capture is not None and self._is_captured(capture, forward):
                forward.share.file_seen(tuple(capture.saves), tuple(capture.paused), self._asked)
        self._left = None

    def _end_scheduled(self, scheduled: ScheduledForward) -> None:
        scheduled.end_forward()
        trace = scheduled.trace
        if scheduled.is_complete:
            if scheduled.num_pauses < len(trace.paused):
                trace.seen_under = None
            totals, counts = scheduled.schedule.totals, self.counts
            counts.seen_bytes += totals.seen_bytes
            counts.unique_bytes += totals.unique_bytes
            counts.kept_bytes += totals.kept_bytes
            counts.window_bytes = max(counts.window_bytes, totals.window_bytes)
            window = scheduled.window
            window.traces.follow(trace)
            window.ledger.peak_live_bytes = max(window.ledger.peak_live_bytes, window.ledger.live_bytes + totals.peak_bytes)
        elif scheduled.has_backward and not self._forwards:
            trace.seen_under = None  # its backward has begun ahead of the last saves
            self._count_followed(scheduled)
        self._scheduled = None

    def _resume(self, share: RatioDecider, scheduled: ScheduledForward) -> None:
        """Go on save by save after a part that has followed a schedule."""
        scheduled.stop()
        self._left = scheduled.trace
        if scheduled.num_saves:
            share.resume(scheduled.trace, scheduled.num_values, scheduled.leaving)
            self._count_followed(scheduled)

    def _count_followed(self, scheduled: ScheduledForward) -> None:
        counts, leaving = self.counts, scheduled.leaving
        for save in (scheduled.trace.seen or ())[: scheduled.num_saves]:
            counts.seen_bytes += save.seen_bytes
        for value in range(scheduled.num_values):
            num_bytes = scheduled.schedule.sizes_bytes.get(value, 0)
            counts.unique_bytes += num_bytes
            counts.kept_bytes += 0 if value in leaving else num_bytes


def follow_schedule(
    window: OffloadWindow,
    asked: tuple[Hashable, ...],
    ratio: float,
    window_bytes: int | None,
    counts: Counts,
    tensor: Tensor,
    paused: tuple[int, ...],
    behind: ScheduledForward | None,
) -> ScheduledForward | None:
    """Return a forward that goes as an earlier one did, from a save on; None where none is known, or another is going on.

    The caller holds the lock of the window.

    Args:
        asked: all that the schedule depends on beside the trace.
        ratio: the share that leaves.
        window_bytes: as asked for; None for twice the largest storage.
        tensor: what is saved.
        paused: before which saves a region of `no_offload` began, or ended.
        behind: what the saves before this one have followed, with nothing done yet; None if it is the first one.
    """
    window.settle()
    place = 0 if behind is None else behind.num_saves
    trace = _trace_with(window, asked, tensor, place, paused, behind)
    if trace is None or not is_free(window):
        return None
    window.fit_arena(max(known.plan(ratio, window_bytes).offload_bytes for known in window.traces))
    schedule = _schedule_of(trace, window, (asked, ratio, window_bytes, len(trace.held)), ratio, window_bytes)
    if schedule is None or not all(save.is_kept for save in schedule.saves[:place]):
        return None
    made = open_scheduled(window, schedule, trace, counts)
    if made is None:
        return None
    made.num_saves = made.began_at = place
    made.tried = (trace, *(() if behind is None or behind.began_at < place else behind.tried))
    made.num_pauses = len(paused)
    return made


def open_scheduled(window: OffloadWindow, schedule: Schedule, trace: Trace, counts: Counts) -> ScheduledForward | None:
    """Return a forward that follows a schedule; None if the host memory for it is not there. The caller holds the lock of the
    window, of which `is_free` has told that nothing is likely to ask for anything.

    Args:
        trace: what it was made from.
        counts: what is done is counted there.
    """
    spans = _spans_for(schedule, window)
    if spans is None:
        return None
    placement = schedule.place(spans, window.device, window.lanes) if any(spans) else None
    window.scheduled = made = ScheduledForward(window, schedule, placement, spans, trace, counts)
    return made


def _spans_for(schedule: Schedule, window: OffloadWindow) -> list[Span | None] | None:
    """Return the host memory that a schedule needs; None if it is not there, or not pinned."""
    spans, is_short = list[Span | None](), False
    for num_bytes in schedule.host_bytes:
        span = None
        if num_bytes:
            try:
                span = window.arena.take(num_bytes)
            except HostMemoryError:
                is_short = True
        spans.append(span)
    taken = [span for span in spans if span is not None]
    if is_short:
        schedule.find_no_room()
    if is_short or any(span.staging is not None for span in taken):
        for span in taken:
            window.arena.give(span)
        return None
    for span in taken:
        for event in span.free_events:
            window.device.wait_event(window.lanes.out, event)
    return spans


def _trace_with(
    window: OffloadWindow,
    asked: tuple[Hashable, ...],
    tensor: Tensor,
    place: int,
    paused: tuple[int, ...],
    behind: ScheduledForward | None,
) -> Trace | None:
    """Return the trace that is likely followed: of those that have begun so, the one that came after the last one when that
    was followed before, or else the last one. None also where another that may have begun so is yet to be looked at."""
    found: list[Trace] = []
    before, tried = (None, ()) if behind is None else (behind.trace, behind.tried)
    for trace in window.traces:
        seen = trace.seen
        if seen is None or trace.requests is None or trace.seen_under != asked:
            if trace.is_awaited():
                return None
        elif (
            trace not in tried
            and len(seen) > place
            and trace.paused[: len(paused)] == paused
            and (before is None or before.seen is None or seen[:place] == before.seen[:place])
            and seen[place].is_like(tensor)
        ):
            found.append(trace)
    expected = window.traces.expected
    return expected if expected in found else next(iter(found), None)


def is_free(window: OffloadWindow) -> bool:
    """Tell whether no graph is likely to ask for anything."""
    ledger, is_used = window.ledger, window.scheduled is not None or window.is_broken or window.is_retired
    if is_used or window.device.is_capturing():
        return False
    for record in ledger.records:
        if record.num_handles and not (record.owner is not None and record.owner.is_spent):
            return False
    while ledger.backlog:  # it was copied, and stays on the host
        ledger.release_oldest()
    return True


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
            forecast=forecast_of(trace, plan, limit_bytes=limit_bytes),
            device=window.device,
            paused=trace.paused,
        )
        if not window.has_schedule:
            window.has_schedule = True
            window.device.empty_cache()  # which steps that decided as they went have left in more pieces than later ones need
        found = trace.schedule = (key, schedule)
    schedule = found[1]
    return None if schedule.is_passed() else schedule
