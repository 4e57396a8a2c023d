"""Times of ops are measured once for each trace, and not in every step."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.activations.recomputing.recording_stage import RecordingStage
from memkit.activations.saved.state import remat_states
from memkit.device import CpuDevice
from memkit.recording import cost
from memkit.recording.recorder import Recorder
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


@pytest.mark.filterwarnings(NO_PLAN_FITS)
def test_new_shapes_are_forgotten(torch_device: torch.device, remat_on: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_MAX_COSTS", 10)
    for size in range(1, 25):
        x = torch.randn(size, device=torch_device, requires_grad=True)
        with remat_on(0.5, "shapes"):
            loss = x.sin().cos().sum()
        loss.backward()

    known_s = remat_states["shapes"].costs.known_s
    assert len(known_s) == 10
    assert sum(op is torch.ops.aten.sum.default for op, *_ in known_s) > 1  # all make a number, of inputs of other sizes


def test_forward_after_a_backward_in_the_same_context_is_seen_as_any_other(torch_device: torch.device, remat_on: Remat) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).to(torch_device)
    x = torch.randn(4, 8, device=torch_device, requires_grad=True)

    with remat_on(0.5, "turns") as context:
        chain(x.flatten(), [1] * 12).sum().backward()
        loss = model(x).exp().sum()
        recording = context._entry.recording._forward.recording
        num_timed = len({op for op, *_ in recording.times})
        loss.backward()

    assert recording.is_timed
    assert num_timed == len(recording.calls) > 5
    trace = next(iter(remat_states["turns"].traces))
    assert {module for _, module in trace.ops.names.values()} >= {"1", "3"}


class Ticks:
    """Stands in for `time`: each reading is a second later than the last, and a reading costs nothing else."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1
        return self.now_s


def test_cost_of_recording_is_what_a_chain_of_ops_takes_longer_with_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, dispatch = Ticks(), Recorder.__torch_dispatch__

    def slow(recorder: Recorder, *args: Any) -> Any:
        ticks.now_s += 3
        return dispatch(recorder, *args)

    monkeypatch.setattr(cost, "time", ticks)
    monkeypatch.setattr(Recorder, "__torch_dispatch__", slow)

    assert cost.recording_cost_s.__wrapped__() == 3


def test_seconds_of_the_recorder_are_those_of_the_ops_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("memkit.activations.recomputing.recording_stage"), "recording_cost_s", lambda: 0.5
    )
    x = torch.randn(16, requires_grad=True)
    for _ in range(2):
        with memkit.Rematerialize(1.0, "seconds", min_bytes=0, device=CpuDevice()):
            with torch.no_grad():
                for _ in range(300):
                    x.sin()
            loss = x.clone().exp().sum()
        loss.backward()

    stats = memkit.stats("seconds")
    assert 300 < stats.num_ops < 310
    assert stats.recorder_s == stats.num_ops * 0.5


def test_error_of_an_op_is_its_own() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(3, 3)
    with memkit.Rematerialize(1.0, "error", min_bytes=0, device=CpuDevice()) as context:
        x.mm(x)
        num_ops = len(context._entry.recording._forward.recording.calls)
        for _ in range(6):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                x.mm(w)
        assert len(context._entry.recording._forward.recording.calls) == num_ops
        x.mm(x)
