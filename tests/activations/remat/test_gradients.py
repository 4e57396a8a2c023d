"""Nothing changes but what is held: gradients are those of the plain run, bit for bit, for every kind of computation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import memkit
from memkit.device import CpuDevice, Device
from tests.activations.cases import assert_same_bits, gradients
from tests.activations.remat.cases import COMPUTATIONS, NAMES
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]


@pytest.mark.parametrize("policy", ["plan", "dtr"])
@pytest.mark.parametrize("name", ["mlp", "skips", "dropout", "many_results"])
def test_plan_is_followed_where_one_was_asked_for(name: str, policy: str, device: Device, remat_on: Remat) -> None:
    for budget in (0.8, 0.4, 0.1):
        for _ in range(2):
            gradients(COMPUTATIONS[name], device.torch_device, lambda: remat_on(budget, "policy", policy=policy))  # noqa: B023

        assert memkit.stats("policy").follows_plan == (policy == "plan")
        memkit.reset("policy")


@pytest.mark.parametrize("name", NAMES)
def test_verified_computations(name: str) -> None:
    """Whatever is run again makes the bytes that it made."""
    device = CpuDevice()
    plain = gradients(COMPUTATIONS[name], device.torch_device, nullcontext)

    for budget in (0.5, 0.1):
        for _ in range(2):
            context = memkit.Rematerialize(budget, "verified", min_bytes=0, verify=True, device=device)
            assert_same_bits(gradients(COMPUTATIONS[name], device.torch_device, lambda: context), plain)  # noqa: B023
        memkit.reset("verified")


@pytest.mark.parametrize("name", NAMES)
def test_computations_whose_small_values_stay(name: str) -> None:
    """What stays for its size is where others may be made from."""
    device = CpuDevice()
    plain = gradients(COMPUTATIONS[name], device.torch_device, nullcontext)

    for policy in ("plan", "dtr"):
        context = memkit.Rematerialize("1B", "small", min_bytes=300, policy=policy, device=device)
        for _ in range(2):
            assert_same_bits(gradients(COMPUTATIONS[name], device.torch_device, lambda: context), plain)  # noqa: B023
        memkit.reset("small")
