"""From an offload ratio to actions, the seconds of the copies, and bytes on the device."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Real

from memkit.plan.gpu import Link
from memkit.plan.plans import Action, Plan, PlannedValue, limit_of
from memkit.plan.timeline import HIDDEN, Lane, Levels, Timeline


def check_ratio(ratio: object, *, where: str) -> float:
    if isinstance(ratio, bool) or not isinstance(ratio, Real):
        raise TypeError(f"{where} must be a number from 0 to 1; found {ratio!r} ({type(ratio).__name__})")
    value = float(ratio)
    if math.isnan(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{where} must be from 0 (move nothing) to 1 (move everything); found {value}")
    return value


def first_to_leave(
    sizes_bytes: Sequence[int], ratio: float, *, window_bytes: int, held: Collection[int] = (), weights: Sequence[float] = ()
) -> tuple[list[int], int]:
    """Return the saves that leave, the shortest prefix that reaches the share, and the bytes of all that are not held."""
    movable = [index for index in range(len(sizes_bytes)) if index not in held]
    seen_bytes = sum(sizes_bytes[index] for index in movable)
    chosen: list[int] = []
    offload_bytes, left, before = 0, 0.0, 0.0 if weights else seen_bytes
    for index in movable:
        before += weights[index] if weights else 0
        if left < ratio * before * (1 - 1e-9):  # 0.1 is a little more than a tenth
            chosen.append(index)
            left += weights[index] if weights else sizes_bytes[index]
            offload_bytes += sizes_bytes[index]
    while chosen and seen_bytes - offload_bytes + sizes_bytes[chosen[-1]] <= window_bytes:
        offload_bytes -= sizes_bytes[chosen.pop()]
    return chosen, seen_bytes


def plan_ratio(
    sizes_bytes: Sequence[int], ratio: float, *, window_bytes: int, held: Collection[int] = (), weights: Sequence[float] = ()
) -> Plan:
    chosen, seen_bytes = first_to_leave(sizes_bytes, ratio, window_bytes=window_bytes, held=held, weights=weights)
    leaving, limit_bytes = frozenset(chosen), limit_of(seen_bytes, ratio, window_bytes)
    return Plan(
        saves=tuple(
            PlannedValue(
                index=index,
                num_bytes=num_bytes,
                action=Action.OFFLOAD if index in leaving else Action.KEEP,
                reason="saved early: the ratio moves it"
                if index in leaving
                else "something else keeps it alive"
                if index in held
                else "saved late: the ratio or the window keeps it",
                is_held=index in held,
            )
            for index, num_bytes in enumerate(sizes_bytes)
        ),
        ratio=ratio,
        limit_bytes=limit_bytes,
        window_bytes=window_bytes,
        predicted_peak_bytes=min(seen_bytes, limit_bytes),
    )


class RatioSoFar:
    """Decides save by save in a forward: by a plan as long as the forward follows one, else so that the ratio holds so far."""

    def __init__(self, ratio: float, window_bytes: int | None = None) -> None:
        self.ratio = ratio
        self.window_bytes = 0  # the window: as requested, or twice the largest storage of the plan or seen so far
        self.offload_bytes = 0
        self.kept_bytes = 0
        self.limit_bytes = 0  # bytes that the device may hold if no other forward is alive
        self._asked_window_bytes = window_bytes
        self._seen_bytes = self._moved_bytes = self._largest_bytes = 0
        self.stays_more_bytes = 0  # bytes that stay beyond the plan, less those that leave beyond it
        self.follow(None)

    def follow(self, plan: Plan | None, *, is_late: bool = False) -> None:
        self._plan, self._is_late = plan, is_late
        self._sum_up()

    def decide(self, num_bytes: int, place: int | None = None, asked: Action | None = None) -> Action:
        self._seen_bytes += num_bytes
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        plan = self._plan
        if plan is None or place is None:
            foreseen = self._until(self.ratio * self._seen_bytes)
        else:
            foreseen = self._until(plan.offload_bytes) if self._is_late else plan.saves[place].action
        action = foreseen if asked is None else asked
        if action is Action.OFFLOAD:
            self._moved_bytes += num_bytes
        if action is not foreseen:
            self.stays_more_bytes += num_bytes if action is Action.KEEP else -num_bytes
        if plan is None or action is not foreseen:
            self._sum_up()
        return action

    def _until(self, wanted_bytes: float) -> Action:
        return Action.OFFLOAD if self._moved_bytes < wanted_bytes else Action.KEEP

    def stays_after_all(self, num_bytes: int) -> None:
        """Note that so many bytes stay that were to leave; fewer, if negative."""
        self.stays_more_bytes += num_bytes
        self._sum_up()

    def _sum_up(self) -> None:
        plan, window_bytes = self._plan, self._asked_window_bytes
        if plan is not None:
            self.window_bytes = plan.window_bytes if window_bytes is None else window_bytes
            self.offload_bytes, kept_bytes, limit_bytes = plan.offload_bytes, plan.kept_bytes, int(plan.limit_bytes)
        else:
            self.window_bytes = 2 * self._largest_bytes if window_bytes is None else window_bytes
            self.offload_bytes, kept_bytes = self._moved_bytes, self._seen_bytes - self._moved_bytes
            limit_bytes = limit_of(self._seen_bytes, self.ratio, self.window_bytes)
        self.kept_bytes = kept_bytes + self.stays_more_bytes
        self.limit_bytes = max(limit_bytes + self.stays_more_bytes, self.window_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSave:
    num_bytes: int
    saved_at_s: float
    needed_at_s: float
    is_held: bool = False


def step_with_copies_s(
    saves: Sequence[TimedSave], leaving: Collection[int], *, forward_s: float, backward_s: float, link: Link, limit_bytes: float
) -> float:
    """Return the seconds of a step: compute waits for the oldest copy where the device holds more than the limit."""
    timeline, live_bytes = Timeline(), 0
    going, away = deque[tuple[int, float]](), set[int]()
    for index, save in enumerate(saves):
        if save.is_held:
            continue
        live_bytes += save.num_bytes
        if index in leaving:
            copy_s, now_s = save.num_bytes / link.d2h_bytes_per_s, timeline.now_s(save.saved_at_s)
            going.append((index, timeline.issue(Lane.OUT, copy_s, after_s=now_s, latency_s=link.latency_s)))
        while live_bytes > limit_bytes and going:
            oldest, done_s = going.popleft()
            timeline.wait(save.saved_at_s, done_s)
            live_bytes -= saves[oldest].num_bytes
            away.add(oldest)
    order = sorted((index for index, save in enumerate(saves) if not save.is_held), key=lambda index: saves[index].needed_at_s)
    to_fetch = deque(index for index in order if index in away)
    back_s: dict[int, float] = {}
    used_bytes = 0
    for index in order:
        moment_s = forward_s + saves[index].needed_at_s
        live_bytes -= used_bytes  # the value used last is free by now
        while to_fetch and (to_fetch[0] == index or live_bytes + saves[to_fetch[0]].num_bytes <= limit_bytes):
            coming = to_fetch.popleft()
            copy_s, now_s = saves[coming].num_bytes / link.h2d_bytes_per_s, timeline.now_s(moment_s)
            back_s[coming] = timeline.issue(Lane.BACK, copy_s, after_s=now_s, latency_s=link.latency_s)
            live_bytes += saves[coming].num_bytes
        timeline.wait(moment_s, back_s.get(index, 0.0))
        used_bytes = saves[index].num_bytes
    return forward_s + backward_s + timeline.late_s


def auto_ratio(
    saves: Sequence[TimedSave], *, forward_s: float, backward_s: float, link: Link, window_bytes: int | None = None
) -> float:
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
        step_s = step_with_copies_s(
            saves, set(leaving), forward_s=forward_s, backward_s=backward_s, link=link, limit_bytes=limit_bytes
        )
        if step_s > HIDDEN * (forward_s + backward_s):
            break
        best = ratio
    return best


class Forecast:
    """The bytes on a device during a backward that repeats an earlier one; the gradient of each input takes as much again."""

    def __init__(
        self, sizes_bytes: Sequence[int], working_bytes: Sequence[int], stays: Sequence[bool], *, limit_bytes: int
    ) -> None:
        self._used_bytes = tuple(itertools.accumulate(sizes_bytes, initial=0))
        self._working_bytes = tuple(working + size for size, working in zip(sizes_bytes, working_bytes, strict=True))
        levels = Levels(len(sizes_bytes))
        for place, (size, working, stay) in enumerate(zip(sizes_bytes, self._working_bytes, stays, strict=True)):
            levels.add(place, place + 1, working)
            levels.add(0 if stay else place, place + 1, size)
        self.peak_bytes = max(limit_bytes + working_bytes[0], levels.peak_bytes)  # at the backward's begin, or at most
        self._highest: list[list[int]] = []  # the highest levels of 1, 2, 4 and more places; made on first use

    def level_bytes(self, now: int, until: int, live_bytes: int) -> int:
        """Return the most bytes from `now` until the place `until` is passed, if nothing else is fetched on the way."""
        first, num_places = now + 1, min(until + 1, len(self._working_bytes)) - now - 1
        if num_places <= 0:
            return live_bytes
        if not self._highest:
            used = (0, *self._used_bytes)
            self._highest = [list(map(operator.sub, self._working_bytes, used))]
        span = num_places.bit_length() - 1
        while len(self._highest) <= span:
            row, width = self._highest[-1], 1 << (len(self._highest) - 1)
            self._highest.append(list(map(max, row, row[width:])))
        row = self._highest[span]
        return live_bytes + self._used_bytes[now] + max(row[first], row[first + num_places - (1 << span)])
