"""What models whose shards are on the host are compared with, on one rank and on two, where each missing order shows."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import memkit
from memkit.device import ReferenceDevice
from memkit.distributed import sharding
from tests.distributed.cases import Model, assert_same, by_hand, load, local, make, optimizer_of, save, step, train
from tests.distributed.composing import CONTEXTS, LOW, TAG
from tests.distributed.groups import Work

HOST = CPUOffloadPolicy()
SEEDS = (None, 0, 1)
"""For `ReferenceDevice`: copies that land as late as they may, or at random."""


@contextmanager
def racing(seed: int | None = None) -> Iterator[ReferenceDevice]:
    """What `shard` makes brings shards to a device on which races show."""
    device = ReferenceDevice(seed=seed)
    with patch.object(sharding, "open_device", lambda _: device):
        yield device


def on_host(model: Model, *, seed: int | None = None, **options: Any) -> Model:
    with racing(seed):
        return memkit.shard(model, offload_policy=HOST, **options)


ENDS = ["embedding", *(f"blocks.{number}" for number in range(4)), "head"]
"""Of a `Model`: also what comes first and last is gathered by itself."""


def with_ends(shard: Callable[..., Model], model: Model) -> Model:
    """Shard a model so that neither end is there with the other. The head stays behind its forward: its backward is next."""
    model = shard(model, layers=ENDS)
    model.head.set_reshard_after_forward(False)  # type: ignore[operator]  # it is one of FSDP2's by now
    model.embedding.set_unshard_in_backward(False)  # type: ignore[operator]
    return model


def check_ends(_: str, *, lora: bool = False) -> None:
    """The bits, and the names of states, are those of a model whose ends are gathered as one."""
    rank, plain = dist.get_rank(), memkit.shard(make(lora=lora))
    names = list(plain.state_dict())
    expected = train(plain, rank)
    for shard in (memkit.shard, on_host):
        model = with_ends(shard, make(lora=lora))
        assert list(model.state_dict()) == names
        assert_same(train(model, rank), expected)


def by_hand_on_host(model: Model, **options: Any) -> Model:
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy, **options)
    return fully_shard(model, mesh=mesh, offload_policy=policy, **options)


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": True},
    "frozen in bfloat16": {"lora": True, "frozen_dtype": torch.bfloat16},
    "micro-batches": {"micro": 2},
    "two ahead": {"prefetch": 2},
    "none ahead": {"prefetch": 0},
    "whole": {"reshard_after_forward": False},
    "tied": {"tied": True},
    "low": {"mp_policy": LOW},
}


def check_same(case: str, _: str = "") -> None:
    """Compare with models that were sharded by hand, in memory of the device and on the host."""
    options = dict(CASES[case])
    rank, mesh, micro = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),)), options.pop("micro", 1)
    build = functools.partial(make, lora=options.pop("lora", False), tied=options.pop("tied", False))
    frozen_dtype, low = options.pop("frozen_dtype", None), options.get("mp_policy")
    of_fsdp = {} if low is None else {"mp_policy": low}
    plain = train(by_hand_on_host(build(frozen_dtype=frozen_dtype), **of_fsdp), rank, micro=micro)
    if low is None:
        assert_same(train(by_hand(build(frozen_dtype=frozen_dtype), mesh), rank, micro=micro), plain)
    for seed in SEEDS:
        model = on_host(build(), seed=seed, frozen_dtype=frozen_dtype, **options)
        assert_same(train(model, rank, micro=micro), plain)


def check_context(name: str, _: str = "") -> None:
    """Compare steps in a context with those without it."""
    warnings.simplefilter("ignore")
    rank, numbers = dist.get_rank(), range(6)
    plain = train(memkit.shard(make(lora=True)), rank, numbers=numbers)
    assert_same(train(on_host(make(lora=True)), rank, numbers=numbers, context=CONTEXTS[name]), plain)
    stats = memkit.stats(TAG)
    assert stats.live_records == 0
    memkit.reset(TAG)
    memkit.reset(f"{TAG} outside")
    assert stats.moved_out_bytes + stats.dropped_bytes > 0


def _halve(model: nn.Module) -> None:
    with torch.no_grad():
        for item in model.parameters():
            item.mul_(0.5)


def _halve_data(model: nn.Module) -> None:
    for item in model.parameters():
        item.data.mul_(0.5)


def _halve_locals(model: nn.Module) -> None:
    for item in model.parameters():
        local(item.data).mul_(0.5)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "in place": _halve,
    "by data": _halve_data,
    "by local tensors": _halve_locals,
    "load_state_dict": _load,
    "load_state_dict(assign=True)": _assign,
}


def check_write(name: str, _: str = "") -> None:
    """What is written to shards is there in the next forward, and not yet in the one before, whose copies may still run."""
    rank = dist.get_rank()

    def run(model: Model) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            with torch.no_grad():
                found.append(model(torch.arange(8)))
            WRITES[name](model)
            found.append(step(model, rank, 0))
            WRITES[name](model)
            model.zero_grad()
        return [item.detach() for item in (*found, *map(local, model.parameters()))]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of assign=True: gradients are lost
        plain = run(memkit.shard(make()))
        for seed in SEEDS:
            assert_same(run(on_host(make(), seed=seed)), plain)


def check_skipped(_: str = "") -> None:
    """A layer that was brought ahead and is not called is brought again in the next forward, with what was written since."""
    rank = dist.get_rank()

    def run(model: Model, prefetch: int) -> list[torch.Tensor]:
        blocks, found = model.blocks, []
        optimizer = optimizer_of(model)
        for skipped in (3, 1, 0, 2):
            model.blocks = nn.ModuleList(block for number, block in enumerate(blocks) if number != skipped)
            found.append(step(model, rank, skipped))
            model.blocks = blocks
            optimizer.step()
            optimizer.zero_grad()
        return [item.detach() for item in (*found, *map(local, model.parameters()))]

    plain = run(memkit.shard(make(), prefetch=0), 0)
    for seed in SEEDS:
        assert_same(run(on_host(make(), seed=seed, prefetch=0), 0), plain)


def check_checkpoint(folder: str) -> None:
    """What is saved by `torch.distributed.checkpoint` goes on in a model on the host, and in one on the device."""
    rank, path = dist.get_rank(), Path(folder) / "of the host"
    model = on_host(make())
    optimizer = optimizer_of(model)
    train(model, rank, optimizer=optimizer)
    save(path, model, optimizer)
    usual = memkit.shard(make())
    usual_optimizer = optimizer_of(usual)
    train(usual, rank, optimizer=usual_optimizer)
    save(path.with_name("of the device"), usual, usual_optimizer)
    saved_bytes, usual_bytes = (
        sum(file.stat().st_size for file in at.iterdir()) for at in (path, path.with_name("of the device"))
    )
    assert abs(saved_bytes - usual_bytes) < 0.01 * usual_bytes  # no memory around the shards
    plain = train(model, rank, numbers=[7, 8], optimizer=optimizer)
    for build in (on_host, memkit.shard):
        model = build(make())
        optimizer = optimizer_of(model)
        load(path, model, optimizer)
        assert_same(train(model, rank, numbers=[7, 8], optimizer=optimizer), plain)


WORKS: dict[str, Work] = {
    **{f"on the host: {name}": functools.partial(check_same, name) for name in CASES},
    **{f"on the host, written {name}": functools.partial(check_write, name) for name in WRITES},
    "on the host, skipped": check_skipped,
    "on the host, checkpoint": check_checkpoint,
}
MORE: dict[str, Work] = {f"on the host, {name}": functools.partial(check_context, name) for name in CONTEXTS}
OFTEN = "on the host: full", "on the host: frozen in bfloat16", "on the host, written by data", "on the host, checkpoint"
"""What is done on two ranks in any run of the tests."""
