"""Begins a forward under a budget: idle since all fits, with regions, or by a plan of single ops and copies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from memkit.activations.budgeting.limits import StepPeak
from memkit.activations.budgeting.state import BudgetState, budget_states
from memkit.activations.offloading.moving_stage import MovingStage, OffloadOptions
from memkit.activations.recomputing.region_plan import choices_ahead, settle_ahead
from memkit.activations.recomputing.unrecorded import IdleStage, RegionStage, open_steady
from memkit.activations.saved.entry import Entry, unpack
from memkit.activations.saved.settled import TimedWays, Way
from memkit.core import backwards
from memkit.core.hooks import innermost_hooks
from memkit.core.sizes import format_bytes
from memkit.errors import BudgetInfeasible

if TYPE_CHECKING:
    from collections.abc import Callable

    from memkit.activations.budgeting.limits import Limits
    from memkit.activations.budgeting.ways import Ways
    from memkit.activations.context import Shapes
    from memkit.activations.recomputing.budget import RematOptions
    from memkit.activations.recomputing.layers import Foretold, Layers, LayerStage
    from memkit.core.hooks import HookPair


_OF_ALLOWED, _OF_KNOWN = 0.98, 0.995
"""Steps with layers use this fraction of the budget, and this one if their size was measured."""


class _StepClock(TimedWays):
    def __init__(self, note_end: Callable[[], None]) -> None:
        super().__init__(is_open=False)
        self._note_end: Callable[[], None] | None = note_end

    def begin_backward(self) -> None:
        note_end, self._note_end = self._note_end, None
        if note_end is not None:
            backwards.on_end(lambda has_failed: None if has_failed else note_end())


def open_budget(entry: Entry, options: RematOptions, limits: Limits, shapes: Shapes | None) -> HookPair | None:
    """Set the stages of a context's entry; return its hooks, None for the entry's own."""
    state = budget_states.open(entry.tag)
    with state.lock:
        stays_idle = state.settled is not None and _stays_idle(state, options, limits, shapes)
        is_other = not stays_idle and limits.plan is None and state.is_of_other_size(shapes)
        state.num_iterations += 1
        state.is_idle = stays_idle
        if is_other and (layers := open_layers_within(state, limits)) is not None:
            entry.recording = layers
            return layers.pair
        if stays_idle:
            state.is_recorded, state.shapes = False, shapes
            entry.recording = idle = IdleStage(state, None)
            return idle.pair
        if state.settled is not None and (shapes is None or state.fits(shapes) or state.limits != limits):
            state.settled, state.fitting = None, ()
        ways = _ways_of(state, limits, shapes)
        if ways is not None and ways.way is not Way.OPS:
            _open_regions(entry, state, ways, options)
            if (stage := entry.recording) is not None:
                return stage.pair if isinstance(stage, IdleStage) else None
        state.way = Way.OPS
        may_be_regions = ways is not None and not ways.is_decided  # regions keep to the budget where they can
        if state.gives_up_plans and limits.plan is None and not may_be_regions:
            layers = open_layers_within(state, limits, gives_up=True)
            if layers is not None:
                entry.recording = layers
                return layers.pair
        from memkit.activations.budgeting.budget_stage import BudgetStage  # imported here, since its imports are many

        state.before = state.learning.num_ended, state.num_deviations
        entry.recording = steady = BudgetStage(state, options, limits)
        if ways is not None and ways.way is Way.OPS and steady.counts.follows_plan:
            ways.count_step()
        pack = steady.follow_known(entry.pack)
        state.counts, state.is_recorded = steady.counts, steady.is_recording
        return None if pack == entry.pack else (pack, unpack)


def open_layers_within(state: BudgetState, limits: Limits, *, gives_up: bool = False) -> LayerStage | None:
    """Begin a forward whose layers are recomputed, but for those that the budget leaves room for at its size."""
    from memkit.activations.recomputing.layers import open_layers  # imported here, since its imports are many

    state.learn_layers()
    counter, device = state.counter, state.costs.device

    def room(layers: Layers, foretold: Foretold) -> float:
        begun_bytes = step.begun_bytes = 0 if counter is None else counter.allocated_bytes()
        if counter is None or not layers.is_counted:  # the budget is for saved tensors alone
            beside_bytes = least_bytes = foretold.input_bytes + foretold.largest_bytes
        elif layers.beside:
            beside_bytes = begun_bytes + layers.beside.at(foretold.size)
            least_bytes = begun_bytes + layers.beside.least_at(foretold.size)
        else:
            return 0.0
        plain_bytes = int(beside_bytes + foretold.saved_bytes)  # a budget that is a share is one of this
        budget_bytes = limits.budget_bytes(plain_bytes) or 0
        coming_bytes = state.coming_bytes(limits)
        least_bytes += coming_bytes
        allowed_bytes = step.allowed_bytes = limits.allocated_bytes(budget_bytes)
        if least_bytes > allowed_bytes:
            told = (
                f"a step takes {format_bytes(int(least_bytes))} with all its layers recomputed, where the first one gets "
                f"{foretold.size:,} elements; the budget allows {format_bytes(allowed_bytes)}. Pass a larger budget, or "
                f"smaller batches.{layers.why_not}"
            )
            if limits.raises:
                raise BudgetInfeasible(told, int(least_bytes))
            state.warn_once(f"layers of {foretold.size.bit_length()}", told)  # once for each doubling of the size
        return (_OF_KNOWN if layers.beside.knows(foretold.size) else _OF_ALLOWED) * allowed_bytes - beside_bytes - coming_bytes

    stage = open_layers(state, None, room, state.learning.takes_less if gives_up else None)
    if stage is None:
        return None
    step = stage.step
    stage.compiling = state.inside.for_all()
    if state.peak is not None and state.peak.num_bytes:
        state.learning.last_peak_bytes = state.peak.num_bytes
    state.judged, state.way = None, Way.OPS
    if state.ways is not None:
        state.ways.begun = None  # the time until the next entry doesn't count
    state.peak = None if counter is None else StepPeak(counter, resets=True)
    if device is not None:
        stage.counts.trial = _StepClock(partial(state.learning.note_end, device.record_event(), device, state.peak))
    state.of_layers = None if state.peak is None else (step, state.peak)
    return stage


def _stays_idle(state: BudgetState, options: RematOptions, limits: Limits, shapes: Shapes | None) -> bool:
    """Tell whether to do nothing: the last step kept to the budget, and one with inputs of this size did so by itself."""
    settled, counter = state.settled, state.counter
    if settled is None or not settled.options.is_like(options) or state.limits != limits:
        return False
    if limits.plan is not None:  # the user's, for steps like this one
        return shapes == state.shapes if shapes is not None else counter is None or counter.peak_bytes() <= settled.budget_bytes
    if counter is None or counter.peak_bytes() > settled.budget_bytes:
        return False
    return shapes is None or state.fits(shapes)


def _ways_of(state: BudgetState, limits: Limits, shapes: Shapes | None) -> Ways | None:
    is_as_before, state.shapes = shapes == state.shapes, shapes
    are_other, state.limits = state.limits != limits, limits
    if state.ways is not None and are_other:
        state.ways = None
        for trace in state.traces:
            state.learning.of(trace).has_chosen = False
        state.let_go_of_others(Way.OPS)
    latest = state.traces.latest
    if state.ways is None and not are_other and latest is not None and is_as_before:
        state.ways, state.ways_for = state.learning.ways_of(latest, state.costs.device, choices_ahead), (latest, shapes)
    if state.ways is not None and state.ways_for is not None and state.ways_for[1] != shapes:
        state.ways.begun = None  # the time until the next entry doesn't count
        return None
    ways, device, counter = state.ways, state.costs.device, state.counter
    if ways is not None and device is not None and (not ways.is_decided or ways.way is not Way.OPS):
        was_decided = ways.is_decided
        peak_bytes = None if state.way is Way.OPS or state.peak is None else state.peak.num_bytes
        is_known = peak_bytes is not None or counter is None or ways.way is Way.OPS or not ways.is_learning
        ways.begin_step(device.record_event(), peak_bytes, was_whole=is_known and _was_whole(state), regions=state.regions)
        if ways.is_decided and not was_decided:
            state.let_go_of_others(ways.way)
    return ways


def _was_whole(state: BudgetState) -> bool:
    if state.way is Way.OPS:
        return state.before[0] < state.learning.num_ended and state.before[1] == state.num_deviations
    return state.of_regions.settled is not None and (state.counts.num_replays > 0 or not state.counts.num_dropped)


def _open_regions(entry: Entry, state: BudgetState, ways: Ways, options: RematOptions) -> None:
    """Begin a forward with regions, inside a `CPUOffload` if a share moves; no stage without a possible region."""
    state.way = ways.way
    options = replace(options, budget=ways.limit_bytes)
    outer = None
    if ways.way is Way.REGIONS_AND_COPIES:
        _open_copies(entry, state, ways, options.min_bytes)
        outer = innermost_hooks()
    steady = open_steady(state.of_regions, options, outer)
    if steady is None and _settle(state, options):
        steady = open_steady(state.of_regions, options, outer)
    if steady is not None:
        counter = state.counter
        state.peak = None if counter is None else StepPeak(counter, resets=ways.is_learning)
        if isinstance(steady, RegionStage) and state.costs.device is not None and ways.begun is not None:
            note_end = partial(state.learning.note_end, ways.begun, state.costs.device, state.peak)
            steady.counts.trial = _StepClock(note_end)
        ways.count_step()
        state.is_recorded, state.judged, state.counts = False, None, state.of_regions.counts
        entry.recording = steady
        return
    ways.give_up()
    if entry.around is not None:
        entry.around.end(has_failed=True)
        entry.around = None
    if ways.is_decided:
        state.let_go_of_others(ways.way)


def _settle(state: BudgetState, options: RematOptions) -> bool:
    regions, trace = state.of_regions, None if state.ways_for is None else state.ways_for[0]
    with regions.lock:
        regions.traces, regions.costs.device, regions.device = state.traces, state.costs.device, state.device
        return trace is not None and settle_ahead(regions, options, trace)


def _open_copies(entry: Entry, state: BudgetState, ways: Ways, min_bytes: int) -> None:
    copies = state.of_copies
    entry.around = around = Entry("MemoryBudget", state.tag, is_last=False, block=entry.block)
    asked = OffloadOptions(
        min_bytes=min_bytes, window_bytes=ways.window_bytes, host_limit_bytes=None, device=state.costs.device
    )
    with copies.lock:
        copies.num_iterations += 1
        copies.looks_for_large = False
        around.moving = moving = MovingStage(copies, asked, ways.ratio, {})
        copies.counts = moving.counts
    around.begin((moving.follow_schedules(around.pack), unpack))
