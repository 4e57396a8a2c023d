"""`BudgetStage` lets each saved tensor stay, move or be dropped. A forward is recorded until its steps are known. Then it goes
by the known step as long as its saves are the expected ones: see [Note: what a steady step leaves out] in `steady_step`."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.activations.budgeting.inside import Room
from memkit.activations.budgeting.learning import PlannedDecider
from memkit.activations.budgeting.limits import StepPeak
from memkit.activations.budgeting.meter import Meter
from memkit.activations.budgeting.planned_forward import PlannedForward
from memkit.activations.budgeting.steady_step import SteadySaves, StepNotes
from memkit.activations.offloading.moving_stage import is_free, is_from_leaf
from memkit.activations.offloading.scheduled import ScheduledForward, ScheduledSaves, take_spans
from memkit.activations.recomputing.budget import RematOptions
from memkit.activations.recomputing.recording_stage import RecordingStage
from memkit.activations.saved.settled import Settled
from memkit.core import torch_private
from memkit.core.interrupts import mended
from memkit.core.kept import KeptHandle
from memkit.core.sizes import format_bytes
from memkit.core.tensors import is_range_of_bytes
from memkit.core.torch_state import dynamo_is_loaded, in_dual_level, is_traced
from memkit.device import default_generator, open_device, why_nothing_is_freed
from memkit.device.ceilings import measure_ceilings, measure_flops
from memkit.plan import Action
from memkit.recording.borders import shards_of
from memkit.recording.expected import Expected, num_writes
from memkit.recording.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from memkit.activations.budgeting.learning import Planned
    from memkit.activations.budgeting.limits import Limits
    from memkit.activations.budgeting.state import BudgetState
    from memkit.activations.budgeting.steady_step import SteadySave, SteadyStep
    from memkit.activations.offloading.scheduled import Schedule
    from memkit.activations.offloading.window import OffloadWindow
    from memkit.activations.recomputing.budget import Decider
    from memkit.activations.recomputing.recorded_forward import RecordedForward
    from memkit.activations.saved.counts import Counts
    from memkit.activations.saved.traces import Trace
    from memkit.recording.recording import Recording


class WatchedRecorder(Recorder):
    """Calls a meter before and after each op, or notes the numbers of its values."""

    meter: Meter | None = None
    notes: StepNotes | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        meter, is_forward = self.meter, not self.recording.is_gathering and torch_private.backward_task() == -1
        if self.notes is not None and is_forward:
            self.notes.begin_op(self.recording)
        if meter is None or not is_forward:
            return super().__torch_dispatch__(func, types, args, kwargs)
        meter.begin_op()
        results = super().__torch_dispatch__(func, types, args, kwargs)
        meter.end_op(str(func), results)
        return results


_UNPLANNED, _AMPLE = 0.9, 0.5
"""A step without a plan may take this fraction of the budget at a save or a request; temporaries and bytes outside of the
context come on top. Above the second fraction of what saved values may take, ended calls of modules are dropped."""
_OF_COMPILED = 0.97
"""Compiled blocks are compiled for steps that take this fraction of the budget."""
_MOST_FITTING = 8  # sizes that are known to keep to the budget by themselves
_OF_LOSS = 9
"""Bytes left free behind the first forward for each byte that the module returns: a float32 cross-entropy over bfloat16 logits
has float32 copies of these, their log-softmax, and all gradients."""


class BudgetStage(RecordingStage):
    _state: BudgetState
    _ample = _AMPLE

    def __init__(self, state: BudgetState, options: RematOptions, limits: Limits) -> None:
        self._limits = limits
        self._meter: Meter | None = None
        self._base_bytes = self._coming_bytes = 0
        self._allowed_bytes = math.inf
        self._opened: PlannedForward | None = None
        self._is_metered = True
        self._notes: StepNotes | None = None
        self._step: SteadyStep | None = None
        self._steady: SteadySaves | None = None
        self._scheduled: ScheduledForward | None = None
        self._due: SteadySave | None = None
        self._is_noted = self.is_recording = True
        self._num_modes = torch_private.num_dispatch_modes()
        super().__init__(state, options)

    @property
    def is_untouched(self) -> bool:  # type: ignore[override]
        """It recorded no save, and took none for a known one."""
        is_known = any(known is not None and known.num_saves for known in (self._steady, self._scheduled))
        return super().is_untouched and not is_known

    @property
    def _needs_calls(self) -> bool:
        return self._limits.plan is None and not self._planned_decider.follows_plan

    def begin(self) -> None:
        if self.is_recording:
            self._compiled.setting = functools.partial(self._state.inside.setting, room=self._room)
            super().begin()

    def follow_known(self, take: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        forward, planned, trace = self._opened, self._planned_decider.planned, self._planned_decider.follower.trace
        state = self._state
        step = None if trace is None or planned is None else state.learning.of(trace).steady_step(planned, state.shapes)
        if step is None or forward is None:
            return take
        self._step, self._notes = step, None
        moves = step.moves if state.inside.are_alike else None  # else one would have to know which block compiles
        scheduled = None if moves is None else _open_moves(forward.window, *moves, self.counts)
        if scheduled is not None:
            self._scheduled, self.is_recording = scheduled, False
            scheduled.on_end, forward.on_end = forward.on_end, None
            saves = ScheduledSaves(functools.partial(self._take_other, take))
            saves.follow(scheduled)
            return saves.pack
        if step.only_moves:
            self._step = None
            return take
        self._steady = SteadySaves(step, forward, self._take_expected, self._leave, take)
        forward.requests = step.requests
        forward.walk.limit_bytes = self._planned_decider.limit_bytes
        if step.ops:
            forward.recording.expected = Expected(step.ops, step.num_values)
            forward.recording.known_s = step.known_s
        return self._steady.pack

    def _room(self, torch_device: torch.device, dtype: torch.dtype) -> Room | None:
        state, device = self._state, self._device or open_device(torch_device)
        counter = device.memory_counter()
        if counter is None or state.budget_bytes is None:
            return None
        flops_per_s = measure_flops(device, dtype)
        if flops_per_s is None:
            return None
        allowed_bytes = _OF_COMPILED * self._limits.allocated_bytes(state.budget_bytes) - self._coming_bytes
        return Room(
            num_bytes=allowed_bytes - counter.allocated_bytes(),
            bytes_per_s=state.learning.gpu(device).both_bytes_per_s,
            flops_per_s=flops_per_s,
            memory_bytes_per_s=measure_ceilings(device).bytes_per_s,
        )

    def _decide(self) -> Decider:
        state, limits, device = self._state, self._limits, self._device
        counter = state.counter
        if counter is not None:
            self._judge()
            self._base_bytes = counter.allocated_bytes()
        if device is not None and (why := why_nothing_is_freed(device)):
            state.warn_once("shared", why)
        self._coming_bytes = state.coming_bytes(limits)
        latest = state.traces.latest
        state.budget_bytes = budget_bytes = state.learning.budget_bytes(latest, limits)
        if budget_bytes is not None:
            self._check_capacity(budget_bytes)
            allowed_bytes = limits.allocated_bytes(budget_bytes)
            self._allowed_bytes = _UNPLANNED * allowed_bytes - self._coming_bytes - state.excess_bytes
        decider = self._planned_decider = PlannedDecider(state.traces, self._plan_of, self._limit_now)
        self.counts.follows_plan = decider.follows_plan
        return decider

    def _check_capacity(self, budget_bytes: int) -> None:
        counter = self._state.counter
        if self._device is None or self._state.is_within_capacity:
            return
        capacity_bytes = None if counter is None else counter.capacity_bytes()
        if capacity_bytes is not None and budget_bytes > capacity_bytes:
            raise ValueError(
                f"a budget must be within what this process can have of the device, {format_bytes(capacity_bytes)}; found "
                f"{format_bytes(budget_bytes)}. Lower the budget"
            )
        self._state.is_within_capacity = True

    def _judge(self) -> None:
        state = self._state
        judged, peak, state.judged, state.peak = state.judged, state.peak, None, None
        learning, counts = state.learning, state.counts
        peak_bytes = None if peak is None or peak is not state.unplanned_peak else peak.num_bytes
        if peak_bytes is not None and state.budget_bytes is not None:
            allowed_bytes = self._limits.allocated_bytes(state.budget_bytes)
            state.excess_bytes = min(max(peak_bytes - allowed_bytes, 0), allowed_bytes // 2)
        if judged is not None and peak is not None and peak.is_over:
            if learning.judge(*judged, peak.num_bytes, self._limits):
                state.note_in_vain(had_plan=True)
            learning.note_link(judged[0], counts.moved_out.rate(), counts.moved_in.rate())

    def _plan_of(self, trace: Trace) -> Planned | None:
        device, learning = self._device, self._state.learning
        if device is None:
            return None
        return learning.planned(trace, self._limits, device, base_bytes=self._base_bytes, coming_bytes=self._coming_bytes)

    def _limit_now(self, forward: PlannedForward | None = None) -> float:
        """Return the most bytes that saved values and replays may take on the device now, beside all other bytes."""
        counter, forward = self._state.counter, forward or self._opened
        if counter is None or forward is None:
            return self._allowed_bytes
        own_bytes = forward.live_bytes + forward.walk.temp_bytes + forward.lingering_bytes
        beside_bytes = counter.allocated_bytes() - own_bytes
        return max(self._allowed_bytes - beside_bytes, 0)

    def _make_forward(self, recording: Recording, window: OffloadWindow) -> RecordedForward:
        decider, state, device = self._planned_decider, self._state, self._device
        self._opened = None
        forward = PlannedForward(
            recording,
            window,
            self._options.score,
            self.counts,
            planned=decider.planned,
            limit_bytes=self._limit_now,
            note_no_host=state.learning.note_no_host,
        )
        self._opened, self._meter, self._notes = forward, None, None
        trace, counter = decider.follower.trace, state.counter
        if device is None:
            return forward
        learning, planned = state.learning, decider.planned
        learned = None if trace is None else learning.of(trace)
        if planned is not None and learned is not None and learned.wants_notes(trace, planned, state.shapes):
            self._notes = StepNotes(planned)
        is_unplanned = planned is None and self._limits.plan is None
        if is_unplanned and self._is_metered and learned is not None and learned.wants_measure(trace):
            self._meter = forward.meter = forward.unpacker = Meter(device, counter, forward)
        elif planned is not None and trace is not None and counter is not None:
            is_judged, is_new = learning.of(trace).count_followed()
            if is_judged:
                state.judged, state.peak = (trace, planned), StepPeak(counter, resets=is_new)
        elif is_unplanned and counter is not None:
            state.peak = state.unplanned_peak = StepPeak(counter, resets=True)
        forward.on_end = functools.partial(learning.note_end, device.record_event(), device, state.peak)
        return forward

    def _make_recorder(self) -> Recorder:
        self._is_metered = self._meter is not None
        if not self._is_metered and self._notes is None:
            return super()._make_recorder()
        # a dispatch mode: see `RecordingStage`

        estimate_s = self._state.costs.estimate_s
        recorder = WatchedRecorder(self._forward.recording, self._options.kinds, default_generator, estimate_s)
        recorder.meter, recorder.notes = self._meter, self._notes
        return recorder

    def _turn(self) -> RecordedForward:
        forward = super()._turn()
        self._notes = None  # notes are only for a first forward
        self._watch(self._meter)
        self._record()
        return forward

    def _watch(self, meter: Meter | None) -> None:
        recorder: Any = self.recorder
        if self._is_metered:
            recorder.meter = meter
        recorder.notes = None

    # Expected saves

    def _take_expected(self, tensor: Tensor, save: SteadySave) -> Any:
        with torch_private.without_python_dispatch(), self._lock:
            forward = self._opened
            assert forward is not None
            try:
                if save.ordinal >= 0:
                    forward.num_passed = save.ordinal - len(forward.saves)
                handle = self._take_known(tensor, save, forward) if save.has_record else self._keep(tensor, save, forward)
                if handle is None:
                    self._due = save
                    handle = self._take(tensor)
                    if self._due is not None and save.ordinal >= 0:  # it does not count
                        self._leave()
                return handle
            except BaseException:  # as `mended` does, at less cost
                self._state.is_broken = True
                raise
            finally:
                self._due = None

    def _take_known(self, tensor: Tensor, save: SteadySave, forward: PlannedForward) -> Any:
        """Return the handle by the plan; None to take the tensor as any other: unexpected, or with a user's mark."""
        recording, expected, step, value = forward.recording, forward.recording.expected, self._step, save.value
        if step is None or expected is None or save.ordinal < 0 or forward.marks or forward.window.is_broken:
            return None
        is_value = tensor.device == self._torch_device and is_range_of_bytes(tensor) and value not in recording.roots
        if not is_value or value in forward.others:
            return None
        storage, version = tensor.untyped_storage(), torch_private.version_of(tensor)
        ledger, node = forward.ledger, torch_private.node_number()
        if ledger.deaths or ledger.orphans:
            ledger.sweep()  # first: a record whose handles have died is gone
        record = forward.record_of(value)
        if recording.find(storage) != value or (version and version > num_writes(recording, value)):
            return None
        if record is not None and record.version != version:
            return None
        forward.note_save(value, node)
        if record is not None:
            handle = ledger.add_handle(record, tensor, forward.unpacker, node)
        else:
            handle = ledger.open(tensor, storage, forward.unpacker, node)
            record = handle.record
            record.maker, record.value = forward, value
            forward.note_record(value, record)
            action = step.planned.actions.get(value)
            if value not in expected.unmade and not (action is Action.RECOMPUTE and forward.drop(value)):
                forward.walk.admit(value)
            if action is Action.OFFLOAD:
                forward.leave(record, tensor, storage, node)
        if save.is_due or forward.waiting:
            forward.pass_save(node, save.ordinal)
        return handle

    def _keep(self, tensor: Tensor, save: SteadySave, forward: PlannedForward) -> Any:
        """Return the handle of a tensor that stays; None if replays read it and it may be an unexpected value."""
        version, device, handle = torch_private.version_of(tensor), forward.ledger.device, None
        if save.is_read:
            if not is_range_of_bytes(tensor):
                return None
            recording, storage = forward.recording, tensor.untyped_storage()
            if recording.find(storage) != save.value or (version and version > num_writes(recording, save.value)):
                return None
            handle = forward.keep_source(save.value, tensor)
        if forward.window.is_broken:
            forward.window.mend()
        if device.takes_notes and save.ordinal >= 0:
            device.note_written(tensor.untyped_storage(), version)
        if save.is_due:
            forward.pass_save(torch_private.node_number(), save.ordinal)
        return (tensor.detach(), version) if handle is None else handle

    # Other saves

    def _take_other(self, take: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        if self._step is not None and torch_private.backward_task() == -1:
            if self._is_complete and self._scheduled is not None and self._scheduled.has_backward:
                with self._lock:
                    self._turn()
            else:
                self._leave()
        return take(tensor)

    @property
    def _is_complete(self) -> bool:
        if self._scheduled is not None:
            return self._scheduled.is_complete
        return self._steady is not None and self._steady.is_complete

    def _leave(self) -> None:
        steady, scheduled, forward = self._steady, self._scheduled, self._opened
        if steady is not None:
            steady.is_on = False
        if scheduled is not None:
            scheduled.stop()
        if self._step is None or forward is None or (forward.task != -1 and self._is_complete):
            return  # another forward begins
        self._step = self._steady = forward.requests = None
        recording = forward.recording
        if recording.expected is not None:
            recording.expected.end(recording)
        num_saves = steady.num_saves if steady is not None else 0 if scheduled is None else scheduled.num_saves
        if steady is not None and num_saves == 0 and recording.expected is None:
            return  # nothing was left out: it may follow another plan
        with self._lock:
            decider, state = self._planned_decider, self._state
            if decider.follower.trace is not None:
                state.learning.of(decider.follower.trace).leave_steady(num_saves)
            decider.leave()
            forward.planned = None
            forward.walk.limit_bytes = decider.limit_bytes
            state.num_deviations += 1
            state.judged, self.counts.follows_plan, self._is_noted = None, False, False
        self._record()

    def _record(self) -> None:
        """Record ops, unless a mode entered since must be left first, code may compile, before which recording must begin, or a
        dual level is open, whose formulas would see it."""
        is_alone = torch_private.num_dispatch_modes() == self._num_modes and not in_dual_level()
        if not self.is_recording and is_alone and not dynamo_is_loaded():
            self.is_recording = True
            self.recorder.__enter__()

    def mark(self, tensor: Tensor, action: Action) -> None:
        if self._step is not None:
            self._leave()
        super().mark(tensor, action)

    # Saving

    def take(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        notes, forward = self._notes, self._opened
        if not self.is_recording:
            return self._take_unrecorded(tensor)
        if notes is None or forward is None:
            return self._take_any(tensor, action)
        num_before = len(forward.saves)
        handle = self._take_any(tensor, action)
        notes.note(tensor, forward, num_before)
        return handle

    def _take_any(self, tensor: Tensor, action: Action | None) -> KeptHandle:
        opened = self._opened
        if opened is None or opened.planned is None or type(tensor) is not Tensor or is_traced():
            return super().take(tensor, action)
        # Compiled code that was not found saves nothing here: it would have shown no op, and a plan is followed so far.
        with torch_private.without_python_dispatch():
            return self._take_locked(tensor)

    def _take_unrecorded(self, tensor: Tensor) -> KeptHandle:
        forward, counter = self._opened, self._state.counter
        is_here = type(tensor) is Tensor and tensor.device == self._torch_device and is_range_of_bytes(tensor)
        if forward is None or counter is None or is_traced() or not is_here:
            return KeptHandle(tensor)
        if tensor.untyped_storage().nbytes() < self._min_bytes or is_from_leaf(tensor):
            return KeptHandle(tensor)
        with torch_private.without_python_dispatch(), self._lock:
            has_room = counter.allocated_bytes() <= self._allowed_bytes
            return KeptHandle(tensor) if has_room else self._move(forward, tensor)

    def _note_save(self, forward: RecordedForward, value: int, num_bytes: int, node: int) -> None:
        due, self._due = self._due, None
        if due is not None and due.value == value and due.ordinal >= 0:
            forward.note_save(value, node)
            return
        if due is not None:
            self._leave()
        if self._meter is not None:
            self._meter.begin_save()
        super()._note_save(forward, value, num_bytes, node)
        opened, decider, planned = self._opened, self._planned_decider, self._planned_decider.planned
        if opened is not None and opened.planned is not planned:
            opened.planned = planned
            self.counts.follows_plan = planned is not None
            state, trace = self._state, decider.follower.trace
            # its peak says nothing about the plan from which it deviated
            is_of_other = state.judged is not None and len(forward.saves) == 1
            state.judged = (trace, planned) if is_of_other and trace is not None and planned is not None else None

    def _end_recorded(self, *, learn: bool) -> None:
        forward, meter, state, notes = self._forward, self._meter, self._state, self._notes
        was_forward, opened = forward.is_forward, self._opened
        self._meter = self._opened = self._notes = None
        self._watch(None)
        if not learn:
            state.judged = None  # a failed step says nothing about its plan
        if learn and was_forward and not len(state.traces):
            roots = [root.tensor() for root in forward.recording.roots.values()]
            parameters = {id(tensor): tensor for tensor in roots if isinstance(tensor, nn.Parameter)}
            state.coming.note_trained(shards_of(parameters.values()))
        super()._end_forward(learn=learn)
        trace, decider = state.traces.latest, self._planned_decider
        if not learn or not was_forward or trace is None:
            return
        if opened is not None and opened.task == -1 and not decider.follows_plan:
            self._leave_room_behind(opened)
        if meter is not None and forward.trace is trace.ops and len(meter.save_places) == len(forward.saves):
            meter.end_forward()
            state.learning.of(trace).meter = meter
        has_followed = notes is not None and decider.planned is notes.planned and decider.follower.trace is trace
        if notes is not None and opened is not None and has_followed:
            learned, steady = state.learning.of(trace), notes.finish(trace, opened, self._options.kinds)
            learned.steady, learned.noted, learned.shapes = steady, notes.planned, state.shapes
        planned, budget_bytes, limits = decider.planned, state.budget_bytes, self._limits
        if planned is not None and planned.plan.is_plain and not forward.marks:
            most_bytes = 0 if budget_bytes is None else limits.allocated_bytes(budget_bytes)
            if limits.plan is not None:
                most_bytes = max(most_bytes, limits.plan.predicted_peak_bytes)
            elif budget_bytes is None or self._coming_bytes:
                return
            calls = () if trace.ops is None else trace.ops.calls
            shapes = state.shapes or (calls[0].shapes if calls else ())
            state.fitting = (*(state.fitting if state.settled is not None else ()), shapes)[-_MOST_FITTING:]
            state.settled = Settled(options=self._options, budget_bytes=most_bytes)

    def _leave_room_behind(self, forward: PlannedForward) -> None:
        """After a forward without a plan, drop or move saved values to make room for the unknown rest of the step."""
        counter, lineage = self._state.counter, forward.lineage
        if counter is None or not lineage.outs:
            return
        room_bytes = self._allowed_bytes - _OF_LOSS * sum(lineage.num_bytes[value] for value in lineage.outs[-1])
        with self._lock:
            while counter.allocated_bytes() > room_bytes and forward.drop_call():
                pass
            forward.move_out(lambda: counter.allocated_bytes() <= room_bytes)

    def _end_forward(self, *, learn: bool) -> None:
        step, scheduled, forward = self._step, self._scheduled, self._forward
        if scheduled is not None:
            scheduled.end_forward()
        is_complete = self._is_complete
        if self._steady is not None:
            self._steady.is_on = False
        self._step = self._steady = self._scheduled = None
        if step is None or not forward.is_forward:
            learn, self._is_noted = learn and self._is_noted, True
            self._end_recorded(learn=learn)
            return
        state, trace = self._state, self._planned_decider.follower.trace
        assert trace is not None
        is_whole = learn and is_complete
        judged = state.judged if is_whole else None
        if learn and not is_complete:
            state.learning.of(trace).leave_steady(len(step.saves))
            state.num_deviations += 1
        self._end_recorded(learn=False)
        state.judged = judged
        if is_whole:
            forward.trace = trace.ops
            for name, figure in step.figures.items():
                setattr(self.counts, name, figure)

    def end(self, *, has_failed: bool) -> None:
        super().end(has_failed=has_failed)
        decider = self.__dict__.pop("_planned_decider", None)  # the decider refers to this stage: break the cycle
        if not has_failed and decider is not None and decider.follows_plan and decider.planned.exceeds_budget:
            self._state.note_in_vain(had_plan=True)

    def _note_plan(self) -> None:
        """Do nothing: `Learning` remembers the plan."""


@mended
def _open_moves(window: OffloadWindow, schedule: Schedule, trace: Trace, counts: Counts) -> ScheduledForward | None:
    window.settle()
    if not is_free(window) or (spans := take_spans(window, schedule.first)) is None:
        return None
    window.scheduled = made = ScheduledForward(window, schedule, schedule.first, spans, trace, counts)
    return made
