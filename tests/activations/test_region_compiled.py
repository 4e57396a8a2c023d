"""Regions whose forward is compiled: the bits are those of the same compiled module, run plain."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.activations.saved.counts import Counts
from tests.activations.cases import assert_same_bits

ALL = RegionSpec()

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
    "dropout": lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh()),
    "batch_norm": lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()),
}


def compiled_forward(block: nn.Module) -> nn.Module:
    block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
    return block


def compiled_module(block: nn.Module) -> nn.Module:
    return torch.compile(block, backend="aot_eager")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def step(blocks: list[nn.Module], context: AbstractContextManager[Any]) -> list[Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(0)
    with context:
        y = x
        for block in blocks:
            y = y + block(y)
        loss = y.square().mean()
    loss.backward()
    parts = nn.ModuleList(blocks)
    left = [loss.detach(), x.grad, *[p.grad.clone() for p in parts.parameters()], *[b.clone() for b in parts.buffers()]]
    return [*left, torch.get_rng_state()]


def _compiled_by(compile_block: Callable[[nn.Module], nn.Module], name: str) -> object:
    is_core = compile_block is compiled_module
    return pytest.param(name, compile_block, marks=() if is_core else pytest.mark.full)


@pytest.mark.core(1)
@pytest.mark.parametrize(
    ("name", "compile_block"), [_compiled_by(by, name) for name in BLOCKS for by in (compiled_forward, compiled_module)]
)
def test_compiled_block_has_the_bits_of_the_plain_run(name: str, compile_block: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    built = [BLOCKS[name]() for _ in range(3)]
    plain, blocks = ([compile_block(copy.deepcopy(block)) for block in built] for _ in range(2))
    wanted = [step(plain, nullcontext()) for _ in range(4)]
    torch._dynamo.reset()
    counters.clear()
    counts = Counts()
    regions, found = Regions(dict.fromkeys(blocks, ALL), counts=counts), []
    for _ in range(2):
        found.append(step(blocks, regions))
    num_graphs = counters["stats"]["unique_graphs"]
    for _ in range(2):
        found.append(step(blocks, regions))

    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]
    assert counts.num_replays == 12
