"""The sequences of saves, and of ops, that a tag has seen, and what was learned about each.

A *trace* is the sequence of saves of one forward, with learned facts: which storages others keep alive, in which order the
backward asks for them, how much else is on the device at each such moment. A forward follows the trace that has begun alike
(`Follower`), and goes by its plan. `OpTrace` knows the ops of a recorded forward, `Capture` a forward that a schedule is made
from.
"""

from __future__ import annotations

import functools
import operator
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from memkit.activations.saved.records import Handle
from memkit.core import torch_private
from memkit.core.kept import KeptHandle
from memkit.core.tensors import Geometry
from memkit.core.torch_state import is_saved_by_compiled_code
from memkit.plan import Action, DTRScore, ModuleCall, Plan, RegionPlanner, RematPlanner, Step, plan_ratio
from memkit.plan.ratio import Forecast
from memkit.profile import MemoryReport, SavedCategory
from memkit.recording.module_calls import Aftermath, NotedCall, SpanCall, span_calls
from memkit.recording.recording import Recording, names_of, step_of

NO_VALUE = -1  # the number of a tensor that always stays: too small, a parameter, the caller's


@dataclass(slots=True)
class SeenSave:
    shape: torch.Size | None  # None for a tensor that is not told from others: one of a class of its own, or without a shape
    dtype: torch.dtype | None
    value: int
    geometry: Geometry | None
    num_bytes: int
    is_written: bool  # the storage has been written when it is saved: see [Note: saved before it is written]
    node: int  # the number of the saving node, from the first one on: equal for tensors saved at once
    num_values: int
    before: int  # the value that the same storage was saved as before, at the first save of this one; else `NO_VALUE`
    seen_bytes: int

    def is_like(self, tensor: Tensor, *, of_any_size: bool = False) -> bool:
        kind, shape = type(tensor), self.shape
        if (kind is not Tensor and kind is not nn.Parameter) or tensor.is_nested:
            return shape is None
        is_as_large = tensor.shape == shape or (of_any_size and shape is not None and tensor.dim() == len(shape))
        return is_as_large and tensor.dtype is self.dtype

    def is_alike(self, other: SeenSave) -> bool:
        return _unsized(self) == _unsized(other) and (self.shape is None) == (other.shape is None)


_unsized = operator.attrgetter("dtype", "value", "is_written", "node", "num_values", "before")
_Planned = TypeVar("_Planned")
_DIGITS = re.compile(r"\d+")


@dataclass(eq=False, slots=True)
class OpTrace:
    step: Step
    names: dict[int, tuple[str, str]]
    calls: tuple[ModuleCall, ...] = ()
    modules: tuple[weakref.ref[nn.Module], ...] = ()
    spans: tuple[SpanCall, ...] = ()
    num_noted: int = 0
    num_seen: int = 1
    is_measured: bool = False
    has_order: bool = False
    rewritten: frozenset[int] = frozenset()  # roots that were written to before that backward had ended
    region_planner: RegionPlanner | None = None
    _planner: RematPlanner | None = None
    _regions: dict[tuple[int | None, int], Any] = field(default_factory=dict)
    _plans: dict[tuple[int, DTRScore], Plan] = field(default_factory=dict)

    def planner(self, score: DTRScore) -> RematPlanner:
        if self._planner is None or self._planner.score != score:
            self._planner = RematPlanner(self.step, score, lambda value: self.names.get(value, ("", "")))
        return self._planner

    def plan(self, budget_bytes: int, score: DTRScore) -> Plan:
        key = (budget_bytes, score)
        if key not in self._plans:
            self._plans[key] = self.planner(score).plan(budget_bytes)
        return self._plans[key]

    def regions(self, of_ops: Plan, plan: Callable[[], _Planned]) -> _Planned:
        key = of_ops.budget_bytes, of_ops.predicted_peak_bytes
        if key not in self._regions:
            self._regions[key] = plan()
        found: _Planned = self._regions[key]
        return found

    def forget_regions(self) -> None:
        self._regions.clear()

    def note_calls(self, noted: Sequence[NotedCall], recording: Recording) -> None:
        known_s = {(call.name, call.number): call.device_s for call in self.calls}
        aftermath = Aftermath(recording, noted)
        planned = (call.as_planned(aftermath) for call in noted)
        calls = tuple(replace(call, device_s=known_s.get((call.name, call.number), 0.0)) for call in planned)
        modules, spans = tuple(call.module for call in noted), span_calls(noted, aftermath)
        self._regions.clear()
        self.calls, self.modules, self.spans = calls, modules, spans  # set together, so that they match after an interrupt
        self.num_noted += 1

    def learn_calls(self, taken_s: Mapping[int, float]) -> None:
        alike = dict[Any, list[float]]()
        kinds = [  # equal for a model's blocks, which take as long
            (type(module()), _DIGITS.sub("*", call.name), call.shapes, call.saves[1] - call.saves[0])
            for call, module in zip(self.calls, self.modules, strict=True)
        ]
        for place, seconds in taken_s.items():
            alike.setdefault(kinds[place], []).append(seconds)
        medians_s = {kind: median(found) for kind, found in alike.items()}
        self.calls = tuple(
            replace(call, device_s=medians_s.get(kind, call.device_s)) for call, kind in zip(self.calls, kinds, strict=True)
        )
        self._regions.clear()

    def learn_order(self, uses: tuple[int, ...], use_ends: tuple[int, ...], rewritten_bytes: Mapping[int, int]) -> None:
        retained_bytes = {**self.step.retained_bytes, **rewritten_bytes}
        self.learn(replace(self.step, uses=uses, use_ends=use_ends, retained_bytes=retained_bytes))
        self.has_order, self.rewritten = True, frozenset(rewritten_bytes)

    def learn(self, step: Step) -> None:
        self._plans.clear()
        self._regions.clear()
        self.step, self._planner = step, None


MAX_TRACES = 16
_MAX_STRANGERS = 8
_MAX_AWAITED = 4
STRANGER = -1  # the place of a save that a report has not foretold, and that is let pass


class SaveKey(NamedTuple):
    """What a save looks like: saves with equal keys in equal places are taken for the same."""

    num_bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    value: int = -1
    num_ops: int = 0
    mark: Action | None = None


@dataclass(eq=False, slots=True)
class Trace:
    keys: tuple[SaveKey, ...]
    funcs: Sequence[Any] = ()
    ops: OpTrace | None = None
    held: set[int] = field(default_factory=set)  # saves whose storage others keep alive: to move them frees nothing
    order: tuple[int, ...] | None = None  # the backward's order of first requests; None until a whole backward was seen
    working_bytes: tuple[int, ...] = ()  # for each place in that order, the other bytes on the device at that moment
    requests: tuple[tuple[int, ...], ...] | None = None  # for each backward of a forward: the value of each request
    seen: tuple[SeenSave, ...] | None = None  # all that the hooks were given, if known: later forwards may follow a schedule
    noted: tuple[SeenSave, ...] = ()  # those of its last forward decided save by save: what came once gets no schedule
    seen_under: object = None  # the arguments that `seen` depends on; None to look again
    schedule: tuple[object, Any] | None = None
    num_awaited: int | None = None  # forwards to see whole, with no schedule, once one left another's schedule for it
    was_come_to: bool = False  # a forward has come to it so, and its backward was not seen as one of its own
    is_report: bool = False  # from a report, which does not know all saves (large buffers, frozen casts): strangers pass
    learned: Any = None  # facts for the room that has planned such steps: they are no part of the sequence
    is_worth_a_plan: bool = True  # it may come again: a model that takes another path each time is not planned each time
    others_bytes: Sequence[int] = ()  # its saves at a size with other proportions (two lengths): some of all leave
    _plan: tuple[tuple[object, ...], Plan] | None = None

    def await_whole(self) -> None:
        """Look at the next forwards whole, since one has come here from another's schedule, if this trace may come again."""
        if self.num_awaited is None and self.seen is None and (self.requests is not None or self.was_come_to):
            self.num_awaited = _MAX_AWAITED
        self.was_come_to = True

    def await_once(self) -> bool:
        if not self.num_awaited or self.seen is not None:
            return False
        self.num_awaited -= 1
        return True

    @property
    def has_marks(self) -> bool:
        return any(key.mark is not None for key in self.keys)

    @property
    def num_noted(self) -> int:
        return 0 if self.ops is None else self.ops.num_noted

    def plan(self, ratio: float, window_bytes: int | None) -> Plan:
        """Return the kept and moved values. A window of None is twice the largest storage."""
        asked = (ratio, window_bytes, len(self.held), not self.others_bytes)  # `held` only grows
        if self._plan is None or self._plan[0] != asked:  # a schedule may ask for another ratio each time
            sizes = [key.num_bytes for key in self.keys]
            largest = max((size for index, size in enumerate(sizes) if index not in self.held), default=0)
            window = 2 * largest if window_bytes is None else window_bytes
            held, (total, other_total) = frozenset(self.held), map(sum, (sizes, self.others_bytes))
            weights = [own / total + other / other_total for own, other in zip(sizes, self.others_bytes, strict=False)]
            self._plan = (asked, plan_ratio(sizes, ratio, window_bytes=window, held=held, weights=weights))
        return self._plan[1]

    def forecast(self, plan: Plan | None, limit_bytes: int) -> Forecast | None:
        if self.order is None or not self.working_bytes:
            return None
        sizes_bytes = [self.keys[index].num_bytes for index in self.order]
        stays = [plan is not None and plan.saves[index].action is Action.KEEP for index in self.order]
        return Forecast(sizes_bytes, self.working_bytes, stays, limit_bytes=limit_bytes)


def trace_of(report: MemoryReport, min_bytes: int) -> Trace:
    saved = [
        record
        for record in report.saved
        if record.storage_bytes >= min_bytes and record.category is not SavedCategory.PARAM_CAST
    ]
    asked = [index for index, record in enumerate(saved) if record.needed_position is not None]
    order = sorted(asked, key=lambda index: saved[index].needed_position or 0)
    return Trace(
        keys=tuple(SaveKey(record.storage_bytes, record.shapes[0], record.dtype) for record in saved),
        held={index for index, record in enumerate(saved) if record.category is SavedCategory.INPUT},
        order=tuple(order) if len(order) == len(saved) else None,
        is_report=True,
    )


class Traces:
    def __init__(self) -> None:
        self._known: list[Trace] = []
        self._after: dict[tuple[Trace | None, Trace], Trace] = {}  # by the last two, or None and the last: what came next
        self._before: Trace | None = None

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Trace]:
        return iter(self._known)

    @property
    def latest(self) -> Trace | None:
        return self._known[0] if self._known else None

    @property
    def expected(self) -> Trace | None:
        last = self.latest
        return None if last is None else self._after.get((self._before, last)) or self._after.get((None, last))

    def follow(self, trace: Trace) -> None:
        last = self.latest
        if last is not None:
            self._after[self._before, last] = self._after[None, last] = trace
        self.add(trace)
        self._before = last

    def has_report(self) -> bool:
        return any(trace.is_report for trace in self._known)

    def add(self, trace: Trace) -> None:
        if trace in self._known:
            self._known.remove(trace)
        self._known.insert(0, trace)
        forgotten = self._known[MAX_TRACES:]
        if forgotten:
            self._after = {pair: after for pair, after in self._after.items() if not {*pair, after}.intersection(forgotten)}
            del self._known[MAX_TRACES:]

    def learn(
        self, follower: Follower, recording: Recording, saves: Sequence[int], nodes: Sequence[int], calls: Sequence[NotedCall]
    ) -> Trace:
        trace = self.find(follower.keys, recording.funcs)
        if trace is None:
            marks = {key.value: key.mark for key in follower.keys}  # marks given before the save distinguish traces
            ops = OpTrace(step_of(recording, saves, nodes, marks), names_of(recording, dict.fromkeys(saves)))
            trace = Trace(keys=tuple(follower.keys), funcs=recording.funcs, ops=ops, is_worth_a_plan=not self._known)
        elif trace.ops is not None:
            trace.ops.num_seen += 1
            trace.is_worth_a_plan = True
        self.add(trace)
        if trace.ops is not None and calls:
            trace.ops.note_calls(calls, recording)
        return trace

    def have_noted(self, seen: Sequence[SeenSave]) -> bool:
        known = (trace.noted for trace in self._known if len(trace.noted) == len(seen))
        return any(all(map(SeenSave.is_alike, noted, seen)) for noted in known)

    def drop_report(self) -> None:
        self._known = [trace for trace in self._known if not trace.is_report]

    def beginning_with(self, keys: Sequence[SaveKey], funcs: Sequence[Any] = ()) -> Trace | None:
        for trace in self._known:
            if trace.is_worth_a_plan and _begins(trace.keys, keys) and _begins(trace.funcs, funcs):
                return trace
        return None

    def find(self, keys: Sequence[SaveKey], funcs: Sequence[Any] = ()) -> Trace | None:
        for trace in self._known:
            is_as_long = len(trace.keys) == len(keys) and len(trace.funcs) == len(funcs)
            if is_as_long and not trace.is_report and _begins(trace.keys, keys) and _begins(trace.funcs, funcs):
                return trace
        return None


def _begins(whole: Sequence[Any], part: Sequence[Any]) -> bool:
    return len(part) <= len(whole) and all(map(operator.eq, whole, part))


def key_of(tensor: Tensor, storage: torch.UntypedStorage) -> SaveKey:
    return SaveKey(storage.nbytes(), tuple(tensor.shape), _name_of(tensor.dtype))


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Follower:
    def __init__(self, traces: Traces) -> None:
        self.keys: list[SaveKey] = []
        self.trace = traces.beginning_with(())
        self.has_changed = False
        self.num_strangers = 0
        self._traces = traces
        self._place = 0
        self._num_matched = 0

    def note(self, key: SaveKey, funcs: Sequence[Any] = ()) -> int | None:
        """Note a save and its ops; return its place in the followed trace, `STRANGER` if a report has none."""
        keys, trace, place = self.keys, self.trace, self._place
        if trace is None:
            if keys:
                keys.append(key)
                return None
        elif place < len(trace.keys) and trace.keys[place] == key:
            start, self._num_matched = self._num_matched, len(funcs)
            if trace.funcs[start : len(funcs)] == funcs[start:]:
                keys.append(key)
                self._place = place + 1
                return place
        keys.append(key)
        other = self._traces.beginning_with(keys, funcs)
        may_be_stranger = trace is not None and trace.is_report and place < len(trace.keys)
        if other is None and may_be_stranger and self.num_strangers < _MAX_STRANGERS:
            self.num_strangers += 1
            return STRANGER
        self.has_changed = other is not None and len(keys) > 1
        self.trace, self._place, self.num_strangers = other, len(keys), 0
        self._num_matched = len(funcs)
        return None if other is None else len(keys) - 1

    def pass_over(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        trace, place = self.trace, self._place
        if trace is not None and trace.is_report and place in trace.held and trace.keys[place] == key_of(tensor, storage):
            self._place += 1

    def give_up(self) -> None:
        """Compare the forward with no trace from here on: not all of its saves were noted."""
        self.keys.append(SaveKey(0))
        self.trace = None

    @property
    def is_whole(self) -> bool:
        return self.trace is not None and self._place == len(self.trace.keys)


class Capture:
    def __init__(self) -> None:
        self.saves: list[SeenSave] = []
        self._first_node = 0
        self._numbers = set[int]()
        self._values: dict[int, tuple[int, Any]] = {}  # by address, the last value of a saved storage, and the storage
        self.is_whole = True  # all movable tensors were noted, and can be told from others

    def note(self, tensor: Tensor, packed: KeptHandle, num_values: int, seen_bytes: int) -> None:
        kind = type(packed)
        value = packed.record.index if isinstance(packed, Handle) and kind is Handle else NO_VALUE
        is_plain = self.add(tensor, value, num_values, seen_bytes)
        if kind is not KeptHandle and not (value != NO_VALUE and is_plain):
            self.is_whole = False

    def add(self, tensor: Tensor, value: int, num_values: int, seen_bytes: int) -> bool:
        geometry, num_bytes, before = None, 0, NO_VALUE
        if value != NO_VALUE:
            storage = tensor.untyped_storage()
            geometry, num_bytes = Geometry.of(tensor), storage.nbytes()
            if value not in self._numbers:
                self._numbers.add(value)
                address = torch_private.storage_address(storage)
                number, original = self._values.get(address, (NO_VALUE, None))
                before = number if original is not None and original() is storage else NO_VALUE
                self._values[address] = value, weakref.ref(storage)
        is_plain = (type(tensor) is Tensor or type(tensor) is nn.Parameter) and not tensor.is_nested
        shape, dtype = (tensor.shape, tensor.dtype) if is_plain else (None, None)
        is_written = not is_plain or tensor.requires_grad or is_saved_by_compiled_code()
        number = torch_private.node_number()
        if not self.saves:
            self._first_node = number
        node = number - self._first_node
        self.saves.append(SeenSave(shape, dtype, value, geometry, num_bytes, is_written, node, num_values, before, seen_bytes))
        return is_plain
