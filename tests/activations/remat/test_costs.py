"""What ops take is measured once for each trace, and not in every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memkit.activations.recomputing.recording_stage import RecordingStage
from memkit.activations.saved.state import remat_states
from memkit.recording import cost as costs
from tests.activations.chains import chain
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_ops_are_timed_in_the_second_step_only(budget: float | str, torch_device: torch.device, remat_on: Remat) -> None:
    x = torch.randn(256, device=torch_device, requires_grad=True)

    timed = []
    for _ in range(5):
        with remat_on(budget, "timed") as context:
            stage = context._entry.recording
            timed.append(isinstance(stage, RecordingStage) and stage._forward.recording.is_timed)
            loss = chain(x, [1] * 12).sum()
        loss.backward()

    assert timed == [False, True, False, False, False]
    (trace,) = remat_states["timed"].traces
    assert trace.ops.is_measured
    assert all(seconds > 0 for seconds in trace.ops.step.lineage.seconds)


def test_step_that_was_planned_stays_as_it_is_in_later_steps(torch_device: torch.device, remat_on: Remat) -> None:
    x, seen = torch.randn(256, device=torch_device, requires_grad=True), []
    for _ in range(4):
        with remat_on(0.5, "frozen"):
            loss = chain(x, [1] * 12).sum()
        (trace,) = remat_states["frozen"].traces
        step = trace.ops.step
        seen.append((step, tuple(step.lineage.seconds), len(step.lineage.maker), dict(step.why_kept), step.uses))
        loss.backward()

    for step, *known in seen:
        assert known == [tuple(step.lineage.seconds), len(step.lineage.maker), dict(step.why_kept), step.uses]
    assert seen[0][0] is not seen[-1][0]
    assert seen[0][1] != seen[-1][1]  # what ops take was measured meanwhile


@pytest.mark.parametrize("name", ["guessed_s", "measured_s"])
def test_costs_of_very_many_shapes_are_not_all_remembered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_MAX_COSTS", 10)
    known = costs.OpCosts()

    for size in range(25):
        args = (torch.empty(size, dtype=torch.uint8),)
        if name == "guessed_s":
            known.estimate_s(torch.sin, args, args[0])
        else:
            known.learn({costs.cost_key(torch.sin, args, args[0]): 1e-6})

    assert [key[1] for key in getattr(known, name)] == list(range(15, 25))


@pytest.mark.filterwarnings(NO_PLAN_FITS)
def test_new_shapes_are_forgotten(torch_device: torch.device, remat_on: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_MAX_COSTS", 10)
    for size in range(1, 25):
        x = torch.randn(size, device=torch_device, requires_grad=True)
        with remat_on(0.5, "shapes"):
            loss = x.sin().cos().sum()
        loss.backward()

    known = remat_states["shapes"].costs
    assert len(known.guessed_s) == 10
    assert 0 < len(known.measured_s) <= 10


def test_forward_after_a_backward_in_the_same_context_is_timed_as_any_other(
    torch_device: torch.device, remat_on: Remat
) -> None:
    x = torch.randn(256, device=torch_device, requires_grad=True)

    with remat_on(0.5, "turns") as context:
        chain(x, [1] * 12).sum().backward()
        loss = chain(x, [1] * 12).sum()
        recording = context._entry.recording._forward.recording
        num_timed = len({op for op, *_ in recording.times})
        loss.backward()

    assert recording.is_timed
    assert num_timed == len(recording.calls) > 12


def test_modules_of_a_forward_after_a_backward_in_the_same_context_are_noted(
    torch_device: torch.device, remat_on: Remat
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).to(torch_device)
    x = torch.randn(4, 8, device=torch_device, requires_grad=True)

    with remat_on(0.5, "turns"):
        chain(x.flatten(), [1] * 12).sum().backward()
        model(x).exp().sum().backward()

    trace = next(iter(remat_states["turns"].traces))
    assert {module for _, module in trace.ops.names.values()} >= {"1", "3"}
