"""What is timed, and with what it is compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torchvision
from torch import Tensor, nn

import memkit
from memkit.device import CpuDevice, ReferenceDevice
from tests.bench.cases import Workload, layers, measuring

measure = measuring.measure


def _workload(seen: Callable[[], None] = lambda: None) -> Workload:
    return layers(torch.randn(4, 16), num_layers=3, seen=seen)


def test_measures_so_many_steps_in_contexts_of_their_own_after_the_warm_up() -> None:
    calls: list[str] = []
    workload = _workload(lambda: calls.append("step"))

    def engine() -> memkit.CPUOffload:
        calls.append("context")
        return memkit.CPUOffload(1.0, "engine", min_bytes=0, device=device)

    device = ReferenceDevice()
    found = measure(workload, engine, device, num_steps=3, num_warmup=2, after_warmup=lambda: calls.append("warm"))

    assert calls == ["context", "step"] * 2 + ["warm"] + ["context", "step"] * 3
    assert found.num_steps == 3
    assert found.step_s >= max(found.forward_s, found.backward_s) > 0
    assert all(param.grad is None for param in workload.model.parameters())
    assert memkit.stats("engine").num_iterations == 5
    assert measure(_workload(), measuring.plain, CpuDevice(), num_steps=1, num_warmup=0).peak_allocated_bytes is None


def test_steps_in_a_row_follow_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device, calls = CpuDevice(), list[str]()
    monkeypatch.setattr(device, "synchronize", lambda: calls.append("wait"))
    workload = _workload(lambda: calls.append("step"))

    found = measure(workload, measuring.plain, device, num_steps=2, num_warmup=1, num_in_a_row=3)

    assert calls == ["wait", "step", "wait"] * 3 + ["step"] * 4 + ["wait"]
    assert found.num_steps == 2
    assert found.in_a_row_s is not None
    assert found.in_a_row_s > 0


def test_without_a_backward_there_is_no_grad_mode_and_no_loss() -> None:
    modes: list[bool] = []
    workload = _workload(lambda: modes.append(torch.is_grad_enabled()))
    forward_only = replace(workload, backward=False, loss=lambda _: pytest.fail("a loss"))

    found = measure(forward_only, measuring.plain, CpuDevice(), num_steps=2, num_warmup=0)

    assert modes == [False, False]
    assert found.backward_s == 0
    assert found.step_s == found.forward_s > 0


def _gradients(workload: Workload, context: object) -> list[Tensor]:
    workload.model.zero_grad()
    with context:
        result = workload.forward()
    workload.loss(result).backward()
    return [param.grad.clone() for param in workload.model.parameters()]


@pytest.mark.parametrize("name", ["save_on_cpu", "synchronous", "checkpointed"])
def test_engines_change_no_gradient(name: str) -> None:
    workload = _workload()
    made = {
        "save_on_cpu": measuring.save_on_cpu,
        "synchronous": lambda: measuring.synchronous(10**6, min_bytes=0),
        "checkpointed": lambda: measuring.checkpointed(workload.model),
    }[name]()

    found = _gradients(workload, made)

    for one, other in zip(found, _gradients(workload, nullcontext()), strict=True):
        assert torch.equal(one, other)


def test_blocks_are_the_members_of_uniform_lists_and_checkpointing_is_taken_off_again() -> None:
    model = torchvision.models.resnet18()
    blocks = measuring.blocks_of(model)

    assert [type(block).__name__ for block in blocks] == ["BasicBlock"] * 8
    assert list(measuring.torch_baselines(model)) == ["torch save_on_cpu", "checkpoint per block"]
    with measuring.checkpointed(model):
        assert "forward" in vars(blocks[0])
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])), "checkpoint per block"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "checkpoint per child"),
        (nn.Linear(4, 4), "checkpoint of the whole"),
    ],
    ids=["blocks", "children", "leaf"],
)
def test_checkpointing_suits_the_model(model: nn.Module, name: str) -> None:
    batch = torch.randn(2, 4)
    workload = Workload(name="tiny", model=model, forward=lambda: model(batch), loss=Tensor.sum)

    ((found, engine),) = measuring.checkpointing(model).items()

    assert found == name
    for one, other in zip(_gradients(workload, engine()), _gradients(workload, nullcontext()), strict=True):
        assert torch.equal(one, other)
