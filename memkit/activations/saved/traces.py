"""Which forward is like which: the sequences of saves, and of ops, that a tag has seen, and what was learned about each.

A *trace* is the sequence of saves of one forward, with what was learned about it: which storages others keep alive, in which
order the backward asks for them, how much else is on the device at each such moment. A forward follows the trace that has begun
alike (`Follower`), and goes by its plan.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkit.activations.saved.op_trace import OpTrace
from memkit.activations.saved.seen import SeenSave
from memkit.plan import Action, Plan, plan_ratio
from memkit.profile import MemoryReport, SavedCategory
from memkit.recording.module_calls import NotedCall
from memkit.recording.recording import Recording, names_of, step_of

_MAX_TRACES = 16
_MAX_STRANGERS = 8
_MAX_AWAITED = 4
_DTYPE_NAMES: dict[torch.dtype, str] = {}
STRANGER = -1
"""The place of a save that a report has not foretold, and that is let pass."""


class SaveKey(NamedTuple):
    """What a save looks like: saves with equal keys in equal places are taken for the same."""

    num_bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    value: int = -1
    """Which value it is, where ops are recorded: that says more than a shape."""
    num_ops: int = 0
    """How many ops were recorded before."""
    mark: Action | None = None
    """What the user has asked to do with it, if that was said by then."""


@dataclass(eq=False, slots=True)
class Trace:
    """One sequence of saves, and of the ops among them where these are recorded, with what is known about it."""

    keys: tuple[SaveKey, ...]
    funcs: Sequence[Any] = ()
    ops: OpTrace | None = None
    """What is known of the ops; None where they are not recorded."""
    held: set[int] = field(default_factory=set)
    """Saves whose storage others keep alive: to move them frees nothing."""
    order: tuple[int, ...] | None = None
    """In which order the backward asks for them first; None until a whole backward was seen."""
    working_bytes: tuple[int, ...] = ()
    """For each place in that order, what else was allocated on the device at that moment."""
    requests: tuple[tuple[int, ...], ...] | None = None
    """For each backward that a forward takes, the value of each request, perhaps again."""
    seen: tuple[SeenSave, ...] | None = None
    """All that the hooks were given, where that is known: later forwards may follow a schedule."""
    seen_under: object = None
    """What was asked for then, on which that depends; None where it is to be looked at again."""
    paused: tuple[int, ...] = ()
    """Before which of these saves a region of `no_offload` began, or ended."""
    schedule: tuple[object, Any] | None = None
    """What it was made for, and that."""
    num_awaited: int | None = None
    """Where forwards came to it from the schedule of another that begins alike: for how many more, at most, none follows a
    schedule, so that it is looked at whole."""
    was_come_to: bool = False
    """Whether a forward has come to it so, and its backward was not seen as one of its own."""
    is_report: bool = False
    """Made from a report, which does not know all that a context sees (large buffers, frozen casts): strangers are let pass."""
    learned: Any = None
    """What else is known of such steps, for the room that has planned them: it is no part of the sequence."""
    is_worth_a_plan: bool = True
    """Whether it may come again: a model that takes another path each time is not planned each time."""
    _plan: tuple[tuple[float, int | None, int], Plan] | None = None

    def await_whole(self) -> None:
        """A forward came to this one from the schedule of another: have the next ones looked at, if it may come again. That is
        known of one whose backward was seen, and of one to which a forward came so before."""
        if self.num_awaited is None and self.seen is None and (self.requests is not None or self.was_come_to):
            self.num_awaited = _MAX_AWAITED
        self.was_come_to = True

    def is_awaited(self) -> bool:
        """Tell whether a forward that begins now is to be looked at, since it may be this one."""
        if not self.num_awaited or self.seen is not None:
            return False
        self.num_awaited -= 1
        return True

    @property
    def has_marks(self) -> bool:
        """Whether the user has asked for anything to be done with what is saved."""
        return any(key.mark is not None for key in self.keys)

    @property
    def num_noted(self) -> int:
        """In how many forwards the calls of modules were noted."""
        return 0 if self.ops is None else self.ops.num_noted

    def plan(self, ratio: float, window_bytes: int | None) -> Plan:
        """Return what to keep and what to move. A window of None is twice the largest storage."""
        asked = (ratio, window_bytes, len(self.held))  # `held` only grows
        if self._plan is None or self._plan[0] != asked:  # a schedule may ask for another ratio each time
            sizes = [key.num_bytes for key in self.keys]
            largest = max((size for index, size in enumerate(sizes) if index not in self.held), default=0)
            window = 2 * largest if window_bytes is None else window_bytes
            self._plan = (asked, plan_ratio(sizes, ratio, window_bytes=window, held=frozenset(self.held)))
        return self._plan[1]


def trace_of(report: MemoryReport, min_bytes: int) -> Trace:
    """Return the trace that a profile foretells."""
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


def trace_of_ops(
    recording: Recording, keys: Sequence[SaveKey], saves: Sequence[int], nodes: Sequence[int], *, is_first: bool
) -> Trace:
    """Return the trace that a recorded forward leaves behind.

    Args:
        recording: its ops.
        keys: its saves.
        saves: the value of each.
        nodes: the number of the node of the graph that made each.
        is_first: whether no trace was known under the tag.
    """
    marks = {key.value: key.mark for key in keys}  # those given before the save: they tell one trace from another
    step = step_of(recording, saves, nodes, marks)
    names = names_of(recording, dict.fromkeys(saves))
    return Trace(keys=tuple(keys), funcs=recording.funcs, ops=OpTrace(step, names), is_worth_a_plan=is_first)


class Traces:
    """The traces of one tag, the last one followed first."""

    def __init__(self) -> None:
        self._known: list[Trace] = []
        self._after: dict[tuple[Trace | None, Trace], Trace] = {}
        """For each two in a row, which one came next the last time; and the same for each alone, behind None."""
        self._before: Trace | None = None
        """What was followed ahead of the last one."""

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Trace]:
        return iter(self._known)

    @property
    def latest(self) -> Trace | None:
        """The last one followed."""
        return self._known[0] if self._known else None

    @property
    def expected(self) -> Trace | None:
        """The one that came next when the last two were followed before, or else the last one."""
        last = self.latest
        return None if last is None else self._after.get((self._before, last)) or self._after.get((None, last))

    def follow(self, trace: Trace) -> None:
        """A forward has followed a trace."""
        last = self.latest
        if last is not None:
            self._after[self._before, last] = self._after[None, last] = trace
        self.add(trace)
        self._before = last

    def has_report(self) -> bool:
        """Tell whether there is a trace that was only foretold."""
        return any(trace.is_report for trace in self._known)

    def add(self, trace: Trace) -> None:
        """Put a trace first; forget the one that was not followed for the longest time if there are many."""
        if trace in self._known:
            self._known.remove(trace)
        self._known.insert(0, trace)
        forgotten = self._known[_MAX_TRACES:]
        if forgotten:
            self._after = {pair: after for pair, after in self._after.items() if not {*pair, after}.intersection(forgotten)}
            del self._known[_MAX_TRACES:]

    def learn(
        self,
        follower: Follower,
        recording: Recording,
        saves: Sequence[int],
        nodes: Sequence[int],
        calls: Sequence[NotedCall],
    ) -> Trace:
        """Return the trace of a recorded forward that is over, which is put first.

        Args:
            follower: how it went along those that were known.
            recording, saves, nodes: see `trace_of_ops`.
            calls: the calls of modules, if they were noted.
        """
        trace = follower.ended_as(recording.funcs)
        if trace is None:
            trace = trace_of_ops(recording, follower.keys, saves, nodes, is_first=not len(self))
        elif trace.ops is not None:
            trace.ops.num_seen += 1
            trace.is_worth_a_plan = True
        self.add(trace)
        if trace.ops is not None and calls:
            trace.ops.note_calls(calls, recording)
        return trace

    def drop_report(self) -> None:
        """Forget what was only foretold."""
        self._known = [trace for trace in self._known if not trace.is_report]

    def beginning_with(self, keys: Sequence[SaveKey], funcs: Sequence[Any] = ()) -> Trace | None:
        """Return the trace that was followed last among those that begin like this and may come again."""
        for trace in self._known:
            if trace.is_worth_a_plan and _begins(trace.keys, keys) and _begins(trace.funcs, funcs):
                return trace
        return None

    def find(self, keys: Sequence[SaveKey], funcs: Sequence[Any] = ()) -> Trace | None:
        """Return the trace of exactly these saves and ops that an earlier forward has left."""
        for trace in self._known:
            is_as_long = len(trace.keys) == len(keys) and len(trace.funcs) == len(funcs)
            if is_as_long and not trace.is_report and _begins(trace.keys, keys) and _begins(trace.funcs, funcs):
                return trace
        return None


def _begins(whole: Sequence[Any], part: Sequence[Any]) -> bool:
    return len(part) <= len(whole) and all(map(operator.eq, whole, part))


def _key_of(tensor: Tensor, storage: torch.UntypedStorage) -> SaveKey:
    dtype = tensor.dtype
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return SaveKey(storage.nbytes(), tuple(tensor.shape), name)


class Follower:
    """How one forward goes along the traces that are known."""

    def __init__(self, traces: Traces) -> None:
        self.keys: list[SaveKey] = []
        self.trace = traces.beginning_with(())
        """The one that it has followed so far, None if it is new."""
        self.has_changed = False
        """Whether it has left one trace for another."""
        self.num_strangers = 0
        self._traces = traces
        self._place = 0
        self._num_matched = 0

    def note_tensor(self, tensor: Tensor, storage: torch.UntypedStorage) -> int | None:
        """Note the next save where no ops are recorded: see `note`."""
        return self.note(_key_of(tensor, storage))

    def note(self, key: SaveKey, funcs: Sequence[Any] = ()) -> int | None:
        """Note the next save, and the ops up to it; return its place in the trace that is followed: None without one,
        `STRANGER` if a report does not know it."""
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
        """Take note of a save that is left alone because of whose storage it is, which a report may have foretold."""
        trace, place = self.trace, self._place
        if trace is not None and trace.is_report and place in trace.held and trace.keys[place] == _key_of(tensor, storage):
            self._place += 1

    def give_up(self) -> None:
        """Hold the forward against none from here on: not all that it has saved was noted."""
        self.keys.append(SaveKey(0))
        self.trace = None

    @property
    def is_whole(self) -> bool:
        """Whether it has come to the end of its trace."""
        return self.trace is not None and self._place == len(self.trace.keys)

    def ended_as(self, funcs: Sequence[Any] = ()) -> Trace | None:
        """Return the known trace that the whole forward was like."""
        trace = self.trace
        if trace is not None and not trace.is_report and len(trace.keys) == len(self.keys) and trace.funcs == funcs:
            return trace
        return self._traces.find(self.keys, funcs)
