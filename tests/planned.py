"""Plans of the same step are looked at once: most tests plan a few small models again and again, in other contexts, on other
devices and behind each interrupt."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from memkit.plan import regions, remat
from memkit.plan.budget import planning, search

_Found = TypeVar("_Found")


def look_once(patch: pytest.MonkeyPatch) -> None:
    """Have all planners remember, for as long as a patch is there, what a step takes that they have simulated."""
    patch.setattr(remat, "simulate", once(remat.simulate))
    simulate = once(search.simulate)
    for module in (search, planning):
        patch.setattr(module, "simulate", simulate)
    patch.setattr(regions.RegionPlanner, "_explored", _explored_once(regions.RegionPlanner._explored))


def is_about_plans(path: Path) -> bool:
    """Tell whether the tests of a file are about plans, which then are looked at each time."""
    return "plan" in path.parts[:-1]


def once(function: Callable[..., _Found]) -> Callable[..., _Found]:
    """Return a function that remembers what it has returned, by the content of its first argument, which does not change, and
    by the others, which can be hashed or are lists. Where lines or calls of this thread are followed, all is done anew."""
    contents: dict[int, tuple[object, bytes]] = {}
    found: dict[object, _Found] = {}

    @functools.wraps(function)
    def remembering(step: Any, *others: Any, **options: Any) -> _Found:
        if _is_followed():
            return function(step, *others, **options)
        known = contents.get(id(step))
        if known is None:
            known = contents[id(step)] = step, pickle.dumps(step)  # alive from now on, so that its id is no other's
        key = known[1], *(tuple(each) if isinstance(each, list) else each for each in others), *sorted(options.items())
        if key not in found:
            found[key] = function(step, *others, **options)
        return found[key]

    return remembering


def _explored_once(explore: Callable[[Any], _Found]) -> Callable[[Any], _Found]:
    """Return how a `RegionPlanner` explores its step, which remembers what others have found."""
    found: dict[bytes, dict[Any, Any]] = {}

    def explored(planner: Any) -> _Found:
        if not planner._is_explored and not _is_followed():
            key = pickle.dumps((planner.step, planner.calls, planner.costs, planner._num_ops))
            if key not in found:
                explore(planner)
                found[key] = planner._found
            planner._is_explored, planner._found = True, dict(found[key])
        return explore(planner)

    return explored


def _is_followed() -> bool:
    return sys.gettrace() is not None or sys.getprofile() is not None
