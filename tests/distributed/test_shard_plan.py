"""What is planned for one rank is what FSDP2 takes there."""

from __future__ import annotations

import pytest
import torch

import memkit
from memkit.plan import ShardedParameter, ShardPlan, plan_shards
from tests.distributed.cases import Model, groups_of, local, make, optimizer_of, step
from tests.distributed.groups import fake_group
from tests.distributed.hosting import HOST, racing


def _planned(model: Model, **options: int) -> ShardPlan:
    *layers, rest = (
        [ShardedParameter(shape=tuple(item.shape), itemsize=item.itemsize, is_trained=item.requires_grad) for item in group]
        for group in groups_of(model)
    )
    return plan_shards(layers, rest, **options)


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in map(local, tensors)}
    return sum(storages.values())


@pytest.mark.parametrize("num_ranks", [1, 8, 64])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("frozen_dtype", [None, torch.bfloat16])
def test_plan_is_what_the_first_rank_takes(num_ranks: int, lora: bool, frozen_dtype: torch.dtype | None) -> None:
    if frozen_dtype is not None and not lora:
        frozen_dtype = None
    plan = _planned(make(lora=lora, frozen_dtype=frozen_dtype), num_ranks=num_ranks)
    with fake_group(num_ranks):
        model = memkit.shard(make(lora=lora), frozen_dtype=frozen_dtype)
        optimizer = optimizer_of(model)
        step(model, 0, 0)
        grads = [item.grad for item in model.parameters() if item.grad is not None]
        optimizer.step()
        states = [item for state in optimizer.state.values() for item in state.values() if item.dim()]

        assert plan.param_bytes == _storage_bytes(list(model.parameters()))
        assert plan.grad_bytes == _storage_bytes(grads)
        assert plan.state_bytes == _storage_bytes(states)


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_plan_counts_what_is_gathered_at_once(num_ranks: int, prefetch: int) -> None:
    with fake_group(num_ranks):
        model = memkit.shard(make(), reshard_after_forward=False)
        model(torch.arange(8))  # all is gathered now
        *layers, rest = (_storage_bytes(list(group)) for group in groups_of(model))

    assert _planned(make(), num_ranks=num_ranks, prefetch=prefetch).gathered_bytes == (prefetch + 1) * layers[0] + rest


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("lora", [False, True])
def test_plan_counts_what_comes_from_the_host(num_ranks: int, lora: bool) -> None:
    with fake_group(num_ranks), racing() as device:
        model = memkit.shard(make(lora=lora), offload_policy=HOST)
        step(model, 0, 0)
    plan = _planned(make(lora=lora), num_ranks=num_ranks, offload=True)

    assert plan.brought_bytes == device.memory_counter().peak_bytes()
    assert plan.host_bytes == plan.param_bytes + plan.grad_bytes + plan.state_bytes
    assert plan.total_bytes == plan.gathered_bytes + plan.brought_bytes


def test_gathered_and_state_dtypes_count() -> None:
    weight = ShardedParameter(shape=(4,), itemsize=4, gathered_itemsize=2)

    assert plan_shards([[weight]], num_ranks=2, state_itemsize=2).gathered_bytes == 8
    assert plan_shards([[weight]], num_ranks=2, state_itemsize=2).state_bytes == 2 * 2 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 1 or more; found 0"),
        ({"num_ranks": 1, "prefetch": -1}, "prefetch is 0 or more; found -1"),
        ({"num_ranks": 1, "states_per_element": -1}, "states_per_element is 0 or more"),
    ],
)
def test_counts_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_shards([], **options)  # type: ignore[arg-type]
