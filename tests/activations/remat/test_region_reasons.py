"""Reasons for a call of a module to be no region: it does more than read its inputs and return its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from memkit.activations.saved.state import remat_states
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat
from tests.activations.remat.test_regions_in_steps import Context, run

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("dear_ops", "quick_plans")]


class Block(nn.Module):
    """Two layers, and something beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.beside(torch.tanh(self.up(x))).sigmoid())

    def beside(self, hidden: Tensor) -> Tensor:
        return hidden


class Model(nn.Module):
    """Six blocks, and ops between them."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(kind() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.behind(x)

    def before(self, x: Tensor) -> None:
        pass

    def behind(self, x: Tensor) -> Tensor:
        return x


def reasons(tag: str, kind: type[nn.Module] = Block) -> set[str]:
    """Return why the last recorded step took the calls of a kind of module for no regions."""
    (trace,) = remat_states[tag].traces
    return {call.why_not for call, module in zip(trace.ops.calls, trace.ops.modules, strict=True) if isinstance(module(), kind)}


def assert_bits_of_plain_run(make: Callable[[], nn.Module], device: Device, context: Context) -> nn.Module:
    """Return the model, which the trace knows while it lives."""
    models: list[nn.Module] = []

    def made() -> nn.Module:
        models.append(make())
        return models[-1]

    for wanted, found in zip(run(make, device, nullcontext, 6), run(made, device, context, 6), strict=True):
        assert_same_bits(found, wanted)
    return models[0]


GATES: list[Tensor] = []


class Gated(Block):
    """Reads a tensor that it finds in a global list."""

    def beside(self, hidden: Tensor) -> Tensor:
        return hidden * GATES[-1]


class MakesGates(Model):
    """Puts a tensor there in each forward."""

    def before(self, x: Tensor) -> None:
        GATES[:] = [torch.sigmoid(x.sum())]


def test_call_that_reads_what_it_was_not_given_is_none(device: Device, remat_on: Remat) -> None:
    model = assert_bits_of_plain_run(lambda: MakesGates(Gated), device, lambda: remat_on(0.4, "gates", min_bytes=1))
    assert reasons("gates") == {"it reads what it was not given"}
    assert reasons("gates", nn.Linear) == {""}
    del model


def test_call_that_is_given_what_it_reads_may_be_one(device: Device, remat_on: Remat) -> None:
    model = assert_bits_of_plain_run(lambda: Model(Block), device, lambda: remat_on(0.4, "plain", min_bytes=1))
    assert reasons("plain") == {""}
    assert remat_states["plain"].settled.regions.num_regions > 0
    del model


class Tells(Block):
    """Leaves its result in a global list."""

    def beside(self, hidden: Tensor) -> Tensor:
        GATES.append(hidden.square().mean())
        return hidden


class Sums(Model):
    """Adds the tensors left there."""

    def before(self, x: Tensor) -> None:
        GATES.clear()

    def behind(self, x: Tensor) -> Tensor:
        total = x + torch.stack(GATES).sum()
        GATES.clear()
        return total


class Passes(nn.Module):
    """Passes on a tensor from a global list."""

    def forward(self, x: Tensor, gates: list[Tensor]) -> Tensor:
        return x


class Gives(Sums):
    """Gives a tensor left there to another module, and nothing reads it."""

    def behind(self, x: Tensor) -> Tensor:
        x = Passes()(x, GATES)
        GATES.clear()
        return x


@pytest.mark.parametrize("kind", [Sums, Gives])
def test_call_of_which_something_is_used_that_it_does_not_return_is_none(
    kind: Callable[[Callable[[], nn.Module]], Model], device: Device, remat_on: Remat
) -> None:
    model = assert_bits_of_plain_run(lambda: kind(Tells), device, lambda: remat_on(0.4, "tells", min_bytes=1))
    assert reasons("tells") == {"what it makes is used elsewhere"}
    assert reasons("tells", nn.Linear) == {""}
    del model


class Clamps(Model):
    """Writes to weights of its blocks, once they have run."""

    def behind(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks:
                block.up.bias.clamp_(-9, 9)
        return x


class ClampsData(Model):
    """As `Clamps`, without raising a counter."""

    def behind(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.up.bias.data.clamp_(-0.1, 0.1)
        return x


class Masked(Block):
    """Has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(64))

    def beside(self, hidden: Tensor) -> Tensor:
        return hidden * self.mask


class Masks(Model):
    """Writes to the buffers of its blocks, once they have run."""

    def behind(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.mask.mul_(0.5)
        return x


@pytest.mark.parametrize(("kind", "block"), [(Clamps, Block), (ClampsData, Block), (Masks, Masked)])
def test_call_whose_weights_are_written_later_is_none(
    kind: Callable[[Callable[[], nn.Module]], Model], block: type[Block], device: Device, remat_on: Remat
) -> None:
    model = kind(block).to(device.torch_device)
    x = torch.randn(8, 32, device=device.torch_device)
    for _ in range(2):
        with remat_on(0.4, "clamps", min_bytes=1):
            model(x).sum()
    assert reasons("clamps", block) == {"its weights are written after it has run"}


class Normed(Block):
    """Has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def beside(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Twice(Model):
    """Calls its blocks twice."""

    def behind(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_call_whose_buffers_are_written_by_the_next_may_be_one(device: Device, remat_on: Remat) -> None:
    model = assert_bits_of_plain_run(lambda: Twice(Normed), device, lambda: remat_on(0.4, "twice", min_bytes=1))
    assert reasons("twice") == {""}
    assert remat_states["twice"].settled.regions.num_regions > 0
    del model
