"""Makes a front: a plan for each budget, and beside it what each mechanism reaches alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from memkit.errors import BudgetInfeasible
from memkit.fronts.checkpoints import checkpoint_curve, fewest_that_fit
from memkit.fronts.front import CheckpointedBlocks, Front, FrontRow
from memkit.plan.actions import Action
from memkit.plan.budget import JointPlanner, MemoryPlan, Problem, unsure
from memkit.sizes import format_gib


def budgets_between(most_bytes: int, least_bytes: int, num_budgets: int) -> list[int]:
    """Return budgets at even distances, the most first and the least last.

    Example:
        >>> budgets_between(10, 4, 3)
        [10, 7, 4]
    """
    if num_budgets == 1 or most_bytes <= least_bytes:
        return [max(most_bytes, least_bytes)]
    step = (most_bytes - least_bytes) / (num_budgets - 1)
    return [most_bytes - int(place * step) for place in range(num_budgets - 1)] + [least_bytes]


def default_budgets(problem: Problem, least_bytes: int, num_budgets: int) -> list[int]:
    """Return budgets from the plain step's peak, or what the GPU has if that is less, down to the least.

    Raises:
        BudgetInfeasible: the least is more than the GPU has.
    """
    gpu = problem.gpu
    if least_bytes > gpu.memory_bytes:
        raise BudgetInfeasible(
            f"the step needs {format_gib(least_bytes)} at the least; the {gpu.name} has {format_gib(gpu.memory_bytes)}. Make "
            "the batch smaller, or name another GPU",
            least_bytes,
        )
    return budgets_between(min(problem.plain_peak_bytes, gpu.memory_bytes), least_bytes, num_budgets)


def make_front(
    problem: Problem,
    limits: Sequence[int] | None,
    *,
    num_budgets: int,
    optimizer: str | None,
    needs_plan: bool = True,
) -> tuple[Front, dict[int, MemoryPlan]]:
    """Return the front of a step, and its plans by their budgets in bytes.

    Args:
        limits: budgets in bytes; None for `num_budgets` from the plain step's peak down to the least.
        optimizer: whose states are in the problem, for people.
        needs_plan: without it, a step that keeps to no budget has rows without figures.

    Raises:
        BudgetInfeasible: no budget can be kept to, and a plan is needed.
    """
    planner = JointPlanner(problem)
    least = planner.least()
    if limits is None and least.peak_bytes > problem.gpu.memory_bytes and not needs_plan:
        limits = [problem.gpu.memory_bytes]
    asked = limits if limits is not None else default_budgets(problem, least.peak_bytes, num_budgets)
    plans, refused = dict[int, MemoryPlan](), list[BudgetInfeasible]()
    for limit in sorted(set(asked)):
        try:
            plans[limit] = planner.plan(limit, with_bound=True)
        except BudgetInfeasible as error:
            refused.append(error)
    if refused and not plans and needs_plan:
        raise refused[-1]
    offload, recompute = (_alone(planner, only, plans) for only in (Action.OFFLOAD, Action.RECOMPUTE))
    curve = checkpoint_curve(problem)
    plain = CheckpointedBlocks(num_blocks=0, peak_bytes=problem.plain_peak_bytes, step_s=problem.plain_s)
    module, op = problem.module_at(least.worst_slot)
    trace, gpu = problem.trace, problem.gpu
    front = Front(
        model=trace.model,
        inputs=trace.inputs,
        gpu=gpu.name,
        is_measured=gpu.is_measured,
        optimizer=optimizer,
        plain_s=problem.plain_s,
        plain_peak_bytes=problem.plain_peak_bytes,
        least_bytes=least.peak_bytes,
        least_module=module,
        least_op=op,
        notes=tuple(unsure(problem)),
        rows=tuple(
            FrontRow(budget_bytes=limit)
            if limit not in plans
            else _row(plans[limit], offload.get(limit), recompute.get(limit), fewest_that_fit(curve, limit, plain))
            for limit in dict.fromkeys(asked)
        ),
    )
    return front, plans


def _alone(joint: JointPlanner, only: Action, budgets: Iterable[int]) -> dict[int, float]:
    """Return what the step takes under each budget with one mechanism alone, where it can be kept to."""
    planner = joint.alone[only]
    least_bytes = planner.least().peak_bytes
    return {limit: planner.best(limit).seconds for limit in sorted(budgets) if limit >= least_bytes}


def _row(
    plan: MemoryPlan, offload_s: float | None, recompute_s: float | None, checkpoint: CheckpointedBlocks | None
) -> FrontRow:
    counts = Counter(value.action for value in plan.values if not value.is_anchor)
    return FrontRow(
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.predicted_peak_bytes,
        step_s=plan.predicted_s,
        bound_s=plan.bound_s,
        replayed_s=plan.replayed_s,
        moved_bytes=plan.moved_bytes,
        num_kept=counts[Action.KEEP],
        num_moved=counts[Action.OFFLOAD],
        num_again=counts[Action.RECOMPUTE],
        offload_s=offload_s,
        recompute_s=recompute_s,
        checkpoint=checkpoint,
    )
