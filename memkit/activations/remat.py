"""`Rematerialize`: the context that drops saved tensors under a byte budget and makes them again when the backward asks."""

from __future__ import annotations

import functools
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memkit.activations.ledger import Handle, KeptHandle, Ledger, Residency, nothing
from memkit.activations.recorder import Recorder
from memkit.activations.remat_stats import RematCounts, RematStats
from memkit.activations.replay import Run
from memkit.activations.tape import CostKey, Tape, cost_key
from memkit.activations.traces import Follower, OpTrace, OpTraces, SaveKey
from memkit.activations.trail import ModuleTrail
from memkit.device import CpuDevice, Device, default_generator, is_capturing, open_device
from memkit.device.ceilings import GUESSED, Ceilings, measure_ceilings
from memkit.errors import BudgetInfeasible
from memkit.hooks import (
    SavedTensorHooks,
    after_backward,
    backward_task,
    dynamo_is_loaded,
    in_checkpoint,
    in_compiled_function,
    innermost_hooks,
    owners,
    stacked_owners,
)
from memkit.plan import NO_OP, DTRScore, RematPlan, Step
from memkit.profile.passes import run_without_data
from memkit.profile.step import Step as ProfiledStep
from memkit.sizes import parse_bytes

_POLICIES = ("plan", "dtr")
_PLAIN_TYPES = (Tensor, nn.Parameter)
_STRIDED = torch.strided
_NoDispatch = torch._C._DisableTorchDispatch
_get_storage = Tensor.untyped_storage
_is_in_backward = torch._C._current_graph_task_id
_NUM_WATCHED = 4
"""In so many first iterations it is noted which module each op is in: that takes the host some time."""


class OfferedHandle(KeptHandle):
    """A saved tensor that stays as far as this context goes, and that the hooks outside of it were given."""

    __slots__ = ("_hooks", "_packed")

    def __init__(self, tensor: Tensor, hooks: SavedTensorHooks) -> None:
        super().__init__(tensor)
        self.alias.data = nothing(tensor.dtype, tensor.device)
        self._hooks = hooks
        self._packed = hooks.pack(tensor)

    def unpack(self) -> Tensor:
        self.check_version()
        return self._hooks.unpack(self._packed)


class _TagState:
    """What is remembered under a tag from one iteration to the next."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.lock = threading.RLock()
        self.num_iterations = 0
        self.num_deviations = 0
        self.counts = RematCounts()
        self.traces = OpTraces()
        self.plan: RematPlan | None = None
        """The one that was followed last."""
        self.device: Device | None = None
        """Where tensors are dropped."""
        self._ledgers: dict[Device, Ledger] = {}
        self.costs_s: dict[CostKey, float] = {}
        """What ops take, by their names and sizes: measured, or else estimated."""
        self._timed: list[tuple[OpTrace | None, Tape]] = []
        self._warned = set[str]()

    def ledger(self, device: Device) -> Ledger:
        if device not in self._ledgers:
            self._ledgers[device] = Ledger(device)
        return self._ledgers[device]

    def ledgers(self) -> list[Ledger]:
        return list(self._ledgers.values())

    def sweep(self) -> None:
        for ledger in self.ledgers():
            ledger.sweep()

    def warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f'Rematerialize (tag "{self.tag}"): {message}', stacklevel=5)

    # What a forward has taught

    def note_timed(self, trace: OpTrace | None, tape: Tape) -> None:
        """The ops of a forward were timed: what they took is read later, when they are done."""
        self._timed.append((trace, tape))

    def read_times(self) -> None:
        """Take up what the ops of the last iteration took."""
        for trace, tape in self._timed:
            self.costs_s.update(tape.read_times())
            if trace is None or trace.is_measured or trace.num_seen == 1:
                continue  # in its first forward a kernel is loaded, or chosen among several
            if len(tape.lineage.seconds) == len(trace.step.lineage.seconds):
                trace.step.lineage.seconds[:] = tape.lineage.seconds
                trace.is_measured = True
                trace.learn(trace.step)
        self._timed.clear()

    # The backward

    def unpack(self, run: Run, handle: Handle) -> Tensor:
        """Return a saved tensor, for work on the current stream; make it again if it was dropped."""
        with self.lock:
            record = handle.record
            ledger, value, task = record.ledger, record.index, backward_task()
            ledger.sweep()
            if task != -1 and run.task != task:
                self._begin_backward(run, task)
            if task != -1:
                run.note_use(value)
            if handle.geometry is None:
                run.evictable.pop(value, None)
                ledger.serve(handle)
                return handle.alias
            original = record.original()
            if original is not None:
                ledger.serve(handle)
                return handle.geometry.over(original)
            if record.residency is Residency.DROPPED:
                self._make(run, handle)
            if record.num_awaiting <= 1:
                run.evictable.pop(value, None)
            return ledger.hand_out(handle)

    def _make(self, run: Run, handle: Handle) -> None:
        run.ledger.expect(handle.record)
        counts, device = run.counts, run.ledger.device
        start = device.record_event()
        ops_before, seconds_before = run.num_replayed_ops, run.replayed_s
        run.make(handle.record.index)
        counts.num_replays += 1
        counts.num_replayed_ops += run.num_replayed_ops - ops_before
        counts.replayed_s += run.replayed_s - seconds_before
        counts.replayed.add(start, device.record_event())
        counts.peak_bytes = max(counts.peak_bytes, run.peak_bytes)

    def _begin_backward(self, run: Run, task: int) -> None:
        is_first = run.task == -1
        trace = run.trace
        run.begin_backward(task, trace.step.uses if isinstance(trace, OpTrace) and trace.has_order else None)
        after_backward(functools.partial(self._end_backward, weakref.ref(run), is_first=is_first))

    def _end_backward(self, reference: weakref.ref[Run], *, is_first: bool) -> None:
        """A backward has ended well."""
        with self.lock:
            self.sweep()
            run = reference()
            if run is None:
                return
            trace = run.trace
            if is_first and isinstance(trace, OpTrace) and not trace.has_order and next(run.records(), None) is None:
                trace.has_order = True
                trace.learn(replace(trace.step, uses=tuple(run.uses)))


class _Unpacker:
    """Brings the tensors of one run back. Handles hold it, so that the run goes with the last of them."""

    __slots__ = ("_run", "_state")

    def __init__(self, state: _TagState, run: Run) -> None:
        self._state = state
        self._run = run

    def unpack(self, handle: Handle) -> Tensor:
        return self._state.unpack(self._run, handle)


_states: dict[str, _TagState] = {}
_states_lock = threading.Lock()


class _Entry:
    """One time in the context: from `with` to its end."""

    decides_last = True
    """What it keeps it offers to the hooks outside of it; hooks inside of it would hide all from it."""

    def __init__(self, state: _TagState, options: Rematerialize) -> None:
        self._state = state
        self._lock = state.lock
        self._options = options
        self._min_bytes = max(1, options.min_bytes)
        self._device = options.device or state.device
        self._torch_device = None if self._device is None else self._device.torch_device
        self._outer = innermost_hooks()
        self._may_be_compiled = dynamo_is_loaded()
        self._ceilings: Ceilings | None = None
        self.counts = RematCounts()
        self._plan: RematPlan | None = None
        self._run = self._open_run(raises=options.strict)
        self.recorder = Recorder(self._run.tape, default_generator, self._estimate_s)
        self._hooks = SavedTensorHooks(self.pack, _unpack, owner=self)
        self._trail = ModuleTrail(self._run.tape)
        is_new = self._follower.trace is None and state.num_iterations < _NUM_WATCHED
        self._watches_modules = is_new or options.verify

    def begin(self) -> None:
        with ExitStack() as contexts:
            if self._watches_modules:
                contexts.enter_context(self._trail)
            contexts.enter_context(self._hooks)
            contexts.enter_context(self.recorder)
            self._contexts = contexts.pop_all()

    def end(self, *, has_failed: bool) -> None:
        self._contexts.close()
        with self._state.lock:
            self._end_forward(learn=not has_failed)
        del self._contexts, self._hooks, self._run, self.recorder  # they hold the entry, and the tape

    # One forward

    def _open_run(self, *, raises: bool) -> Run:
        """Begin to record: at the entry, or when a backward has run since the last save."""
        state, options = self._state, self._options
        state.sweep()
        state.read_times()
        self._follower = Follower(state.traces if options.policy == "plan" else OpTraces())
        trace = self._follower.trace
        self._plan = self._plan_of(trace, raises=raises)
        device = self._device or CpuDevice()
        tape = Tape(
            device,
            known_s=() if trace is None else trace.step.lineage.seconds,
            retained=frozenset() if self._plan is None else self._plan.retained,
            is_timed=state.num_iterations == 1 if trace is None else not state.traces.are_measured(),
            is_verified=options.verify,
        )
        return Run(tape, state.ledger(device), options.score, self._limit_bytes(), self.counts)

    def _budget_bytes(self) -> float:
        """Return the budget, as far as it is known: a share is one of what is saved in all."""
        budget = self._options.budget
        if isinstance(budget, int):
            return budget
        trace = self._follower.trace
        if trace is not None:
            return budget * trace.step.saved_bytes
        return math.inf if budget == 1 else budget * self.counts.saved_bytes

    def _limit_bytes(self) -> float:
        self.counts.budget_bytes = self._budget_bytes()
        self.counts.follows_plan = self._plan is not None
        self._to_drop = frozenset[int]() if self._plan is None else self._plan.dropped
        return self.counts.budget_bytes if self._plan is None else self._plan.limit_bytes

    def _plan_of(self, trace: OpTrace | None, *, raises: bool) -> RematPlan | None:
        """Return the plan to follow."""
        options, state = self._options, self._state
        if trace is None:
            return None
        given = options.plan
        if given is not None:
            if [planned.value for planned in given.values] == list(dict.fromkeys(trace.step.saves)):
                state.plan = given
                return given
            num_values = len(set(trace.step.saves))
            state.warn_once(
                "plan",
                f"the plan that was given is of another step: it has {len(given.values)} values, and {num_values} were saved. "
                "It is not used.",
            )
        budget_bytes = math.ceil(self._budget_bytes())
        try:
            plan = trace.plan(budget_bytes, options.score)
        except BudgetInfeasible as error:
            if raises:
                raise
            state.warn_once("budget", f"{error}. It is exceeded by as little as can be.")
            planner = trace.planner(options.score)
            plan = planner.plan(budget_bytes, planner.smallest())
        state.plan = plan
        return plan

    def _end_forward(self, *, learn: bool) -> None:
        """No more saves belong to the run."""
        run, state, follower = self._run, self._state, self._follower
        if not run.is_forward:
            return
        run.is_forward = False
        tape = run.tape
        counts = self.counts
        counts.num_ops += len(tape.funcs)
        counts.recorder_s += self.recorder.seconds()
        counts.peak_bytes = max(counts.peak_bytes, run.peak_bytes)
        if learn and follower.saves and self._options.policy == "plan":
            trace = follower.ended_as(tape.funcs)
            if trace is None:
                trace = _trace_of(run, follower.saves, is_first=not len(state.traces))
            else:
                trace.num_seen += 1
            state.traces.add(trace)
            run.trace = trace
        if tape.is_timed:
            state.note_timed(run.trace if isinstance(run.trace, OpTrace) else None, tape.times_alone())
        tape.close()

    # Saving

    def pack(self, tensor: Tensor) -> KeptHandle:
        """Take a tensor that autograd saves. This is a saved-tensor hook: grad mode is off, the tensor is the real one."""
        if _is_in_backward() != -1:
            return KeptHandle(tensor)
        if self._may_be_compiled and in_compiled_function():
            raise RuntimeError(
                f'Rematerialize (tag "{self._state.tag}"): a compiled function was called in the context. To be recorded it '
                "runs op by op, as if it were not compiled. Leave torch.compile away, or leave the context away and set "
                "torch._functorch.config.activation_memory_budget, which recomputes inside of what is compiled"
            )
        with _NoDispatch(), self._lock:  # what is done here is no part of the forward
            return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> KeptHandle:
        if type(tensor) not in _PLAIN_TYPES and is_traceable_wrapper_subclass(tensor):
            return self._keep(tensor)
        if tensor.layout is not _STRIDED or (tensor.device != self._torch_device and not self._is_here(tensor.device)):
            return self._keep(tensor)
        run = self._run
        if not run.is_forward or run.task != -1:
            run = self._turn()
        storage = _get_storage(tensor)
        tape = run.tape
        found = tape.current.get(storage._cdata)
        if found is None or found[0]() is not storage:
            return self._keep(tensor)  # it was there before
        value, num_bytes = found[1], storage.nbytes()
        root = tape.roots.get(value)
        if root is not None and not root.is_inside:
            return self._keep(tensor)  # it is somebody else's
        if num_bytes < self._min_bytes:
            return self._keep_noted(run, value, tensor)
        if tensor._version and tensor._version > tape.num_writes(value):  # somebody else has written to it, as another thread
            value = tape.add_root(tensor, storage, is_inside=True)
            root = tape.roots[value]
        run.ledger.sweep()
        is_new = not run.is_saved(value)
        self._note_save(run, value, num_bytes)
        record = run.record_of(value)
        if record is not None and record.version != tensor._version:
            return self._keep(tensor)  # it was written to behind the recorder's back
        if record is None:
            if is_new:
                self.counts.saved_bytes += num_bytes
                self.counts.num_saved += 1
                self._raise_limit(run)
            drops = self._drops(run, value, num_bytes)
            if self._outer is not None and not (drops and run.secure(value)):
                run.offered_bytes += num_bytes
                return self._keep_noted(run, value, tensor)
            record = run.ledger.open_record(storage, tensor._version, owner=None, index=value)
            run.note_record(value, record)
            handle = run.ledger.add_handle(record, tensor, _Unpacker(self._state, run))
            if value not in run.fixed and root is None:
                run.admit(value)
                if drops:
                    run.drop(value)
        else:
            handle = run.ledger.add_handle(record, tensor, _Unpacker(self._state, run))
        if run.live_bytes > run.limit_bytes:
            run.make_room(0)
        run.note_peak()
        return handle

    def _keep(self, tensor: Tensor) -> KeptHandle:
        if self._outer is None or tensor.layout is not _STRIDED:
            return KeptHandle(tensor)
        return OfferedHandle(tensor, self._outer)

    def _keep_noted(self, run: Run, value: int, tensor: Tensor) -> KeptHandle:
        handle = self._keep(tensor)
        run.others[value] = weakref.ref(handle)
        return handle

    def _note_save(self, run: Run, value: int, num_bytes: int) -> None:
        run.note_save(value)
        had_plan = self._plan is not None
        if self._follower.note(run.tape.funcs, SaveKey(len(run.tape.funcs), value, num_bytes)):
            trace = self._follower.trace
            run.tape.known_s = () if trace is None else trace.step.lineage.seconds
            self._plan = self._plan_of(trace, raises=False)
            run.tape.retained = frozenset() if self._plan is None else self._plan.retained
            run.limit_bytes = self._limit_bytes()
            if trace is None and had_plan:
                self._state.num_deviations += 1

    def _raise_limit(self, run: Run) -> None:
        """What is saved has grown, and with it a budget that is a share of it."""
        if self._plan is None:
            run.limit_bytes = self._limit_bytes()

    def _drops(self, run: Run, value: int, num_bytes: int) -> bool:
        """Tell whether a value is dropped as soon as it is saved."""
        if value in run.fixed or value in run.wished:
            return value in run.wished
        if self._plan is not None:
            return value in self._to_drop
        return self._outer is not None and run.live_bytes + run.offered_bytes + num_bytes > run.limit_bytes

    def _turn(self) -> Run:
        """A backward has begun since the last save: what comes now is another forward."""
        self._end_forward(learn=True)
        self._run = self._open_run(raises=False)
        self.recorder.follow(self._run.tape)
        self._trail.follow(self._run.tape)
        return self._run

    def _is_here(self, torch_device: torch.device) -> bool:
        """Tell whether tensors on a device are dropped: the one that was asked for, or the first that saves any."""
        device = self._device
        if device is None:
            if torch_device.type not in ("cpu", "cuda"):
                return False
            device = self._device = self._state.device = open_device(torch_device)
            self._torch_device = device.torch_device
            self._run.tape.device = device
            self._run.ledger = self._state.ledger(device)
        return device.torch_device == torch_device

    def _estimate_s(self, func: Any, args: Sequence[Any], results: Any) -> float:
        key, costs_s = cost_key(func, args, results), self._state.costs_s
        seconds = costs_s.get(key)
        if seconds is None:
            seconds = costs_s[key] = self._guess_s(func, args, results)
        return seconds

    def _guess_s(self, func: Any, args: Sequence[Any], results: Any) -> float:
        if self._ceilings is None:
            if self._device is None or self._device.torch_device.type == "meta":
                return GUESSED.estimate_s(func, args, results)
            self._ceilings = measure_ceilings(self._device)
        return self._ceilings.estimate_s(func, args, results)

    # The user's word

    def mark(self, tensor: Tensor, *, keep: bool) -> None:
        """What is in a tensor now is to be kept, or made again."""
        run = self._run
        with torch._C._DisableTorchDispatch(), self._state.lock:
            storage = tensor.untyped_storage()
            value = run.tape.find(storage)
            if value is None or value in run.tape.roots:
                return
            run.tape.sync()
            wanted, other = (run.fixed, run.wished) if keep else (run.wished, run.fixed)
            wanted.add(value)
            other.discard(value)
            record = run.record_of(value)
            if record is None:
                return
            if keep:
                run.evictable.pop(value, None)
                if record.residency is Residency.DROPPED:
                    run.ledger.restore(record, storage)
            elif record.residency is Residency.DEVICE:
                run.drop(value)


def _unpack(packed: KeptHandle) -> Tensor:
    return packed.unpack()


def _trace_of(run: Run, saves: list[SaveKey], *, is_first: bool) -> OpTrace:
    """Return the trace that a forward has left."""
    tape, values = run.tape, dict.fromkeys(run.saves)
    tape.sync()
    lineage = tape.lineage
    made = [value for value in values if lineage.maker[value] != NO_OP]
    return OpTrace(
        funcs=tape.funcs,
        saves=saves,
        names={
            value: (str(tape.calls[lineage.maker[value]].func), tape.modules.get(lineage.maker[value], "")) for value in made
        },
        is_first=is_first,
        step=Step(
            lineage=lineage,
            saves=tuple(run.saves),
            uses=tuple(reversed(run.saves)),
            fixed=frozenset(values) - frozenset(made) | (run.fixed & values.keys()),
            dropped=frozenset(run.wished & values.keys()),
            retained_bytes={value: root.num_bytes for value, root in tape.roots.items() if root.is_inside or root.is_lost},
        ),
    )


class Rematerialize:
    """Hold what autograd saves in this context to a budget: drop what is cheap to make again, and do so in the backward.

    Gradients are those of the plain run, bit for bit, wherever its ops are deterministic. No module needs a mark: the ops of
    the forward are recorded, and the ones that lead to a dropped tensor are run again when the backward asks for it. Nothing
    that the forward did beside that happens twice: running statistics, random number generators and buffers are as in the
    plain run.

    The first step under a tag is held to the budget as it goes, by the score of dynamic tensor rematerialization; from the
    second on a plan is followed, which is made once for each sequence of ops. A step that goes another way is carried by the
    score again.

    Args:
        budget: what saved tensors and the temporaries of replays may take on the device: bytes, text such as "8GiB", or a
            share of the saved bytes, a float above 0 and at most 1. What the plain run saves beside that (parameters, inputs,
            storages under `min_bytes`) does not count. It may be exceeded by what one op makes.
        tag: which memory to use: one per model, or per kind of step.
        policy: "plan", or "dtr" to let the score decide in every step.
        plan: a plan to follow instead, as `memkit.remat_plan` returns and `RematPlan.with_action` edits.
        score: how the next to be dropped is chosen.
        min_bytes: storages smaller than this stay.
        strict: raise when no plan keeps to the budget, instead of a warning.
        verify: compare everything that is made again with what it was, which is copied to host memory, and raise at the first
            difference. Slow: to find out why a gradient is off.
        device: where to drop tensors; by default the first device that saves any.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, the object is entered twice at once, or it is entered in another
            `Rematerialize`, or inside a function that `torch.utils.checkpoint` is checkpointing.
        BudgetInfeasible: with `strict`, no plan keeps to the budget.

    Example:
        >>> import torch, memkit
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> with memkit.Rematerialize(budget=0.5, tag="example", min_bytes=0):
        ...     loss = model(torch.randn(32, 64)).sum()
        >>> loss.backward()
        >>> memkit.remat_stats("example").num_dropped > 0
        True

    Source: Kirisame et al., Dynamic Tensor Rematerialization, arXiv 2006.09616.
    """

    def __init__(
        self,
        budget: int | float | str,
        tag: str = "default",
        *,
        policy: str = "plan",
        plan: RematPlan | None = None,
        score: DTRScore = DTRScore(),  # noqa: B008  # frozen
        min_bytes: int = 2**20,
        strict: bool = False,
        verify: bool = False,
        device: Device | None = None,
    ) -> None:
        if not isinstance(tag, str):
            raise TypeError(f"tag is a string; found {type(tag).__name__}")
        if policy not in _POLICIES:
            raise ValueError(f'policy is "plan" or "dtr"; found {policy!r}')
        if plan is not None and not isinstance(plan, RematPlan):
            raise TypeError(f"plan is a RematPlan, as memkit.remat_plan returns; found {type(plan).__name__}")
        if not isinstance(score, DTRScore):
            raise TypeError(f"score is a memkit.DTRScore; found {type(score).__name__}")
        if isinstance(min_bytes, bool) or not isinstance(min_bytes, int):
            raise TypeError(f"min_bytes is a number of bytes (an int); found {min_bytes!r}")
        if min_bytes < 0:
            raise ValueError(f"min_bytes is a number of bytes, 0 or more; found {min_bytes}")
        if device is not None and not isinstance(device, Device):
            raise TypeError(f"device is a memkit.device.Device; found {type(device).__name__}. For CUDA, leave it away")
        self.budget = check_budget(budget)
        self.tag = tag
        self.policy = policy
        self.plan = plan
        self.score = score
        self.min_bytes = min_bytes
        self.strict = strict
        self.verify = verify
        self.device = device
        self._entry: _Entry | None = None
        self._is_entered = False

    def __enter__(self) -> Rematerialize:
        if self._is_entered:
            raise ValueError(f'this Rematerialize (tag "{self.tag}") is entered already')
        if is_capturing():
            raise RuntimeError(
                f'Rematerialize (tag "{self.tag}") was entered while a CUDA graph is being captured: what is recorded is run '
                "again by the host, which a graph does not do. Leave the context away in what is captured"
            )
        if in_checkpoint():
            raise ValueError(
                f'Rematerialize (tag "{self.tag}") was entered inside a checkpointed function, which would undo the '
                "checkpoint. Put the context around the checkpoint, or leave the checkpoint away"
            )
        if any(isinstance(owner, _Entry) for owner in stacked_owners()):
            raise ValueError(
                f'Rematerialize (tag "{self.tag}") was entered inside another Rematerialize: one budget holds for all that is '
                "saved. Use memkit.keep and memkit.recompute to treat parts of a model differently"
            )
        unwilling = next((owner for owner in owners() if not owner.can_lend), None)
        if unwilling is not None:
            raise ValueError(
                f'Rematerialize (tag "{self.tag}"): what {type(unwilling).__name__} owns cannot be had again in the backward, '
                "and dropped tensors may be made from it. Use one of the two"
            )
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            with _states_lock:
                state = _states.setdefault(self.tag, _TagState(self.tag))
            with state.lock:
                entry = _Entry(state, self)
                state.num_iterations += 1
                state.counts = entry.counts
            entry.begin()
            self._entry = entry
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        entry, self._entry, self._is_entered = self._entry, None, False
        if entry is not None:
            entry.end(has_failed=kind is not None)


class _Within:
    """`Rematerialize` for a state of its own, which no tag names."""

    def __init__(self, state: _TagState, options: Rematerialize) -> None:
        self._state = state
        self._options = options

    def __enter__(self) -> None:
        self._entry = _Entry(self._state, self._options)
        self._entry.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._entry.end(has_failed=kind is not None)


def check_budget(budget: object) -> int | float:
    """Return a budget as bytes (int), or as a share of the saved bytes (float).

    Raises:
        TypeError: it is neither a number nor text.
        ValueError: it is not positive, NaN, a float above 1, or text that is no size.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise TypeError(f'budget is bytes (an int), text such as "8GiB", or a share (a float up to 1); found {budget!r}')
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ValueError(
                f"a budget that is a float is a share of the saved bytes, above 0 and at most 1; found {budget}. For bytes, "
                'give an int, or text such as "8GiB"'
            )
        return budget
    try:
        return parse_bytes(budget)
    except ValueError as error:
        raise ValueError(f"budget: {error}") from None


def _current_entry() -> _Entry | None:
    return next((owner for owner in reversed(stacked_owners()) if isinstance(owner, _Entry)), None)


def keep(tensor: Tensor) -> Tensor:
    """Return the tensor, and have the `Rematerialize` around keep it if it is saved. Without one around, nothing happens.

    What is meant is all that is in the tensor's storage now; what is written there later is another value.
    """
    entry = _current_entry()
    if entry is not None:
        entry.mark(tensor, keep=True)
    return tensor


def recompute(tensor: Tensor) -> Tensor:
    """Return the tensor, and have the `Rematerialize` around drop it when it is saved, whatever the budget. Without one around,
    nothing happens."""
    entry = _current_entry()
    if entry is not None:
        entry.mark(tensor, keep=False)
    return tensor


def forget(tag: str) -> None:
    """Forget what is kept under a tag. Unknown tags are fine; graphs that are alive keep working."""
    with _states_lock:
        _states.pop(tag, None)


def _state_of(tag: str) -> _TagState:
    with _states_lock:
        state = _states.get(tag)
    if state is None:
        raise ValueError(f'no Rematerialize was entered under the tag "{tag}"; known tags: {sorted(_states) or "none"}')
    return state


def remat_plan(tag: str = "default") -> RematPlan:
    """Return the plan that was followed last under a tag.

    Raises:
        ValueError: no context with that tag was entered, or none has followed a plan: the first step never does.
    """
    plan = _state_of(tag).plan
    if plan is None:
        raise ValueError(f'no plan was followed under the tag "{tag}" yet: the first step is recorded, the second follows one')
    return plan


def min_budget(
    model: nn.Module,
    *args: Any,
    kwargs: dict[str, Any] | None = None,
    loss_fn: Callable[[Any], Tensor] | None = None,
    target: str = "cuda",
    min_bytes: int = 2**20,
    score: DTRScore = DTRScore(),  # noqa: B008  # frozen
) -> int:
    """Return the smallest budget in bytes that `Rematerialize` can keep to, without a GPU and without running the model.

    The step is traced without data, and the least that plans for it reach is returned. No op is run again more than a few times
    on average: what is possible by more than that is not looked for.

    Args:
        model: on any device; it is left as it is.
        args, kwargs: the inputs of its forward; only shapes and dtypes count.
        loss_fn: called with what the model returns; must return one number. By default the sum of its outputs is the loss.
        target: whose kernels to imitate, "cuda" or "cpu".
        min_bytes, score: as for `Rematerialize`.

    Raises:
        TypeError: `model` is no module.
        ProfileError, DataDependentError: as `profile_memory` with `device="meta"`.

    Example:
        >>> import torch, memkit
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)])
        >>> x = torch.randn(4096, 256)
        >>> memkit.min_budget(model, x) < memkit.profile_memory(model, x, print_table=False).activation_bytes / 3
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"min_budget needs a torch.nn.Module; found {type(model).__name__}")
    step = ProfiledStep(model=model, args=args, kwargs=dict(kwargs or {}), loss_fn=loss_fn, backward=True)
    state = _TagState("min_budget")
    options = Rematerialize(1.0, state.tag, score=score, min_bytes=min_bytes, device=CpuDevice(torch.device("meta")))
    run_without_data(step, target, _Within(state, options))
    trace = next(iter(state.traces), None)
    return 0 if trace is None else trace.planner(score).smallest().peak_bytes


def remat_stats(tag: str = "default") -> RematStats:
    """Return what `Rematerialize` did under a tag, in its last iteration.

    Raises:
        ValueError: no context with that tag was entered with grad mode on, since it was reset.
    """
    state = _state_of(tag)
    with state.lock:
        state.sweep()
        return state.counts.stats(
            tag=tag,
            num_iterations=state.num_iterations,
            num_deviations=state.num_deviations,
            ledgers=state.ledgers(),
            counter=None if state.device is None else state.device.memory_counter(),
        )
