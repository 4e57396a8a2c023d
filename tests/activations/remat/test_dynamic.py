"""Steps unlike the last one go by the score, and only repeated steps are planned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.saved.state import remat_states
from memkit.device import Device
from tests.activations.cases import assert_same_bits, inputs_on, mlp, skips
from tests.activations.chains import UNIT_BYTES, Context, chain, leaf_on, step
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NO_PLAN_FITS)]


def test_shapes_that_alternate_are_planned_each(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    first, second = [1] * 10, [1, 1, 3, 1, 1, 3, 1]
    plain = [step(leaf_on(device.torch_device), units) for units in (first, second)]
    for count in range(6):
        for units, wanted in zip((first, second), plain, strict=True):
            assert_same_bits(step(x, units, lambda: remat_on(9 * UNIT_BYTES, "alternate")), wanted)
            assert memkit.stats("alternate").follows_plan or count < 3
    planners = {trace.ops._planner for trace in remat_states["alternate"].traces}
    for _ in range(4):
        for units in (first, second):
            step(x, units, lambda: remat_on(9 * UNIT_BYTES, "alternate"))

    assert {trace.ops._planner for trace in remat_states["alternate"].traces} == planners
    assert len(planners) == 2


def test_small_last_batch(device: Device, remat_on: Remat) -> None:
    """It keeps everything, raises nothing, and the next epoch follows the plan of the first."""

    def run(context: Context) -> list[Tensor]:
        x, w = inputs_on(device.torch_device)
        for _ in range(3):
            for size in (8, 8, 8, 2):
                with context():
                    loss = skips(x[:size], w).sum()
                loss.backward()
        return [x.grad, w.grad]

    assert_same_bits(run(lambda: remat_on("8KiB", "epoch", strict=True)), run(nullcontext))


def test_deviation_in_the_middle_of_a_plan(device: Device, remat_on: Remat) -> None:
    def run(context: Context) -> list[Tensor]:
        x, w = inputs_on(device.torch_device)
        for count in range(8):
            torch.manual_seed(count)
            with context():
                y = mlp(x, w)
                loss = (skips(y, w) if count % 4 == 3 else mlp(y.cos(), w)).exp().sum()
            loss.backward()
        return [x.grad, w.grad]

    plain = run(nullcontext)
    assert_same_bits(run(lambda: remat_on(0.3, "middle")), plain)
    assert memkit.stats("middle").num_deviations == 2  # a path that came once is not planned


@pytest.mark.parametrize("change", ["ops", "saves"])
def test_step_with_other_ops_or_other_saves_is_another(change: str, device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    frozen = leaf_on(device.torch_device).detach()

    def run(is_other: bool, context: Callable[[], object]) -> list[Tensor]:
        x.grad = None
        with context():
            y = chain(x, [1] * 4)
            y = (
                (y.cos() if is_other else y.sin())
                if change == "ops"
                else y * (chain(x, [1]) if is_other else chain(frozen, [1]))
            )
            y = chain(y, [1] * 4)
        y.sum().backward()
        return [y.detach(), x.grad]

    plain = [run(is_other, nullcontext) for is_other in (False, True)]
    for _ in range(3):
        for is_other in (False, True):
            assert_same_bits(run(is_other, lambda: remat_on(0.4, "another")), plain[is_other])
    assert len(remat_states["another"].traces) == 2
