"""Which of all combinations of a test's parameters run with `-m full`: as many as have each pair of values, or each value,
as its mark says. `pytest -m ""` runs all of them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest

Case = Mapping[str, object]
"""The value of each parameter, by its name."""


def covering(cases: Sequence[Case], num_together: int, covered: Iterable[Case] = ()) -> list[int]:
    """Return which of the cases to run, so that each has been together with each as in some case: the first of the best.

    Args:
        num_together: how many values at a time: 1 for each value once, 2 for each pair of values of two parameters.
        covered: cases that run anyway.
    """
    found = [_together(case, num_together) for case in cases]
    missing = set().union(*found).difference(*(_together(case, num_together) for case in covered))
    chosen: list[int] = []
    gains = [len(each) for each in found]  # at most: what a case adds only shrinks
    while missing:
        best = -1
        for index in sorted(range(len(cases)), key=lambda index: -gains[index]):
            if best >= 0 and gains[index] < gains[best]:
                break
            gains[index] = len(found[index] & missing)
            if best < 0 or (-gains[index], index) < (-gains[best], best):
                best = index
        chosen.append(best)
        missing -= found[best]
    return sorted(chosen)


def _together(case: Case, num_together: int) -> set[Hashable]:
    values = [(name, type(value), _key(value)) for name, value in case.items()]
    return set(itertools.combinations(values, min(num_together, len(values))))


def _key(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def leave_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return which tests `-m full` leaves out: those marked `repeats`, and what adds nothing of those marked `covering`."""
    left_out: set[pytest.Item] = set()
    of_function: dict[tuple[object, ...], list[pytest.Function]] = {}
    for item in items:
        if "repeats" in item.keywords:
            left_out.add(item)
        elif isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            of_function.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for same in of_function.values():
        num_together, times = _covering(*same[0].get_closest_marker("covering").args)  # type: ignore[union-attr]
        rest = [item for item in same if "full" in item.keywords]
        short = [_params(item) for item in same if "full" not in item.keywords]  # which have run by themselves
        for time in range(times):
            chosen = {rest[index] for index in covering([_params(item) for item in rest], num_together, () if time else short)}
            rest = [item for item in rest if item not in chosen]
        left_out.update(rest)
    return left_out


def _covering(num_together: int, times: int = 1) -> tuple[int, int]:
    return num_together, times


def _params(item: pytest.Function) -> Case:
    """Return the parameters of a test; one that is a tuple counts as several."""
    found: dict[str, object] = {}
    for name, value in item.callspec.params.items():
        found.update({f"{name} {at}": part for at, part in enumerate(value)} if type(value) is tuple else {name: value})
    return found
