"""One forward under `Rematerialize`: what is done with each tensor that autograd saves."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.activations.context import Mover, TaggedEntry, is_within
from memkit.activations.counts import Counts
from memkit.activations.eligibility import is_range_of_bytes
from memkit.activations.forward import Forward
from memkit.activations.ops import OpKinds, op_kinds
from memkit.activations.recorded import cost_key
from memkit.activations.recording import Recording
from memkit.activations.records import Handle, Record
from memkit.activations.remat_state import RematState, open_state
from memkit.activations.replay import Run
from memkit.activations.small import all_too_small
from memkit.activations.traces import Follower, OpTrace, OpTraces, SaveKey
from memkit.activations.trail import ModuleTrail
from memkit.device import CpuDevice, Device, default_generator, open_device
from memkit.device.ceilings import GUESSED, Ceilings, measure_ceilings
from memkit.errors import BudgetInfeasible
from memkit.hooks import SavedTensorHooks, innermost_hooks, stacked_owners
from memkit.interrupts import Block
from memkit.kept import ForwardedHandle, KeptHandle
from memkit.plan import NO_OP, Action, DTRScore, Plan, Step, ends_of, tell_kept
from memkit.sizes import format_bytes
from memkit.torch_state import dynamo_is_loaded, has_own_dispatch, in_compiled_function, is_traced, leave_mode

_LOGGER = logging.getLogger(__name__)
NO_BUDGET = sys.maxsize
"""What is held to no budget: only what the user asks for is dropped."""
_NUM_WATCHED = 4
"""In so many first iterations it is noted which module each op is in: that takes the host some time."""
_PLAIN_TYPES = (Tensor, nn.Parameter)
_get_storage = Tensor.untyped_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class RematOptions:
    """What was asked for: see `Rematerialize`."""

    budget: int | float
    policy: str
    plan: Plan | None
    score: DTRScore
    min_bytes: int
    strict: bool
    verify: bool
    device: Device | None
    kinds: OpKinds
    """What is known of ops, the user's word included."""
    yields: bool = False
    """Whether it gives way to any other context that is entered inside of it."""


class Entry(TaggedEntry):
    """One time in the context: from `with` to its end."""

    def __init__(self, state: RematState, options: RematOptions, block: Block | None = None) -> None:
        from memkit.activations.recorder import Recorder  # a dispatch mode: its base is a private class of torch

        self.tag = state.tag
        self._state = state
        self._lock = state.lock
        self._options = options
        self.yields = options.yields
        self._min_bytes = max(1, options.min_bytes)
        self._device = options.device or state.device
        self._torch_device = None if self._device is None else self._device.torch_device
        self._outer = innermost_hooks()
        self._mover = self._outer.owner if self._outer is not None and isinstance(self._outer.owner, Mover) else None
        """The context outside, if that moves saved tensors."""
        self._may_be_compiled = dynamo_is_loaded()
        self._ceilings: Ceilings | None = None
        may_drop = options.budget not in (1.0, NO_BUDGET)
        self._small_bytes: dict[int, int] | None = {} if state.looks_for_large and may_drop else None
        """Bytes of values that could be dropped but for their size, as long as nothing larger is known."""
        self.counts = Counts()
        self._plan: Plan | None = None
        state.know(options.kinds)
        self._run = self._open_run(raises=options.strict)
        self.recorder = Recorder(self._run.recording, options.kinds, default_generator, self._estimate_s)
        self._hooks = SavedTensorHooks(
            self.pack, _unpack, owner=self, name=f'Rematerialize (tag "{state.tag}")', is_last=True, block=block
        )
        self._trail = ModuleTrail(self._run.recording)
        is_new = self._follower.trace is None and state.num_iterations < _NUM_WATCHED
        self._watches_modules = is_new or options.verify
        self._is_over = False

    def begin(self) -> None:
        try:
            self._hooks.__enter__()
            if self._watches_modules:
                self._trail.__enter__()
            self.recorder.__enter__()
        except BaseException:
            self._take_off()
            raise

    def end(self, *, has_failed: bool) -> None:
        """The context was left. After an interrupt in here this may be called again."""
        if self._is_over:
            return
        self._take_off()
        with self._lock:
            self._end_forward(learn=not has_failed)
        self._is_over = True
        del self._hooks, self._run, self.recorder  # they hold the entry, and the recording

    def _take_off(self) -> None:
        leave_mode(self.recorder)
        self._trail.__exit__()
        self._hooks.__exit__()  # last: for as long as they are on, `end_left` will see to the others as well

    # One forward

    def _open_run(self, *, raises: bool) -> Run:
        """Begin to record: at the entry, or when a backward has run since the last save."""
        state, options = self._state, self._options
        state.sweep()
        state.read_times()
        self._follower = Follower(state.traces if options.policy == "plan" else OpTraces())
        trace = self._follower.trace
        self._plan = self._plan_of(trace, raises=raises)
        if trace is None or trace is not state.traces.latest:
            self._judge(state.counts, raises=raises)
        device = self._device or CpuDevice()
        recording = Recording(
            device,
            known_s=() if trace is None else trace.step.lineage.seconds,
            retained=frozenset() if self._plan is None else self._plan.retained,
            is_timed=state.num_iterations == 1 if trace is None else not state.traces.are_measured(),
            is_verified=options.verify,
        )
        return Run(recording, state.window(device), options.score, self._limit_bytes(), self.counts, state.begin_backward)

    def _budget_bytes(self) -> float:
        """Return the budget, as far as it is known: a share is one of what is saved in all."""
        budget = self._options.budget
        if isinstance(budget, int):
            return budget
        trace = self._follower.trace
        if trace is not None:
            return budget * trace.step.saved_bytes
        return math.inf if budget == 1 else budget * self.counts.saved_bytes

    def _judge(self, counts: Counts, *, raises: bool) -> None:
        """Tell if the score alone has not kept to the budget in the last iteration. What is planned by now is not judged."""
        is_to_be_judged, counts.is_to_be_judged = counts.is_to_be_judged, False
        if not (is_to_be_judged and counts.exceeds_budget and counts.budget == self._options.budget):
            return
        message = (
            f"a budget of {format_bytes(math.ceil(counts.budget_bytes))} was exceeded: the last step took "
            f"{format_bytes(counts.peak_bytes)}, and no op of it makes more than {format_bytes(counts.largest_bytes)}"
            f"{tell_kept(counts.opless_bytes)}"
        )
        if raises:
            raise BudgetInfeasible(message, counts.peak_bytes)
        self._warn_of_budget(message)

    def _warn_of_budget(self, message: str) -> None:
        self._state.warn_once(f"budget {self._options.budget}", f"{message}. It is exceeded by as little as can be.")

    def _limit_bytes(self) -> float:
        self.counts.budget = self._options.budget
        self.counts.budget_bytes = self._budget_bytes()
        self.counts.follows_plan = self._plan is not None
        self._planned = {} if self._plan is None else {save.value: save.action for save in self._plan.saves}
        return self.counts.budget_bytes if self._plan is None else self._plan.limit_bytes

    def _plan_of(self, trace: OpTrace | None, *, raises: bool) -> Plan | None:
        """Return the plan to follow."""
        options, state = self._options, self._state
        if trace is None:
            return None
        given = options.plan
        if given is not None:
            if [save.value for save in given.saves] == list(dict.fromkeys(trace.step.saves)):
                state.plan = given
                return given
            num_values = len(set(trace.step.saves))
            state.warn_once(
                "plan",
                f"the plan that was given is of another step: it has {len(given.saves)} values, and {num_values} were saved. "
                "It is not used.",
            )
        budget_bytes = math.ceil(self._budget_bytes())
        try:
            plan = trace.plan(budget_bytes, options.score)
        except BudgetInfeasible as error:
            if raises:
                raise
            self._warn_of_budget(str(error))
            planner = trace.planner(options.score)
            plan = planner.plan(budget_bytes, planner.least_found())
        if plan is not state.plan:
            _LOGGER.debug('Rematerialize (tag "%s"): %s', state.tag, plan)
        state.plan = plan
        return plan

    def _end_forward(self, *, learn: bool) -> None:
        """No more saves belong to the run."""
        run, state, follower = self._run, self._state, self._follower
        if not run.is_forward:
            return
        run.is_forward = False
        if run.forward is not None:
            run.window.end_forward(run.forward, learn=learn)
        if self._mover is not None:
            state.moved = run.moved_values()
        recording = run.recording
        counts = self.counts
        counts.num_ops += len(recording.funcs)
        counts.peak_bytes = max(counts.peak_bytes, run.walk.peak_bytes)
        counts.is_to_be_judged = learn and self._plan is None
        if counts.is_to_be_judged:
            counts.largest_bytes = max(counts.largest_bytes, _largest_bytes(recording))
        if learn and follower.saves and self._options.policy == "plan":
            trace = follower.ended_as(recording.funcs)
            if trace is None:
                trace = _trace_of(run, follower.saves, is_first=not len(state.traces))
            else:
                trace.num_seen += 1
            state.traces.add(trace)
            run.trace = trace
        if recording.is_timed:
            state.note_timed(run.trace if isinstance(run.trace, OpTrace) else None, recording.times_alone())
        recording.close()
        if learn and self._small_bytes is not None:
            message = self._too_small(self._small_bytes)
            if message:
                state.warn_once("small", message)
            state.looks_for_large = not message and not counts.num_saved
            self._small_bytes = {} if state.looks_for_large else None

    def _too_small(self, small_bytes: Mapping[int, int]) -> str:
        """Return what to say if the forward has saved more than the budget, and nothing large enough to be dropped."""
        is_share = isinstance(self._options.budget, float)
        if self.counts.num_saved or sum(small_bytes.values()) <= (0 if is_share else self._options.budget):
            return ""
        return all_too_small(small_bytes.values(), self._min_bytes, done="dropped")

    # Saving

    def pack(self, tensor: Tensor) -> KeptHandle:
        """Take a tensor that autograd saves. This is a saved-tensor hook: grad mode is off, the tensor is the real one."""
        if torch_private.backward_task() != -1 or is_traced():
            return KeptHandle(tensor)
        if (self._may_be_compiled or dynamo_is_loaded()) and in_compiled_function():
            raise RuntimeError(
                f'Rematerialize (tag "{self._state.tag}"): a compiled function was called in the context. To be recorded it '
                "runs op by op, as if it were not compiled. Leave out torch.compile, or leave out the context and set "
                "torch._functorch.config.activation_memory_budget, which recomputes inside of what is compiled"
            )
        if type(tensor) not in _PLAIN_TYPES:
            return self._pack_of_class(tensor)
        with torch_private.without_python_dispatch():  # what is done here is no part of the forward
            return self._pack_locked(tensor)

    def _pack_of_class(self, tensor: Tensor) -> KeptHandle:
        if has_own_dispatch(tensor):
            with torch_private.without_dispatch_modes():
                return self._forward(tensor, is_checked=False)
        with torch_private.without_subclass_functions(), torch_private.without_python_dispatch():
            return self._pack_locked(tensor)

    def _pack_locked(self, tensor: Tensor) -> KeptHandle:
        with self._lock:
            try:
                return self._pack(tensor)
            except BaseException:  # as `mended` does, at less cost
                self._state.is_broken = True
                raise

    def _pack(self, tensor: Tensor) -> KeptHandle:
        if not is_range_of_bytes(tensor):
            return KeptHandle(tensor)  # nobody can do more with it
        if tensor.device != self._torch_device and not self._is_here(tensor.device):
            return self._keep(tensor)
        run = self._run
        if not run.is_forward or run.task != -1:
            run = self._turn()
        storage = _get_storage(tensor)
        recording = run.recording
        found = recording.current.get(torch_private.storage_address(storage))
        if found is None or found[0]() is not storage:
            return self._keep(tensor)  # it was there before
        value, num_bytes = found[1], storage.nbytes()
        root = recording.roots.get(value)
        if root is not None and not root.is_inside:
            return self._keep(tensor)  # it is somebody else's
        if num_bytes < self._min_bytes:
            if self._small_bytes is not None:
                self._small_bytes[value] = num_bytes
            return self._offer(run, value, tensor, None)
        version = torch_private.version_of(tensor)
        if version and version > recording.num_writes(value):  # written to elsewhere, as by another thread
            value = recording.add_root(tensor, storage, is_inside=True)
            root = recording.roots[value]
        if self._state.is_broken:
            self._state.mend()
        run.ledger.sweep()
        is_new = not run.is_saved(value)
        node = torch_private.node_number()
        self._note_save(run, value, num_bytes, node)
        if root is not None and root.alias is not None:
            return self._offer(run, value, tensor, Action.KEEP)  # it is held, and counted, whatever becomes of the handle
        record = run.record_of(value)
        if record is not None and record.version != version:
            run.note_offer(value, tensor)
            return self._keep(tensor)  # it was written to behind the recorder's back
        if record is None:
            if is_new:
                self.counts.saved_bytes += num_bytes
                self.counts.num_saved += 1
                if root is not None:
                    self.counts.note_opless(recording.why_kept.get(value), num_bytes)
                self._raise_limit(run)
            action = self._action(run, value, num_bytes)
            drops = action is Action.RECOMPUTE and value not in run.others  # one that was offered is offered again
            if action is Action.OFFLOAD or (self._outer is not None and not (drops and run.secure(value))):
                run.offered_bytes += num_bytes
                return self._offer(run, value, tensor, action if action is Action.OFFLOAD else run.marks.get(value))
            window = run.window
            record = window.ledger.open_record(storage, version, maker=run, value=value)
            run.note_record(value, record)
            handle = window.ledger.add_handle(record, tensor, window, node)
            if run.marks.get(value) is not Action.KEEP and root is None:
                run.walk.admit(value)
                if drops:
                    run.walk.drop(value)
        else:
            handle = run.ledger.add_handle(record, tensor, run.window, node)
        if run.live_bytes > run.walk.limit_bytes:
            run.make_room()
        run.walk.note_peak()
        return handle

    def _keep(self, tensor: Tensor) -> KeptHandle:
        if self._mover is not None:
            return self._mover.take(tensor, None)
        return self._forward(tensor, is_checked=True)

    def _forward(self, tensor: Tensor, *, is_checked: bool) -> KeptHandle:
        """Give a tensor to the hooks outside, if there are any."""
        outer = self._outer
        return KeptHandle(tensor) if outer is None else ForwardedHandle(tensor, outer.pack, outer.unpack, is_checked=is_checked)

    def _offer(self, run: Run, value: int, tensor: Tensor, action: Action | None) -> KeptHandle:
        """Return the handle of a value that is not dropped: it may leave for host memory.

        Args:
            action: what is asked for; None leaves that to the context outside.
        """
        if self._mover is not None:
            handle = self._mover.take(tensor, None if action is Action.RECOMPUTE else action)
        elif action is Action.OFFLOAD:
            handle = self._move(run, tensor)
        else:
            handle = self._forward(tensor, is_checked=True)
        if type(handle) is KeptHandle or run.note_offer(value, tensor):
            run.others[value] = weakref.ref(handle)
        return handle

    def _move(self, run: Run, tensor: Tensor) -> KeptHandle:
        """Return the handle of a tensor that leaves."""
        window = run.window
        if isinstance(window.device, CpuDevice):
            self._state.warn_once("offload", "there is no other memory to move saved tensors to: they stay.")
            return KeptHandle(tensor)
        return window.pack(self._forward_of(run), tensor, _get_storage(tensor), action=Action.OFFLOAD) or KeptHandle(tensor)

    def _forward_of(self, run: Run) -> Forward:
        """Return what leaves in a forward."""
        if run.forward is None:
            run.forward = Forward(run.window.traces, ratio=1.0, window_bytes=None, counts=self.counts)
            run.window.open_forward(run.forward)
        return run.forward

    def _note_save(self, run: Run, value: int, num_bytes: int, node: int) -> None:
        run.note_save(value, node)
        had_plan = self._plan is not None
        key = SaveKey(len(run.recording.funcs), value, num_bytes, run.marks.get(value))
        if self._follower.note(run.recording.funcs, key):
            trace = self._follower.trace
            run.recording.known_s = () if trace is None else trace.step.lineage.seconds
            self._plan = self._plan_of(trace, raises=False)
            run.recording.retained = frozenset() if self._plan is None else self._plan.retained
            run.walk.limit_bytes = self._limit_bytes()
            if trace is None and had_plan:
                self._state.num_deviations += 1
                _LOGGER.debug('Rematerialize (tag "%s"): save %d is not that of the plan', self._state.tag, len(run.saves))

    def _raise_limit(self, run: Run) -> None:
        """What is saved has grown, and with it a budget that is a share of it."""
        if self._plan is None:
            run.walk.limit_bytes = self._limit_bytes()

    def _action(self, run: Run, value: int, num_bytes: int) -> Action | None:
        """Return what is done with a value as soon as it is saved; None where nobody has said anything: it stays as far as this
        context goes, until room is short."""
        action = run.marks.get(value)
        if action is not None or self._plan is not None:
            return action or self._planned.get(value)
        exceeds = self._outer is not None and run.live_bytes + run.offered_bytes + num_bytes > run.walk.limit_bytes
        return Action.RECOMPUTE if exceeds else None

    def _turn(self) -> Run:
        """A backward has begun since the last save: what comes now is another forward."""
        self._end_forward(learn=True)
        self._run = self._open_run(raises=self._options.strict)
        self.recorder.follow(self._run.recording)
        self._trail.follow(self._run.recording)
        return self._run

    def _is_here(self, torch_device: torch.device) -> bool:
        """Tell whether tensors on a device are dropped: the one that was asked for, or the first that saves any."""
        device = self._device
        if device is None:
            if torch_device.type not in ("cpu", "cuda"):
                return False
            device = self._device = self._state.device = open_device(torch_device)
            self._torch_device = device.torch_device
            self._run.recording.device = device
            self._run.window = self._state.window(device)
        return device.torch_device == torch_device

    def _estimate_s(self, func: Any, args: Sequence[Any], results: Any) -> float:
        key, state = cost_key(func, args, results), self._state
        seconds = state.costs_s.get(key) or state.guessed_s.get(key)
        if seconds is None:
            seconds = self._guess_s(func, args, results)
            state.remember(state.guessed_s, {key: seconds})
        return seconds

    def _guess_s(self, func: Any, args: Sequence[Any], results: Any) -> float:
        if self._ceilings is None:
            if self._device is None or self._device.torch_device.type == "meta":
                return GUESSED.estimate_s(func, args, results)
            self._ceilings = measure_ceilings(self._device)
        return self._ceilings.estimate_s(func, args, results)

    # The user's word

    def mark(self, tensor: Tensor, action: Action) -> None:
        """Do this with what is in a tensor now."""
        run = self._run
        with torch_private.without_python_dispatch(), self._state.lock:
            try:
                storage = tensor.untyped_storage()
            except RuntimeError:  # it is no range of bytes, and always stays
                return
            recording = run.recording
            value = recording.find(storage)
            if value is None or value in recording.roots:
                why_kept = None if value is None else recording.why_kept.get(value)
                if self._mover is not None and action is not Action.RECOMPUTE:
                    self._mover.mark(tensor, action)
                elif action is Action.RECOMPUTE and why_kept is not None:
                    self._state.warn_once(
                        f"recompute {why_kept}",
                        f"memkit.recompute was given what cannot be made again: {why_kept}. It stays.",
                    )
                return
            recording.sync()
            run.marks[value] = action
            record, handle = run.record_of(value), run.other(value)
            if record is not None:
                self._change(run, record, tensor, storage, action)
            elif isinstance(handle, Handle) and (action is not Action.RECOMPUTE or run.secure(value)):
                if action is Action.RECOMPUTE:
                    handle.record.maker, handle.record.value = run, value
                    run.note_record(value, handle.record)
                handle.unpacker.change(handle.record, storage, action)

    def _change(self, run: Run, record: Record, tensor: Tensor, storage: torch.UntypedStorage, action: Action) -> None:
        """Do something else with a value that is saved already, and that is in a storage of the user's."""
        if action is Action.RECOMPUTE:
            run.walk.drop(record.value)
            return
        run.walk.evictable.pop(record.value, None)
        if action is Action.OFFLOAD and not isinstance(run.window.device, CpuDevice):
            run.window.adopt(self._forward_of(run), record, tensor, storage)
        run.window.change(record, storage, action)


def open_entry(tag: str, options: RematOptions, block: Block) -> Entry:
    """Return what is there while a context is entered, which has not begun yet."""
    state = open_state(tag)
    with state.lock:
        entry = Entry(state, options, block)
        state.num_iterations += 1
        state.num_inner += is_within(tag)
        state.counts = entry.counts
        return entry


def open_recorder(tag: str, *, min_bytes: int, device: Device | None, block: Block) -> Entry:
    """Return an entry that drops only what the user asks for."""
    options = RematOptions(
        budget=NO_BUDGET,
        policy="dtr",  # a plan would also drop what others bring along, as that takes no time
        plan=None,
        score=DTRScore(),
        min_bytes=min_bytes,
        strict=False,
        verify=False,
        device=device,
        kinds=op_kinds(),
        yields=True,
    )
    return open_entry(tag, options, block)


def end_yielding() -> None:
    """End the entries around that give way to another context."""
    for owner in stacked_owners():
        if isinstance(owner, Entry) and owner.yields:
            owner.end(has_failed=False)


def _unpack(packed: KeptHandle) -> Tensor:
    return packed.unpack()


def _largest_bytes(recording: Recording) -> int:
    """Return the most that one op has made."""
    made = (sum(call.outs_bytes) for call in recording.calls)
    return max((*made, *(root.num_bytes for root in recording.roots.values() if root.is_inside)), default=0)


def _trace_of(run: Run, saves: list[SaveKey], *, is_first: bool) -> OpTrace:
    """Return the trace that a forward has left."""
    recording, values = run.recording, dict.fromkeys(run.saves)
    recording.sync()
    lineage = recording.lineage
    made = [value for value in values if lineage.maker[value] != NO_OP]
    marks = {key.value: key.mark for key in saves}  # of those that were given before the save: they tell one trace from another
    return OpTrace(
        funcs=recording.funcs,
        saves=saves,
        names={
            value: (str(recording.calls[lineage.maker[value]].func), recording.modules.get(lineage.maker[value], ""))
            for value in made
        },
        is_first=is_first,
        step=Step(
            lineage=lineage,
            saves=tuple(run.saves),
            uses=tuple(reversed(run.saves)),
            use_ends=ends_of(run.save_nodes[::-1]),
            fixed=frozenset(values) - frozenset(made) | {value for value, mark in marks.items() if mark is Action.KEEP},
            dropped=frozenset(value for value, mark in marks.items() if mark is Action.RECOMPUTE),
            moved=frozenset(value for value, mark in marks.items() if mark is Action.OFFLOAD),
            retained_bytes=recording.retained_bytes(),
            why_kept=recording.why_kept,
        ),
    )
