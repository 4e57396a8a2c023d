"""`shard` in one process: as one rank, and as one of 8 and 64 whose others are not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import memkit
from memkit.activations.budgeting.limits import UNKNOWN_STATE_BYTES, coming_state_bytes
from memkit.activations.budgeting.state import budget_states
from memkit.device import ReferenceDevice
from tests.distributed.cases import (
    Collectives,
    Model,
    assert_same,
    by_hand,
    groups_of,
    local,
    make,
    optimizer_of,
    padded_bytes,
    step,
    train,
)
from tests.distributed.groups import fake_group
from tests.distributed.hosting import with_ends


@pytest.mark.parametrize("lora", [False, True])
def test_one_rank_trains_as_sharded_by_hand(one: None, lora: bool) -> None:
    plain = train(by_hand(make(lora=lora), init_device_mesh("cpu", (1,))), 0)

    assert_same(train(memkit.shard(make(lora=lora)), 0), plain)


def test_returns_the_model_which_is_one_of_fsdp(one: None) -> None:
    model = make()

    assert memkit.shard(model) is model
    assert isinstance(model, FSDPModule)
    assert [isinstance(block, FSDPModule) for block in model.blocks] == [True] * 4
    assert not isinstance(model.embedding, FSDPModule)
    assert all(isinstance(item, DTensor) for item in model.parameters())


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("lora", [False, True])
def test_bytes_of_a_rank_go_by_formula(num_ranks: int, lora: bool) -> None:
    whole = {name: item.detach() for name, item in make(lora=lora).named_parameters()}
    for rank in (0, num_ranks - 1):
        with fake_group(num_ranks, rank):
            model = memkit.shard(make(lora=lora))
            for name, item in model.named_parameters():
                rows = -(-whole[name].shape[0] // num_ranks)
                assert local(item).untyped_storage().nbytes() == rows * whole[name][0].nbytes, name
                assert len(local(item)) == max(0, min(rows, whole[name].shape[0] - rank * rows)), name


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("lora", [False, True])
def test_gathers_all_and_reduces_what_is_trained(num_ranks: int, lora: bool) -> None:
    groups = [padded_bytes(group, num_ranks) for group in groups_of(make(lora=lora))]
    trained = [padded_bytes([item for item in group if item.requires_grad], num_ranks) for group in groups_of(make(lora=lora))]
    *layers, rest = groups
    with fake_group(num_ranks), Collectives() as seen:
        step(memkit.shard(make(lora=lora)), 0, 0)

    assert seen.gathered_bytes == [rest, *layers, *reversed(layers)]  # what is in no layer stays until its backward
    assert seen.reduced_bytes == [num for num in reversed([trained[-1], *trained[:-1]]) if num]


def test_states_that_are_left_free_for_are_those_of_a_rank() -> None:
    """By formula; without an optimizer it is found out which shards were gathered."""
    with fake_group(8):
        model = memkit.shard(make())
        numel = sum(local(item).numel() for item in model.parameters())
        with memkit.MemoryBudget("1MiB", tag="rank", min_bytes=0, device=ReferenceDevice()):
            loss = model(torch.arange(8)).sum()
        loss.backward()

        assert budget_states.open("rank").coming.num_bytes() == UNKNOWN_STATE_BYTES * numel
        assert coming_state_bytes(optimizer_of(model)) == 2 * 4 * numel
        assert numel < sum(item.numel() for item in model.parameters()) / 6


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_layers_are_gathered_ahead(prefetch: int) -> None:
    with fake_group(8):
        model = memkit.shard(make(), prefetch=prefetch)
        ahead = [_prefetched(model, layer) for layer in (model, *model.blocks)]

    reach = [list(range(4))[number : number + prefetch] for number in range(5)]
    back = [list(range(4))[: 4 - number][::-1][:prefetch] for number in (0, 4, 3, 2, 1)]
    assert ahead == list(zip(reach, back, strict=True))


def _prefetched(model: Model, layer: nn.Module) -> tuple[list[int], list[int]]:
    states = [block._get_fsdp_state() for block in model.blocks]
    state = layer._get_fsdp_state()
    return (
        [states.index(item) for item in state._states_to_forward_prefetch],
        [states.index(item) for item in state._states_to_backward_prefetch],
    )


def test_frozen_parameters_have_a_dtype_of_their_own(one: None) -> None:
    low = {True: torch.float32, False: torch.bfloat16}
    model = memkit.shard(make(lora=True), frozen_dtype=torch.bfloat16)
    plain = train(by_hand(make(lora=True, frozen_dtype=torch.bfloat16), init_device_mesh("cpu", (1,))), 0)

    assert all(item.dtype == low[item.requires_grad] for item in model.parameters())
    assert_same(train(model, 0), plain)


def test_frozen_dtype_without_frozen_parameters_warns(one: None) -> None:
    with pytest.warns(UserWarning, match=r"frozen_dtype=torch.bfloat16 changes nothing: no parameter is frozen"):
        memkit.shard(make(), frozen_dtype=torch.bfloat16)


def test_mixed_precision_is_that_of_fsdp(one: None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = memkit.shard(make(), mp_policy=policy)

    optimizer = optimizer_of(model)
    assert model(torch.arange(8)).dtype == torch.bfloat16
    step(model, 0, 0)
    optimizer.step()
    assert all(item.dtype == torch.float32 for item in model.parameters())


@pytest.mark.parametrize(("reshard", "parts"), [(True, 8), (False, 1)])
def test_layers_are_let_go_of_after_their_forward(reshard: bool, parts: int) -> None:
    with fake_group(8):
        model = memkit.shard(make(), reshard_after_forward=reshard)
        model(torch.arange(8))

        assert len(local(model.blocks[0].up.weight)) == -(-22 // parts)
        assert not isinstance(model.embedding.weight, DTensor)  # is needed again at once


def test_two_dimensions_are_replicas_of_shards() -> None:
    with fake_group(8):
        model = memkit.shard(make(), mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards")))

        assert len(local(model.head.weight)) == -(-17 // 4)


def test_model_without_data_is_sharded_and_filled_afterwards() -> None:
    with fake_group(8):
        with torch.device("meta"):
            model = Model()
        memkit.shard(model).to_empty(device="cpu")

        assert local(model.head.weight).device.type == "cpu"


@pytest.mark.parametrize("layers", [["blocks.1", "blocks.3"], None, lambda name, module: isinstance(module, nn.Linear)])
def test_layers_are_chosen(one: None, layers: object) -> None:
    model = memkit.shard(make(), layers=layers)
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule) and name]

    linear = [f"blocks.{number}.{kind}" for number in range(4) for kind in ("up", "down")]
    expected = [f"blocks.{number}" for number in range(4)] if layers is None else layers
    assert names == ([*linear, "head"] if callable(layers) else expected)
    assert_same(train(model, 0), train(make(), 0))


def test_ends_are_gathered_ahead_as_layers_are() -> None:
    with fake_group(8):
        model = with_ends(memkit.shard, make())
        layers = [model.embedding, *model.blocks, model.head]
        ahead = [layer._get_fsdp_state()._states_to_forward_prefetch for layer in (model, *layers)]

        assert ahead == [*([layer._get_fsdp_state()] for layer in layers), []]
