"""Contexts within sharded layers: gradients are those of the sharded model without them, bit for bit, in one process.

On two ranks see test_two_ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memkit
from memkit.device import ReferenceDevice
from tests.distributed.cases import assert_same, make, train
from tests.distributed.composing import CASES, CONTEXTS, TAG, check_same, check_two_forwards
from tests.distributed.groups import group_of_one

pytestmark = pytest.mark.filterwarnings("ignore:Rematerialize .* cannot be kept to", "ignore:MemoryBudget")


@pytest.fixture(autouse=True)
def one() -> Iterator[None]:
    with group_of_one():
        yield


def _always(context: str, case: str, attached: bool) -> bool:
    """Tell whether one of them is run always: each context once, in turn within and attached."""
    return case == ("LoRA" if attached else "plain") and attached == (list(CONTEXTS).index(context) % 2 == 1)


RUNS = [
    pytest.param(*run, marks=() if _always(*run) else pytest.mark.full)
    for run in itertools.product(CONTEXTS, CASES, (False, True))
    if run[0] != "both" or not run[2]
]


@pytest.mark.parametrize(("context", "case", "attached"), RUNS)
def test_gradients_are_the_same(context: str, case: str, attached: bool) -> None:
    acted_bytes = check_same(context, attached=attached, **CASES[case])

    assert acted_bytes > 0 or (context == "MemoryBudget, half" and case == "low")


def test_gathered_parameters_do_not_move() -> None:
    """The bytes that move are those of the model without shards, from the first step on."""

    def moved_bytes(model: nn.Module) -> list[int]:
        found = []
        for _ in range(3):
            with memkit.CPUOffload(1.0, TAG, min_bytes=0, device=device):
                loss = model(torch.arange(16)).square().mean()
            loss.backward()
            found.append(memkit.stats(TAG).moved_out_bytes)
        memkit.reset(TAG)
        return found

    device = ReferenceDevice()
    assert moved_bytes(memkit.shard(make())) == moved_bytes(make())


def test_two_forwards_in_one_context() -> None:
    check_two_forwards()


class _Pair(nn.Module):
    """A layer that ends with what saves its own result, and returns it in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take and return "x" of [batch, 16]."""
        return {"x": torch.sigmoid(self.linear(given["x"])).exp()}


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Pair() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, 16]."""
        given = {"x": x}
        for layer in self.layers:
            given = {"x": layer(given)["x"] * 2}  # what is made between layers may be made again
        return given["x"]


@pytest.mark.parametrize("budget", [0.7, 0.4, 0.1])
def test_results_of_layers_are_roots(budget: float) -> None:
    def run(context: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = memkit.shard(_Chain())
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for number in range(6):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
            with (
                memkit.Rematerialize(budget, tag=TAG, min_bytes=0, device=ReferenceDevice()) if context else torch.enable_grad()
            ):
                loss = model(x).square().mean()
            loss.backward()
            found += [loss.detach(), *(item.grad.to_local().clone() for item in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert_same(run(True), run(False))
    assert memkit.stats(TAG).num_dropped > 0


def test_layers_that_were_sharded_by_hand_are_refused_where_others_are_needed() -> None:
    """Nothing wrong is computed: what a layer needs of another one's parameters raises."""
    mesh, model = init_device_mesh("cpu", (1,)), make()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    with pytest.raises(RuntimeError, match=r"was it resharded\? Shard by memkit.shard, or mark"):
        train(model, 0, context=lambda: memkit.Rematerialize(0.1, tag=TAG, min_bytes=0, device=ReferenceDevice()))
