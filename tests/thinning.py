"""Which combinations of a test's parameters there are: no more than have each pair of values together."""

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


def thin(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return which tests there are. Those of a function that run by default all are, but for those that a mark `core(n)` makes
    slow; of the slow ones, those that have two values (or as many as a mark `covering(n)` says) together for the first time.
    Without that mark, those that one `parametrize` gives together count as one."""
    functions: dict[object, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            is_on_gpu = "gpu" in item.keywords  # which are thinned by themselves
            functions.setdefault((item.path, item.cls, item.originalname, is_on_gpu), []).append(item)
    left_out = {item for same in functions.values() for item in _left_out(same)}
    return [item for item in items if item not in left_out]


def _left_out(items: list[pytest.Function]) -> set[pytest.Function]:
    fast = [item for item in items if "slow" not in item.keywords]
    core = items[0].get_closest_marker("core")
    if core is not None:
        chosen = covering([_params(item) for item in fast], core.args[0])
        for index in set(range(len(fast))).difference(chosen):
            fast[index].add_marker(pytest.mark.slow)
        fast = [fast[index] for index in chosen]
    slow = [item for item in items if "slow" in item.keywords]
    mark = items[0].get_closest_marker("covering")
    params = _params if mark else _rows
    needed = covering([params(item) for item in slow], mark.args[0] if mark else 2, [params(item) for item in fast])
    return set(slow).difference(slow[index] for index in needed)


def _together(case: Case, num_together: int) -> set[Hashable]:
    values = [(name, type(value), _key(value)) for name, value in case.items()]
    return set(itertools.combinations(values, min(num_together, len(values))))


def _key(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _params(item: pytest.Function) -> Case:
    """Return the parameters of a test; one that is a tuple counts as several."""
    found: dict[str, object] = {}
    for name, value in item.callspec.params.items():
        found.update({f"{name} {at}": part for at, part in enumerate(value)} if type(value) is tuple else {name: value})
    return found


def _rows(item: pytest.Function) -> Case:
    """Return the parameters of a test; those that are written in the rows of one table count as one."""
    found = dict(item.callspec.params)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        if len(names) > 1:
            found[" ".join(names)] = tuple(_key(found.pop(name)) for name in names)
    return found
