"""What saved values may take where calls of modules are recomputed as a whole, so that a step keeps to a budget: each choice of
calls is held against what is on the device beside, from the begin of the step to its end.

A call has its saved values while it runs, and again from the first moment at which the backward asks for one of them.
"""

from __future__ import annotations

from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from memkit.plan.actions import Action
from memkit.plan.timeline import Levels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memkit.plan.budget.problem import HeldValue, Problem
    from memkit.plan.region_step import RegionBytes, RegionNeeds

_HIDDEN = 0.9
"""For so much of the forward copies are on the link beside calls of modules that are recomputed."""


class Moving(NamedTuple):
    """What leaves beside calls of modules that are recomputed."""

    limit_bytes: int
    """What saved values may take, those that leave with them."""
    kept_bytes: int
    """So much of that is not dropped."""
    num_bytes: int
    """So much of what is not dropped leaves: it hides behind the computation."""
    window_bytes: int
    """So much of it the device may hold at a time: what is on its way."""


def fit_regions(problem: Problem, choices: Sequence[RegionNeeds], allowed_bytes: int) -> int | None:
    """Return what saved values may take where nothing leaves; None if no choice keeps to what the step may take.

    Args:
        problem: the step.
        choices: what calls may be recomputed, the quickest first.
        allowed_bytes: what the step may take on the device.
    """
    fitting = (choice for choice in choices if choice.regions and _peak_bytes(problem, choice) <= allowed_bytes)
    return next((choice.peak_bytes for choice in fitting), None)


def fit_copies(problem: Problem, choices: Sequence[RegionNeeds], allowed_bytes: int, bytes_per_s: float) -> Moving | None:
    """Return what may leave, for the quickest choice that keeps to what the step may take then; None if none does.

    Args:
        problem, choices, allowed_bytes: see `fit_regions`.
        bytes_per_s: of the link, both ways at once.
    """
    if problem.num_forward_points >= len(problem.points):
        return None
    hidden_bytes = int(_HIDDEN * problem.starts_s[problem.points[problem.num_forward_points]] * bytes_per_s)
    for choice in choices:
        if not choice.regions:
            continue  # that is no such choice
        kept = list(_kept(problem, choice))
        leaving: list[HeldValue] = []
        num_bytes = 0
        for held in kept:  # what is saved first leaves
            if num_bytes + held.num_bytes > hidden_bytes:
                break
            if Action.OFFLOAD in held.choices:
                leaving.append(held)
                num_bytes += held.num_bytes
        window_bytes = 2 * max((held.num_bytes for held in leaving), default=0)
        if num_bytes <= window_bytes:
            continue  # what is on its way takes as much
        if _peak_bytes(problem, choice, leaving, window_bytes) <= allowed_bytes:
            kept_bytes = sum(held.num_bytes for held in kept)
            return Moving(choice.peak_bytes, kept_bytes, num_bytes, window_bytes)
    return None


def peak_with_regions(problem: Problem, choice: RegionNeeds, ratio: float, window_bytes: int) -> int:
    """Return the most bytes that a step takes on the device.

    Args:
        problem, choice: see `fit_regions`.
        ratio: the share of what is not dropped that leaves, what is saved first.
        window_bytes: see `Moving`.
    """
    kept = list(_kept(problem, choice))
    most_bytes = ratio * sum(held.num_bytes for held in kept)
    reached = accumulate(held.num_bytes for held in kept)
    leaving = [held for held, num_bytes in zip(kept, reached, strict=True) if num_bytes <= most_bytes]
    return _peak_bytes(problem, choice, leaving, window_bytes)


def _kept(problem: Problem, choice: RegionNeeds) -> Iterator[HeldValue]:
    """Yield the saved values that are not dropped, in the order of their first saves."""
    dropped = set[int]().union(*(region.dropped for region in choice.regions))
    return (held for held in problem.values if not held.is_anchor and held.value not in dropped)


def _second_run_bytes(problem: Problem, region: RegionBytes, inside: Sequence[HeldValue]) -> int:
    """Return the most bytes that a second run takes: what it makes, and what was there beside as the forward made that, such as
    the workspaces of convolutions."""
    most_bytes, made_bytes = region.peak_bytes, 0
    in_order = sorted(inside, key=lambda held: held.made)
    for held, until in zip(in_order, [*(after.made for after in in_order[1:]), 0], strict=True):
        made_bytes += held.num_bytes
        beside = problem.working_bytes[held.made : max(until, held.made + 1)]
        most_bytes = max(most_bytes, made_bytes + max(beside, default=0))
    return most_bytes


def _peak_bytes(problem: Problem, choice: RegionNeeds, leaving: Sequence[HeldValue] = (), window_bytes: int = 0) -> int:
    """Return the most bytes on the device at once, with some calls recomputed, and what leaves in host memory, but for
    `window_bytes` of it that are on their way."""
    values, num_slots = problem.values, problem.num_slots
    levels, away = Levels(num_slots), Levels(num_slots)
    for held in _kept(problem, choice):
        levels.add(held.made, held.freed, held.num_bytes)
    held_until: dict[int, int] = {}
    for region in choice.regions:
        inside = [values[problem.index[value]] for value in region.dropped if value in problem.index]
        begin = min((held.use for held in inside), default=num_slots)
        for held in inside:
            levels.add(held.made, held.released, held.num_bytes)
            levels.add(max(begin, held.released), held.freed, held.num_bytes)
        more_bytes = _second_run_bytes(problem, region, inside) - sum(held.num_bytes for held in inside)
        end = min(begin + 1, num_slots)  # of the second run
        levels.add(begin, end, max(more_bytes, 0))
        held_until |= {value: max(end, held_until.get(value, 0)) for value in region.inputs}
    for value, end in held_until.items():
        place = problem.index.get(value)
        if place is not None:
            held = values[place]
            levels.add(held.released if held.is_anchor else held.freed, end, held.num_bytes)
        elif value in problem.retained:
            released, num_bytes = problem.retained[value]
            levels.add(released, end, num_bytes)
    for held in leaving:
        away.add(held.released, held.use, held.num_bytes)
    beside = map(add, problem.working_bytes, levels.each())
    return problem.base_bytes + max(
        (full - max(gone - window_bytes, 0) for full, gone in zip(beside, away.each(), strict=False)), default=0
    )
