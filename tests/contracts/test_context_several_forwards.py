"""Several forwards, and what is written to between them and before their backwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.device import Device
from memkit.plan import Action, MemoryPlan
from memkit.recording.recording import Recording
from tests.activations.budgeting.plans import plan_of_one, planner_of
from tests.activations.cases import assert_same_bits
from tests.activations.conftest import open_test_device
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.gpus import ON_GPU

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)

Make = Callable[[], AbstractContextManager[object]]


@pytest.fixture(params=["late", *ON_GPU])
def device(request: pytest.FixtureRequest) -> Device:
    return open_test_device(request.param)


def _budget(device: Device) -> Make:
    return lambda: memkit.MemoryBudget("1536B", "forwards", min_bytes=0, device=device)


def _remat(device: Device) -> Make:
    return lambda: memkit.Rematerialize("1KiB", "forwards", min_bytes=0, device=device)


def _least(device: Device) -> Make:
    return lambda: memkit.Rematerialize("1B", "forwards", min_bytes=0, device=device)


class Written:
    """Tensors that forwards write to, and read by copies, so that plain autograd doesn't mind."""

    def __init__(self, device: Device) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8, device=device.torch_device))
        self.vector, self.matrix = torch.ones(8, device=device.torch_device), torch.ones(1, 8, device=device.torch_device)
        self.statistics = nn.BatchNorm1d(8).to(device.torch_device)
        self.device = device

    def vector_in_forward(self, number: int) -> Tensor:
        self.vector.mul_(1.5)
        return self.vector.clone()

    def matrix_in_forward(self, number: int) -> Tensor:
        self.matrix.sum()
        self.matrix.mul_(1.5)
        return self.matrix.clone()

    def matrix_in_other_forward(self, number: int) -> Tensor:
        if number:
            self.matrix.mul_(1.5)
        return self.matrix.tanh()

    def statistics_in_other_forward(self, number: int) -> Tensor:
        if number:
            self.statistics.train()(self.matrix * torch.ones(4, 1, device=self.device.torch_device))
        return self.statistics.running_mean + self.statistics.running_var.sqrt()

    def vector_in_backward(self, number: int) -> Tensor:
        read = self.vector.clone()
        other = torch.ones(8, device=self.device.torch_device, requires_grad=True)
        other.register_hook(lambda _: self.vector.mul_(1.5))
        with torch.enable_grad():
            other.sum().backward()
        return read + self.vector.clone()


def _steps(written: Written, name: str, make: Make, num_steps: int = 5) -> list[Tensor]:
    """Return the gradients of several steps, each of two forwards and then their backwards."""
    found = []
    for _ in range(num_steps):
        written.weight.grad = None
        losses = []
        for number in range(2):
            with make():
                x = torch.ones(12, 8, device=written.device.torch_device) * (2 - number)
                with torch.no_grad():
                    read = getattr(written, name)(number)
                losses.append((linear(x if number else x.tanh(), written.weight) * read.clone()).square().sum())
        for loss in losses:
            loss.backward()
        found.append(written.weight.grad.clone())
    return found


@pytest.mark.parametrize("make", [_budget, _remat, _least])
@pytest.mark.parametrize(
    "name",
    ["vector_in_forward", "matrix_in_forward", "matrix_in_other_forward", "statistics_in_other_forward", "vector_in_backward"],
)
def test_what_a_later_forward_writes_to_is_read_as_it_was(name: str, make: Callable[[Device], Make], device: Device) -> None:
    wanted = _steps(Written(device), name, nullcontext)

    assert_same_bits(_steps(Written(device), name, make(device)), wanted)


def test_what_is_written_to_before_each_backward_may_be_recomputed_from_under_a_plan(device: Device) -> None:
    plans = list[MemoryPlan]()

    def gradients(make: Make) -> list[Tensor]:
        written, found = Written(device), []
        for _ in range(6):
            written.weight.grad = None
            with make():
                h = linear(torch.ones(12, 8, device=device.torch_device), written.weight)
                for _ in range(6):
                    h = (h * written.matrix.tanh()).sin() + h
                loss = h.square().sum()
            written.matrix.mul_(1.1)
            loss.backward()
            found.append(written.weight.grad.clone())
        return found

    def make() -> memkit.MemoryBudget:
        trace = budget_states["forwards"].traces.latest if "forwards" in budget_states else None
        if not plans and trace is not None and trace.learned is not None and trace.learned.planner is not None:
            plans.append(plan_of_one(planner_of("forwards"), Action.RECOMPUTE))
        return memkit.MemoryBudget(1.0, "forwards", min_bytes=0, device=device, plan=plans[0] if plans else None)

    assert_same_bits(gradients(make), gradients(nullcontext))
    assert memkit.stats("forwards").follows_plan
    assert memkit.stats("forwards").num_dropped > 10


def test_what_a_later_forward_writes_to_is_copied_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    written, copied, copy_root = Written(device), list[Recording](), Recording._copy_root

    def copy(recording: Recording, *given: Any) -> None:
        copied.append(recording)
        copy_root(recording, *given)

    with memkit.Rematerialize("1B", "forwards", min_bytes=0, device=device):
        loss = (linear(torch.ones(12, 8, device=device.torch_device), written.weight) * written.matrix.tanh()).sum()
    monkeypatch.setattr(Recording, "_copy_root", copy)
    with memkit.Rematerialize("1B", "forwards", min_bytes=0, device=device):
        for _ in range(5):
            written.matrix.mul_(1.5)

    assert len(copied) == 1
    loss.backward()
