"""`profile_memory` of what FSDP2 has sharded, in one process: as one rank, and as one of 8 whose others are not there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import memkit
from memkit.core import torch_private
from memkit.core.torch_state import fsdp_groups
from memkit.errors import MissingTorchNameError, ProfileError
from memkit.plan import ShardedParameter, plan_shards
from memkit.profile import MemoryCategory, MemoryReport
from memkit.profile.sharded import Shards
from tests.distributed.cases import Model, assert_same, by_hand, groups_of, local, make, optimizer_of, step, train
from tests.distributed.groups import fake_group, group_of_one
from tests.distributed.hosting import on_host
from tests.distributed.profiling import Broken, assert_same_activations, bytes_in, profile


def _by_hand(model: Model) -> Model:
    return by_hand(model, init_device_mesh("cpu", (1,)))


def _layers_alone(model: Model) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    return model


def _as_one(model: Model) -> Model:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def _ends_together(model: Model) -> Model:
    fully_shard([model.embedding, model.head], mesh=init_device_mesh("cpu", (1,)))
    return _by_hand(model)


def _kept(model: Model) -> Model:
    return memkit.shard(model, reshard_after_forward=False, prefetch=0)


WAYS: dict[str, Callable[[Model], Any]] = {
    "shard": memkit.shard,
    "by hand": _by_hand,
    "layers alone": _layers_alone,
    "as one": _as_one,
    "kept": _kept,
    "ends together": _ends_together,
}


@pytest.mark.parametrize("way", [way if way == "shard" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_activations_are_told_from_what_is_gathered(one: None, way: str) -> None:
    plain = profile(make(), 0)
    model = WAYS[way](make())

    reports = [profile(model, 0, warmup=warmup) for warmup in (0, 1)]

    for report in reports:
        assert_same_activations(report, plain)
        assert report.param_cast_bytes == 0
        assert (report.param_bytes, report.grad_bytes) == (plain.param_bytes, plain.grad_bytes)
    assert bytes_in(reports[0]) == bytes_in(reports[1])
    other = make()
    assert torch.equal(step(model, 0, 0), step(other, 0, 0))
    assert_same([local(item.grad) for item in model.parameters()], [item.grad for item in other.parameters()])


def test_forward_alone_leaves_shards(one: None) -> None:
    plain = profile(make(), 0, backward=False, optimizer=None)
    model = memkit.shard(make())

    report = profile(model, 0, backward=False, optimizer=None)

    assert_same_activations(report, plain)
    assert all(isinstance(item, DTensor) for item in model.parameters())
    assert report.sharding is not None
    assert report.sharding.gathered_bytes is not None
    assert 0 < report.sharding.gathered_bytes < plain.param_bytes
    assert report.step_memory is None
    assert_same(train(model, 0), train(make(), 0))


def test_casts_of_what_is_gathered_are_casts(one: None) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = profile(make(), 0)
        report = profile(memkit.shard(make()), 0)

    assert report.param_cast_bytes == plain.param_cast_bytes > 0
    assert_same_activations(report, plain)


def test_shards_in_host_memory_are_told_from_those_on_the_device(one: None) -> None:
    (group,) = fsdp_groups(memkit.shard(make(), offload_policy=CPUOffloadPolicy(pin_memory=False)).blocks[0])
    parameters = tuple(item.sharded_param for item in group.fsdp_params)
    elsewhere = SimpleNamespace(fsdp_params=group.fsdp_params, device=torch.device("cuda:0"))

    assert Shards(modules=(None,), groups=(group,)).on_host == ()
    assert Shards(modules=(None,), groups=(elsewhere,)).on_host == parameters


def test_parameters_that_are_brought_from_the_host(one: None) -> None:
    plain = profile(make(), 0)
    model = on_host(make())

    report = profile(model, 0)

    assert_same_activations(report, plain)
    assert (report.param_bytes, report.grad_bytes) == (plain.param_bytes, plain.grad_bytes)
    assert_same(train(model, 0), train(make(), 0))


# What one of several takes


@pytest.mark.parametrize("prefetch", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_gathered_bytes_are_those_of_the_plan(prefetch: int) -> None:
    def sharded(parameters: list[nn.Parameter]) -> list[ShardedParameter]:
        return [ShardedParameter(shape=tuple(item.shape), itemsize=item.itemsize) for item in parameters]

    *layers, rest = map(sharded, groups_of(make()))
    planned = plan_shards(layers, rest, num_ranks=8, prefetch=prefetch)
    with fake_group(8, rank=5):
        report = profile(memkit.shard(make(), prefetch=prefetch), 0)

    assert report.param_bytes == planned.param_bytes
    assert report.grad_bytes == planned.grad_bytes
    assert report.sharding is not None
    assert report.sharding.gathered_bytes is not None
    assert planned.gathered_bytes <= report.sharding.gathered_bytes
    layer_bytes = sum(item.gathered_bytes(8) for item in layers[0])
    assert report.sharding.gathered_bytes <= planned.gathered_bytes + 2 * layer_bytes  # through a buffer each


def test_parameters_at_the_peak_are_named(one: None) -> None:
    report = profile(memkit.shard(make(), reshard_after_forward=False), 0, optimizer=None, backward=True)

    memory = report.step_memory
    assert memory is not None
    alive = [(it.module, it.what) for it in memory.storages if it.category is MemoryCategory.PARAM]
    assert alive.count(("blocks.2.up", "weight")) == 1
    assert alive.count(("blocks.2.up", "weight, gathered")) == 1
    assert max(memory.levels[MemoryCategory.PARAM]) == 2 * report.param_bytes


def test_replicas_of_shards() -> None:
    with fake_group(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))
        report = profile(memkit.shard(make(), mesh=mesh), 0)

    assert report.sharding is not None
    assert (report.sharding.num_ranks, report.sharding.num_shards) == (8, 4)


def test_states_are_those_of_shards() -> None:
    with fake_group(8, rank=7):
        model = memkit.shard(make())
        optimizer = optimizer_of(model)
        ahead = profile(model, 0, optimizer=optimizer)
        step(model, 0, 0)
        optimizer.step()
        after = profile(model, 0, optimizer=optimizer)

    assert ahead.optimizer is not None
    assert after.optimizer is not None
    assert ahead.sharding is not None
    assert ahead.optimizer.state_bytes == after.optimizer.state_bytes == 2 * ahead.sharding.shard_bytes
    counters_bytes = 4 * len(optimizer.state)
    assert after.optimizer.there_bytes == 2 * ahead.sharding.shard_bytes + counters_bytes
    assert ahead.optimizer.there_bytes == 0


def test_optimizer_of_the_model_before_it_was_sharded_is_refused(one: None) -> None:
    model = make()
    optimizer = optimizer_of(model)
    memkit.shard(model)

    with pytest.raises(ValueError, match="optimizer must be made on the model's parameters"):
        profile(model, 0, optimizer=optimizer)


# The report


def test_report_says_that_parameters_are_shards(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for rank in (0, 5):
        with fake_group(8, rank=rank):
            report = profile(memkit.shard(make()), 0, print_table=True)
        printed.append(capsys.readouterr().out)

    text = str(report)
    assert report.sharding is not None
    assert "rank 5 of 8" in text.splitlines()[0]
    assert "parameters as a whole, split between 8 ranks: 0.01 MiB" in text
    assert "... gathered at once, at most: 0.01 MiB" in text
    assert "(model) [sharded]" in text
    assert report.marked("sharded") == ("(model)", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert "rank 0 of 8" in printed[0]
    assert printed[1] == ""
    assert MemoryReport.from_json(report.to_json()) == report


# What is refused


def _middle_of_accumulating(model: Any) -> None:
    model.set_requires_gradient_sync(False)


def _gradients_left(model: Any) -> None:
    _middle_of_accumulating(model)
    step(model, 0, 0)
    model.set_requires_gradient_sync(True)


def _more_backwards(model: Any) -> None:
    model.set_is_last_backward(False)


def _steps_in_backward(model: Any) -> None:
    model.head.weight.register_post_accumulate_grad_hook(lambda _: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_middle_of_accumulating, "in the middle of accumulating gradients that are not reduced yet"),
        (_gradients_left, "in the middle of accumulating gradients that are not reduced yet"),
        (_more_backwards, r"set_is_last_backward\(False\)"),
        (_steps_in_backward, "head.weight has a hook that runs when its gradient is accumulated"),
    ],
)
def test_what_a_profile_would_damage_is_refused(one: None, change: Callable[[Any], None], message: str) -> None:
    model = memkit.shard(make())
    change(model)

    with pytest.raises(ProfileError, match=message):
        profile(model, 0)


@pytest.mark.parametrize("options", [{"device": "meta"}, {"device": "meta", "trace": True}, {"fit": "1GiB"}, {"gpu": "H100"}])
def test_sharded_models_without_data_are_refused(one: None, options: dict[str, Any]) -> None:
    with pytest.raises(ProfileError, match=r"sharded by fully_shard, and what ranks send each other needs data.*--ranks N"):
        profile(memkit.shard(make()), 0, **options)


def _without_data() -> nn.Module:
    with torch.device("meta"):
        model = Model()
    return memkit.shard(model)


def _between_some_ranks() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("one", "other"))["other"]
    return fully_shard(make(), mesh=mesh)


def _tensor_parallel() -> nn.Module:
    model, mesh = make(), init_device_mesh("cpu", (8,))
    fully_shard(model.blocks[0], mesh=mesh)
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Replicate()]))
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_without_data, "its shards are on the meta device, without data; fill them first"),
        (_between_some_ranks, "needs all 8 ranks of the process group; found one that is split between 4"),
        (_tensor_parallel, r"and head\.weight was a DTensor before, as of tensor parallelism"),
    ],
)
def test_other_shards_are_refused(build: Callable[[], nn.Module], message: str) -> None:
    with fake_group(8), pytest.raises(ProfileError, match=message):
        profile(build(), 0)


def test_model_whose_group_is_gone_is_refused() -> None:
    with group_of_one():
        model = memkit.shard(make())

    with pytest.raises(ProfileError, match="its process group is gone"):
        profile(model, 0)


def test_torch_without_a_name_says_which(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = memkit.shard(make())
    monkeypatch.setattr(torch_private, "FSDP_SUMS", "_no_such_sums")

    with pytest.raises(MissingTorchNameError, match=r"profile of a model that is sharded needs .*\._no_such_sums") as raised:
        profile(model, 0)

    assert raised.value.symbol.endswith("FSDPParamGroup._no_such_sums")


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("way", ["by hand", "ends together"])
def test_model_that_has_raised_trains_afterwards(one: None, when: str, way: str) -> None:
    model = make()
    broken = model.blocks[2] = Broken(model.blocks[2], 0, when)
    WAYS[way](model)

    with pytest.raises(ValueError, match="bad batch") as raised:
        profile(model, 0)

    where = {"forward": "raised in blocks.2 ", "backward": "raised in the backward of blocks."}
    assert any(where[when] in note for note in raised.value.__notes__)
    broken.when = "never"
    assert all(item.grad is None for item in model.parameters())
    assert all(isinstance(item, DTensor) for item in model.parameters())
    assert isinstance(model, FSDPModule)
    assert dist.is_initialized()
    assert_same(train(model, 0), train(make(), 0))
