"""A step that is known to drop nothing runs as if there were no context, until it changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
from torch import Tensor, nn

import memkit
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, leaf_on, step
from tests.activations.remat.conftest import Remat

UNITS = [1] * 10
Context = Callable[[], AbstractContextManager[object]]


def blocks() -> nn.Module:
    layers = (nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(40))
    return nn.Sequential(*layers)


def train(model: nn.Module, x: Tensor, context: Context) -> list[Tensor]:
    model.zero_grad()
    with context():
        loss = model(x).sum()
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters()), *(buf.clone() for buf in model.buffers())]


@pytest.mark.parametrize("budget", [1.0, "1GiB"])
def test_what_is_shown_is_what_the_last_recorded_step_had(budget: float | str, device: Device, remat_on: Remat) -> None:
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), UNITS)
    recorded = []
    for number in range(6):
        assert_same_bits(step(x, UNITS, lambda: remat_on(budget, "shown")), plain)
        stats = memkit.stats("shown")
        recorded.append(stats.is_recorded)
        assert stats.num_iterations == number + 1
        assert (stats.num_saved, stats.num_dropped, stats.num_replays) == (len(UNITS), 0, 0)
        assert stats.saved_bytes == sum(UNITS) * UNIT_BYTES

    assert recorded == [True, True, True, False, False, False]
    assert (stats.num_deviations, stats.recorder_s) == (0, 0)
    plan = memkit.Rematerialize(budget, "shown").plan
    assert plan is not None
    assert set(plan.actions) == {memkit.plan.Action.KEEP}


def test_larger_step_is_noticed_and_the_next_is_held_to_the_budget(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    large = [1] * 30
    plain = [step(leaf_on(device.torch_device), units) for units in (UNITS, large)]
    for _ in range(5):
        assert_same_bits(step(x, UNITS, lambda: remat_on(15 * UNIT_BYTES, "larger")), plain[0])
    found = []
    for _ in range(4):
        assert_same_bits(step(x, large, lambda: remat_on(15 * UNIT_BYTES, "larger")), plain[1])
        stats = memkit.stats("larger")
        found.append((stats.is_recorded, stats.num_dropped > 0))

    assert found == [(False, False), (True, True), (True, True), (True, True)]
    assert stats.num_deviations >= 1


def test_smaller_budget_is_kept_to_at_once(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(5):
        step(x, UNITS, lambda: remat_on(1.0, "other"))
    step(x, UNITS, lambda: remat_on(0.4, "other"))

    assert memkit.stats("other").is_recorded
    assert memkit.stats("other").num_dropped > 0


@pytest.mark.parametrize("budget", [1.0, "1GiB"])
def test_word_that_comes_late_counts_from_the_next_step_on(budget: float | str, device: Device, remat_on: Remat) -> None:
    def run(word: Callable[[Tensor], Tensor], context: Context) -> list[Tensor]:
        x = leaf_on(device.torch_device)
        with context():
            y = word(x.sin().clone()).sin().exp()
        y.sum().backward()
        return [y.detach(), x.grad]

    plain = run(lambda tensor: tensor, nullcontext)
    dropped = []
    for number in range(9):
        word = memkit.recompute if number >= 5 else memkit.keep
        assert_same_bits(run(word, lambda: remat_on(budget, "late")), plain)
        dropped.append(memkit.stats("late").num_dropped)

    assert dropped == [0] * 6 + [1] * 3
