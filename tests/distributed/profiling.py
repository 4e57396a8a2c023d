"""Profiles of sharded models, and what they are held against: for one process and for several."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.errors import ShardError
from memkit.profile import MemoryReport
from tests.distributed.cases import (
    Model,
    assert_same,
    groups_of,
    local,
    make,
    optimizer_of,
    padded_bytes,
    step,
    tokens_of,
    train,
)
from tests.distributed.groups import TIMEOUT


def profile(model: nn.Module, rank: int, **options: Any) -> MemoryReport:
    """Profile a whole step on the batch of one rank."""
    tokens = tokens_of(rank, 0)

    def loss_fn(output: Tensor) -> Tensor:
        return functional.cross_entropy(output, tokens.roll(1))

    options = {"loss_fn": loss_fn, "optimizer": "adamw", "print_table": False, **options}
    return memkit.profile_memory(model, tokens, **options)


def assert_same_activations(found: MemoryReport, plain: MemoryReport) -> None:
    """What autograd saves is what it saves of the model that is not sharded, storage by storage, and row by row."""
    assert found.activation_bytes == plain.activation_bytes > 0

    def saved(report: MemoryReport) -> list[object]:
        return [(it.storage, it.version, it.storage_bytes, it.category, it.module, it.save_ordinals) for it in report.saved]

    def rows(report: MemoryReport) -> list[object]:
        return [(it.fqn, it.activation_bytes, it.self_bytes, it.num_saves, it.num_calls) for it in report.modules]

    assert saved(found) == saved(plain)
    assert rows(found) == rows(plain)
    assert sum(it.self_bytes for it in found.modules) == found.activation_bytes


def bytes_in(report: MemoryReport) -> list[object]:
    """Return all of a report that is no time."""
    rows = [(it.fqn, it.param_bytes, it.activation_bytes, it.peak_bytes, it.backward_peak_bytes) for it in report.modules]
    peaks = (report.before_bytes, report.forward_peak_bytes, report.backward_peak_bytes, report.step_peak_bytes)
    return [rows, peaks, report.sharding, report.optimizer, report.grad_bytes, report.step_memory]


def check_rank(_: str, *, lora: bool = False, by: Callable[[Model], nn.Module] = memkit.shard) -> tuple[int, int, int, int]:
    """Return the bytes of shards, with padding and without, of their gradients and their states."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    plain = profile(make(lora=lora), rank)
    model = by(make(lora=lora))
    before = step(model, rank, 0)
    grads = [(item, item.grad, item.grad if item.grad is None else local(item.grad).clone()) for item in model.parameters()]

    report = profile(model, rank)

    again = profile(model, rank)
    assert_same_activations(report, plain)
    if num_ranks == 1:
        assert bytes_in(again) == bytes_in(report)
    else:  # gloo lets go of what it has sent in threads of its own, now sooner and now later
        assert_same_activations(again, report)
        assert (again.param_bytes, again.grad_bytes, again.optimizer) == (
            report.param_bytes,
            report.grad_bytes,
            report.optimizer,
        )
        assert again.step_peak_bytes == pytest.approx(report.step_peak_bytes, rel=0.2)
    for item, grad, kept in grads:
        assert item.grad is grad
        assert grad is None or torch.equal(local(grad), kept)
    model.zero_grad()
    assert torch.equal(step(model, rank, 0), before)
    for item, _, kept in grads:
        assert kept is None or torch.equal(local(item.grad), kept)
    assert report.param_bytes == padded_bytes(make(lora=lora).parameters(), num_ranks) // num_ranks
    assert report.sharding is not None
    assert report.optimizer is not None
    assert report.grad_bytes is not None
    assert (report.sharding.rank, report.sharding.num_ranks, report.sharding.num_shards) == (rank, num_ranks, num_ranks)
    assert report.sharding.whole_bytes == plain.param_bytes
    assert report.sharding.gathered_bytes is not None
    layers = [padded_bytes(group, num_ranks) for group in groups_of(make(lora=lora))]
    assert layers[0] + layers[-1] <= report.sharding.gathered_bytes <= 4 * layers[0] + 2 * layers[-1]
    return report.param_bytes, report.sharding.shard_bytes, report.grad_bytes, report.optimizer.state_bytes


def check_training(_: str) -> None:
    """A profile ahead of the first forward, and between two steps, changes nothing of a training."""
    rank = dist.get_rank()
    plain = train(memkit.shard(make()), rank)
    model = memkit.shard(make())
    optimizer = optimizer_of(model)
    profile(model, rank)
    found = train(model, rank, numbers=[0], optimizer=optimizer)[: -len(list(model.parameters()))]
    profile(model, rank, optimizer=optimizer)
    profile(model, rank, backward=False, optimizer=None)
    found += train(model, rank, numbers=[1, 2], optimizer=optimizer)

    assert_same(found, plain)


class Broken(nn.Module):
    """Raises on one rank, in its forward or its backward."""

    def __init__(self, inner: nn.Module, rank: int, when: str) -> None:
        super().__init__()
        self.inner, self.rank, self.when = inner, rank, when

    def forward(self, x: Tensor) -> Tensor:
        """Take and return what the inner module does."""
        if self.when == "forward":
            self.fail()
        x = self.inner(x)
        if self.when == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, *_: object) -> None:
        if dist.get_rank() == self.rank:
            raise ValueError("bad batch")


def check_raised_on_one(_: str, *, when: str) -> None:
    """What one rank raises is raised on all at once, and both go on afterwards."""
    rank = dist.get_rank()
    model = make()
    broken = model.blocks[2] = Broken(model.blocks[2], 1, when)
    memkit.shard(model, layers=[f"blocks.{number}" for number in range(4)])
    begin = time.monotonic()
    for warmup in (1, 0):
        if rank == 1:
            with pytest.raises(ValueError, match="bad batch") as own:
                profile(model, rank, warmup=warmup)
            assert any("raised on rank 1 of 2 while running a step, wa" in note for note in own.value.__notes__)
        else:
            with pytest.raises(ShardError, match=r"running a step, wa.* rank 1 raised ValueError: bad batch") as other:
                profile(model, rank, warmup=warmup)
            assert other.value.rank == 1
    assert time.monotonic() - begin < TIMEOUT.total_seconds() / 2  # which nobody waits for

    broken.when = "never"
    plain = make()
    plain.blocks[2] = Broken(plain.blocks[2], 1, "never")
    assert_same_activations(profile(model, rank), profile(plain, rank))
    assert_same(train(model, rank), train(memkit.shard(_wrapped(), layers=[f"blocks.{it}" for it in range(4)]), rank))


def _wrapped() -> Model:
    model = make()
    model.blocks[2] = Broken(model.blocks[2], 1, "never")
    return model


def check_bad_argument(_: str) -> None:
    rank = dist.get_rank()
    model = memkit.shard(make())
    if rank == 1:
        with pytest.raises(ValueError, match="warmup must be a number of runs"):
            profile(model, rank, warmup=-1)
    else:
        with pytest.raises(ShardError, match="profile_memory: while looking at the model, rank 1 raised ValueError: warmup"):
            profile(model, rank)


def check_other_arguments(_: str) -> None:
    model = memkit.shard(make())
    with pytest.raises(ShardError, match=r"profile_memory needs the same model on every rank.*or in arguments"):
        profile(model, dist.get_rank(), warmup=1 + dist.get_rank())


def check_other_layers(_: str) -> None:
    """One rank leaves out layers: both say so at once, where they would wait for each other until the group's timeout."""
    model, rank = memkit.shard(make()), dist.get_rank()
    if rank == 1:
        model.forward = lambda tokens: model.head(model.embedding(tokens))
    begin = time.monotonic()
    with pytest.raises(ShardError, match=r"profile_memory needs the same model on every rank.*in layers"):
        profile(model, rank)
    assert time.monotonic() - begin < TIMEOUT.total_seconds() / 2  # which nobody waits for

    if rank == 1:
        del model.forward
    assert_same(train(model, rank), train(memkit.shard(make()), rank))


PROFILES = {
    "profile": check_rank,
    "profile of LoRA": functools.partial(check_rank, lora=True),
    "profile in a training": check_training,
    "raised in a forward": functools.partial(check_raised_on_one, when="forward"),
    "raised in a backward": functools.partial(check_raised_on_one, when="backward"),
    "bad argument of a profile": check_bad_argument,
    "other arguments of a profile": check_other_arguments,
    "other layers in a profile": check_other_layers,
}
