"""`memkit plan`, after its arguments are parsed, with the share of one rank of a split model."""

from __future__ import annotations

import argparse
import functools
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, pairwise

import torch
from torch import nn

from memkit.cli.specs import UsageError, model_of, profiled, said_as
from memkit.core.terminal import STDOUT, terminal_width, write_text
from memkit.distributed.sharding import check_layers, check_model
from memkit.plan import ShardedParameter, ShardPlan, StepTrace, find_gpu, plan_shards
from memkit.plan.asked import budget_bytes_of, problem_of
from memkit.plan.budget.planning import JointPlanner
from memkit.plan.budget.problem import Problem, make_problem
from memkit.plan.front import LargestBatch, draw, largest, make_front, to_text
from memkit.profile import MemoryReport
from memkit.profile.alive import AliveStorage, MemoryCategory
from memkit.profile.optimizer_states import state_bytes_of
from memkit.weights.selection import find_layers

_logger = logging.getLogger("memkit.cli.main")


def shards_of(model: nn.Module, num_ranks: int, *, optimizer: str | None, offload: bool = False) -> ShardPlan:
    """Return the bytes that the first of `num_ranks` ranks takes of a model and an optimizer, one layer gathered ahead."""
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
    """Return the trace of a step on one rank; a layer's unsharded gradients are freed when those of the next are complete."""
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
    return [ShardedParameter(shape=tuple(it.shape), itemsize=it.itemsize, is_trained=it.requires_grad) for it in parameters]


def plan(options: argparse.Namespace) -> None:
    gpu = said_as("--gpu", lambda: find_gpu(options.gpu))
    meta = torch.device("meta")
    model = model_of(options, meta)

    def report_with(batch: int | None) -> MemoryReport:
        sized = [(name, shape if batch is None else (batch, *shape[1:]), dtype) for name, shape, dtype in options.inputs]
        return profiled(options, model, sized, meta, backward=True, trace=True)

    shards = None
    if options.ranks is not None:
        how = {"optimizer": options.optimizer, "offload": options.offload_params}
        shards = said_as("--ranks", functools.partial(shards_of, model, options.ranks, **how))

    def problem_in(report: MemoryReport) -> Problem:
        if shards is None:
            return problem_of(report, gpu)
        state_bytes = 0 if shards.is_offloaded else shards.state_bytes
        return make_problem(trace_on_rank(report, model, shards), gpu, optimizer_bytes=state_bytes)

    _logger.info("tracing %s", options.spec)
    report = report_with(None)
    problem = problem_in(report)
    limits = said_as("--budget", lambda: [budget_bytes_of(budget, problem) for budget in options.budgets or ()])
    _logger.info("planning for the %s", gpu.name)
    front, plans = make_front(
        problem,
        limits or None,
        num_budgets=options.steps or 8,
        optimizer=options.optimizer,
        needs_plan=not options.batch_search,  # another batch may fit
    )
    front = replace(front, ranks=shards)
    if options.batch_search:
        limit = max(limits) if limits else gpu.memory_bytes
        front = replace(front, batch=_largest_batch(problem, lambda batch: problem_in(report_with(batch)), limit, options))
    if options.json != STDOUT:
        print(to_text(front, width=terminal_width()), flush=True)  # before files, which may fail
    if options.json is not None:
        contents = {budget_bytes: json.loads(plan.to_json()) for budget_bytes, plan in plans.items()}
        write_text(options.json, front.to_json(contents) + "\n")
    if options.plot is not None:
        draw(front, options.plot)
    if options.html is not None:
        report.to_html(options.html, plans=plans.values())


def _largest_batch(
    problem: Problem, problem_with: Callable[[int], Problem], budget_bytes: int, options: argparse.Namespace
) -> LargestBatch:
    shapes = [shape for _, shape, _ in options.inputs]
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1 or 0 in sizes or not all(shapes):
        raise UsageError(
            "--batch-search needs inputs whose first sizes are the batch: equal, and 1 or more; "
            f"found {', '.join('x'.join(map(str, shape)) for shape in shapes)}. Leave it out"
        )
    (begin,) = sizes
    traced = {begin: problem}

    def of(batch: int) -> Problem:
        if batch not in traced:
            _logger.info("tracing a batch of %d", batch)
            traced[batch] = problem_with(batch)
        return traced[batch]

    plain = largest(lambda batch: of(batch).plain_peak_bytes, budget_bytes, begin=begin, most=7)
    best = largest(lambda batch: JointPlanner(of(batch)).least().peak_bytes, budget_bytes, begin=max(plain[0], 1), most=7)
    return LargestBatch(
        budget_bytes=budget_bytes, num_plain=plain[0], num_planned=best[0], is_plain_found=plain[1], is_planned_found=best[1]
    )
