"""What is remembered under a tag of `Rematerialize` from one step to the next, and how saved tensors come back."""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import replace

from memkit import backwards
from memkit.activations.counts import Counts
from memkit.activations.ops import OpKinds, op_kinds
from memkit.activations.recorded import CostKey
from memkit.activations.recording import Recording
from memkit.activations.replay import Run
from memkit.activations.traces import OpTrace, OpTraces
from memkit.activations.window import OffloadWindow
from memkit.device import Device
from memkit.errors import warn_user
from memkit.interrupts import mended
from memkit.plan import Plan, ends_of

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
        self.counts = Counts()
        self.traces = OpTraces()
        self._kinds = op_kinds()
        self.plan: Plan | None = None
        """The one that was followed last."""
        self.moved = frozenset[int]()
        """Values of the last forward that the context outside has moved to host memory."""
        self.device: Device | None = None
        """Where tensors are dropped."""
        self._windows: dict[Device, OffloadWindow] = {}
        self.costs_s: dict[CostKey, float] = {}
        """What ops take, by their names and sizes, as it was measured."""
        self.guessed_s: dict[CostKey, float] = {}
        """What ops are thought to take that were not measured."""
        self._timed: list[tuple[OpTrace | None, Recording]] = []
        self._warned = set[str]()
        self.looks_for_large = True
        """Whether all that was saved so far was smaller than `min_bytes`, and nobody was told."""

    def window(self, device: Device) -> OffloadWindow:
        if device not in self._windows:
            self._windows[device] = OffloadWindow(device, self.tag, self.lock)
        return self._windows[device]

    def windows(self) -> list[OffloadWindow]:
        return list(self._windows.values())

    def mend(self) -> None:
        """Put right what was broken off: see [Note: interrupts] in `memkit.interrupts`."""
        for window in self.windows():
            window.mend()
        self.is_broken = False

    @mended
    def sweep(self) -> None:
        for window in self.windows():
            window.settle()

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
            if trace is None or trace.is_measured:
                continue
            lineage, seconds = trace.step.lineage, recording.lineage.seconds
            if len(seconds) == len(lineage.seconds):
                trace.learn(replace(trace.step, lineage=lineage.with_seconds(seconds)))
                trace.is_measured = trace.num_seen > 1  # in its first forward a kernel is loaded, or chosen among several
        self._timed.clear()

    # The backward

    def begin_backward(self, run: Run, task: int) -> None:
        """A backward asks for what a forward has saved, for the first time or again."""
        is_first = run.task == -1
        trace = run.trace
        run.begin_backward(task, trace.step.uses if isinstance(trace, OpTrace) and trace.has_order else None)
        backwards.on_end(functools.partial(self._end_backward, weakref.ref(run), is_first))

    def _end_backward(self, reference: weakref.ref[Run], is_first: bool, has_failed: bool) -> None:
        """A backward is over."""
        if not has_failed:
            self._learn_order(reference(), is_first=is_first)

    @mended
    def _learn_order(self, run: Run | None, *, is_first: bool) -> None:
        self.sweep()
        if run is None:
            return
        trace = run.trace
        if is_first and isinstance(trace, OpTrace) and not trace.has_order and next(run.records(), None) is None:
            trace.learn(replace(trace.step, uses=tuple(run.uses), use_ends=ends_of(run.use_nodes)))
            trace.has_order = True


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
