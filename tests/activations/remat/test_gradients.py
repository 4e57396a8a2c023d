"""Nothing changes but what is held: gradients are those of the plain run, bit for bit, for every kind of computation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import CpuDevice, Device
from tests.activations.cases import assert_same_bits, gradients
from tests.activations.remat.cases import COMPUTATIONS
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat
from tests.models import CASES

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]

BUDGETS = (0.8, 0.4, 0.1)
NOTHING_TO_GAIN = {
    ("custom_function_in_place", "plan"),  # its writes are counted twice: it is kept
    ("custom_function_in_place", "dtr"),
    ("attention", "plan"),  # one node has saved all, and needs all of it at once
}


@pytest.mark.parametrize("policy", ["plan", "dtr"])
@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations(name: str, policy: str, device: Device, remat_on: Remat) -> None:
    computation = COMPUTATIONS[name]
    plain = gradients(computation, device.torch_device, nullcontext)

    num_replays = 0
    for budget in BUDGETS:
        for _ in range(2):  # of two steps each: one that is recorded, and three that follow a plan
            found = gradients(computation, device.torch_device, lambda: remat_on(budget, "computation", policy=policy))  # noqa: B023

            assert_same_bits(found, plain)
        stats = memkit.stats("computation")
        num_replays += stats.num_replays
        assert stats.live_records == 0
        assert stats.follows_plan == (policy == "plan")
        memkit.reset("computation")
    assert num_replays > 0 or (name, policy) in NOTHING_TO_GAIN


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_verified_computations(name: str) -> None:
    """Whatever is run again makes the bytes that it made."""
    device = CpuDevice()
    plain = gradients(COMPUTATIONS[name], device.torch_device, nullcontext)

    for budget in (0.5, 0.1):
        for _ in range(2):
            context = memkit.Rematerialize(budget, "verified", min_bytes=0, verify=True, device=device)
            assert_same_bits(gradients(COMPUTATIONS[name], device.torch_device, lambda: context), plain)  # noqa: B023
        memkit.reset("verified")


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations_whose_small_values_stay(name: str) -> None:
    """What stays for its size is where others may be made from."""
    device = CpuDevice()
    plain = gradients(COMPUTATIONS[name], device.torch_device, nullcontext)

    for policy in ("plan", "dtr"):
        context = memkit.Rematerialize("1B", "small", min_bytes=300, policy=policy, device=device)
        for _ in range(2):
            assert_same_bits(gradients(COMPUTATIONS[name], device.torch_device, lambda: context), plain)  # noqa: B023
        memkit.reset("small")


def _step(model: nn.Module, inputs: list[Tensor], context: object) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    with context:
        output = model(*inputs)
    output = output if isinstance(output, Tensor) else next(iter(output.values() if isinstance(output, dict) else output))
    output.float().square().mean().backward()
    return [
        output.detach(),
        *[param.grad for param in model.parameters() if param.grad is not None],
        *[buffer.clone() for buffer in model.buffers()],
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shapes[0][-1] < 64 or name == "resnet18"])
def test_models(name: str) -> None:
    case, device = CASES[name], CpuDevice()
    model, inputs = case.model(), case.inputs()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(buffers, strict=False)
    plain = _step(model, inputs, nullcontext())

    for _ in range(3):
        model.load_state_dict(buffers, strict=False)
        found = _step(model, inputs, memkit.Rematerialize(0.15, "model", min_bytes=0, device=device))

        assert_same_bits(found, plain)
        assert memkit.stats("model").live_records == 0
