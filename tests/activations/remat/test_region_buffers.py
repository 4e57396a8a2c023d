"""Buffers in steps with regions: read-only use is learned once, and writes are as in the plain run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.saved.state import remat_states
from memkit.device import Device
from memkit.errors import ReplayMismatchError
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat
from tests.activations.remat.test_region_reasons import Block, Masked, Model
from tests.activations.remat.test_steady import train

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("dear_ops", "quick_plans")]
TAG = "buffers"


class Rare(Masked):
    """Writes to its buffer where a list has anything."""

    def beside(self, hidden: Tensor) -> Tensor:
        if WRITES:
            self.mask.mul_(0.5)
        return super().beside(hidden)


WRITES: list[bool] = []


class Widely(Rare):
    """Has a buffer that is too large to be kept twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(2**15, 64)

    def beside(self, hidden: Tensor) -> Tensor:
        if WRITES:
            self.mask.mul_(0.5)
        return hidden * self.mask[0]


class CountsCalls(Block):
    """Counts its calls in a buffer, and reads that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def beside(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        return hidden * self.num_calls.clone()


class Frozen(Block):
    """Has a batch norm that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64).eval()
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def beside(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Updates(Frozen):
    """Updates the statistics all the same, without a counter, and reads them."""

    def beside(self, hidden: Tensor) -> Tensor:
        norm = self.norm
        nn.functional.batch_norm(hidden.detach(), norm.running_mean, norm.running_var, training=True)
        norm.num_batches_tracked += 1
        return norm(hidden) * norm.num_batches_tracked.clone()


class Pair:
    """The same model twice: one is trained plainly, one under a budget."""

    def __init__(self, block: Callable[[], nn.Module], device: Device, remat_on: Remat) -> None:
        self._remat_on = remat_on
        self.models = []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(Model(block).to(device.torch_device))
        self.x = torch.randn(8, 32, device=device.torch_device)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.models[1].blocks

    def train(self, index: int) -> list[Tensor]:
        """Train one of them for a step: the second under a budget."""
        return train(self.models[index], self.x, (lambda: self._remat_on(0.4, TAG, min_bytes=1)) if index else nullcontext)

    def step(self) -> None:
        """Train each for a step, and compare them."""
        assert_same_bits(self.train(1), self.train(0))
        assert_same_bits(list(self.models[1].buffers()), list(self.models[0].buffers()))

    def settle(self) -> None:
        """Take steps until their plan is known."""
        for _ in range(5):
            self.step()
        assert {module() for module in remat_states[TAG].settled.regions.specs} & {*self.blocks}
        assert not memkit.stats(TAG).is_recorded

    def change(self, change: Callable[[nn.Module], object]) -> None:
        """Change all blocks of both."""
        for model in self.models:
            for block in model.blocks:
                change(block)


def test_buffers_that_are_only_read_are_compared_in_one_step(
    device: Device, remat_on: Remat, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, compared, equal = Pair(Masked, device, remat_on), set[int](), torch.equal
    pair.settle()
    with monkeypatch.context() as patch:  # the host would wait for a comparison
        patch.setattr(torch, "equal", lambda *both: compared.update(each.data_ptr() for each in both) or equal(*both))
        found = pair.train(1)

    assert compared.isdisjoint(block.mask.data_ptr() for block in pair.blocks)
    assert_same_bits(found, pair.train(0))


class RareInData(Rare):
    """The same, so that no counter is raised."""

    def beside(self, hidden: Tensor) -> Tensor:
        if WRITES:
            self.mask.data.mul_(0.5)
        return hidden * self.mask.clone()


class RareStatistics(Masked):
    """Updates statistics where a list has anything: by an op that raises no counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def beside(self, hidden: Tensor) -> Tensor:
        return functional.batch_norm(hidden, self.mean, self.mask, training=bool(WRITES))


@pytest.mark.parametrize("block", [Rare, RareInData, RareStatistics])
def test_small_buffers_that_are_written_after_all(
    block: Callable[[], nn.Module], device: Device, remat_on: Remat, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(block, device, remat_on)
    pair.settle()
    for is_written in (True, False, False, True, True):
        monkeypatch.setitem(globals(), "WRITES", [True] * is_written)
        pair.step()

    assert not memkit.stats(TAG).is_recorded


def test_buffers_that_are_written_are_as_in_the_plain_run(device: Device, remat_on: Remat) -> None:
    pair = Pair(CountsCalls, device, remat_on)
    pair.settle()
    for _ in range(7):
        pair.step()

    assert not memkit.stats(TAG).is_recorded


@pytest.mark.parametrize("block", [Frozen, Updates])
def test_batch_norm_that_does_not_train_is_in_regions(block: Callable[[], nn.Module], device: Device, remat_on: Remat) -> None:
    pair = Pair(block, device, remat_on)
    for _ in range(7):
        pair.step()
    stats = memkit.stats(TAG)

    assert not stats.is_recorded
    assert stats.num_replays > 0
    assert stats.num_deviations == 0
    assert stats.ledger_peak_bytes <= stats.budget_bytes
    planned = {type(module()) for module in remat_states[TAG].settled.regions.specs}
    assert block in planned


def write(block: nn.Module) -> None:
    block.mask.mul_(0.9)


def replace_buffer(block: nn.Module) -> None:
    block.mask = block.mask * 0.9


def add_buffer(block: nn.Module) -> None:
    block.register_buffer("num_calls", torch.zeros((), device=block.mask.device))
    block.beside = lambda hidden: block.mask * CountsCalls.beside(block, hidden)


def replace_forward(block: nn.Module) -> None:
    def beside(hidden: Tensor) -> Tensor:
        block.mask.data.mul_(0.5)
        return hidden * block.mask.clone()

    block.beside = beside


@pytest.mark.parametrize("change", [write, replace_buffer, add_buffer, replace_forward])
def test_change_between_two_steps_is_noticed(change: Callable[[nn.Module], object], device: Device, remat_on: Remat) -> None:
    pair = Pair(Masked, device, remat_on)
    pair.settle()
    pair.change(change)
    for _ in range(4):
        pair.step()


@pytest.mark.slow
def test_large_buffer_that_is_written_in_a_later_step_raises(device: Device, remat_on: Remat) -> None:
    pair = Pair(Widely, device, remat_on)
    pair.settle()
    WRITES.append(True)
    try:
        with pytest.raises(ReplayMismatchError, match='the buffer "mask", which it writes to and did not before'):
            pair.step()
        for model in pair.models:
            for block in model.blocks:
                nn.init.ones_(block.mask)
        pair.step()
    finally:
        WRITES.clear()

    assert memkit.stats(TAG).is_recorded
