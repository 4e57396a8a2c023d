"""What is reported is what happened."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

import memkit
from memkit.device import CpuDevice
from memkit.recording import cost
from memkit.recording.recorder import Recorder


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


@pytest.mark.parametrize("number", [1, 2])
def test_seconds_of_the_recorder_are_those_of_the_ops_it_saw(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("memkit.activations.recomputing.recording_stage"), "recording_cost_s", lambda: 0.5
    )
    x = torch.randn(16, requires_grad=True)
    for _ in range(number + 1):
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


def test_small_sizes_are_printed() -> None:
    x = torch.randn(16, requires_grad=True)
    with memkit.Rematerialize(1.0, "small", min_bytes=0, device=CpuDevice()):
        x.clone().exp().sin()

    assert ["saved", "64 bytes"] in [re.split(r"  +", line) for line in str(memkit.stats("small")).splitlines()]
