"""What `memkit plan` does, once its arguments are read."""

from __future__ import annotations

import argparse
import functools
import json
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from memkit.fronts.batches import largest
from memkit.fronts.front import LargestBatch
from memkit.fronts.picture import draw
from memkit.fronts.ranks import shards_of, trace_on_rank
from memkit.fronts.rows import make_front
from memkit.fronts.table import to_text
from memkit.plan.asked import budget_bytes_of, problem_of
from memkit.plan.budget import Problem, least_budget, make_problem
from memkit.plan.gpus import find_gpu
from memkit.profile import MemoryReport, profile_memory
from memkit.specs import UsageError, autocast, build_model, loss_of, make_inputs, said_as
from memkit.terminal import STDOUT, terminal_width, write_text

_DTYPE = "float32"
"""The default dtype of inputs."""
_NUM_BUDGETS = 8
_MOST_TRACES = 14
"""The most batches for which a step is traced."""

_logger = logging.getLogger("memkit.cli")


def plan(options: argparse.Namespace) -> None:
    """Trace the model without data, plan its step for each budget, print the table, write the files."""
    gpu = said_as("--gpu", lambda: find_gpu(options.gpu))
    meta = torch.device("meta")
    _logger.info("building %s", options.spec)
    model = build_model(options.spec, meta).train()
    if options.dtype is not None:
        model = model.to(getattr(torch, options.dtype))

    def report_with(batch: int | None) -> MemoryReport:
        def sized(shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape if batch is None else (batch, *shape[1:])

        inputs, named = make_inputs(
            model,
            [(sized(shape), dtype) for shape, dtype in options.inputs],
            [(name, sized(shape), dtype) for name, shape, dtype in options.named_inputs],
            dtype_name=options.dtype or _DTYPE,
            device=meta,
        )
        with autocast(options.autocast, meta):
            return profile_memory(
                model,
                *inputs,
                kwargs=named,
                loss_fn=loss_of(model, named),
                backward=True,
                optimizer=options.optimizer,
                device="meta",
                target="cuda",
                trace=True,
                tag=options.spec,
                print_table=False,
            )

    shards = None
    if options.ranks is not None:
        shares = {"optimizer": options.optimizer, "offload": options.offload_params}
        shards = said_as("--ranks", functools.partial(shards_of, model, options.ranks, **shares))

    def problem_in(report: MemoryReport) -> Problem:
        if shards is None:
            return problem_of(report, gpu)
        return make_problem(
            trace_on_rank(report, model, shards), gpu, optimizer_bytes=0 if shards.is_offloaded else shards.state_bytes
        )

    def problem_with(batch: int | None) -> Problem:
        return problem_in(report_with(batch))

    _logger.info("tracing %s", options.spec)
    report = report_with(None)
    problem = problem_in(report)
    limits = said_as("--budget", lambda: [budget_bytes_of(budget, problem) for budget in options.budgets or ()])
    _logger.info("planning for the %s", gpu.name)
    front, plans = make_front(
        problem,
        limits or None,
        num_budgets=options.steps or _NUM_BUDGETS,
        optimizer=options.optimizer,
        needs_plan=not options.batch_search,  # another batch may fit
    )
    front = replace(front, ranks=shards)
    if options.batch_search:
        limit = max(limits) if limits else gpu.memory_bytes
        front = replace(front, batch=_largest_batch(problem, problem_with, limit, options))
    if options.json != STDOUT:
        print(to_text(front, width=terminal_width()), flush=True)  # ahead of files, which may fail
    if options.json is not None:
        contents = {budget_bytes: json.loads(plan.to_json()) for budget_bytes, plan in plans.items()}
        write_text(options.json, front.to_json(contents) + "\n")
    if options.plot is not None:
        draw(front, options.plot)
    if options.html is not None:
        report.to_html(options.html, plans=plans.values())


def _largest_batch(
    problem: Problem, problem_with: Callable[[int | None], Problem], budget_bytes: int, options: argparse.Namespace
) -> LargestBatch:
    """Return the largest batch that fits, plain and planned: each that is tried is traced anew."""
    shapes = [*(shape for shape, _ in options.inputs), *(shape for _, shape, _ in options.named_inputs)]
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

    half = _MOST_TRACES // 2
    plain = largest(lambda batch: of(batch).plain_peak_bytes, budget_bytes, begin=begin, most=half)
    planned = largest(lambda batch: least_budget(of(batch)), budget_bytes, begin=max(plain[0], 1), most=half)
    return LargestBatch(
        budget_bytes=budget_bytes,
        num_plain=plain[0],
        num_planned=planned[0],
        is_plain_found=plain[1],
        is_planned_found=planned[1],
    )
