"""Which of all combinations of a test's parameters run by themselves and with `-m full`: as many as have each value, or each
pair of values, as its marks say. `pytest -m ""` runs all of them."""

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


def mark_full(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` what adds nothing of the tests marked `core`."""
    for same in _by_function(items, "core"):
        short = [item for item in same if "full" not in item.keywords]
        for item in _unneeded(short, "core"):
            item.add_marker(pytest.mark.full)


def leave_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return which tests `-m full` leaves out: those marked `repeats`, and what adds nothing of those marked `covering`."""
    items = list(items)
    left_out = {item for item in items if "repeats" in item.keywords}
    for same in _by_function(items, "covering"):
        short = [item for item in same if "full" not in item.keywords]  # which have run by themselves
        left_out.update(_unneeded([item for item in same if "full" in item.keywords], "covering", short))
    return left_out


def _unneeded(items: list[pytest.Function], mark: str, covered: Iterable[pytest.Function] = ()) -> list[pytest.Function]:
    if not items:
        return []
    num_together, times = (*items[0].get_closest_marker(mark).args, 1)[:2]  # type: ignore[union-attr]
    found = [_params(item) for item in covered]
    for _ in range(times):
        chosen = set(covering([_params(item) for item in items], num_together, found))
        items, found = [item for index, item in enumerate(items) if index not in chosen], []
    return items


def _by_function(items: Iterable[pytest.Item], mark: str) -> Iterable[list[pytest.Function]]:
    found: dict[tuple[object, ...], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and mark in item.keywords:
            found.setdefault((item.path, item.cls, item.originalname), []).append(item)
    return found.values()


def _params(item: pytest.Function) -> Case:
    """Return the parameters of a test; one that is a tuple counts as several."""
    found: dict[str, object] = {}
    for name, value in item.callspec.params.items():
        found.update({f"{name} {at}": part for at, part in enumerate(value)} if type(value) is tuple else {name: value})
    return found
