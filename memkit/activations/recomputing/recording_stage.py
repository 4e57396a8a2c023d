"""`RecordingStage` records a forward for `Rematerialize`; the decider drops saved tensors."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.activations.recomputing.budget import NO_BUDGET, BudgetDecider, Decider, RematOptions
from memkit.activations.recomputing.compiled_calls import CompiledCalls
from memkit.activations.recomputing.recorded_forward import RecordedForward
from memkit.activations.recomputing.region_plan import bytes_with_regions, settle
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.entry import Stage, all_too_small, handing_on, is_within, moving_in
from memkit.activations.saved.records import Handle
from memkit.activations.saved.settled import SizesSeen
from memkit.activations.saved.state import remat_states
from memkit.activations.saved.traces import NO_VALUE, SaveKey
from memkit.core import torch_private
from memkit.core.hooks import SavedTensorHooks
from memkit.core.kept import KeptHandle
from memkit.core.tensors import PLAIN_TYPES, is_parameter, is_range_of_bytes
from memkit.core.torch_state import dynamo_is_loaded, has_own_dispatch, is_below_transform, is_traced, leave_mode
from memkit.device import CpuDevice, default_generator, open_device, why_nothing_is_freed
from memkit.errors import warn_user
from memkit.plan import Action
from memkit.recording.cost import recording_cost_s
from memkit.recording.expected import num_writes
from memkit.recording.module_calls import ModuleTrail
from memkit.recording.recording import Recording

if TYPE_CHECKING:
    from memkit.activations.offloading.window import OffloadWindow
    from memkit.activations.saved.state import RematState
    from memkit.recording.recorder import Recorder


_LOGGER = logging.getLogger(__name__)
_NUM_WATCHED, _NUM_NOTED = 4, 2
"""So many first steps note each op's module, so many alike ones the called modules: the first may prepare some."""
_NOT_LEARNED = (
    "a dual level was opened within the context: what is saved from then on stays, and the step is not learned. If every step "
    "opens one, nothing is planned, and a budget that is a share has no effect"
)
_get_storage = Tensor.untyped_storage


class RecordingStage(Stage):
    """Records the ops of a forward, and drops recomputable tensors. Others go to the next stage, which may move them, or to the
    innermost hooks outside. Later steps need not be recorded once they are known."""

    moves = False
    _ample = 1.0  # above this fraction of the limit all ended calls are dropped, since nobody knows what comes

    def __init__(
        self,
        state: RematState,
        options: RematOptions,
        *,
        moving: Stage | None = None,
        outer: SavedTensorHooks | None = None,
    ) -> None:
        self._state, self._lock = state, state.lock
        self._options = options
        self._min_bytes = max(1, options.min_bytes)
        self._device = state.costs.device = options.device or state.device
        self._torch_device = None if self._device is None else self._device.torch_device
        self._moving, self._hand_on = moving, handing_on(moving, outer)
        self._hand_on_unchecked = handing_on(moving, outer, is_checked=False)
        self._has_outer = moving is not None or outer is not None
        self._settles = options.may_settle
        self._needs_plan = options.may_settle and not options.keeps_all
        self._small_bytes: dict[int, int] | None = {} if state.looks_for_large and options.may_drop else None
        self.counts = Counts(trial=state.trial)
        state.know(options.kinds)
        self._forward = self._open_forward()
        decider = self._decider
        may_keep_all = self._needs_plan and decider.plan is not None and not decider.plan.dropped
        self._sizes = SizesSeen(options.min_bytes) if may_keep_all else None
        self.recorder = self._make_recorder()
        trace, number = decider.follower.trace, state.num_iterations
        notes_calls = self._needs_calls and (trace is None or trace.num_noted < _NUM_NOTED or not decider.follows_plan)
        self._trail = ModuleTrail(self._forward.recording, notes_calls=notes_calls)
        self._watches_modules = options.verify or notes_calls or (trace is None and number < _NUM_WATCHED)
        self._forward.watch(self._trail)
        self._compiled = CompiledCalls(f'{state.name} (tag "{state.tag}")', self.recorder, self._trail)
        self._is_over = False
        self._sees_all = True
        """Whether the recorder was on until the end. A step that it saw in part is not learned."""

    @property
    def _needs_calls(self) -> bool:
        return self._needs_plan

    @property
    def is_untouched(self) -> bool:  # type: ignore[override]  # a fact of the class in others
        return self._forward.is_forward and not self._forward.saves

    def begin(self) -> None:
        if self._watches_modules:
            self._trail.__enter__()
        self._compiled.begin(self.model)
        self.recorder.__enter__()

    def take_off(self) -> None:
        if self._is_over:
            return
        leave_mode(self.recorder)
        self._compiled.end()
        self._trail.__exit__()
        if self.recorder.sees_dual:
            self._warn_of_dual()

    def _warn_of_dual(self) -> None:
        self.recorder.sees_dual = False
        warn_user(
            "a dual level was opened within a context of memkit that records, and nothing was saved for a backward since, or a "
            "transform of torch.func has opened it: the last bits of forward-mode derivatives of norms and products may differ "
            "from those of the plain run. Enter the context inside of torch.autograd.forward_ad.dual_level(), where it records "
            "nothing"
        )

    def end(self, *, has_failed: bool) -> None:
        if self._is_over:
            return
        with self._lock:
            self._end_forward(learn=self._sees_all and not has_failed)
            if self._sees_all and not has_failed and self._settles:
                settle(self._state, self._options, self._decider, self._sizes, self._forward.recording.is_timed)
        self._is_over = True
        del self._forward, self._decider, self.recorder  # they hold the recording, and this

    # One forward

    def _open_forward(self) -> RecordedForward:
        state, options = self._state, self._options
        state.sweep()
        state.read_times()
        self._decider = decider = self._decide()
        self._note_plan()
        trace, device = decider.follower.trace, self._device or CpuDevice()
        recording = Recording(
            device,
            known_s=decider.known_s,
            retained=frozenset(decider.retained),
            rewritten=() if decider.ops is None else decider.ops.rewritten,
            is_timed=state.num_iterations == 1 if trace is None else not state.are_measured(),
            is_verified=options.verify,
        )
        return self._make_forward(recording, state.window(device))

    def _decide(self) -> Decider:
        with_regions = functools.partial(bytes_with_regions, self._state, self._options) if self._settles else None
        return BudgetDecider(self._state, self._options, self.counts, with_regions)

    def _make_forward(self, recording: Recording, window: OffloadWindow) -> RecordedForward:
        return RecordedForward(recording, window, self._options.score, self._decider.limit_bytes, self.counts)

    def _make_recorder(self) -> Recorder:
        from memkit.recording.recorder import Recorder  # a dispatch mode: its base is a private class of torch

        return Recorder(self._forward.recording, self._options.kinds, default_generator, self._state.costs.estimate_s)

    def _note_plan(self) -> None:
        state, plan = self._state, self._decider.plan
        if plan is not None and plan is not state.plan:
            _LOGGER.debug('Rematerialize (tag "%s"): %s', state.tag, plan)
            state.plan = plan

    def _end_forward(self, *, learn: bool) -> None:
        forward, state, follower, counts = self._forward, self._state, self._decider.follower, self.counts
        if not forward.is_forward:
            return
        forward.is_forward = False
        if forward.moving is not None:
            forward.window.end_forward(forward.moving, learn=learn)
        if self._moving is not None:
            state.moved = forward.moved_values()
        recording = forward.recording
        counts.num_ops += len(recording.funcs)
        counts.peak_bytes = max(counts.peak_bytes, forward.walk.peak_bytes)
        counts.is_to_be_judged = learn and not self._decider.follows_plan
        if counts.is_to_be_judged:
            counts.largest_bytes = max(counts.largest_bytes, recording.largest_bytes)
        if learn and follower.keys and self._options.policy != "dtr":
            forward.trace = state.learn(self._decider, recording, forward.saves, forward.save_nodes, self._trail.calls)
        if recording.is_timed:
            state.note_timed(forward.trace, recording.times_alone())
        recording.close(may_drop=bool(forward.walk.evictable) and forward.walk.limit_bytes < NO_BUDGET)
        if learn and self._small_bytes is not None:
            budget, sizes_bytes = self._options.budget, self._small_bytes.values()
            if exceeds := not counts.num_saved and sum(sizes_bytes) > (budget if isinstance(budget, int) else 0):
                state.warn_once("small", all_too_small(sizes_bytes, self._min_bytes, done="dropped"))
            state.looks_for_large = not exceeds and not counts.num_saved
            self._small_bytes = {} if state.looks_for_large else None

    def _turn(self) -> RecordedForward:
        self._end_forward(learn=self._sees_all)
        self._settles = self._settles and not self._needs_plan  # a plan is for a single forward
        self._forward = self._open_forward()
        self.recorder.follow(self._forward.recording)
        self._trail.follow(self._forward.recording)
        return self._forward

    # Saving

    def take(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        if is_traced():
            return KeptHandle(tensor)
        if self.recorder.sees_dual:  # derivative formulas ask whether any mode is on: see [Note: seen by formulas]
            if is_below_transform():  # after the op, torch would dispatch to Python again, to a mode that is gone
                self._warn_of_dual()
            else:
                self.recorder.sees_dual = self._sees_all = False
                self.take_off()
                if self._options.may_drop:
                    self._state.warn_once("dual level", _NOT_LEARNED)
        if self._compiled.is_on or dynamo_is_loaded():
            self._compiled.check_save()
        if type(tensor) in PLAIN_TYPES:
            with torch_private.without_python_dispatch():  # ops here are no part of the forward
                return self._take_locked(tensor)
        if has_own_dispatch(tensor):
            with torch_private.without_dispatch_modes():
                return self._hand_on_unchecked(tensor)
        with torch_private.without_subclass_functions(), torch_private.without_python_dispatch():
            return self._take_locked(tensor)

    def _take_locked(self, tensor: Tensor) -> KeptHandle:
        with self._lock:
            try:
                return self._take(tensor)
            except BaseException:  # as `mended` does, at less cost
                self._state.is_broken = True
                raise

    def _take(self, tensor: Tensor) -> KeptHandle:
        if not is_range_of_bytes(tensor):
            return KeptHandle(tensor)  # nothing else can be done with it
        if tensor.device != self._torch_device and not self._is_here(tensor.device):
            return self._hand_on(tensor)
        forward = self._forward
        if not forward.is_forward or forward.task != -1:
            forward = self._turn()
        storage = _get_storage(tensor)
        if self._sizes is not None:
            self._sizes.note(tensor, storage)
        recording = forward.recording
        found = recording.current.get(torch_private.storage_address(storage))
        value = found[1] if found is not None and found[0]() is storage else self._compiled.add_unseen(tensor, storage)
        if value == NO_VALUE:
            return self._hand_on(tensor)  # it existed before
        num_bytes, root = storage.nbytes(), recording.roots.get(value)
        if (root is not None and not root.is_inside) or is_parameter(tensor):
            return self._hand_on(tensor)  # the caller holds it
        if num_bytes < self._min_bytes:
            if self._small_bytes is not None:
                self._small_bytes[value] = num_bytes
            return self._offer(forward, value, tensor, None)
        version = torch_private.version_of(tensor)
        if version and version > num_writes(recording, value):  # written to elsewhere, as by another thread
            value = recording.add_root(tensor, storage, is_inside=True)
            root = recording.roots[value]
        window = forward.window
        if window.is_broken:
            window.mend()
        ledger = window.ledger
        if ledger.deaths or ledger.orphans:
            ledger.sweep()
        is_new = not forward.is_saved(value)
        node = torch_private.node_number()
        self._note_save(forward, value, num_bytes, node)
        record = forward.record_of(value)
        if record is None and root is not None and root.alias is not None:  # held and counted even if the handle dies
            forward.end_save(node)
            return self._offer(forward, value, tensor, Action.KEEP)
        if record is not None and record.version != version:
            forward.end_save(node)
            forward.note_offer(value, tensor)
            return self._hand_on(tensor)  # a write to it went unseen
        if record is None:
            if is_new:
                self.counts.saved_bytes += num_bytes
                self.counts.num_saved += 1
                if root is not None:
                    self.counts.note_opless(recording.why_kept.get(value), num_bytes)
                self._decider.grow()
                forward.walk.limit_bytes = self._decider.limit_bytes
            held_bytes = forward.live_bytes + forward.offered_bytes + num_bytes if self._has_outer else 0
            action = forward.marks.get(value) or self._decider.action(value, held_bytes)
            drops = action is Action.RECOMPUTE and value not in forward.others  # an offered value is offered again
            leaves = action is Action.OFFLOAD
            if (leaves and not forward.moves) or (self._has_outer and not (drops and forward.secure(value))):
                forward.offered_bytes += num_bytes
                return self._offer(forward, value, tensor, action if leaves else forward.marks.get(value))
            handle = ledger.open(tensor, storage, forward.unpacker, node)
            record = handle.record
            record.maker, record.value = forward, value
            forward.note_record(value, record)
            is_made = root is None and (recording.expected is None or value not in recording.expected.unmade)
            if forward.marks.get(value) is not Action.KEEP and is_made:
                forward.walk.admit(value)
                if drops:
                    forward.walk.drop(value)
            if leaves:
                forward.leave(record, tensor, storage, node)
        else:
            handle = ledger.add_handle(record, tensor, forward.unpacker, node)
        limit_bytes = forward.walk.limit_bytes
        if limit_bytes != math.inf and forward.live_bytes > self._ample * limit_bytes:
            while self._ample < 1 and forward.drop_call():
                pass
            forward.make_room()
        forward.walk.note_peak()
        forward.end_save(node)
        return handle

    def _note_save(self, forward: RecordedForward, value: int, num_bytes: int, node: int) -> None:
        forward.note_save(value, node)
        decider, recording = self._decider, forward.recording
        had_plan = decider.follows_plan
        key = SaveKey(num_bytes, value=value, num_ops=len(recording.funcs), mark=forward.marks.get(value))
        if decider.note(key, recording.funcs):
            recording.known_s, recording.retained = decider.known_s, frozenset(decider.retained)
            forward.walk.limit_bytes = decider.limit_bytes
            if had_plan and not decider.follows_plan:
                self._state.num_deviations += 1
                _LOGGER.debug('Rematerialize (tag "%s"): save %d is not that of the plan', self._state.tag, len(forward.saves))
            self._note_plan()

    def _offer(self, forward: RecordedForward, value: int, tensor: Tensor, action: Action | None) -> KeptHandle:
        """Return the handle of a value that is not dropped, and may move: by the mark, or as the outer context decides."""
        if self._moving is not None:
            handle = self._moving.take(tensor, None if action is Action.RECOMPUTE else action)
        elif action is Action.OFFLOAD:
            handle = self._move(forward, tensor)
        else:
            handle = self._hand_on(tensor)
        if type(handle) is KeptHandle or forward.note_offer(value, tensor):
            forward.others[value] = weakref.ref(handle)
        return handle

    def _move(self, forward: RecordedForward, tensor: Tensor) -> KeptHandle:
        window = forward.window
        if not window.device.has_own_memory:
            self._state.warn_once("shared", f"saved tensors stay: {why_nothing_is_freed(window.device)}")
            return KeptHandle(tensor)
        return window.pack(forward.open_moving(), tensor, _get_storage(tensor), Action.OFFLOAD) or KeptHandle(tensor)

    def _is_here(self, torch_device: torch.device) -> bool:
        device = self._device
        if device is None:
            if torch_device.type not in ("cpu", "cuda"):
                return False
            device = self._device = self._state.device = self._state.costs.device = open_device(torch_device)
            self._torch_device = device.torch_device
            self._forward.settle_on(self._state.window(device))
        return device.torch_device == torch_device

    # The user's marks

    def mark(self, tensor: Tensor, action: Action) -> None:
        forward = self._forward
        with torch_private.without_python_dispatch(), self._lock:
            try:
                storage = tensor.untyped_storage()
            except RuntimeError:  # it is no range of bytes, and always stays
                return
            recording = forward.recording
            value = recording.find(storage)
            root = None if value is None else recording.roots.get(value)
            may_move = forward.moves and root is not None and root.is_inside and action is not Action.RECOMPUTE
            if value is None or (root is not None and not may_move):
                why_kept = None if value is None else recording.why_kept.get(value)
                if self._moving is not None and action is not Action.RECOMPUTE:
                    self._moving.mark(tensor, action)
                elif action is Action.RECOMPUTE and why_kept is not None:
                    message = f"memkit.recompute was given what cannot be recomputed: {why_kept}. It stays."
                    self._state.warn_once(f"recompute {why_kept}", message)
                return
            recording.sync()
            forward.marks[value] = action
            record, handle = forward.record_of(value), forward.other(value)
            if record is not None:
                forward.change(record, tensor, storage, action)
            elif isinstance(handle, Handle) and (action is not Action.RECOMPUTE or forward.secure(value)):
                if action is Action.RECOMPUTE:
                    handle.record.maker, handle.record.value = forward, value
                    forward.note_record(value, handle.record)
                handle.unpacker.change(handle.record, storage, action)


def open_recording(
    tag: str,
    options: RematOptions,
    *,
    moving: Stage | None = None,
    outer: SavedTensorHooks | None = None,
) -> RecordingStage:
    is_inner = moving is not None or is_within(tag)
    moving = moving or moving_in(outer)
    state = remat_states.open(tag)
    with state.lock:
        stage = RecordingStage(state, options, moving=moving, outer=outer)
        state.num_iterations += 1
        state.num_inner += is_inner
        state.counts, state.is_recorded, state.settled = stage.counts, True, None
        return stage


def remat_figures(tag: str) -> dict[str, Any] | None:
    state = remat_states.get(tag)
    if state is None:
        return None
    with state.lock:
        state.sweep()
        counts = state.counts
        return {
            **state.figures(),
            "budget_bytes": None if counts.budget_bytes >= NO_BUDGET else math.ceil(counts.budget_bytes),
            "recorder_s": counts.num_ops * recording_cost_s() if state.is_recorded else 0.0,
            "num_kept": counts.num_saved - counts.num_dropped,
            **(counts.figures_of_copies() if counts.moved_out.num_copies else {}),
        }
