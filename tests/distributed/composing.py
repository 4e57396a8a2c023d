"""What runs in sharded layers for the tests of composing: each context beside what shows that it has done something."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import memkit
from memkit.activations.recomputing import region_plan
from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.activations.saved.counts import Counts
from memkit.device import ReferenceDevice
from tests.distributed.cases import NUM_LAYERS, WIDTH, Model, assert_same, make, steps, train

Make = Callable[[], AbstractContextManager[Any]]

TAG = "sharded"
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _options(seed: int | None = None) -> dict[str, Any]:
    return {"tag": TAG, "min_bytes": 0, "device": ReferenceDevice() if seed is None else ReferenceDevice(seed=seed)}


def _both() -> AbstractContextManager[None]:
    @contextmanager
    def entered() -> Any:
        with ExitStack() as stack:
            stack.enter_context(memkit.CPUOffload(0.5, **{**_options(), "tag": f"{TAG} outside"}))
            stack.enter_context(memkit.Rematerialize(0.6, **_options()))
            yield

    return entered()


CONTEXTS: dict[str, Make] = {
    "CPUOffload(0.2)": lambda: memkit.CPUOffload(0.2, **_options()),
    "CPUOffload(1.0)": lambda: memkit.CPUOffload(1.0, **_options(seed=0)),
    "Rematerialize(0.5)": lambda: memkit.Rematerialize(0.5, **_options()),
    "Rematerialize(0.1)": lambda: memkit.Rematerialize(0.1, **_options()),
    "both": _both,
    "MemoryBudget, half": lambda: memkit.MemoryBudget("22KiB", **_options()),
    "MemoryBudget, least": lambda: memkit.MemoryBudget("12KiB", **_options()),
}
"""A step of the model saves about 46 KiB."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "LoRA": {"lora": True},
    "two ahead": {"prefetch": 2},
    "low": {"mp_policy": LOW},
    "whole": {"reshard_after_forward": False},
    "micro-batches": {"micro": 2},
}


@functools.cache
def _plain(rank: int, num_ranks: int, num_steps: int, lora: bool, micro: int, **options: Any) -> list[torch.Tensor]:
    """Return each step without a context. All ranks ask for the same in the same order, so each has it or none."""
    assert (rank, num_ranks) == (dist.get_rank(), dist.get_world_size())
    return train(memkit.shard(make(lora=lora), **options), rank, numbers=range(num_steps), micro=micro)


def check_same(context: str, *, attached: bool, num_steps: int = 7, lora: bool = False, micro: int = 1, **options: Any) -> int:
    """Compare each step in a context with one without it; return how many bytes the context has moved or dropped."""
    rank, numbers = dist.get_rank(), range(num_steps)
    plain = _plain(rank, dist.get_world_size(), num_steps, lora, micro, **options)
    model = memkit.shard(make(lora=lora), **options)
    if attached:
        attachment = memkit.attach(model, CONTEXTS[context]())
        found = train(model, rank, numbers=numbers, micro=micro)
        attachment.remove()
    else:
        found = train(model, rank, numbers=numbers, micro=micro, context=CONTEXTS[context])
    assert_same(found, plain)
    stats = memkit.stats(TAG)
    assert stats.live_records == 0
    memkit.reset(TAG)
    memkit.reset(f"{TAG} outside")
    return stats.moved_out_bytes + stats.dropped_bytes


def _root(model: Model, **options: Any) -> nn.Module:
    return fully_shard(model, **options)


def _layers(model: Model, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return model


def _layers_and_root(model: Model, **options: Any) -> nn.Module:
    return fully_shard(_layers(model, **options), **options)


BY_HAND: dict[str, Callable[..., nn.Module]] = {"root": _root, "layers": _layers, "layers and root": _layers_and_root}
"""How `fully_shard` is called without `memkit.shard`."""
RESHARDS: dict[str, dict[str, Any]] = {
    "": {},
    "always": {"reshard_after_forward": True},
    "never": {"reshard_after_forward": False},
}


def _by_hand(
    how: str, reshards: str, forwards: int, rank: int, num_ranks: int, make_context: Make | None, attached: bool = False
) -> list[torch.Tensor]:
    model = BY_HAND[how](make(), mesh=init_device_mesh("cpu", (num_ranks,)), **RESHARDS[reshards])
    # what is not sharded is each rank's own here: its gradients are not reduced
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = memkit.attach(model, make_context()) if attached and make_context else None
    context = make_context if make_context and not attached else nullcontext
    found = steps(model, context, forwards=forwards, optimizer=optimizer)
    if attachment is not None:
        attachment.remove()
    return found


_plain_by_hand = functools.cache(functools.partial(_by_hand, make_context=None))
"""The same without a context: see `_plain`."""


def check_by_hand(how: str, context: str, *, reshards: str = "", forwards: int = 2, attached: bool = False) -> int:
    """Compare steps of several forwards in one context, or each in an attached one, with those without; return how much
    the context has moved or dropped."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    found = _by_hand(how, reshards, forwards, rank, num_ranks, CONTEXTS[context], attached)
    assert_same(found, _plain_by_hand(how, reshards, forwards, rank, num_ranks))
    stats = memkit.stats(TAG)
    assert stats.live_records == 0
    memkit.reset(TAG)
    memkit.reset(f"{TAG} outside")
    assert stats.num_kept >= 0
    return stats.num_copies_out + stats.num_dropped


class _Block(nn.Module):
    """A layer with a module inside whose call saves several times what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return [batch, WIDTH]."""
        return x + self.inner(self.norm(x))


def check_regions(_: str = "", *, how: str = "shard", forwards: int = 1) -> None:
    """Compare steps in which calls of modules within sharded ones are run again as a whole with those without; nothing is
    recorded in them any more. On several ranks the last one has no context: a recompute gathers nothing."""
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), ReferenceDevice()

    def run(make_context: Make) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(_Block() for _ in range(4)))
        mesh = init_device_mesh("cpu", (num_ranks,))
        model = memkit.shard(model) if how == "shard" else fully_shard(model, mesh=mesh, reshard_after_forward=True)
        optimizer = torch.optim.AdamW(model.parameters())
        batches = [torch.randn(32, WIDTH) for _ in range(8 * forwards)]
        return steps(model, make_context, num_steps=8, forwards=forwards, optimizer=optimizer, given=batches.__getitem__)

    has_context = num_ranks == 1 or rank < num_ranks - 1
    options: dict[str, Any] = {"tag": TAG, "min_bytes": 0, "device": device}
    with mock.patch.object(region_plan, "_seconds_of_ops", return_value=1e9):  # whatever this machine takes for an op
        found = run((lambda: memkit.Rematerialize(0.5, **options)) if has_context else nullcontext)
    assert_same(found, run(nullcontext))
    if has_context:
        stats = memkit.stats(TAG)
        assert not stats.is_recorded
        assert stats.num_replays > 0
        assert stats.num_deviations == 0
        memkit.reset(TAG)


LAYER_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "LoRA": {"lora": True},
    "low": {"mp_policy": LOW},
    "whole": {"reshard_after_forward": False},
    "two ahead": {"prefetch": 2},
    "on the host": {"offload_policy": CPUOffloadPolicy()},
}


def check_whole_layers(_: str = "", *, case: str = "plain", forwards: int = 1) -> None:
    """Compare steps in which sharded layers themselves are run again as a whole, within what gathers them, with those without.
    On several ranks the last one recomputes nothing: that gathers nothing."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    options = dict(LAYER_CASES[case])
    lora = options.pop("lora", False)

    def run(counts: Counts | None) -> list[torch.Tensor]:
        model = memkit.shard(make(lora=lora), **options)
        regions = None if counts is None else Regions({block: RegionSpec() for block in model.blocks}, counts=counts)
        optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])
        found = steps(model, lambda: regions or nullcontext(), num_steps=3, forwards=forwards, optimizer=optimizer)
        assert regions is None or not regions.not_taken
        return found

    counts = Counts() if num_ranks == 1 or rank < num_ranks - 1 else None
    assert_same(run(counts), run(None))
    assert counts is None or counts.num_replays == 3 * forwards * NUM_LAYERS
