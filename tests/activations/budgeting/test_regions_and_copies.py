"""Steps in which calls of modules are recomputed, and a share of the kept values leaves: each is exact, whatever it does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.activations.recomputing.unrecorded import RegionStage
from memkit.activations.saved.settled import Way
from memkit.core.hooks import innermost_pack
from memkit.device import Device, ReferenceDevice
from tests.activations.budgeting.test_semantics import STEPS, Make, Net, Step, outcome, plain_step
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.activations.remat.conftest import dear_ops as dear_ops

pytestmark = [
    pytest.mark.filterwarnings(NO_PLAN_FITS),
    pytest.mark.usefixtures("any_times", "dear_ops", "moving"),
]


class Block(nn.Module):
    """Its ops are hard to run again: random numbers, writes in place, views, and a value that is saved twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(functional.gelu(self.layer(x)), 0.2)
        left, right = y.chunk(2, 1)
        return x + torch.cat([left.sin() * right, torch.relu_(right * left)], 1)


class BlockNet(Net):
    """The same as modules, six of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor, depth: int = 6) -> Tensor:
        for block in self.layers[:depth]:
            x = block(x)
        return self.norm(x).exp().tanh()


def _budgeted(device: Device) -> tuple[BlockNet, Make]:
    torch.manual_seed(0)
    net = BlockNet().to(device.torch_device)
    optimizer = torch.optim.SGD(net.parameters())  # for whose states nothing is left free
    return net, functools.partial(memkit.MemoryBudget, 0.6, "both", optimizer=optimizer, min_bytes=0, device=device)


def _decided() -> bool:
    ways = budget_states["both"].ways
    return ways is not None and ways.is_decided


def _learned(device: Device) -> tuple[BlockNet, Make]:
    """Run plain steps until the fastest way is known."""
    net, make = _budgeted(device)
    plain = outcome(net, plain_step, device, nullcontext)
    while not budget_states or not _decided():
        assert_same_bits(outcome(net, plain_step, device, make), plain)
        assert memkit.stats("both").num_iterations <= 40
    assert budget_states["both"].way is Way.REGIONS_AND_COPIES
    stats = memkit.stats("both")
    assert stats.num_copies_out
    assert stats.num_replays
    return net, make


@pytest.mark.slow
@pytest.mark.parametrize("room", [0.02, 1.0])
def test_copies_beside_calls_are_tried_only_where_it_would_fit_if_none_left_in_time(
    room: float, fastest: Callable[[Way], None]
) -> None:
    """Until copies follow a schedule, steps may take as much more as should leave."""
    device = ReferenceDevice()
    fastest(Way.REGIONS_AND_COPIES)
    net, make = _budgeted(device)
    while not budget_states or not _decided():
        outcome(net, plain_step, device, make)
        stats = memkit.stats("both")
        device.capacity_bytes = None if stats.budget_bytes is None else int((1 + room) * stats.budget_bytes)
        assert stats.num_iterations <= 60

    assert (Way.REGIONS_AND_COPIES in budget_states["both"].ways.fastest_s) == (room == 1.0)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "train",
    [pytest.param(step, marks=() if step.__name__ == "retained" else pytest.mark.slow) for step in STEPS],
    ids=lambda train: train.__name__,
)
def test_other_steps_are_exact_and_leave_nothing(train: Step, device: Device, fastest: Callable[[Way], None]) -> None:
    fastest(Way.REGIONS_AND_COPIES)
    net, make = _learned(device)

    for step in (train, train, plain_step, train, plain_step):
        assert_same_bits(outcome(net, step, device, make), outcome(net, step, device, nullcontext))
    device.synchronize()
    stats = memkit.stats("both")
    assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)


@pytest.mark.slow
def test_copies_end_with_the_context_whatever_fails_at_its_end(
    device: Device, fastest: Callable[[Way], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest(Way.REGIONS_AND_COPIES)
    net, make = _learned(device)

    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(RegionStage, "end", fail)
        with pytest.raises(ArithmeticError, match="injected"):
            plain_step(net, device, make)
    assert innermost_pack() is None

    assert_same_bits(outcome(net, plain_step, device, make), outcome(net, plain_step, device, nullcontext))


@pytest.mark.parametrize("kind", ["raises", "no backward"])
@pytest.mark.slow
def test_steps_that_are_none_do_not_count(kind: str, device: Device, fastest: Callable[[Way], None]) -> None:
    """They take less time than any."""
    fastest(Way.OPS)
    net, make = _budgeted(device)

    def raise_(*_: object) -> None:
        raise ArithmeticError("injected")

    x = torch.randn(8, 16, device=device.torch_device)
    for _ in range(30):
        outcome(net, plain_step, device, make)
        ways = budget_states["both"].ways
        if ways is not None and ways.is_decided:
            break
        handle = net.norm.register_forward_hook(raise_) if kind == "raises" else None
        with contextlib.suppress(ArithmeticError), make():
            net(x)
        if handle is not None:
            handle.remove()
        if ways is not None:
            num_before = sum(len(tried.pairs) for tried in ways._tries)
            with contextlib.suppress(ArithmeticError), make():
                net(x)
            assert sum(len(tried.pairs) for tried in ways._tries) <= num_before
