"""The step under a plan, moment by moment: its peak is the one that the plan predicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memkit.page.under_plan import under_plan
from memkit.plan import Action, MemoryPlan, StepTrace
from memkit.plan.budget.planning import JointPlanner, plan_budget_jointly
from memkit.plan.budget.problem import make_problem
from tests.page.browser import plans_of, report_of_blocks
from tests.plan.budget.steps import gpu, layers, random_trace


def peak_under(trace: StepTrace, plan: MemoryPlan) -> int:
    base_bytes = plan.plain_peak_bytes - max(trace.live_bytes)
    levels = zip(trace.live_bytes, *under_plan(trace, plan), strict=True)
    return base_bytes + max(map(sum, levels))


@pytest.mark.parametrize("mib_per_s", [500, 20_000])
@pytest.mark.parametrize("seed", range(8))
def test_peak_of_a_step_is_as_predicted(seed: int, mib_per_s: int) -> None:
    trace = layers(6) if not seed else random_trace(seed)
    problem = make_problem(trace, gpu(mib_per_s))
    joint = JointPlanner(problem)

    for planner in (joint, *joint.alone.values()):
        least_bytes = planner.least().peak_bytes
        for share in (0.0, 0.3, 0.6, 0.9):
            plan = planner.plan(int(least_bytes + share * (problem.plain_peak_bytes - least_bytes)))
            assert peak_under(trace, plan) == plan.predicted_peak_bytes


@pytest.mark.parametrize("share", [0.95, 0.8])
def test_peak_of_a_model_is_as_predicted(share: float) -> None:
    report = report_of_blocks(6)
    assert report.trace is not None
    (plan,) = plans_of(report, share)

    assert peak_under(report.trace, plan) == plan.predicted_peak_bytes


def test_nothing_changes_where_all_stays() -> None:
    trace = layers(3)
    problem = make_problem(trace, gpu())

    saved, again = under_plan(trace, plan_budget_jointly(problem, problem.plain_peak_bytes))

    assert not any(saved)
    assert not any(again)


def test_what_leaves_is_gone_until_it_is_fetched() -> None:
    trace = layers(6)
    problem = make_problem(trace, gpu())
    plan = plan_budget_jointly(problem, int(0.7 * problem.plain_peak_bytes), actions={Action.OFFLOAD})
    leaving = [value for value in plan.values if value.action is Action.OFFLOAD]

    saved, _ = under_plan(trace, plan)

    assert leaving
    assert min(saved) < 0
    assert -min(saved) <= sum(value.num_bytes for value in leaving)
    assert saved[0] == saved[-1] == 0


def test_plan_of_another_step_is_refused() -> None:
    problem = make_problem(layers(3), gpu())
    plan = plan_budget_jointly(problem, problem.plain_peak_bytes)

    with pytest.raises(ValueError, match="this plan is for another step: model"):
        under_plan(replace(layers(3), model="Other"), plan)
