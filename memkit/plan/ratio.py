"""From a ratio to a plan, or to one action after the other: the storages saved earliest leave, because they are needed last."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from numbers import Real

from memkit.plan.actions import Action, Plan, PlannedSave, limit_of


def check_ratio(ratio: object, *, where: str) -> float:
    """Return a ratio that is fit to be used.

    Args:
        ratio: what was given.
        where: what it was given as, for the message: "offload_ratio", "the schedule at iteration 7".

    Raises:
        TypeError: it is no real number.
        ValueError: it is NaN, or not from 0 to 1.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, Real):
        raise TypeError(f"{where} must be a number from 0 to 1; found {ratio!r} ({type(ratio).__name__})")
    value = float(ratio)
    if math.isnan(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{where} must be from 0 (move nothing) to 1 (move everything); found {value}")
    return value


def first_to_leave(
    sizes_bytes: Sequence[int], ratio: float, *, window_bytes: int, held: Collection[int] = ()
) -> tuple[list[int], int]:
    """Return the saves that leave, by index, and how many bytes all have that are not held.

    The shortest beginning of the saves whose bytes reach the share leaves. If what stays is less than the window, the latest of
    those stay as well, as many as the window holds: they would still be on the device when the backward starts, so to copy them
    would be in vain.

    Args: as of `plan_ratio`.
    """
    movable = [index for index in range(len(sizes_bytes)) if index not in held]
    seen_bytes = sum(sizes_bytes[index] for index in movable)
    wanted_bytes = ratio * seen_bytes * (1 - 1e-9)  # 0.1 is a little more than a tenth
    chosen: list[int] = []
    offload_bytes = 0
    for index in movable:
        if offload_bytes >= wanted_bytes:
            break
        chosen.append(index)
        offload_bytes += sizes_bytes[index]
    while chosen and seen_bytes - offload_bytes + sizes_bytes[chosen[-1]] <= window_bytes:
        offload_bytes -= sizes_bytes[chosen.pop()]
    return chosen, seen_bytes


def plan_ratio(sizes_bytes: Sequence[int], ratio: float, *, window_bytes: int, held: Collection[int] = ()) -> Plan:
    """Return the plan that moves a share of the saved bytes: see `first_to_leave`.

    Args:
        sizes_bytes: bytes of each saved storage, in the order of first saves.
        ratio: the share, 0 to 1.
        window_bytes: bytes that the device may hold in any case.
        held: indices of storages that something else keeps alive.
    """
    chosen, seen_bytes = first_to_leave(sizes_bytes, ratio, window_bytes=window_bytes, held=held)
    leaving, limit_bytes = frozenset(chosen), limit_of(seen_bytes, ratio, window_bytes)
    return Plan(
        saves=tuple(
            PlannedSave(
                index=index,
                num_bytes=num_bytes,
                action=Action.OFFLOAD if index in leaving else Action.KEEP,
                reason=_LEAVES if index in leaving else _HELD if index in held else _STAYS,
                is_held=index in held,
            )
            for index, num_bytes in enumerate(sizes_bytes)
        ),
        ratio=ratio,
        limit_bytes=limit_bytes,
        window_bytes=window_bytes,
        predicted_peak_bytes=min(seen_bytes, limit_bytes),
    )


_LEAVES = "saved early: the ratio moves it"
_STAYS = "saved late: the ratio or the window keeps it"
_HELD = "something else keeps it alive"


class RatioSoFar:
    """Decides save by save, as a forward goes: by a plan as long as one is followed, else so that a ratio is kept so far.

    Args:
        ratio: the share of the bytes that is to leave.
        window_bytes: bytes that the device may hold in any case; None for twice the largest storage.
    """

    def __init__(self, ratio: float, window_bytes: int | None = None) -> None:
        self.ratio = ratio
        self.window_bytes = 0
        """The window: as asked for, or twice the largest storage, of the plan or of what was seen."""
        self.offload_bytes = 0
        """What leaves: by plan, or so far."""
        self.kept_bytes = 0
        """What stays on the device: by plan, or so far."""
        self.limit_bytes = 0
        """What the device may hold if no other forward is alive."""
        self._asked_window_bytes = window_bytes
        self._seen_bytes = self._moved_bytes = self._largest_bytes = 0
        self.stays_more_bytes = 0
        """What stays beyond what was foreseen, for want of host memory or by the user's word, less what leaves by it."""
        self.follow(None)

    def follow(self, plan: Plan | None, *, is_late: bool = False) -> None:
        """Go by a plan from here on, or by none.

        Args:
            is_late: whether something was saved before that went by another: then only the share of the plan is kept to.
        """
        self._plan, self._is_late = plan, is_late
        self._sum_up()

    def decide(self, num_bytes: int, place: int | None = None, asked: Action | None = None) -> Action:
        """Return what to do with the next storage that is saved, and count it.

        Args:
            place: its index in the plan; None if it is in none.
            asked: what the user, or the context inside, has said.
        """
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
        """So many bytes stay that were to leave; fewer, if that is negative."""
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
