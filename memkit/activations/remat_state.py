"""What is remembered under a tag of `Rematerialize` from one step to the next, and how saved tensors come back."""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import replace

from torch import Tensor

from memkit.activations.counts import RematCounts
from memkit.activations.ledger import Handle, Ledger, Residency
from memkit.activations.ops import OpKinds, op_kinds
from memkit.activations.recorded import CostKey
from memkit.activations.recording import Recording
from memkit.activations.replay import Run
from memkit.activations.traces import OpTrace, OpTraces
from memkit.device import Device
from memkit.errors import warn_user
from memkit.hooks import after_backward, backward_task
from memkit.interrupts import mended
from memkit.plan import RematPlan, ends_of

_MAX_COSTS = 8192
"""For so many kinds and sizes of ops it is remembered what they take."""


class RematState:
    """What is remembered under a tag from one iteration to the next."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.lock = threading.RLock()
        self.is_broken = False
        self.num_iterations = 0
        self.num_inner = 0
        """Of these, those in a `CPUOffload` under the same tag."""
        self.num_deviations = 0
        self.counts = RematCounts()
        self.traces = OpTraces()
        self._kinds = op_kinds()
        self.plan: RematPlan | None = None
        """The one that was followed last."""
        self.device: Device | None = None
        """Where tensors are dropped."""
        self._ledgers: dict[Device, Ledger] = {}
        self.costs_s: dict[CostKey, float] = {}
        """What ops take, by their names and sizes, as it was measured."""
        self.guessed_s: dict[CostKey, float] = {}
        """What ops are thought to take that were not measured."""
        self._timed: list[tuple[OpTrace | None, Recording]] = []
        self._warned = set[str]()
        self.looks_for_large = True
        """Whether all that was saved so far was smaller than `min_bytes`, and nobody was told."""

    def ledger(self, device: Device) -> Ledger:
        if device not in self._ledgers:
            self._ledgers[device] = Ledger(device)
        return self._ledgers[device]

    def ledgers(self) -> list[Ledger]:
        return list(self._ledgers.values())

    def mend(self) -> None:
        """Put right what was broken off: see [Note: interrupts] in `memkit.interrupts`."""
        for ledger in self.ledgers():
            ledger.mend()
        self.is_broken = False

    @mended
    def sweep(self) -> None:
        for ledger in self.ledgers():
            ledger.sweep()

    def warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn_user(f'Rematerialize (tag "{self.tag}"): {message}')

    # What a forward has taught

    def know(self, kinds: OpKinds) -> None:
        """Forget what was learned with another word on which ops are pure: it is of other values."""
        if kinds is not self._kinds:
            self._kinds, self.traces = kinds, OpTraces()

    def remember(self, costs_s: dict[CostKey, float], found: dict[CostKey, float]) -> None:
        """Add to what is known, and forget the oldest if that is too much."""
        costs_s.update(found)
        while len(costs_s) > _MAX_COSTS:
            del costs_s[next(iter(costs_s))]

    def note_timed(self, trace: OpTrace | None, recording: Recording) -> None:
        """The ops of a forward were timed: what they took is read later, when they are done."""
        self._timed.append((trace, recording))

    def read_times(self) -> None:
        """Take up what the ops of the last iteration took."""
        for trace, recording in self._timed:
            self.remember(self.costs_s, recording.read_times())
            if trace is None or trace.is_measured or trace.num_seen == 1:
                continue  # in its first forward a kernel is loaded, or chosen among several
            if len(recording.lineage.seconds) == len(trace.step.lineage.seconds):
                trace.step.lineage.seconds[:] = recording.lineage.seconds
                trace.learn(trace.step)
                trace.is_measured = True
        self._timed.clear()

    # The backward

    @mended
    def unpack(self, run: Run, handle: Handle, node: int) -> Tensor:
        """Return what a node has saved, for work on the current stream; make it again if it was dropped."""
        record = handle.record
        ledger, value, task = record.ledger, record.index, backward_task()
        ledger.sweep()
        if task != -1 and run.task != task:
            self._begin_backward(run, task)
        if task != -1:
            run.note_use(value, node)
        if handle.geometry is None:
            run.evictable.pop(value, None)
            ledger.serve(handle)
            return handle.alias
        original = record.original()
        if original is not None:
            ledger.serve(handle)
            return handle.over_original(original)
        ledger.fetched_copy(record)  # gives up one that was written to
        if record.residency is Residency.DROPPED:
            if task == -1:
                run.compare_settings()
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

    @mended
    def _end_backward(self, reference: weakref.ref[Run], *, is_first: bool) -> None:
        """A backward has ended well."""
        self.sweep()
        run = reference()
        if run is None:
            return
        trace = run.trace
        if is_first and isinstance(trace, OpTrace) and not trace.has_order and next(run.records(), None) is None:
            trace.learn(replace(trace.step, uses=tuple(run.uses), use_ends=ends_of(run.use_nodes)))
            trace.has_order = True


class RunUnpacker:
    """Brings back what one node of a run's graph has saved. Handles hold it, so that the run goes with the last of them."""

    __slots__ = ("_node", "_run", "_state")

    def __init__(self, state: RematState, run: Run, node: int) -> None:
        self._state = state
        self._run = run
        self._node = node

    def unpack(self, handle: Handle) -> Tensor:
        return self._state.unpack(self._run, handle, self._node)


states: dict[str, RematState] = {}
_states_lock = threading.RLock()


def open_state(tag: str) -> RematState:
    """Return what is remembered under a tag, which may be new."""
    with _states_lock:
        return states.setdefault(tag, RematState(tag))


def find_state(tag: str) -> RematState | None:
    """Return what is remembered under a tag, None if nothing is."""
    with _states_lock:
        return states.get(tag)


def forget(tag: str) -> None:
    """Forget what is kept under a tag. Unknown tags are fine; graphs that are alive keep working."""
    with _states_lock:
        states.pop(tag, None)
