"""Begins a forward under a budget, in the way that its steps go: nothing is done where all fits, or calls of modules are
recomputed, or a plan of single ops and copies is followed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memkit.activations.budgeting.state import BudgetState, budget_states, regions_tag
from memkit.activations.budgeting.ways import Way
from memkit.activations.recomputing.opening import open_recording
from memkit.activations.recomputing.settling import NEXT_STEPS
from memkit.activations.recomputing.steady import IdleStage, open_steady
from memkit.activations.saved.entry import unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from memkit.activations.budgeting.limits import Limits
    from memkit.activations.budgeting.ways import Ways
    from memkit.activations.recomputing.budget import RematOptions
    from memkit.activations.saved.entry import Stage
    from memkit.hooks import HookPair


def open_budget(
    tag: str, options: RematOptions, limits: Limits, take: Callable[[Tensor], Any]
) -> tuple[Stage, HookPair | None]:
    """Return the stage of a context that is about to be entered, and its hooks; None for those of the entry.

    Args:
        take: the hook of the entry.
    """
    state = budget_states.open(tag)
    with state.lock:
        state.num_iterations += 1
        if state.settled is not None and _stays_idle(state, options, limits):
            state.is_recorded = False
            idle = IdleStage(state, None)
            return idle, idle.pair
        state.settled = None
        ways = _ways_of(state, limits)
        if ways is not None and ways.way is Way.REGIONS:
            opened = _open_regions(state, ways, replace(options, budget=ways.limit_bytes))
            if opened is not None:
                return opened
        from memkit.activations.budgeting.steady_stage import SteadyStage  # only now: what it needs is a long way down

        state.regions_tag = None
        stage = SteadyStage(state, options, limits)
        if ways is not None and stage.counts.follows_plan:
            ways.count_step()
        pack = stage.follow_known(take)
        state.counts, state.is_recorded = stage.counts, stage.is_recording
        return stage, None if pack is take else (pack, unpack)


def _stays_idle(state: BudgetState, options: RematOptions, limits: Limits) -> bool:
    """Tell whether a step that is like the last needs nothing: the last one has kept to the budget."""
    settled, counter = state.settled, state.counter
    if settled is None or not settled.options.is_like(options) or state.limits != limits or counter is None:
        return False
    return counter.peak_bytes() <= settled.budget_bytes


def _ways_of(state: BudgetState, limits: Limits) -> Ways | None:
    """Return what chooses between ways, once a plan was followed; None where there is no choice."""
    if state.ways is not None and state.limits != limits:
        state.ways = None
    if state.ways is None and state.limits == limits:
        state.ways = state.learning.ways_of(state.traces.latest)
    ways, device, counter = state.ways, state.costs.device, state.counter
    state.limits = limits
    if ways is not None and device is not None and (not ways.is_decided or ways.way is Way.REGIONS):
        ways.begin_step(device.record_event(), None if counter is None else counter.peak_bytes())
        if counter is not None:
            counter.reset_peak()
    return ways


def _open_regions(state: BudgetState, ways: Ways, options: RematOptions) -> tuple[Stage, HookPair | None] | None:
    """Begin a forward as a `Rematerialize` does that is held to what saved values may take; None if that would run single ops
    again as well."""
    state.regions_tag = tag = regions_tag(state.tag)
    steady = open_steady(tag, options, None)
    if steady is not None:
        ways.count_step()
        state.is_recorded = False
        return steady, steady.pair
    if not ways.note_recorded():
        ways.give_up()
        return None
    state.is_recorded = True
    return open_recording(tag, options, settling=NEXT_STEPS), None
