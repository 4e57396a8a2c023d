"""Turns a trace of the whole model into that of one rank, with the model sharded as `memkit.shard` would do it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, pairwise

import torch
from torch import nn

from memkit.distributed.sharding import check_layers, check_model
from memkit.plan import ShardedParameter, ShardPlan, plan_shards
from memkit.plan.step_trace import StepTrace
from memkit.profile import MemoryReport
from memkit.profile.alive import AliveStorage, MemoryCategory
from memkit.profile.optimizer_states import state_bytes_of
from memkit.weights.selection import find_layers


def shards_of(model: nn.Module, num_ranks: int, *, optimizer: str | None, offload: bool = False) -> ShardPlan:
    """Return what the first rank takes of a model and an optimizer, with one layer gathered ahead.

    Args:
        model: with data or without.
        num_ranks: between how many it is split.
        optimizer: by name, as `profile_memory` takes it. Its states are counted on the shards.
        offload: whether shards, their gradients and states are in host memory.

    Raises:
        ValueError: `memkit.shard` would refuse the model.
        ProfileError: the optimizer does not step without data.
    """
    layers = _layers_of(model)
    inside = {id(item) for layer in layers.values() for item in layer.parameters()}
    outside = [item for item in model.parameters() if id(item) not in inside]
    groups = [list(layer.parameters()) for layer in layers.values()]
    plan = plan_shards(
        [_sharded(group) for group in groups], _sharded(outside), num_ranks=num_ranks, states_per_element=0, offload=offload
    )
    if optimizer is None:
        return plan
    shards = [
        nn.Parameter(torch.empty(-(-item.shape[0] // num_ranks), *item.shape[1:], dtype=item.dtype, device="meta"))
        for item in chain(*groups, outside)
        if item.requires_grad
    ]
    return replace(plan, state_bytes=state_bytes_of(shards, optimizer))


def trace_on_rank(report: MemoryReport, model: nn.Module, shards: ShardPlan) -> StepTrace:
    """Return the trace of a step on one rank, whose inputs are those of the report.

    Shards of parameters and gradients, or those in transfer from the host, and what is gathered at a time, are there all the
    time. A layer's unsharded gradients are freed when those of the next layer in the backward are complete; until then the
    buffer that they are reduced from is held. Those of parameters in no layer stay to the end. Computation and saved values are
    the same.

    Args:
        report: the report of the whole model, with a trace.
        model: the same model.
        shards: the result of `shards_of`. Its optimizer states are not in the trace.
    """
    trace, memory = report.trace, report.step_memory
    assert trace is not None
    assert memory is not None
    names = list(_layers_of(model))
    grads = dict[str, list[AliveStorage]]()
    whole_bytes = 0
    for storage in memory.storages:
        if storage.category is MemoryCategory.PARAM:
            whole_bytes += storage.num_bytes
        elif storage.category is MemoryCategory.GRAD:
            layer = next((name for name in names if f"{storage.module}.".startswith(f"{name}.")), None)
            if layer is not None:
                grads.setdefault(layer, []).append(storage)
    live_bytes = list(trace.live_bytes)
    complete = sorted((max(storage.begin for storage in found), layer) for layer, found in grads.items())
    for (_, layer), (until, _) in pairwise(complete):
        for storage in grads[layer]:
            for moment in range(until + 1, min(storage.end, len(live_bytes))):
                live_bytes[moment] -= storage.num_bytes
    held_bytes = shards.total_bytes if shards.is_offloaded else shards.total_bytes - shards.state_bytes
    return replace(trace, base_bytes=trace.base_bytes - whole_bytes + held_bytes, live_bytes=tuple(live_bytes))


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    check_model(model)
    layers = find_layers(model, None, feature="shard")
    check_layers(model, layers)
    return layers


def _sharded(parameters: Iterable[nn.Parameter]) -> list[ShardedParameter]:
    return [
        ShardedParameter(shape=tuple(item.shape), itemsize=item.itemsize, is_trained=item.requires_grad) for item in parameters
    ]
