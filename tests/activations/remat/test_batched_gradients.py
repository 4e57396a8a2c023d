"""Many gradients at once, by `vmap`: their inputs are recomputed below it, as in the forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian

import memkit
from memkit.device import CpuDevice, Device, default_generator
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat
from tests.contracts.contexts import Around

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]

Context = AbstractContextManager[object]
Gradients = Callable[[nn.Module, Tensor, Context], tuple[Tensor, ...]]


def _model(torch_device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(3))
    return nn.Sequential(*blocks).to(torch_device)


def batched_gradients(model: nn.Module, x: Tensor, context: Context) -> tuple[Tensor, ...]:
    with context:
        y = model(x).sum(0)
    return torch.autograd.grad(y, [x, *model.parameters()], torch.eye(8, device=x.device), is_grads_batched=True)


def vectorized_hessian(model: nn.Module, x: Tensor, context: Context) -> tuple[Tensor, ...]:
    def forward(x: Tensor) -> Tensor:
        with context:
            return model(x).sin().sum()

    return (hessian(forward, x, vectorize=True),)


def gradients_of_a_context_in_a_map(model: nn.Module, x: Tensor, context: Context) -> tuple[Tensor, ...]:
    def forward(x: Tensor) -> Tensor:
        with context:
            return model(x)

    y = torch.func.vmap(forward, randomness="same")(x).sum()
    return torch.autograd.grad(y, [x, *model.parameters()])


def _run(gradients: Gradients, torch_device: torch.device, context: Context) -> list[Tensor]:
    model = _model(torch_device)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(torch_device).requires_grad_()
    found = []
    for _ in range(3):
        found += gradients(model, x, context)
    return [*found, torch.get_rng_state(), default_generator(torch_device).get_state()]


@pytest.mark.parametrize("kind", ["alone", "verified", "in an offload"])
@pytest.mark.parametrize("gradients", [batched_gradients, vectorized_hessian, gradients_of_a_context_in_a_map])
def test_many_gradients_at_once(gradients: Gradients, kind: str, device: Device, remat_on: Remat) -> None:
    if kind == "in an offload" and isinstance(device, CpuDevice):
        pytest.skip("nothing is offloaded from it")
    plain = _run(gradients, device.torch_device, nullcontext())
    context: Context = remat_on(0.1, "many", verify=kind == "verified")
    if kind == "in an offload":
        offload = memkit.CPUOffload(1.0, "many", min_bytes=0, window_bytes=0, device=device)
        context = Around(offload, remat_on(0.3, "many"))

    assert_same_bits(_run(gradients, device.torch_device, context), plain)
    stats = memkit.stats("many")
    assert stats.num_replayed_ops > 0
    assert (stats.moved_in_bytes > 0) == (kind == "in an offload")
