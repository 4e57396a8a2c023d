"""What a plan costs: seconds of copies, and how long a step takes with them.

A step can be no faster than its *roofline*: the forward or the copies out, whichever takes longer, then the backward or the
copies back. The *lane simulation* adds the order of things: no copy begins before its tensor exists, none ends after its first
use, and the device holds no more than it may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memkit.plan.actions import limit_of
from memkit.plan.ratio import first_to_leave
from memkit.plan.timeline import HIDDEN, Lane, Timeline
from memkit.transfer import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSave:
    """One saved storage and its moments."""

    num_bytes: int
    """Bytes of the storage."""
    saved_at_s: float
    """Seconds from the start of the forward to its first save."""
    needed_at_s: float
    """Seconds from the start of the backward to its first use."""
    is_held: bool = False
    """Whether the caller keeps it alive, so that to move it would free nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step."""

    forward_s: float
    """Seconds of the forward."""
    backward_s: float
    """Seconds of the backward."""

    @property
    def step_s(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


def roofline_s(*, forward_s: float, backward_s: float, out_bytes: int, back_bytes: int, link: Link) -> float:
    """Return the least seconds of a step that moves so many bytes out in its forward and back in its backward."""
    return max(forward_s, out_bytes / link.d2h_bytes_per_s) + max(backward_s, back_bytes / link.h2d_bytes_per_s)


def simulate_lanes(
    saves: Sequence[TimedSave],
    offloaded: Collection[int],
    *,
    forward_s: float,
    backward_s: float,
    link: Link,
    limit_bytes: float | None = None,
) -> StepTime:
    """Return how long a step takes that moves some of its saved storages.

    Args:
        saves: all saved storages, in the order of first saves.
        offloaded: indices of those that leave.
        forward_s, backward_s: seconds without any copies.
        link: how fast copies are; each also takes its latency.
        limit_bytes: the most bytes of `saves` that the device may hold. None sets no limit: then nothing waits for room, and
            the forward is over when the last copy is.
    """
    timeline = Timeline()
    out = [index for index in range(len(saves)) if index in offloaded and not saves[index].is_held]
    resident = _simulate_forward(timeline, saves, frozenset(out), forward_s=forward_s, link=link, limit=limit_bytes)
    late_s = timeline.late_s
    _simulate_backward(timeline, saves, set(out) - resident, forward_s=forward_s, link=link, limit=limit_bytes)
    return StepTime(forward_s=forward_s + late_s, backward_s=backward_s + (timeline.late_s - late_s))


def _simulate_forward(
    timeline: Timeline,
    saves: Sequence[TimedSave],
    out: frozenset[int],
    *,
    forward_s: float,
    link: Link,
    limit: float | None,
) -> set[int]:
    """Simulate the forward. Return which of `out` are still on the device at its end."""
    backlog: deque[tuple[int, float]] = deque()
    for index, save in enumerate(saves):
        if save.is_held:
            continue
        timeline.live_bytes += save.num_bytes
        if index in out:
            copy_s, now_s = save.num_bytes / link.d2h_bytes_per_s, timeline.now_s(save.saved_at_s)
            backlog.append((index, timeline.issue(Lane.OUT, copy_s, after_s=now_s, latency_s=link.latency_s)))
        while limit is not None and timeline.live_bytes > limit and backlog:
            oldest, done_s = backlog.popleft()
            timeline.wait(save.saved_at_s, done_s)
            timeline.live_bytes -= saves[oldest].num_bytes
    if limit is None:
        timeline.wait(forward_s, timeline.free_s(Lane.OUT))
        return set()
    return {index for index, _ in backlog}


def _simulate_backward(
    timeline: Timeline, saves: Sequence[TimedSave], away: set[int], *, forward_s: float, link: Link, limit: float | None
) -> None:
    """Simulate the backward, which has what is away come back."""
    order = sorted((index for index, save in enumerate(saves) if not save.is_held), key=lambda index: saves[index].needed_at_s)
    to_fetch = deque(index for index in order if index in away)
    done_s: dict[int, float] = {}
    begin_s = timeline.now_s(forward_s)

    def fetch(now_s: float) -> None:
        index = to_fetch.popleft()
        copy_s = saves[index].num_bytes / link.h2d_bytes_per_s
        done_s[index] = timeline.issue(Lane.BACK, copy_s, after_s=now_s, latency_s=link.latency_s)
        timeline.live_bytes += saves[index].num_bytes

    used_bytes = 0
    for index in order:
        moment_s = forward_s + saves[index].needed_at_s
        now_s = timeline.now_s(moment_s)
        timeline.live_bytes -= used_bytes  # what was used last falls free by now
        while to_fetch and (limit is None or timeline.live_bytes + saves[to_fetch[0]].num_bytes <= limit):
            fetch(begin_s if limit is None else now_s)
        if to_fetch and to_fetch[0] == index:
            fetch(now_s)
        timeline.wait(moment_s, done_s.get(index, 0.0))
        used_bytes = saves[index].num_bytes


def auto_ratio(
    saves: Sequence[TimedSave],
    *,
    forward_s: float,
    backward_s: float,
    link: Link,
    window_bytes: int | None = None,
) -> float:
    """Return the largest ratio whose copies hide behind the computation.

    Args:
        saves: the saved storages, in the order of first saves.
        forward_s, backward_s: seconds without any copies.
        link: how fast copies are.
        window_bytes: bytes that the device may hold in any case; by default twice the largest of `saves`.
    """
    sizes = [save.num_bytes for save in saves]
    held = frozenset(index for index, save in enumerate(saves) if save.is_held)
    movable = [size for index, size in enumerate(sizes) if index not in held]
    if not any(movable):
        return 0.0
    window = 2 * max(movable) if window_bytes is None else window_bytes
    best, chosen_bytes = 0.0, 0
    for size in movable:  # the plan changes where one more storage is chosen
        chosen_bytes += size
        ratio = chosen_bytes / sum(movable)
        leaving, seen_bytes = first_to_leave(sizes, ratio, window_bytes=window, held=held)
        limit_bytes = limit_of(seen_bytes, ratio, window)
        time = simulate_lanes(
            saves, set(leaving), forward_s=forward_s, backward_s=backward_s, link=link, limit_bytes=limit_bytes
        )
        if time.step_s > HIDDEN * (forward_s + backward_s):
            break
        best = ratio
    return best
