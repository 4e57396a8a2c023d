"""Steps with a known plan, of ops that write: each is exact, whatever they write to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import Device
from tests.activations.budgeting.plans import Make, steady
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)

TAG = "writes"
NUM_BLOCKS = 6


class Block(nn.Module):
    """A batch norm, which updates its statistics, and writes in place; each step may replace their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.linspace(-1, 1, 16))
        self.reads: Callable[[Block], Tensor] = lambda block: block.scale
        self.writes_to = "made"
        self.is_marked = False

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.reads(self)
        x = memkit.recompute(x) if self.is_marked else x
        made = self.norm(self.layer(x))
        other = made + x
        torch.relu_({"made": made, "other": other, "saved": x, "root": self.scale}[self.writes_to])
        total = made + other
        total += 1
        return total.sin()


def _blocks(device: Device) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(NUM_BLOCKS)).to(device.torch_device)


def _train(blocks: nn.ModuleList, make: Make, between: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Return all results of a step, and restore the buffers."""
    device = next(blocks.parameters()).device
    before = {name: buffer.clone() for name, buffer in blocks.named_buffers()}
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    with make():
        y = x
        for block in blocks:
            y = block(y)
        loss = y.square().sum()
    between()
    loss.backward()
    found = [loss.detach(), x.grad, *(own.grad for own in blocks.parameters() if own.grad is not None)]
    found += [buffer.clone() for buffer in blocks.buffers()]
    blocks.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in blocks.named_buffers():
            buffer.copy_(before[name])
    return found


def _followed(blocks: nn.ModuleList, device: Device, between: Callable[[], None] = lambda: None) -> Make:
    """Return a context under which differences are recomputed, once steps under it are known and were exact."""
    run = partial(_train, blocks, between=between)
    follow = steady(run, TAG, device, of=_is_difference, num_steps=4)
    assert memkit.stats(TAG).num_dropped
    return follow


def _is_difference(op: str, _: str) -> bool:
    return "sub" in op


def _steady(device: Device) -> tuple[nn.ModuleList, Make]:
    """Return a model whose next step is a steady one, and its context."""
    blocks = _blocks(device)
    follow = _followed(blocks, device)
    assert memkit.stats(TAG).num_dropped == NUM_BLOCKS
    return blocks, follow


OTHERS = ["reads its statistics", "reads those of another", "reads those of an earlier one", "other", "root"]


def _change(blocks: nn.ModuleList, which: int, what: str) -> None:
    block = blocks[which]
    number = {OTHERS[0]: which, OTHERS[1]: which + 1, OTHERS[2]: which - 1}.get(what)
    if number is None:
        block.writes_to = what
    else:
        block.reads = lambda _: blocks[number % NUM_BLOCKS].norm.running_var


def _step_of_others(blocks: nn.ModuleList) -> None:
    """Run other data forward, which updates the statistics and nothing else."""
    other = torch.randn(8, 16, generator=torch.Generator().manual_seed(5)).to(next(blocks.parameters()).device)
    with torch.no_grad():
        for block in blocks:
            block.norm(other)


@pytest.mark.parametrize("what", OTHERS[:3])
def test_statistics_that_are_read_in_another_step_are_as_they_were(what: str, device: Device) -> None:
    """Another forward updates them between forward and backward."""
    blocks = _blocks(device)
    between = partial(_step_of_others, blocks)
    make = _followed(blocks, device, between)
    _change(blocks, 2, what)
    assert_same_bits(_train(blocks, make, between), _train(blocks, nullcontext, between))


def test_statistics_that_are_read_once_the_step_has_left_its_plan_are_as_they_were(device: Device) -> None:
    blocks = _blocks(device)
    between = partial(_step_of_others, blocks)
    make = _followed(blocks, device, between)
    first, leaves, reads = list(blocks)[:3]
    leaves.is_marked = reads.is_marked = True
    reads.reads = lambda _: first.norm.running_var
    assert_same_bits(_train(blocks, make, between), _train(blocks, nullcontext, between))


@pytest.mark.covering(2)
@pytest.mark.parametrize("which", [2, *(pytest.param(which, marks=pytest.mark.slow) for which in (0, NUM_BLOCKS - 1))])
@pytest.mark.parametrize("what", OTHERS)
def test_step_whose_ops_read_or_write_something_else_is_exact(what: str, which: int, device: Device) -> None:
    """The ops are the same in the same order: their inputs tell that it is another step."""
    blocks, make = _steady(device)
    usual = _train(blocks, nullcontext)
    _change(blocks, which, what)
    assert_same_bits(_train(blocks, make), _train(blocks, nullcontext))
    for block in blocks:
        block.reads, block.writes_to = (lambda block: block.scale), "made"
    other = partial(memkit.MemoryBudget, 1.0, TAG, min_bytes=0, device=device)  # the plan is for no step but the one
    for _ in range(2):
        assert_same_bits(_train(blocks, other), usual)
    stats = memkit.stats(TAG)
    assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)


# What is written to later


class Reads(nn.Module):
    """Reads the statistics of a batch norm behind it, for a value that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm(self.layer(x))
        return (made + x - self.norm.running_mean).sin() + made


class Twice(nn.Module):
    """Writes twice to its own result, or to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("scale", torch.linspace(-1, 1, 16))
        self.writes_to_scale = False

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.scale
        made = self.layer(x)
        target = self.scale if self.writes_to_scale else made
        target += 1
        y = x - self.scale
        target += 1
        return y.sin() + made


class Counts(nn.Module):
    """Writes to several tensors at once that nothing else uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("first", torch.zeros(4))
        self.register_buffer("second", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        torch._foreach_add_([self.first, self.second], 1)
        made = self.layer(x - 0.5)
        torch._foreach_add_([made], 1)
        return made.sin()


class NotCalled(nn.Module):
    """Reads the statistics of a norm that only the other forward calls, perhaps by a view."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layer, self.norm, self.shape = nn.Linear(16, 16), nn.BatchNorm1d(16), shape or (16,)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm.running_var
        return self.layer(self.layer(x) - (read if len(self.shape) == 1 else read.view(self.shape)))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("kind", [Reads, Counts, NotCalled, partial(NotCalled, 1, 16)])
def test_what_ops_and_other_forwards_write_to_is_as_it_was(kind: Callable[[], Any], is_training: bool, device: Device) -> None:
    """Updates of statistics raise no counter."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(kind() for _ in range(4)).to(device.torch_device).train(is_training)

    def between() -> None:
        if kind is not Counts:
            _step_of_others(blocks.train())
            blocks.train(is_training)

    _followed(blocks, device, between)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Overwrites(nn.Module):
    """Writes over its input, which nothing of the graph needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("scale", torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            difference = x - self.scale
            x = layer(difference.sin()).relu_() + difference.cos()
            if number == 0:
                x = x + Doubled.apply(other.mul_(1.5))
        return x


def test_what_is_written_over_is_not_held(device: Device) -> None:
    torch.manual_seed(0)
    ahead, model = nn.Linear(16, 16).to(device.torch_device), Overwrites().to(device.torch_device)
    x = torch.randn(8, 16, device=device.torch_device)

    def is_held(context: Make) -> bool:
        given = ahead(x)
        storage = weakref.ref(given.untyped_storage())
        with context():
            y = model(x, given)
        del given
        is_there = storage() is not None
        y.square().sum().backward()
        return is_there

    held = list[bool]()
    steady(lambda make: held.append(is_held(make)) or [], TAG, device, of=_is_difference, num_steps=4)

    assert memkit.stats(TAG).num_dropped
    assert not held[-1]


def test_two_writes_to_what_is_read_between_them_are_exact(device: Device) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Twice() for _ in range(4)).to(device.torch_device)
    make = _followed(blocks, device)
    changed = blocks[2]
    changed.writes_to_scale = True
    assert_same_bits(_train(blocks, make), _train(blocks, nullcontext))
