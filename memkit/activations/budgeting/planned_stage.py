"""`PlannedStage`: what `MemoryBudget` does in a step that goes like an earlier one with the same plan: see `steady_step`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from memkit.activations.budgeting.budget_stage import BudgetStage
from memkit.activations.budgeting.steady_step import SteadySaves
from memkit.activations.offloading.moving_stage import is_free, is_from_leaf, open_scheduled
from memkit.activations.offloading.scheduled import ScheduledSaves
from memkit.core import torch_private
from memkit.core.kept import KeptHandle
from memkit.core.tensors import is_range_of_bytes
from memkit.core.torch_state import dynamo_is_loaded, is_traced
from memkit.plan import Action
from memkit.recording.expected import Expected, num_writes
from memkit.recording.functions import QuietFunctions

if TYPE_CHECKING:
    from collections.abc import Callable

    from memkit.activations.budgeting.limits import Limits
    from memkit.activations.budgeting.planned_forward import PlannedForward
    from memkit.activations.budgeting.state import BudgetState
    from memkit.activations.budgeting.steady_step import Moves, SteadySave, SteadyStep
    from memkit.activations.offloading.scheduled import ScheduledForward
    from memkit.activations.recomputing.budget import RematOptions
    from memkit.activations.recomputing.recorded_forward import RecordedForward


class PlannedStage(BudgetStage):
    """Follows what is known of a step as long as it saves what is expected; then it does what `BudgetStage` does."""

    def __init__(self, state: BudgetState, options: RematOptions, limits: Limits) -> None:
        self._step: SteadyStep | None = None
        """What is expected, as long as the step does not deviate."""
        self._steady: SteadySaves | None = None
        self._scheduled: ScheduledForward | None = None
        self._quiet: QuietFunctions | None = None
        self._due: SteadySave | None = None
        """What is expected of the tensor that is being taken."""
        self._is_noted = self.is_recording = True
        """Whether all saves so far were noted, and whether ops are recorded."""
        self._num_modes = torch_private.num_dispatch_modes()
        super().__init__(state, options, limits)

    def follow_known(self, take: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return the pack hook for a step that is known."""
        forward, planned, trace = self._opened, self._planned_decider.planned, self._planned_decider.follower.trace
        state = self._state
        step = None if trace is None or planned is None else state.learning.steady_step(trace, planned)
        if step is None or forward is None or trace is None or state.learning.of(trace).shapes != state.shapes:
            return take  # what is called with other shapes saves something else, and not all of it may be seen any more
        self._step, self._notes = step, None
        moves = step.moves if state.inside.are_alike else None  # else it would have to be known which block compiles
        scheduled = None if moves is None else self._open_scheduled(moves, forward)
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
        if step.calls:
            self._quiet = self._steady.functions = QuietFunctions(step.calls, self.recorder)
            return self._steady.pack_between
        return self._steady.pack

    def _open_scheduled(self, moves: Moves, forward: PlannedForward) -> ScheduledForward | None:
        state, window = self._state, forward.window
        with state.lock:
            if window.is_broken:
                window.mend()
            try:
                window.settle()
                return open_scheduled(window, moves.schedule, moves.trace, self.counts) if is_free(window) else None
            except BaseException:  # as `mended` does
                window.is_broken = True
                raise

    def begin(self) -> None:
        if self.is_recording:
            super().begin()
        if self._quiet is not None:
            self._functions = self._quiet
            self._quiet.__enter__()

    def take_off(self) -> None:
        super().take_off()
        self._quiet = None  # it holds the recorder

    # What is expected

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
        """Return the handle of a tensor after doing what the plan says; None if it may be another value than expected, or has a
        mark of the user's. Then it is taken as any other tensor."""
        recording, expected, step, value = forward.recording, forward.recording.expected, self._step, save.value
        if step is None or expected is None or save.ordinal < 0 or forward.marks or forward.window.is_broken:
            return None
        is_value = tensor.device == self._torch_device and is_range_of_bytes(tensor) and value not in recording.roots
        if not is_value or value in forward.others:
            return None
        storage, version = tensor.untyped_storage(), torch_private.version_of(tensor)
        ledger, node = forward.ledger, torch_private.node_number()
        if ledger.deaths or ledger.orphans:
            ledger.sweep()  # ahead: a record whose handles have died is none any more
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
            action = step.planned.schedule.actions.get(value)
            if value not in expected.unmade and not (action is Action.RECOMPUTE and forward.drop(value)):
                forward.walk.admit(value)
            if action is Action.OFFLOAD:
                forward.leave(record, tensor, storage, node)
        if save.is_due or forward.is_waiting:
            forward.pass_save(node, save.ordinal)
        return handle

    def _keep(self, tensor: Tensor, save: SteadySave, forward: PlannedForward) -> Any:
        """Return the handle of a tensor that stays, after doing what is due with other values; None if replays are to read it
        and it may be another value than expected."""
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

    def _note_save(self, forward: RecordedForward, value: int, num_bytes: int, node: int) -> None:
        due, self._due = self._due, None
        if due is not None and due.value == value and due.ordinal >= 0:
            forward.note_save(value, node)
            return
        if due is not None:
            self._leave()
        super()._note_save(forward, value, num_bytes, node)

    # What is not

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
        if self._quiet is not None:
            self._quiet.stop()
        if scheduled is not None:
            scheduled.stop()
            self._foresight = None if scheduled.num_saves else self._foresight  # it would be asked of other saves
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
                state.learning.leave_steady(decider.follower.trace, num_saves)
            decider.leave()
            forward.follow(None)
            forward.walk.limit_bytes = decider.limit_bytes
            state.num_deviations += 1
            state.judged, self.counts.follows_plan, self._is_noted = None, False, False
        self._record()

    def take(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        if self.is_recording:
            return super().take(tensor, action)
        forward, counter = self._opened, self._state.counter
        if forward is None or counter is None or is_traced() or not self._may_leave(tensor):
            return KeptHandle(tensor)
        with torch_private.without_python_dispatch(), self._lock:
            has_room = counter.allocated_bytes() <= self._allowed_bytes
            return KeptHandle(tensor) if has_room else self._move(forward, tensor)

    def _may_leave(self, tensor: Tensor) -> bool:
        is_here = type(tensor) is Tensor and tensor.device == self._torch_device and is_range_of_bytes(tensor)
        return is_here and tensor.untyped_storage().nbytes() >= self._min_bytes and not is_from_leaf(tensor)

    def _record(self) -> None:
        """Record ops from here on, unless a dispatch mode was entered since that must be left first, or something may be
        compiled, before which the recorder must be on."""
        if not self.is_recording and torch_private.num_dispatch_modes() == self._num_modes and not dynamo_is_loaded():
            self.is_recording = True
            self.recorder.__enter__()

    def mark(self, tensor: Tensor, action: Action) -> None:
        if self._step is not None:
            self._leave()
        super().mark(tensor, action)

    # The end

    def _turn(self) -> RecordedForward:
        forward = super()._turn()
        self._record()
        return forward

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
            super()._end_forward(learn=learn)
            return
        state, trace = self._state, self._planned_decider.follower.trace
        assert trace is not None
        is_whole = learn and is_complete
        judged = state.judged if is_whole else None
        if learn and not is_complete:
            state.learning.leave_steady(trace, len(step.saves))
            state.num_deviations += 1
        super()._end_forward(learn=False)
        state.judged = judged
        if is_whole:
            forward.trace = trace.ops
            for name, figure in step.figures.items():
                setattr(self.counts, name, figure)
