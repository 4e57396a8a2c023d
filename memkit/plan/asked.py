"""`plan_memory`: from a user's arguments to a plan."""

from __future__ import annotations

import os
from numbers import Integral
from typing import Protocol

from memkit.core.sizes import check_budget, format_bytes
from memkit.plan.budget.planning import JointPlanner
from memkit.plan.budget.problem import Problem, make_problem
from memkit.plan.gpu import GpuSpec, find_gpu
from memkit.plan.plans import MemoryPlan
from memkit.plan.step import StepTrace

_FEWEST_BYTES = 2**20
_STATES = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}  # how many states of a parameter's size and dtype each has


class TracedReport(Protocol):
    """A `memkit.profile.MemoryReport` with a trace."""

    @property
    def trace(self) -> StepTrace | None: ...


def plan_memory(
    source: TracedReport | StepTrace,
    *,
    budget: int | float | str,
    gpu: str | os.PathLike[str] | GpuSpec,
    optimizer: str | None = None,
) -> MemoryPlan:
    """Plan a training step under a memory budget, for a GPU that need not be there: what to keep, what to offload to the host
    and what to recompute. What the plan says of time and memory is predicted: docs/plan.md tells how well.

    Args:
        source: a report of `profile_memory(..., device="meta", backward=True, trace=True)`, or its trace.
        budget: the most bytes on the device at once, with parameters, gradients and the states of the optimizer: text such as
            "12GiB", bytes as an int of at least 2**20, or a share of the plain step's peak as a float up to 1.
        gpu: a name such as "RTX 4090", a file that `memkit bench machine --save` wrote, or a `memkit.plan.GpuSpec`.
        optimizer: "adamw" and "adam" count two states of each trainable parameter's size as there all along, "momentum" one,
            "sgd" none; None those of the optimizer that the report was made with, if there was one.

    Returns:
        The plan: `predicted_s`, `predicted_peak_bytes`, `bound_s`, `min_budget_bytes`, `explain()`, `to_json()`.

    Raises:
        BudgetInfeasible: no plan keeps to the budget.
        OSError: the file cannot be read.
        ReportFormatError: it holds no spec of a GPU.
        TypeError: `source`, `budget` or `gpu` is of no such kind.
        ValueError: the report has no trace; the budget is not positive, reads in two ways, or is more than the GPU has; memkit
            knows no such GPU or optimizer.

    Example:
        >>> import torch, memkit
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
        ...     x = torch.empty(4096, 512)
        >>> report = memkit.profile_memory(model, x, device="meta", backward=True, trace=True, print_table=False)
        >>> plan = memkit.plan_memory(report, budget=0.7, gpu="RTX 4090")
        >>> plan.predicted_peak_bytes <= 0.7 * plan.plain_peak_bytes
        True
    """
    problem = problem_of(source, find_gpu(gpu), optimizer)
    return JointPlanner(problem).plan(budget_bytes_of(budget, problem), with_bound=True, is_steady=True)


def trace_of(source: TracedReport | StepTrace) -> StepTrace:
    if isinstance(source, StepTrace):
        return source
    if not hasattr(source, "trace"):
        raise TypeError(f"a plan is made from a memkit.profile.MemoryReport or its trace; found {type(source).__name__}")
    if source.trace is None and getattr(source, "sharding", None) is not None:
        raise ValueError(
            "a plan needs a report with a trace, and that of one rank of a model that is sharded has none. Profile the model "
            "before sharding; memkit plan --ranks N plans for one rank"
        )
    if source.trace is None:
        raise ValueError(
            "a plan needs a report with a trace; found one without. "
            'Profile with profile_memory(model, ..., device="meta", backward=True, trace=True)'
        )
    return source.trace


def problem_of(source: TracedReport | StepTrace, gpu: GpuSpec, optimizer: str | None = None) -> Problem:
    trace, counted = trace_of(source), None if isinstance(source, StepTrace) else getattr(source, "optimizer", None)
    if optimizer is None and counted is not None:
        return make_problem(trace, gpu, optimizer_bytes=counted.state_bytes)
    if optimizer is not None and optimizer not in _STATES:
        found = repr(optimizer) if isinstance(optimizer, str) else f"a {type(optimizer).__name__}"
        raise ValueError(f"optimizer must be one of {', '.join(_STATES)}, or None; found {found}")
    num_states = 0 if optimizer is None else _STATES[optimizer]
    return make_problem(trace, gpu, optimizer_bytes=num_states * trace.trainable_bytes)


def budget_or_share(budget: int | float | str) -> int | float:
    """Return a budget as bytes, or as a share of the plain step's peak."""
    checked = check_budget(budget, share="share of the plain step's peak")
    if isinstance(checked, int) and isinstance(budget, Integral) and checked < _FEWEST_BYTES:
        raise ValueError(
            f"budget={budget!r} reads as {format_bytes(checked)} or as {checked} MiB. "
            f'Write "{checked}B" or "{checked}MiB"; an int is bytes, at least {_FEWEST_BYTES}'
        )
    return checked


def budget_bytes_of(budget: int | float | str, problem: Problem) -> int:
    checked = budget_or_share(budget)
    budget_bytes = checked if isinstance(checked, int) else int(checked * problem.plain_peak_bytes)
    gpu = problem.gpu
    if budget_bytes > gpu.memory_bytes:
        raise ValueError(
            f"a budget must be within what the {gpu.name} has, {gpu.memory_bytes / 2**30:.2f} GiB; found {budget!r}, which is "
            f"{budget_bytes / 2**30:.2f} GiB. Lower the budget, or name another GPU"
        )
    return budget_bytes
