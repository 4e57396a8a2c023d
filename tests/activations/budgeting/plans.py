"""Plans that no planner would make: a legal action for each value, drawn at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.device import Device
from memkit.plan import Action, JointPlanner, MemoryPlan
from memkit.plan.budget.simulate import simulate
from tests.activations.cases import assert_same_bits

Make = Callable[[], AbstractContextManager[object]]


def planner_of(tag: str) -> JointPlanner:
    """Return the planner of the last step under a tag."""
    return budget_states[tag].traces.latest.learned.planner


def random_plan(planner: JointPlanner, seed: int) -> MemoryPlan:
    """Return a plan for a step with any action for each value, under any budget; it may exceed it."""
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
    """Return a plan with one action, as late as possible, for all values for which it is legal; the others stay."""
    problem = planner.problem
    actions = [action if action in held.choices else Action.KEEP for held in problem.values]
    return planner.told(simulate(problem, actions, problem.plain_peak_bytes), problem.plain_peak_bytes, 0)


def plan_of_some(tag: str, action: Action, every: int, *, of: Collection[int] | None = None) -> MemoryPlan:
    """Return a plan with an action for one in so many values, where it is legal, over a fast enough link."""
    gpu = planner_of(tag).problem.gpu
    rates = dict.fromkeys(("d2h_bytes_per_s", "h2d_bytes_per_s", "both_bytes_per_s"), 1e15)
    planner = JointPlanner(replace(planner_of(tag).problem, gpu=replace(gpu, copy_latency_s=0.0, **rates)))
    problem, places = planner.problem, itertools.count(1)
    may_be = [action in held.choices and (of is None or held.value in of) for held in problem.values]
    actions = [action if may and next(places) % every == 0 else Action.KEEP for may in may_be]
    return planner.told(simulate(problem, actions, problem.plain_peak_bytes), problem.plain_peak_bytes, 0)


def steady(
    run: Callable[[Make], list[Tensor]],
    tag: str,
    device: Device,
    action: Action = Action.RECOMPUTE,
    every: int = 1,
    *,
    of: Callable[[str, str], bool] | None = None,
    min_bytes: int = 0,
    num_steps: int = 3,
) -> Make:
    """Compare steps to the plain run until they are steady by a plan of some; return its context. `of` picks values by the
    names of the op and the module that make them."""
    make, plain = partial(memkit.MemoryBudget, 1.0, tag, min_bytes=min_bytes, device=device), run(nullcontext)
    for _ in range(3):
        assert_same_bits(run(make), plain)
    names = planner_of(tag).problem.trace.names
    values = None if of is None else {value for value, name in names.items() if of(*name)}
    follow = partial(make, plan=plan_of_some(tag, action, every, of=values))
    for _ in range(num_steps):
        assert_same_bits(run(follow), plain)
    return follow
