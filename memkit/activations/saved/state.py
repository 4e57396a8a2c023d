"""What contexts remember under a tag from one iteration to the next: one `TagState` for each kind of context."""

from __future__ import annotations

import threading
import weakref
from abc import ABC
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.saved.counts import Counts, reached_s
from memkit.activations.saved.entry import Unasked
from memkit.activations.saved.settled import Settled, TimedWays
from memkit.activations.saved.traces import MAX_TRACES, OpTrace, Traces, trace_of
from memkit.core.interrupts import mended
from memkit.device import Device
from memkit.errors import warn_user
from memkit.plan import Plan
from memkit.profile import MemoryReport
from memkit.recording.cost import OpCosts
from memkit.recording.ops import OpKinds, op_kinds
from memkit.recording.recording import Recording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memkit.activations.context import Shapes
    from memkit.activations.recomputing.budget import Decider
    from memkit.activations.recomputing.layers import Layers
    from memkit.recording.module_calls import NotedCall

_MAX_RATIOS = 10_000
_GIVEN_UP = 1_000
"""More deviations than any step is forgiven."""
_OFTEN, _MOST_SEEN = 3, 64
"""Shapes of inputs that came so often, in at least one of so many steps, are recorded. So many shapes are remembered."""
_NUM_VAIN, _VAIN_AMONG = 3, 100
"""Plans are given up once so many iterations had none that held, among so many."""


class TagState(ABC):
    """Callers hold `lock` for all work with its saved tensors."""

    name: str

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.lock = threading.RLock()
        self.num_iterations = 0
        self.counts = Counts()
        self.looks_for_large = True
        self.unasked = Unasked(f'{self.name} (tag "{tag}")')
        self._windows: dict[Device, OffloadWindow] = {}
        self._warned = set[str]()

    def windows(self) -> list[OffloadWindow]:
        with self.lock:
            return list(self._windows.values())

    def window(self, device: Device) -> OffloadWindow:
        with self.lock:
            if device not in self._windows:
                warn = weakref.WeakMethod(self.warn_once)
                self._windows[device] = OffloadWindow(device, self.name, self.tag, self.lock, warn)
            return self._windows[device]

    @property
    def is_broken(self) -> bool:
        return any(window.is_broken for window in self._windows.values())

    @is_broken.setter
    def is_broken(self, is_broken: bool) -> None:
        for window in self._windows.values():
            window.is_broken = is_broken

    def mend(self) -> None:
        for window in self._windows.values():
            window.mend()

    @mended
    def sweep(self) -> None:
        for window in self._windows.values():
            window.settle()

    def figures(self) -> dict[str, Any]:
        windows = self.windows()
        scheduled = [forward for window in windows for forward in window.all_scheduled]
        return {
            "num_iterations": self.num_iterations,
            "live_records": sum(window.ledger.num_records for window in windows) + sum(each.num_live for each in scheduled),
            "live_bytes": sum(window.ledger.live_bytes for window in windows) + sum(each.live_bytes for each in scheduled),
            "host_in_use_bytes": sum(window.arena.in_use_bytes for window in windows),
            "host_peak_bytes": sum(window.arena.peak_in_use_bytes for window in windows),
            "host_held_bytes": sum(window.arena.held_bytes for window in windows),
            "num_pins": sum(window.arena.num_pins for window in windows),
        }

    def warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn_user(f'{self.name} (tag "{self.tag}"): {message}')

    def retire(self) -> None:
        for window in self.windows():
            _retired.add(window)
            window.retire()


class OffloadState(TagState):
    name = "CPUOffload"

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.ratios: deque[float] = deque(maxlen=_MAX_RATIOS)
        self.report: MemoryReport | None = None
        self.auto: tuple[tuple[MemoryReport, int, int | None], float] | None = None
        """The arguments of the last search for a ratio that hides its copies, and the ratio."""
        self.is_recorded = False
        """Forwards are recorded, since something of them was to be recomputed."""
        self.idles_with: object = None
        """The arguments of the last forward, if its ratio of 0 left nothing to do; else None."""

    def planned_window(self, device: Device, min_bytes: int) -> OffloadWindow:
        with self.lock:
            window = self.window(device)
            if self.report is not None and not len(window.traces):
                window.traces.add(trace_of(self.report, min_bytes))
            return window


class RematState(TagState):
    name = "Rematerialize"

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.num_inner = 0
        self.num_deviations = 0
        self.is_recorded = True
        self.num_recorded = 0
        self.num_left = 0
        """How many iterations had other regions than planned."""
        self.trial: TimedWays | None = None
        self.settled: Settled | None = None
        self.traces = Traces()
        self.plan: Plan | None = None
        self._in_vain = {had_plan: deque[int](maxlen=_NUM_VAIN) for had_plan in (False, True)}
        """The numbers of the last iterations in which plans did not help, by whether they had one."""
        self.layers: Layers | None = None
        self.known_shapes: dict[Shapes, None] = {}
        """Shapes of the inputs of recorded steps, the last at the end."""
        self.was_other = False
        """The last step was of another size than the recorded ones."""
        self._records_next = False
        """The next step is recorded, whatever its size."""
        self._seen_shapes: dict[Shapes, tuple[int, int]] = {}
        """For shapes of inputs, the last ones at the end: the number of the first step that had them, and of all such steps."""
        self.moved = frozenset[int]()
        self.device: Device | None = None
        self.costs = OpCosts()
        self._kinds = op_kinds()
        self._timed: list[tuple[OpTrace | None, Recording]] = []

    def know(self, kinds: OpKinds) -> None:
        """Forget all if other ops are pure now: values are numbered differently then."""
        if kinds is not self._kinds:
            if len(self.traces):
                self.layers, self.known_shapes = None, {}
            self._kinds, self.traces = kinds, Traces()

    def forget_layers(self) -> None:
        """Record the next step and find layers anew, since a step has called none of the known ones."""
        self.layers, self.was_other, self._records_next = None, False, True

    def is_of_other_size(self, shapes: Shapes | None) -> bool:
        """Tell whether a step goes without a plan, since none with inputs of these shapes was recorded. Shapes of many steps
        are recorded. For unknown shapes (None), the answer is as for the last step."""
        if shapes is None or self._records_next:
            return self.was_other
        first, count = self._seen_shapes.pop(shapes, (self.num_iterations, 0))
        self._seen_shapes[shapes] = first, count + 1
        is_often = count + 1 >= _OFTEN and (count + 1) * _OFTEN > self.num_iterations - first
        self.was_other = len(self.traces) > 0 and bool(self.known_shapes) and shapes not in self.known_shapes and not is_often
        if self.was_other:
            if len(self._seen_shapes) > _MOST_SEEN:
                self._seen_shapes.pop(next(iter(self._seen_shapes)))
            return True
        self.known_shapes.pop(shapes, None)
        self.known_shapes[shapes] = None
        if len(self.known_shapes) > MAX_TRACES:
            self.known_shapes.pop(next(iter(self.known_shapes)))
        return False

    def fits(self, shapes: Shapes) -> bool:
        """Tell whether a step of these sizes may go as the last recorded one, where nothing is dropped."""
        return True

    def unsettle(self) -> None:
        """Record the next step, since something was not as before."""
        if self.settled is not None:
            self.num_left += self.settled.regions is not None
            self.settled = None
            self.num_deviations += 1

    def choose_again(self) -> None:
        """Record the next step and choose regions anew, since a call could not be the planned region."""
        self.unsettle()
        for trace in self.traces:
            if trace.ops is not None:
                trace.ops.forget_regions()

    def give_up_regions(self) -> None:
        """Record all steps from now on, since a recomputed module did not do the same as before."""
        self.settled, self.num_left, self.counts.has_mismatch = None, _GIVEN_UP, False

    def learn(
        self, decider: Decider, recording: Recording, saves: Sequence[int], nodes: Sequence[int], calls: Sequence[NotedCall]
    ) -> OpTrace | None:
        """A forward is in vain if it is like none before, or if there is no plan for it even after three."""
        trace = self.traces.learn(decider.follower, recording, saves, nodes, calls)
        self._records_next = False
        if not decider.follows_plan and trace.ops is not None and not trace.has_marks:
            has_no_plan = trace.ops.num_seen > 3 and self.unasked.was_asked and getattr(trace.learned, "planner", None) is None
            if trace.ops.num_seen == 1 or has_no_plan:
                self.note_in_vain(had_plan=False)
        return trace.ops

    def note_in_vain(self, *, had_plan: bool) -> None:
        """Note that plans do not help in this iteration, whose plan took more than the budget, or which had none."""
        if self.num_iterations not in self._in_vain[had_plan]:
            self._in_vain[had_plan].append(self.num_iterations)

    def figures(self) -> dict[str, Any]:
        counts, counter = self.counts, None if self.costs.device is None else self.costs.device.memory_counter()
        return {
            **super().figures(),
            "num_iterations": self.num_iterations - self.num_inner,
            "peak_allocated_bytes": None if counter is None else counter.peak_bytes(),
            "peak_reserved_bytes": None if counter is None else counter.peak_reserved_bytes(),
            "num_deviations": self.num_deviations,
            "is_recorded": self.is_recorded,
            "follows_plan": counts.follows_plan,
            "num_ops": counts.num_ops,
            "num_saved": counts.num_saved,
            "saved_bytes": counts.saved_bytes,
            "num_dropped": counts.num_dropped,
            "dropped_bytes": counts.dropped_bytes,
            "ledger_peak_bytes": counts.peak_bytes,
            "num_replays": counts.num_replays,
            "num_replayed_ops": counts.num_replayed_ops + counts.num_replays * counts.ops_of_region,
            "estimated_replay_s": counts.replayed_s + counts.num_replays * counts.region_s,
            "measured_replay_s": reached_s(counts.replayed),
        }

    @property
    def gives_up_plans(self) -> bool:
        """Recording takes more than plans bring, since iterations don't repeat."""
        if self.layers is not None and self.layers.are_all:
            return True
        return any(len(found) == _NUM_VAIN and found[-1] - found[0] < _VAIN_AMONG for found in self._in_vain.values())

    def are_measured(self) -> bool:
        """Tell whether the times of all forwards that may come again are known. Which one comes shows too late."""
        return all(trace.ops.is_measured for trace in self.traces if trace.ops is not None and trace.is_worth_a_plan)

    def note_timed(self, trace: OpTrace | None, recording: Recording) -> None:
        self._timed.append((trace, recording))

    def read_times(self) -> None:
        for trace, recording in self._timed:
            taken_s, call_times = recording.read_times()
            self.costs.learn(taken_s)
            if trace is None or trace.is_measured:
                continue
            if call_times:
                trace.learn_calls(call_times)
            lineage, seconds = trace.step.lineage, recording.lineage.seconds
            if len(seconds) == len(lineage.seconds):
                trace.learn(replace(trace.step, lineage=lineage.with_seconds(seconds)))
                trace.is_measured = trace.num_seen > 1  # in its first forward a kernel is loaded, or chosen among several
        self._timed.clear()


_retired = set[OffloadWindow]()
"""Windows that still hold host memory: a graph needs it, or a copy."""


def _settle_retired() -> None:
    for window in tuple(_retired):
        window.settle()
        if window.arena.held_bytes == 0:
            _retired.discard(window)


_State = TypeVar("_State", bound=TagState)


class States(dict[str, _State]):
    def __init__(self, make: Callable[[str], _State]) -> None:
        super().__init__()
        self._make = make
        self._lock = threading.RLock()

    def open(self, tag: str) -> _State:
        _settle_retired()
        with self._lock:
            found = self.get(tag)
            return self.setdefault(tag, self._make(tag)) if found is None else found

    def forget(self, tag: str) -> None:
        with self._lock:
            state = self.pop(tag, None)
        if state is not None:
            state.retire()
        _settle_retired()


offload_states = States(OffloadState)
remat_states = States(RematState)
