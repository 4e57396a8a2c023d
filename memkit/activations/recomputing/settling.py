"""When a step need not be recorded any more: asked at the end of each that was."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from memkit.activations.recomputing.budget import BudgetDecider, RematOptions
from memkit.activations.recomputing.region_plan import plan_regions
from memkit.activations.saved.settled import Settled, SizesSeen
from memkit.activations.saved.trial import Trial, Way

if TYPE_CHECKING:
    from memkit.activations.saved.state import RematState

_NUM_RECORDED = 3
"""So many steps are recorded at least: by the third it is known what each op takes."""
_MOST_DEVIATIONS = 3
"""A model of which so many steps had other regions than were planned is recorded from then on."""


def settle(state: RematState, options: RematOptions, decider: BudgetDecider, sizes: SizesSeen | None, is_timed: bool) -> None:
    """Note what the next steps are to do, now that one was recorded to its end.

    Args:
        state: what is known under the tag; its counts are those of the step.
        options: what was asked for.
        decider: what has said what to drop.
        sizes: what was saved, if that was added up.
        is_timed: whether its ops were timed, each by itself, which takes time.
    """
    state.num_recorded += 1
    state.settled = None
    if not options.may_settle or state.num_recorded < _NUM_RECORDED or _has_wishes(state):
        return
    budget_bytes = state.counts.budget_bytes
    if sizes is None:
        state.settled = Settled(options=options, sizes=SizesSeen(options.min_bytes), budget_bytes=budget_bytes)
        return
    trace, plan = decider.follower.trace, decider.plan
    if plan is None or trace is None or trace.ops is None or trace.ops.num_seen < _NUM_RECORDED:
        return
    if not state.counts.num_dropped and plan.predicted_peak_bytes <= (plan.budget_bytes or 0):
        state.settled = Settled(options=options, sizes=sizes, budget_bytes=budget_bytes)
    elif trace.ops.is_measured and state.num_left < _MOST_DEVIATIONS and not trace.has_marks:
        device = state.costs.device
        torch_device = torch.device("cpu") if device is None else device.torch_device
        regions = trace.ops.regions(plan, functools.partial(plan_regions, trace.ops, len(trace.funcs), plan, torch_device))
        if regions is not None and not _lacks_ops(state, regions.trial, is_timed=is_timed):
            state.settled = Settled(options=options, sizes=sizes, budget_bytes=budget_bytes, regions=regions)


def _lacks_ops(state: RematState, trial: Trial, *, is_timed: bool) -> bool:
    """Tell whether the next step is to run single ops again: another one is to be timed, or they are faster."""
    device = state.costs.device
    if device is None or device.torch_device.type == "cpu":
        return False  # it is certain by itself
    state.trial = trial
    if not is_timed:
        trial.end_forward(Way.OPS)
    return trial.lacks_ops or trial.prefers_ops()


def _has_wishes(state: RematState) -> bool:
    """Tell whether the user has asked to drop or to move something, which may come again."""
    steps = [trace.ops.step for trace in state.traces if trace.ops is not None]
    return any(step.dropped or step.moved for step in steps)
