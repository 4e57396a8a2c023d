"""Steps whose plan is known, of ops that write: to what nothing is made from they are not recorded, and each step is exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.device import Device
from memkit.plan import Action
from memkit.recording.recorded import Call
from memkit.recording.recording import Recording
from tests.activations.budgeting.plans import plan_of_some, planner_of
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)

Make = Callable[[], AbstractContextManager[object]]
TAG = "writes"
NUM_BLOCKS = 6


class Block(nn.Module):
    """A batch norm, which updates its statistics, and writes in place; what they do it to may be said anew in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.linspace(-1, 1, 16))
        self.reads: Callable[[Block], Tensor] = lambda block: block.scale
        self.writes_to = "made"

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.reads(self)
        made = self.norm(self.layer(x))
        other = made + x
        torch.relu_({"made": made, "other": other, "saved": x, "root": self.scale}[self.writes_to])
        total = made + other
        total += 1
        return total.sin()


def _blocks(device: Device) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(NUM_BLOCKS)).to(device.torch_device)


def _train(blocks: nn.ModuleList, make: Make) -> list[Tensor]:
    """Return all that a step leaves, and have the buffers be what they were."""
    device = next(blocks.parameters()).device
    before = {name: buffer.clone() for name, buffer in blocks.named_buffers()}
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    with make():
        y = x
        for block in blocks:
            y = block(y)
        loss = y.square().sum()
    loss.backward()
    assert x.grad is not None
    found = [loss.detach(), x.grad, *(own.grad for own in blocks.parameters() if own.grad is not None)]
    found += [buffer.clone() for buffer in blocks.buffers()]
    blocks.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in blocks.named_buffers():
            buffer.copy_(before[name])
    return found


def _steady(device: Device) -> tuple[nn.ModuleList, Make]:
    """Return a model whose next step is a steady one, and the context of that: each difference is made again, nothing else."""
    blocks, make = _blocks(device), partial(memkit.MemoryBudget, 1.0, TAG, min_bytes=0, device=device)
    plain = _train(blocks, nullcontext)
    for _ in range(3):
        assert_same_bits(_train(blocks, make), plain)
    names = planner_of(TAG).problem.trace.names
    differences = {value for value, (op, _) in names.items() if "sub" in op}
    assert len(differences) == NUM_BLOCKS
    follow = partial(make, plan=plan_of_some(TAG, Action.RECOMPUTE, 1, of=differences))
    for _ in range(3):
        assert_same_bits(_train(blocks, follow), plain)
    return blocks, follow


def test_ops_that_write_to_what_nothing_needs_are_not_recorded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, make = _steady(device)
    plain, calls, close = _train(blocks, nullcontext), list[Call](), Recording.close
    monkeypatch.setattr(Recording, "close", lambda self: (calls.extend(self.calls), close(self)))
    assert_same_bits(_train(blocks, make), plain)

    stats = memkit.stats(TAG)
    assert stats.follows_plan
    assert stats.num_deviations == 0
    assert stats.num_dropped == NUM_BLOCKS
    trace = budget_states[TAG].traces.latest
    assert trace is not None
    assert {str(call.func) for call in calls} == {"aten.sub.Tensor", "aten.sin.default"}  # what differences are made of
    for name in ("relu_", "add_", "batch_norm"):
        assert sum(name in str(func) for func in trace.funcs) >= NUM_BLOCKS


OTHERS = ["reads its statistics", "reads those of another", "reads those of an earlier one", "other", "root"]


def _change(blocks: nn.ModuleList, which: int, what: str) -> None:
    block = blocks[which]
    assert isinstance(block, Block)
    number = {OTHERS[0]: which, OTHERS[1]: which + 1, OTHERS[2]: which - 1}.get(what)
    if number is None:
        block.writes_to = what
        return
    of = blocks[number % NUM_BLOCKS]
    assert isinstance(of, Block)
    statistics = of.norm.running_var
    assert isinstance(statistics, Tensor)
    block.reads = lambda _: statistics


@pytest.mark.parametrize("which", [2, *(pytest.param(which, marks=pytest.mark.full) for which in (0, NUM_BLOCKS - 1))])
@pytest.mark.parametrize("what", OTHERS)
def test_step_whose_ops_read_or_write_something_else_is_exact(what: str, which: int, device: Device) -> None:
    """The ops are the same, one after the other: what they are given tells that it is another step."""
    blocks, make = _steady(device)
    usual = _train(blocks, nullcontext)
    _change(blocks, which, what)
    assert_same_bits(_train(blocks, make), _train(blocks, nullcontext))
    for block in blocks:
        assert isinstance(block, Block)
        block.reads, block.writes_to = (lambda block: block.scale), "made"
    other = partial(memkit.MemoryBudget, 1.0, TAG, min_bytes=0, device=device)  # the plan is for no step but the one
    for _ in range(2):
        assert_same_bits(_train(blocks, other), usual)
    stats = memkit.stats(TAG)
    assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)


def test_write_to_what_was_saved_raises_as_it_does_without(device: Device) -> None:
    blocks, make = _steady(device)
    block = blocks[2]
    assert isinstance(block, Block)
    block.writes_to = "saved"
    for context in (nullcontext, make):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            _train(blocks, context)
    device.synchronize()
