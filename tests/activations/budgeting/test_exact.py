"""Whatever the plan, and whatever is computed: the bits are those of the plain run, and each byte moves once each way."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.device import Device
from tests.activations.budgeting.plans import planner_of, random_plan
from tests.activations.cases import assert_same_bits, gradients
from tests.activations.remat.cases import COMPUTATIONS, NAMES
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_plain_run(name: str, share: float, device: Device) -> None:
    computation = COMPUTATIONS[name]
    plain = gradients(computation, device.torch_device, nullcontext)
    context = functools.partial(memkit.MemoryBudget, share, "exact", min_bytes=0, device=device)

    for _ in range(3):
        assert_same_bits(gradients(computation, device.torch_device, context), plain)
    assert memkit.stats("exact").live_records == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
@pytest.mark.parametrize("name", NAMES)
def test_any_legal_plan_is_exact(name: str, seed: int, device: Device) -> None:
    computation = COMPUTATIONS[name]
    plain = gradients(computation, device.torch_device, nullcontext)
    context = functools.partial(memkit.MemoryBudget, 1.0, "any", min_bytes=0, device=device)
    for _ in range(2):
        gradients(computation, device.torch_device, context)
    trace = budget_states["any"].traces.latest
    if trace is None or trace.learned is None or trace.learned.planner is None:
        pytest.skip("nothing is planned where no backward asks, or where each step is another")
    plan = random_plan(planner_of("any"), seed)

    for _ in range(3):  # in the second and third one only that is noted of which something is to be done
        found = gradients(computation, device.torch_device, functools.partial(context, plan=plan))
        assert_same_bits(found, plain)
        stats = memkit.stats("any")
        assert stats.live_records == 0
        assert stats.moved_in_bytes <= stats.moved_out_bytes <= plan.moved_bytes
