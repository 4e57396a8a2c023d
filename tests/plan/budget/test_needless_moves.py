"""Copies that save no time and no room are left out of a plan."""

from __future__ import annotations

import pytest

from memkit.plan import Action
from memkit.plan.budget.problem import Problem, make_problem
from memkit.plan.budget.search import without_needless_moves
from memkit.plan.budget.simulate import simulate
from tests.plan.budget.steps import gpu, layers, random_trace

SHARES = (1.0, 0.9, 0.7)


def _all_offloaded(problem: Problem) -> list[Action]:
    pairs = zip(problem.values, problem.plain, strict=True)
    return [Action.OFFLOAD if Action.OFFLOAD in held.choices else action for held, action in pairs]


def test_all_stays_where_all_fits() -> None:
    problem = make_problem(layers(4), gpu(400_000))
    actions = _all_offloaded(problem)
    moving = simulate(problem, actions, problem.plain_peak_bytes)
    assert moving.moves
    found = without_needless_moves(problem, moving, problem.plain_peak_bytes)

    assert found.moves == ()
    assert found.seconds <= moving.seconds
    assert found.peak_bytes <= problem.plain_peak_bytes


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(20))
def test_step_is_as_fast_and_fits_as_well(seed: int, share: float) -> None:
    problem = make_problem(random_trace(seed), gpu((4_000, 40_000, 400_000)[seed % 3]))
    budget_bytes = round(share * problem.plain_peak_bytes)
    actions = _all_offloaded(problem)
    moving = simulate(problem, actions, budget_bytes)
    found = without_needless_moves(problem, moving, budget_bytes)

    assert found.seconds <= moving.seconds
    assert found.excess_bytes <= moving.excess_bytes
    assert found.moved_bytes <= moving.moved_bytes
    assert {move.index for move in found.moves} <= {move.index for move in moving.moves}
    assert simulate(problem, found.actions, budget_bytes) == found
