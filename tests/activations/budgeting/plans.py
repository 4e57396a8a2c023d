"""Plans that no planner would make: a legal action for each value, drawn at random."""

from __future__ import annotations

import random

from memkit.activations.budgeting.state import budget_states
from memkit.plan import Action, JointPlanner, MemoryPlan
from memkit.plan.budget import simulate


def planner_of(tag: str) -> JointPlanner:
    """Return what has planned the last step under a tag."""
    trace = budget_states[tag].traces.latest
    assert trace is not None
    assert trace.learned is not None
    planner = trace.learned.planner
    assert isinstance(planner, JointPlanner)
    return planner


def random_plan(planner: JointPlanner, seed: int) -> MemoryPlan:
    """Return a plan for a step with any action for each value, under any budget; it may take more."""
    draw = random.Random(seed)
    problem = planner.problem
    favourite = draw.choice(list(Action))
    actions = [
        favourite if favourite in held.choices and draw.random() < 0.5 else draw.choice(sorted(held.choices))
        for held in problem.values
    ]
    budget_bytes = int(draw.uniform(0.2, 1.0) * problem.plain_peak_bytes) + 1
    return planner.told(simulate(problem, actions, budget_bytes), budget_bytes, 0)


def plan_of_one(planner: JointPlanner, action: Action) -> MemoryPlan:
    """Return a plan that does the same with all for which that is legal, as late as may be; the others stay."""
    problem = planner.problem
    actions = [action if action in held.choices else Action.KEEP for held in problem.values]
    return planner.told(simulate(problem, actions, problem.plain_peak_bytes), problem.plain_peak_bytes, 0)
