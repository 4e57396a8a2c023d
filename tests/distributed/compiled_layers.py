"""Layers that are compiled each by itself, before or after they are sharded, with contexts inside."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

import memkit
from tests.compiling import FORMS, Backend, in_form
from tests.distributed.cases import Model, assert_same, make, train
from tests.distributed.composing import CONTEXTS, TAG, Make
from tests.distributed.hosting import on_host

SHARDS: dict[str, Callable[..., Model]] = {"on the device": memkit.shard, "on the host": on_host}
ORDERS = "before", "after"
ACTING = "CPUOffload(1.0)", "Rematerialize(0.1)", "both", "MemoryBudget, half", "MemoryBudget, least"


def _build(form: str, order: str, where: str, backend: Backend) -> Model:
    def compiled(model: Model) -> Model:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = in_form(form, block, backend)
        return model

    if order == "before":
        return SHARDS[where](compiled(make()))
    return compiled(SHARDS[where](make()))


def _trained(form: str, order: str, where: str, context: Make) -> list[Tensor]:
    backend = Backend()
    torch.compiler.reset()
    found = train(_build(form, order, where, backend), dist.get_rank(), numbers=range(5), context=context)
    torch.compiler.reset()
    assert backend.num_graphs > 0
    return found


@functools.cache
def _plain(form: str, order: str, where: str, rank: int, num_ranks: int) -> list[Tensor]:
    """Return each step without a context. All ranks ask for the same in the same order, so each has it or none."""
    assert (rank, num_ranks) == (dist.get_rank(), dist.get_world_size())
    return _trained(form, order, where, nullcontext)


def check_same(form: str, order: str, where: str, context: str, _: str = "") -> None:
    """Compare each step in a context with one without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of budgets that can't be kept to, and of Dynamo's
        plain = _plain(form, order, where, dist.get_rank(), dist.get_world_size())
        assert_same(_trained(form, order, where, CONTEXTS[context]), plain)
    stats = memkit.stats(TAG)
    assert stats.live_records == 0
    memkit.reset(TAG)
    memkit.reset(f"{TAG} outside")
    assert stats.moved_out_bytes + stats.dropped_bytes > 0


def check_whole(form: str, order: str) -> None:
    """Compare a model that is compiled as a whole with its shards on the host, and on the device."""
    found = []
    for build in SHARDS.values():
        torch.compiler.reset()
        backend = Backend()
        model = in_form(form, build(make()), backend) if order == "after" else build(in_form(form, make(), backend))
        found.append(train(model, dist.get_rank()))
        assert backend.num_graphs > 0
    torch.compiler.reset()
    assert_same(*found)


RUNS = list(itertools.product(FORMS, ORDERS, SHARDS, ACTING))
"""What `check_same` is given."""


def name_of(form: str, order: str, where: str, context: str) -> str:
    return f"compiled {order}, {form}, {where}, {context}"
