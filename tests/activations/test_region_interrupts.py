"""Ctrl-C at any line of a region's forward or recompute: the next step has the bits of the plain run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit.activations.recomputing.regions import Regions, RegionSpec
from tests.activations.cases import assert_same_bits
from tests.interrupts import hooks_around, interrupts

ALL = RegionSpec()


class Steps(nn.Module):
    """A buffer that is written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return (x * self.steps).sin()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), Steps())
    return nn.Sequential(nn.Linear(8, 8), block, nn.Sequential(nn.Linear(8, 8), nn.Tanh()))


def stepping(net: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], list[Tensor]]:
    """Return a step that begins with the same weights, buffers and random state each time."""
    state = {name: value.clone() for name, value in net.state_dict().items()}

    def step() -> list[Tensor]:
        net.load_state_dict(state)
        net.zero_grad()
        net.train()
        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16), context():
            loss = net(x).float().square().mean()
        loss.backward()
        buffers = [buffer.clone() for buffer in net.buffers()]
        return [loss.detach(), x.grad, *[p.grad.clone() for p in net.parameters()], *buffers, torch.get_rng_state()]

    return step


@pytest.mark.full
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("nested", [pytest.param(False, marks=pytest.mark.full), True])
def test_next_step_has_the_bits_of_the_plain_run(nested: bool, count: int) -> None:
    plain, net = build(), build()
    wanted = stepping(plain, nullcontext)()
    chosen = {part: ALL for part in net.modules() if nested or part in (net[1], net[2])}
    regions = Regions(chosen)
    step = stepping(net, lambda: regions)
    assert_same_bits(step(), wanted)
    around = hooks_around(net)

    for place in interrupts(step, count):
        assert_same_bits(step(), wanted), place
        assert hooks_around(net) == around, place
        assert not torch.is_autocast_enabled("cpu"), place
        assert torch.autocast_increment_nesting() == 1, place
        torch.autocast_decrement_nesting()


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.full)])
def test_loop_goes_on_within_the_context(count: int) -> None:
    plain, net = build(), build()
    wanted = stepping(plain, nullcontext)()
    step = stepping(net, nullcontext)
    regions = Regions({net[1]: ALL, net[2]: ALL})
    with regions:
        assert_same_bits(step(), wanted)

        for place in interrupts(step, count):
            assert_same_bits(step(), wanted), place
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_hooks_of_the_user_are_off_after_an_interrupt() -> None:
    def interrupt(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    region = nn.Sequential(nn.Linear(4, 4))
    region.append(nn.Module())
    region[1].forward = interrupt  # type: ignore[method-assign]
    with Regions({region: ALL}), pytest.raises(KeyboardInterrupt), torch.autograd.graph.save_on_cpu():
        region(torch.ones(4, 4))

    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
