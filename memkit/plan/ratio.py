"""From a ratio to a plan: the storages saved earliest leave, because they are needed last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from memkit.plan.actions import Action, Plan


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


def plan_ratio(sizes_bytes: Sequence[int], ratio: float, *, window_bytes: int, held: frozenset[int] = frozenset()) -> Plan:
    """Return the plan that moves a share of the saved bytes.

    The shortest beginning of the saves whose bytes reach the share leaves. If what stays is less than the window, the latest of
    those stay as well, as many as the window holds: they would still be on the device when the backward starts, so to copy them
    would be in vain.

    Args:
        sizes_bytes: bytes of each saved storage, in the order of first saves.
        ratio: the share, 0 to 1.
        window_bytes: bytes that the device may hold in any case.
        held: indices of storages that somebody else keeps alive.
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
    leaving = frozenset(chosen)
    return Plan(
        sizes_bytes=tuple(sizes_bytes),
        actions=tuple(Action.OFFLOAD if index in leaving else Action.KEEP for index in range(len(sizes_bytes))),
        ratio=ratio,
        window_bytes=window_bytes,
        held=held,
        seen_bytes=seen_bytes,
        offload_bytes=offload_bytes,
    )
