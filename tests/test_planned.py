"""What planners remember while tests run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from memkit.plan import DTRScore, JointPlanner, RematPlanner, remat
from memkit.plan.budget.problem import make_problem
from tests import planned
from tests.plan.budget.steps import gpu, plan_budget_jointly, random_trace
from tests.plan.reference import random_step
from tests.plan.test_regions import ON_HOST, random_tree


@dataclass
class _Step:
    number: int


def test_same_content_is_looked_at_once() -> None:
    asked: list[tuple[int, object]] = []

    @planned.once
    def simulate(step: _Step, actions: object, *, limit: int = 0) -> int:
        asked.append((step.number, actions))
        return step.number + limit

    found = [simulate(_Step(number), actions, limit=5) for number in (1, 2, 1) for actions in ([3], [3], (4,))]

    assert found == [6, 6, 6, 7, 7, 7, 6, 6, 6]
    assert asked == [(1, [3]), (1, (4,)), (2, [3]), (2, (4,))]
    assert simulate(_Step(1), [3], limit=6) == 7
    assert simulate(_Step(1), [3]) == 1
    assert len(asked) == 6


@contextmanager
def _followed(follow: str) -> Iterator[None]:
    before = getattr(sys, f"get{follow}")()
    getattr(sys, f"set{follow}")(lambda *_: None)
    try:
        yield
    finally:
        getattr(sys, f"set{follow}")(before)


@pytest.mark.parametrize("follow", ["trace", "profile"])
def test_all_is_done_anew_where_somebody_follows_it(follow: str) -> None:
    asked: list[int] = []
    simulate = planned.once(asked.append)
    with _followed(follow):
        simulate(1)
        simulate(1)

    assert asked == [1, 1]


def _plans() -> list[object]:
    """Return the plans of several steps by all planners, those of each of them made twice."""
    found: list[object] = []
    for _ in range(2):
        for seed in (1, 2):
            step = random_step(seed, 8)
            remat = RematPlanner(step, DTRScore())
            found += [remat.best(share * step.saved_bytes) for share in (0.3, 0.7)]
            found += random_tree(seed).planner(ON_HOST).choices()
            problem = make_problem(random_trace(seed, 8), gpu())
            found.append(plan_budget_jointly(problem, JointPlanner(problem).least().peak_bytes))
    return found


@pytest.mark.slow
def test_planners_find_what_they_find_without_it() -> None:
    with _followed("trace"):
        anew = _plans()

    assert _plans() == anew


def test_tests_of_plans_look_at_each(request: pytest.FixtureRequest) -> None:
    assert hasattr(remat.simulate, "__wrapped__")  # here it is remembered
    assert planned.is_about_plans(Path("tests/plan/budget/test_planning.py"))
    assert not planned.is_about_plans(request.path)
