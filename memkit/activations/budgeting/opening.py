"""Begins a forward under a budget: idle since all fits, with regions, or by a plan of single ops and copies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memkit.activations.budgeting.limits import StepPeak
from memkit.activations.budgeting.state import BudgetState, budget_states, copies_tag, regions_tag
from memkit.activations.offloading.moving_stage import MovingStage, OffloadOptions
from memkit.activations.recomputing.region_plan import choices_ahead, settle_ahead
from memkit.activations.recomputing.unrecorded import IdleStage, RegionStage, open_steady
from memkit.activations.saved.entry import Entry, unpack
from memkit.activations.saved.settled import TimedWays, Way
from memkit.activations.saved.state import offload_states, remat_states
from memkit.core import backwards
from memkit.core.hooks import innermost_hooks

if TYPE_CHECKING:
    from memkit.activations.budgeting.limits import Limits
    from memkit.activations.budgeting.ways import Ways
    from memkit.activations.context import Shapes
    from memkit.activations.recomputing.budget import RematOptions
    from memkit.activations.saved.entry import Stage
    from memkit.core.hooks import HookPair, SavedTensorHooks
    from memkit.device import Device, Event


_MOST_REPLAYED = 30
"""A step that ran its ops again so many times is not recorded later on."""


class _StepClock(TimedWays):
    def __init__(self, state: BudgetState, device: Device, begun: Event) -> None:
        super().__init__(is_open=False)
        self._state, self._begun, self._peak = state, (device, begun), state.peak
        self._is_over = False

    def begin_backward(self) -> None:
        if not self._is_over:
            self._is_over = True
            backwards.on_end(self._note)

    def _note(self, has_failed: bool) -> None:
        device, begun = self._begun
        if not has_failed:
            self._state.region_times = [*self._state.region_times[-2:], (begun, device.record_event())]
            if self._peak is not None:
                self._peak.end_backward()


def open_budget(entry: Entry, options: RematOptions, limits: Limits, shapes: Shapes | None) -> HookPair | None:
    """Set the stages of a context's entry; return its hooks, None for the entry's own."""
    state = budget_states.open(entry.tag)
    with state.lock:
        state.num_iterations += 1
        if state.settled is not None and _stays_idle(state, options, limits, shapes):
            state.is_recorded, state.shapes = False, shapes
            entry.recording = idle = IdleStage(state, None)
            return idle.pair
        if state.settled is not None:
            state.settled, state.most_numel = None, 0
        ways = _ways_of(state, limits, shapes)
        if ways is not None and ways.way is not Way.OPS:
            _open_regions(entry, state, ways, options)
            if (stage := entry.recording) is not None:
                return stage.pair if isinstance(stage, IdleStage) else None
        state.regions_tag = state.copies_tag = None
        if state.is_recorded and state.counts.num_replayed_ops > _MOST_REPLAYED * state.counts.num_ops:
            state.note_in_vain(had_plan=False, is_enough=True)
        may_be_regions = ways is not None and not ways.is_decided  # regions keep to the budget where they can
        if state.gives_up_plans and limits.plan is None and not may_be_regions:
            from memkit.activations.recomputing.unrecorded import open_layers  # imported here, since its imports are many

            layers = open_layers(state, None, takes_less=state.learning.takes_less)
            if layers is not None:
                state.judged, entry.recording = None, layers
                return layers.pair
        from memkit.activations.budgeting.budget_stage import BudgetStage  # imported here, since its imports are many

        state.before = state.learning.num_ended, state.num_deviations
        entry.recording = steady = BudgetStage(state, options, limits)
        if ways is not None and ways.way is Way.OPS and steady.counts.follows_plan:
            ways.count_step()
        pack = steady.follow_known(entry.pack)
        state.counts, state.is_recorded = steady.counts, steady.is_recording
        return None if pack == entry.pack else (pack, unpack)


def _stays_idle(state: BudgetState, options: RematOptions, limits: Limits, shapes: Shapes | None) -> bool:
    """Tell whether to do nothing: the last step kept to the budget, and one with inputs of this size did so by itself."""
    settled, counter = state.settled, state.counter
    if settled is None or not settled.options.is_like(options) or state.limits != limits:
        return False
    if limits.plan is not None:  # the user's, for steps like this one
        return shapes == state.shapes if shapes is not None else counter is None or counter.peak_bytes() <= settled.budget_bytes
    if counter is None or counter.peak_bytes() > settled.budget_bytes:
        return False
    state.most_numel = max(state.most_numel, _numel(state.shapes))
    return _numel(shapes) <= state.most_numel


def _numel(shapes: Shapes | None) -> int:
    return sum(shape.numel() for shape in shapes or ())


def _ways_of(state: BudgetState, limits: Limits, shapes: Shapes | None) -> Ways | None:
    is_as_before, state.shapes = shapes == state.shapes, shapes
    if state.ways is not None and state.limits != limits:
        state.ways = None
        state.learning.choose_again(state.traces)
        _let_go_of_others(state, Way.OPS)
    latest = state.traces.latest
    if state.ways is None and state.limits == limits and latest is not None and is_as_before:
        state.ways, state.ways_for = state.learning.ways_of(latest, state.costs.device, choices_ahead), (latest, shapes)
    if state.ways is not None and state.ways_for is not None and state.ways_for[1] != shapes:
        state.ways.skip_step()
        state.limits = limits
        return None
    ways, device, counter = state.ways, state.costs.device, state.counter
    state.limits = limits
    if ways is not None and device is not None and (not ways.is_decided or ways.way is not Way.OPS):
        was_decided = ways.is_decided
        peak_bytes = None if state.regions_tag is None or state.peak is None else state.peak.num_bytes
        is_known = peak_bytes is not None or counter is None or ways.way is Way.OPS or not ways.is_learning
        ways.begin_step(device.record_event(), peak_bytes, was_whole=is_known and _was_whole(state), regions=state.regions)
        if ways.is_decided and not was_decided:
            _let_go_of_others(state, ways.way)
    return ways


def _was_whole(state: BudgetState) -> bool:
    if state.regions_tag is None:
        return state.before[0] < state.learning.num_ended and state.before[1] == state.num_deviations
    regions = remat_states.get(state.regions_tag)
    if regions is None or regions.settled is None:
        return False
    return regions.counts.num_replays > 0 or not regions.counts.num_dropped


def _let_go_of_others(state: BudgetState, way: Way) -> None:
    if way is Way.OPS:
        remat_states.forget(regions_tag(state.tag))
    else:
        for window in state.windows():
            window.fit_arena(0)
    if way is not Way.REGIONS_AND_COPIES:
        offload_states.forget(copies_tag(state.tag))


def _open_regions(entry: Entry, state: BudgetState, ways: Ways, options: RematOptions) -> None:
    """Begin a forward with regions, inside a `CPUOffload` if a share moves; no stage without a possible region."""
    state.regions_tag, state.copies_tag = regions_tag(state.tag), None
    options = replace(options, budget=ways.limit_bytes)
    outer = None
    if ways.way is Way.REGIONS_AND_COPIES:
        _open_copies(entry, state, ways, options.min_bytes)
        outer = innermost_hooks()
    steady = open_steady(state.regions_tag, options, outer) or _settled_ahead(state, options, outer)
    if steady is not None:
        counter = state.counter
        state.peak = None if counter is None else StepPeak(counter, resets=ways.is_learning)
        if isinstance(steady, RegionStage) and state.costs.device is not None and ways.begun is not None:
            steady.counts.trial = _StepClock(state, state.costs.device, ways.begun)
        ways.count_step()
        state.is_recorded = False
        entry.recording = steady
        return
    ways.give_up()
    if entry.around is not None:
        entry.around.end(has_failed=True)
        entry.around = None
    if ways.is_decided:
        _let_go_of_others(state, ways.way)


def _settled_ahead(state: BudgetState, options: RematOptions, outer: SavedTensorHooks | None) -> Stage | None:
    assert state.regions_tag is not None
    regions, trace = remat_states.open(state.regions_tag), None if state.ways_for is None else state.ways_for[0]
    with regions.lock:
        regions.traces, regions.costs.device, regions.device = state.traces, state.costs.device, state.device
        is_settled = trace is not None and settle_ahead(regions, options, trace)
    return open_steady(state.regions_tag, options, outer) if is_settled else None


def _open_copies(entry: Entry, state: BudgetState, ways: Ways, min_bytes: int) -> None:
    state.copies_tag = copies_tag(state.tag)
    copies = offload_states.open(state.copies_tag)
    entry.around = around = Entry("MemoryBudget", state.tag, is_last=False, block=entry.block)
    asked = OffloadOptions(
        min_bytes=min_bytes, window_bytes=ways.window_bytes, host_limit_bytes=None, device=state.costs.device
    )
    with copies.lock:
        copies.num_iterations += 1
        copies.looks_for_large, copies.warns_for = False, state
        around.moving = moving = MovingStage(copies, asked, ways.ratio, {})
        copies.counts = moving.counts
    around.begin((moving.follow_schedules(around.pack), unpack))
