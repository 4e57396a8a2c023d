"""Without `device=` it is the first that saves anything: known only once a forward is under way, and ops have run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.recomputing import recording_stage as stage
from memkit.activations.saved.state import remat_states
from tests.activations.cases import assert_same_bits
from tests.gpus import ON_GPU

pytestmark = pytest.mark.filterwarnings("ignore:.*(as little as can be|no memory apart from|MemoryBudget)")

Around = Callable[[], AbstractContextManager[object]]


@pytest.fixture(params=["cpu", "found late", *ON_GPU])
def torch_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "found late":  # as a GPU is, after ops have run
        device = memkit.device.ReferenceDevice()
        monkeypatch.setattr(stage, "open_device", lambda _: device)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


class Net(nn.Module):
    """One that begins with an op that saves nothing, and writes to what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = x.add(1).mul_(2).add_(x.neg())
        return self.layers(y)  # type: ignore[no-any-return]


def _once(net: nn.Module, x: Tensor, around: Around) -> Sequence[Tensor]:
    with around():
        loss = net(x).square().sum()
    loss.backward()
    return [loss]


def _penalty(net: nn.Module, x: Tensor, around: Around) -> Sequence[Tensor]:
    with around():
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        loss = grad.square().sum()
    loss.backward()
    return [loss]


def _product_with_hessian(net: nn.Module, x: Tensor, around: Around) -> Sequence[Tensor]:
    parameters = list(net.parameters())
    with around():
        loss = net(x).square().sum()
    grads = torch.autograd.grad(loss, parameters, create_graph=True)
    return torch.autograd.grad(sum((grad * grad.detach().cos()).sum() for grad in grads), parameters, allow_unused=True)


def _two_backwards(net: nn.Module, x: Tensor, around: Around) -> Sequence[Tensor]:
    with around():
        loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def _two_forwards(net: nn.Module, x: Tensor, around: Around) -> Sequence[Tensor]:
    with around():
        first, second = net(x).square().sum(), net(x.sin()).cos().sum()
        first.backward(retain_graph=True)
        third = net(x.cos()).sum()
    third.backward()
    (first + second).backward()
    return [first, second, third]


STEPS = {
    "once": _once,
    "penalty": _penalty,
    "product with Hessian": _product_with_hessian,
    "two backwards": _two_backwards,
    "two forwards": _two_forwards,
}


def _rematerialize() -> memkit.Rematerialize:
    return memkit.Rematerialize(0.2, "late", min_bytes=0)


def _score() -> memkit.Rematerialize:
    return memkit.Rematerialize(0.2, "late", min_bytes=0, policy="dtr", verify=True)


def _offload() -> memkit.CPUOffload:
    return memkit.CPUOffload(0.5, "late", min_bytes=0)


def _inside() -> AbstractContextManager[object]:
    both = ExitStack()
    both.enter_context(_offload())
    both.enter_context(_rematerialize())
    return both


def _budget() -> memkit.MemoryBudget:
    return memkit.MemoryBudget(0.5, "late", min_bytes=0)


CONTEXTS: dict[str, Around] = {
    "Rematerialize": _rematerialize,
    "by the score": _score,
    "inside CPUOffload": _inside,
    "MemoryBudget": _budget,
}


def _run(step: str, torch_device: torch.device, around: Around) -> list[list[Tensor]]:
    torch.manual_seed(0)
    net, found = Net().to(torch_device), []
    for _ in range(2):
        x = torch.randn(6, 4, device=torch_device, requires_grad=True)
        results = STEPS[step](net, x, around)
        grads = [tensor.grad.clone() for tensor in (x, *net.parameters()) if tensor.grad is not None]
        found.append([*(result.detach().clone() for result in results), *grads])
    return found


ON_DEVICES = [
    pytest.param(context, device, marks=pytest.mark.slow if device == "cpu" and context != "Rematerialize" else ())
    for context in CONTEXTS
    for device in ("cpu", "found late")
]
ON_DEVICES += [pytest.param(context, "cuda", marks=pytest.mark.gpu) for context in CONTEXTS]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("context", "torch_device"), ON_DEVICES, indirect=["torch_device"])
def test_graph_is_used_again_in_first_steps(step: str, context: str, torch_device: torch.device) -> None:
    plain = _run(step, torch_device, nullcontext)

    for found, expected in zip(_run(step, torch_device, CONTEXTS[context]), plain, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("step", STEPS)
def test_device_is_known_once_a_step_saves(step: str, torch_device: torch.device) -> None:
    """Steps before have saved nothing: the first was not recorded, the second failed."""
    plain = _run(step, torch_device, nullcontext)
    with _rematerialize(), torch.no_grad():
        Net()(torch.ones(6, 4))
    with _rematerialize():
        torch.ones(4).add(1)
    with pytest.raises(ZeroDivisionError), _rematerialize():
        1 / 0  # noqa: B018

    for found, expected in zip(_run(step, torch_device, _rematerialize), plain, strict=True):
        assert_same_bits(found, expected)


def test_later_contexts_share_one_window_of_the_cpu() -> None:
    for _ in range(2):
        with memkit.Rematerialize(0.5, "late", min_bytes=0, device="cpu"):
            loss = Net()(torch.ones(6, 4)).sum()
        loss.backward()

    assert len(remat_states["late"].windows()) == 1
