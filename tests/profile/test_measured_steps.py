"""What a profile says of a step where an allocator counts: the peak is its own, the parts are those of storages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memkit
from memkit.device import CpuDevice
from memkit.device.base import MemoryCounter
from memkit.profile import MemoryCategory, MemoryReport, tracker

MIB = 2**20


class Counter(MemoryCounter):
    """An allocator that has taken so much at the peak of each part of a step."""

    def allocated_bytes(self) -> int:
        return 5 * MIB

    def peak_bytes(self) -> int:
        return 64 * MIB

    def peak_reserved_bytes(self) -> int:
        return 70 * MIB

    def reset_peak(self) -> None:
        pass


class Counted(CpuDevice):
    """The CPU, with an allocator that counts."""

    def memory_counter(self) -> MemoryCounter:  # type: ignore[override]
        return Counter()


@pytest.fixture
def _counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "open_device", lambda *_, **__: Counted())


def step(*, stepped: bool = False) -> MemoryReport:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)), torch.randn(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    report: MemoryReport = memkit.profile_memory(model, x, optimizer=optimizer, print_table=False, warmup=0)
    return report


@pytest.mark.full
@pytest.mark.usefixtures("_counts")
def test_peak_is_the_allocators_with_states_that_are_still_to_come() -> None:
    report = step()

    assert report.optimizer is not None
    assert report.step_peak_bytes == 64 * MIB + report.optimizer.state_bytes
    assert report.step_memory is not None
    assert report.step_memory.levels[MemoryCategory.PARAM][0] == report.param_bytes
    assert report.grad_bytes == report.param_bytes


@pytest.mark.full
@pytest.mark.usefixtures("_counts")
def test_states_that_are_there_are_in_what_was_measured() -> None:
    assert step(stepped=True).step_peak_bytes == 64 * MIB


@pytest.mark.full
@pytest.mark.usefixtures("_counts")
def test_what_is_no_storage_of_the_step_is_told() -> None:
    report = step()

    assert report.step_memory is not None
    rest = report.step_peak_bytes - report.step_memory.peak_bytes
    assert f"other tensors, workspaces and rounding {rest / MIB:.1f}" in str(report)
    assert report.peak_to_text(top=None).endswith(f"beside these, other tensors, workspaces and rounding: {rest / MIB:.2f} MiB")


def test_compiled_models_say_what_cannot_be_told() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(4, 8)
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]

    report = memkit.profile_memory(model, x, backward=True, print_table=False, warmup=0)

    assert report.step_memory is None
    assert "torch.compile runs a part of the model; profile it before that" in report.peak_to_text()
