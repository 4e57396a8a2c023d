"""Contexts within sharded layers: gradients are those of the sharded model without them, bit for bit, in one process.

On two ranks see test_two_ranks.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import memkit
from memkit.activations.budgeting.limits import UNKNOWN_STATE_BYTES
from memkit.activations.budgeting.state import budget_states
from memkit.activations.recomputing.regions import why_not_region
from memkit.device import ReferenceDevice
from tests.distributed.cases import assert_same, by_hand, local, make, optimizer_of, steps, train
from tests.distributed.composing import (
    BY_HAND,
    CASES,
    CONTEXTS,
    LAYER_CASES,
    RESHARDS,
    TAG,
    Make,
    check_by_hand,
    check_same,
    check_whole_layers,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Rematerialize .* cannot be kept to", "ignore:MemoryBudget"),
    pytest.mark.usefixtures("one"),
]


@pytest.mark.core(1)
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("context", "attached"),
    [(name, attached) for name in CONTEXTS for attached in (False, True) if name != "both" or not attached],
)
@pytest.mark.parametrize("case", CASES)
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


def _budget_step(model: nn.Module, budget: str = "1MiB") -> None:
    with memkit.MemoryBudget(budget, tag=TAG, min_bytes=0, device=ReferenceDevice()):
        loss = model(torch.arange(16) % 17).square().mean()
    loss.backward()


@pytest.mark.parametrize("lora", [False, True])
def test_states_are_left_free_for_until_shards_are_stepped(lora: bool) -> None:
    """What a forward has read are parameters that FSDP2 has gathered, which nobody steps."""
    model = memkit.shard(make(lora=lora))
    optimizer = optimizer_of(model)
    numel = sum(local(item).numel() for item in model.parameters() if item.requires_grad)
    for _ in range(2):
        _budget_step(model)
        assert budget_states.open(TAG).coming.num_bytes() == UNKNOWN_STATE_BYTES * numel
    optimizer.step()

    assert budget_states.open(TAG).coming.num_bytes() == 0


def test_budget_of_a_sharded_model_is_used() -> None:
    """The plan is for the budget, and not for what is left of it beside states that never come."""
    model = memkit.shard(make())
    optimizer = optimizer_of(model)
    for _ in range(5):
        _budget_step(model, "18KiB")
        optimizer.step()
        optimizer.zero_grad()

    stats = memkit.stats(TAG)
    assert stats.follows_plan
    assert 0.8 * 18 * 2**10 < stats.predicted_peak_bytes <= 18 * 2**10


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


def test_results_of_layers_are_roots() -> None:
    def run(context: Make) -> list[Tensor]:
        torch.manual_seed(0)
        model = memkit.shard(_Chain())
        return steps(model, context, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), given=_numbers)

    assert_same(run(_remat(0.4)), run(nullcontext))
    assert memkit.stats(TAG).num_dropped > 0


def _numbers(seed: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def _remat(budget: float) -> Make:
    return lambda: memkit.Rematerialize(budget, tag=TAG, min_bytes=0, device=ReferenceDevice())


_WRONG_ONCE = [("root", name, "always", 2, False) for name in ("Rematerialize(0.5)", "MemoryBudget, half")]
"""Without an error."""
BY_HAND_RUNS = [
    pytest.param(*run, marks=() if run in _WRONG_ONCE else pytest.mark.slow)
    for run in itertools.product(BY_HAND, CONTEXTS, RESHARDS, (1, 2), (False, True))
    if run[1] != "both" or not run[4]
]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("how", "context", "reshards", "forwards", "attached"), BY_HAND_RUNS)
def test_what_was_sharded_by_hand(how: str, context: str, reshards: str, forwards: int, attached: bool) -> None:
    assert check_by_hand(how, context, reshards=reshards, forwards=forwards, attached=attached) > 0


@pytest.mark.core(1)
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("case", LAYER_CASES)
def test_sharded_layers_are_recomputed_as_a_whole(case: str, forwards: int) -> None:
    check_whole_layers(case=case, forwards=forwards)


def test_what_has_sharded_modules_in_it_is_no_region() -> None:
    model = by_hand(make(), init_device_mesh("cpu", (1,)))

    assert "its forward talks to other processes" in why_not_region(model)
    assert why_not_region(model.blocks[0]) == ""
    assert why_not_region(model.blocks[0].up) == ""


def test_what_sharded_module_is_no_region() -> None:
    model, mesh = make(), init_device_mesh("cpu", (1,))
    apart, hooked, wrapping = (fully_shard(model.blocks[number], mesh=mesh) for number in range(3))
    apart.set_unshard_in_backward(False)
    hooked.register_forward_hook(lambda *_: None)
    wrapping.up.weight._local_tensor = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))  # such a gather may count as a write

    assert why_not_region(apart) == "FSDP2 does not gather it for its backward"
    assert "it has hooks" in why_not_region(hooked)
    assert "made up of others" in why_not_region(wrapping)


class _Ends(nn.Module):
    """A model whose first layer, which is sharded by itself, computes further with what its embedding gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Sequential(nn.Embedding(17, 8), nn.Dropout(0.1), nn.GELU(), nn.Tanh()), nn.Sigmoid())
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Take [batch], return [batch, 8]."""
        output: Tensor = self.layers(self.first(tokens))
        return output


@pytest.mark.parametrize("context", ["Rematerialize(0.1)", "MemoryBudget, least"])
def test_what_is_not_gathered_for_its_backward_is_kept(context: str) -> None:
    def run(make_context: Make) -> list[Tensor]:
        torch.manual_seed(0)
        model = memkit.shard(_Ends(), layers=["first", *(f"layers.{number}" for number in range(3))])
        model.first.set_unshard_in_backward(False)  # type: ignore[operator]  # it is one of FSDP2's by now
        return steps(model, make_context, num_steps=8, given=lambda _: torch.arange(17))

    assert_same(run(CONTEXTS[context]), run(nullcontext))
    assert context != "Rematerialize(0.1)" or memkit.stats(TAG).num_replays > 0
    memkit.reset(TAG)


def test_marks_are_set_once_and_around_the_hook_of_fsdp_alone() -> None:
    """What others do ahead of a forward, also to what they are given, is seen."""

    def run(context: Make) -> list[Tensor]:
        torch.manual_seed(0)
        model, counts = _Doubled(), list[int]()
        fully_shard(model.second, mesh=init_device_mesh("cpu", (1,)))
        model.second.register_forward_pre_hook(lambda _, args: (args[0].cos() * 2,))
        model.second.register_forward_pre_hook(lambda _, args: (args[0].mul_(3),), prepend=True)
        for seed in range(4):
            found = steps(model, context, num_steps=1, given=lambda _, seed=seed: _numbers(seed))  # type: ignore[misc]
            counts.append(len(model.second._forward_pre_hooks) + len(model.second._forward_hooks))
        assert set(counts) == {counts[0]}
        return found

    assert_same(run(_remat(0.1)), run(nullcontext))
    assert memkit.stats(TAG).num_dropped > 0


class _Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, 16]."""
        return torch.sigmoid(self.second(self.first(x).exp() + 1).tanh())


@pytest.mark.parametrize("context", [name for name in CONTEXTS if name != "both" and not name.startswith("CPUOffload")])
def test_what_is_sharded_within_a_context_is_refused(context: str) -> None:
    model = make()
    with (
        pytest.raises(ValueError, match=r"FSDP2 has sharded 5 modules within .*tag \"sharded\".*Shard before it is entered"),
        CONTEXTS[context](),
    ):
        by_hand(model, init_device_mesh("cpu", (1,)))

    train(model, 0, context=CONTEXTS[context])  # which is fine


def test_weights_that_are_let_go_of_by_hand_are_missed_by_name() -> None:
    """What is computed from them outside of their module's forward, nothing can make again."""
    model = make()
    block = fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (1,)))

    def step(_: int) -> None:
        with memkit.Rematerialize(0.01, tag=TAG, min_bytes=0, device=ReferenceDevice()):
            block.unshard()
            loss = functional.linear(torch.ones(8, 13), block.up.weight).sigmoid().exp().square().mean()
            block.reshard()
        loss.backward()

    with pytest.raises(RuntimeError, match=r"only 0 bytes now: was it resharded since.* Mark with memkit.keep"):
        list(map(step, range(3)))
