"""How many calls what stays, and what is dropped, costs the host in a steady step under a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.device import ReferenceDevice
from memkit.plan import Action, MemoryPlan
from memkit.plan.budget.simulate import simulate
from tests.activations.budgeting.plans import planner_of
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.calls import num_calls


def _blocks(num_blocks: int = 40) -> nn.Sequential:
    layers = (lambda: nn.LayerNorm(32), lambda: nn.Linear(32, 64), nn.GELU, lambda: nn.Linear(64, 32))
    return nn.Sequential(*[make() for _ in range(num_blocks) for make in layers])


def _python_calls(
    make: Callable[[ReferenceDevice], AbstractContextManager[object]], tag: str, num_steps: int, num_blocks: int = 40
) -> tuple[int, Any]:
    """Return how many Python functions of memkit, but not of its devices, are called in a steady step, and its figures."""
    device, model, x = ReferenceDevice(), _blocks(num_blocks), torch.randn(8, 32)

    def step() -> None:
        with make(device):
            loss = model(x).sum()
        loss.backward()

    for _ in range(num_steps):
        step()
    return num_calls(step), memkit.stats(tag)


def _calls_of_budget(action: Action, every: int, num_blocks: int = 40) -> tuple[int, Any]:
    """Return how many calls a step takes under a plan that does something with one in so many values, and its figures."""
    plans: list[MemoryPlan] = []

    def make(device: ReferenceDevice) -> memkit.MemoryBudget:
        trace = budget_states["budget"].traces.latest if "budget" in budget_states else None
        if not plans and trace is not None and trace.learned is not None and trace.learned.planner is not None:
            problem, places = planner_of("budget").problem, itertools.count(1)
            actions = [
                action if action in each.choices and next(places) % every == 0 else Action.KEEP for each in problem.values
            ]
            told = simulate(problem, actions, problem.plain_peak_bytes)
            plans.append(planner_of("budget").told(told, problem.plain_peak_bytes, 0))
        return memkit.MemoryBudget(1.0, "budget", min_bytes=1, device=device, plan=plans[0] if plans else None)

    memkit.reset("budget")
    found = _python_calls(make, "budget", 6, num_blocks)
    assert found[1].follows_plan
    assert found[1].num_deviations == 0
    return found


_NUM_SAVES = 400
"""Of the blocks: what a layer norm, two linear layers and a GELU save, with their weights."""


@pytest.mark.slow
@pytest.mark.filterwarnings(NO_PLAN_FITS)
def test_what_stays_under_a_budget_costs_the_host_few_calls() -> None:
    found_calls, stats = _calls_of_budget(Action.OFFLOAD, 10)
    calls_of_more, stats_of_more = _calls_of_budget(Action.OFFLOAD, 10, num_blocks=80)
    num_moved = stats_of_more.num_copies_out - stats.num_copies_out

    assert 20 <= num_moved <= 30
    assert calls_of_more - found_calls - 25 * num_moved <= 3 * (_NUM_SAVES - num_moved)
    assert found_calls <= 2000  # whatever a step takes once


@pytest.mark.slow
@pytest.mark.filterwarnings(NO_PLAN_FITS)
def test_ops_of_a_step_that_drops_cost_the_host_few_calls() -> None:
    """But for what a dropped value costs, its replay included."""
    found = {every: _calls_of_budget(Action.RECOMPUTE, every) for every in (10, 100)}
    dropped = {every: stats.num_dropped for every, (_, stats) in found.items()}
    per_dropped = (found[10][0] - found[100][0]) / (dropped[10] - dropped[100])

    assert dropped[10] > 20
    assert found[100][0] - per_dropped * dropped[100] <= 12 * found[100][1].num_ops


@pytest.mark.slow
@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("sizes", [(4, 16), pytest.param((4, 8, 16, 32), marks=pytest.mark.slow)])
def test_a_chain_of_drops_costs_the_host_as_many_calls_per_block_whatever_its_length(sizes: tuple[int, ...]) -> None:
    found = [_calls_of_budget(Action.RECOMPUTE, 1, num_blocks) for num_blocks in sizes]

    assert [stats.num_dropped for _, stats in found] == [6 * num_blocks - 1 for num_blocks in sizes]
    assert all(calls <= 1100 * num_blocks for num_blocks, (calls, _) in zip(sizes, found, strict=True))
