"""Reasons for a call of a module to be no region: it does more than read its inputs and return its result."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.recomputing import compiled_calls
from memkit.activations.saved.state import remat_states
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat
from tests.activations.remat.test_regions_in_steps import run
from tests.activations.remat.test_spans import Other

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


GATES: list[Tensor] = []


class Gated(Block):
    """Reads a tensor that it finds in a global list."""

    def beside(self, hidden: Tensor) -> Tensor:
        return hidden * GATES[-1]


class MakesGates(Model):
    """Puts a tensor there in each forward."""

    def before(self, x: Tensor) -> None:
        GATES[:] = [torch.sigmoid(x.sum())]


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


class Normed(Block):
    """Has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def beside(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Differentiates(Block):
    """Adds to the gradient of a weight."""

    def beside(self, hidden: Tensor) -> Tensor:
        self.up.bias.sum().backward()
        return hidden


class Twice(Model):
    """Calls its blocks twice."""

    def behind(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counts(Block):
    """Counts its calls, in an attribute."""

    num_calls = 0

    def beside(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        return hidden


class Remembers(Block):
    """Appends to a list in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def beside(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden.detach().sum().item())
        return hidden


class Draws(Block):
    """Draws from Python's generator."""

    def beside(self, hidden: Tensor) -> Tensor:
        return hidden * random.random()


class WritesToItsInput(Block):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * 2)
        x.detach().mul_(0.5)
        return y + 1


class WritesAfterwards(nn.Module):
    """Writes to a part's input once the part has returned: nothing of it was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Doubles()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        y = self.part(x)
        return x.mul_(0.5) + y


class Doubles(Block):
    """Saves none of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


class Cached(Block):
    """Adds to an object among its part's inputs, as attention does to a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.adds = Adds()

    def beside(self, hidden: Tensor) -> Tensor:
        return self.adds(hidden, cache := Cache()) + len(cache.found)


class Cache:
    def __init__(self) -> None:
        self.found: list[Tensor] = []


class Adds(nn.Module):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.found.append(x.detach())
        return x.sin().exp() * len(cache.found)


REASONS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], str]] = {
    "gives what it reads": (lambda: Model(Block), Block, ""),
    "differentiates": (lambda: Model(Differentiates), Block, "an op in it cannot run twice"),
    "called twice, writing to its buffers": (lambda: Twice(Normed), Block, ""),
    "reads a global": (lambda: MakesGates(Gated), Block, "it reads what it was not given"),
    "leaves a result elsewhere": (lambda: Sums(Tells), Block, "what it makes is used elsewhere"),
    "leaves a result for a module": (lambda: Gives(Tells), Block, "what it makes is used elsewhere"),
    "counts": (lambda: Model(Counts), Block, "its forward changes an attribute"),
    "remembers": (lambda: Model(Remembers), Block, "its forward changes an attribute"),
    "draws": (lambda: Model(Draws), Block, "it draws random numbers of Python's or NumPy's"),
    "writes to its input": (lambda: Model(WritesToItsInput), Block, "an op in it writes to what was there before"),
    "has its input written to": (lambda: Model(WritesAfterwards), Doubles, "what it is given is written to later"),
    "is given a cache": (lambda: Model(Cached), Adds, "it is given an object that it may change"),
}


def reasons(tag: str, kind: type[nn.Module] = Block) -> set[str]:
    """Return why the last recorded step took the calls of a kind of module for no regions."""
    (trace,) = remat_states[tag].traces
    return {call.why_not for call, module in zip(trace.ops.calls, trace.ops.modules, strict=True) if isinstance(module(), kind)}


@pytest.mark.parametrize("name", REASONS)
def test_call_is_no_region_if_it_does_more_than_read_its_inputs(name: str, device: Device, remat_on: Remat) -> None:
    make, kind, why_not = REASONS[name]
    models: list[nn.Module] = []

    def made() -> nn.Module:
        models.append(make())
        return models[-1]

    plain, found = run(made, device, nullcontext, 6), run(made, device, lambda: remat_on(0.35, name, min_bytes=1), 6)
    for wanted, step in zip(plain, found, strict=True):
        assert_same_bits(step, wanted)

    for one, other in zip(models[0].modules(), models[1].modules(), strict=True):
        assert getattr(one, "num_calls", 0) == getattr(other, "num_calls", 0)
        assert getattr(one, "seen", []) == getattr(other, "seen", [])
    assert reasons(name, kind) == {why_not}
    if kind is Block and not isinstance(models[1].blocks[0], WritesToItsInput):
        assert reasons(name, nn.Linear) == {""}
    assert why_not or remat_states[name].settled.regions.num_regions > 0


def test_modules_that_a_loop_calls_may_be_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something may be compiled, memkit sets hooks on an outermost module while that runs."""
    monkeypatch.setattr(compiled_calls, "dynamo_is_loaded", lambda: True)
    blocks, x = Model(Block).blocks, torch.randn(4, 32, requires_grad=True)
    for _ in range(2):
        y = x
        with memkit.Rematerialize(0.35, "loop", min_bytes=1):
            for block in blocks:
                y = block(y)
        y.sum().backward()

    assert reasons("loop") == {""}


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
    kind: Callable[[Any], Model], block: type[Block], device: Device, remat_on: Remat
) -> None:
    model = kind(block).to(device.torch_device)
    x = torch.randn(8, 32, device=device.torch_device)
    for _ in range(2):
        with remat_on(0.4, "clamps", min_bytes=1):
            model(x).sum()
    assert reasons("clamps", block) == {"its weights are written after it has run"}


@pytest.mark.parametrize(("kind", "spans"), [(nn.Sequential, ["0:2", "2:4"]), (Other, [])])
def test_neighbours_that_a_sequential_calls_in_turn_are_spans(
    kind: type[nn.Sequential], spans: list[str], device: Device, remat_on: Remat
) -> None:
    model = kind(nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Sigmoid())
    x = torch.randn(8, 32, device=device.torch_device, requires_grad=True)
    for _ in range(2):
        with remat_on(0.4, "spans", min_bytes=1):
            model(x).sum()
            with torch.no_grad():
                model(x)
    (trace,) = remat_states["spans"].traces

    assert [span.call.name for span in trace.ops.spans] == spans
