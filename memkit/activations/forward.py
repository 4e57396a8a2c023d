"""Which saves follow which, forward and backward: what one forward has seen, and what earlier ones have taught.

A *trace* is the sequence of saves of one forward, with what was learned about it: which storages somebody else keeps alive, in
which order the backward asks for them, and how much else is on the device at each such moment. A *forward* is one under a
context, with the backwards through it. It follows the trace that has begun alike, and decides by its plan; where none has, it
keeps the ratio as it goes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from memkit import torch_private
from memkit.activations.counts import Counts
from memkit.activations.eligibility import counted_by
from memkit.activations.records import Record
from memkit.plan import Action, Forecast, Plan, RatioSoFar, plan_ratio
from memkit.profile import MemoryReport, SavedCategory
from memkit.storages import storage_key

_LOGGER = logging.getLogger(__name__)
_MAX_TRACES = 16
_MAX_STRANGERS = 8


class SaveKey(NamedTuple):
    """What the first save of a storage looks like: saves with equal keys in equal places are taken for the same."""

    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(eq=False, slots=True)
class Trace:
    """A sequence of first saves, and what is known about it."""

    keys: tuple[SaveKey, ...]
    held: set[int] = field(default_factory=set)
    """Saves whose storage somebody else keeps alive: to move them frees nothing."""
    order: tuple[int, ...] | None = None
    """In which order the backward asks for them first; None until a whole backward was seen."""
    working_bytes: tuple[int, ...] = ()
    """For each place in that order, what else was allocated on the device at that moment."""
    _plans: dict[tuple[float, int | None, int], Plan] = field(default_factory=dict)
    is_report: bool = False
    """Made from a report, which does not know all that a context sees (large buffers, frozen casts): strangers are let pass."""

    def plan(self, ratio: float, window_bytes: int | None) -> Plan:
        """Return what to keep and what to move. A window of None is twice the largest storage."""
        asked = (ratio, window_bytes, len(self.held))  # `held` only grows
        if asked not in self._plans:
            sizes = [key.num_bytes for key in self.keys]
            largest = max((size for index, size in enumerate(sizes) if index not in self.held), default=0)
            window = 2 * largest if window_bytes is None else window_bytes
            self._plans.clear()  # a schedule may ask for another ratio each time
            self._plans[asked] = plan_ratio(sizes, ratio, window_bytes=window, held=frozenset(self.held))
        return self._plans[asked]


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


class Traces:
    """The traces of one tag on one device, the last one followed first."""

    def __init__(self) -> None:
        self._known: list[Trace] = []

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Trace]:
        return iter(self._known)

    def has_report(self) -> bool:
        """Tell whether there is a trace that was only foretold."""
        return any(trace.is_report for trace in self._known)

    def add(self, trace: Trace) -> None:
        """Put a trace first; forget the one that was not followed for the longest time if there are many."""
        if trace in self._known:
            self._known.remove(trace)
        self._known.insert(0, trace)
        del self._known[_MAX_TRACES:]

    def drop_report(self) -> None:
        """Forget what was only foretold."""
        self._known = [trace for trace in self._known if not trace.is_report]

    def beginning_with(self, keys: Sequence[SaveKey]) -> Trace | None:
        """Return the trace that was followed last among those that begin like this."""
        return next((trace for trace in self._known if trace.keys[: len(keys)] == tuple(keys)), None)

    def learned(self, keys: Sequence[SaveKey]) -> Trace | None:
        """Return the trace of exactly these saves that an earlier forward has left."""
        return next((trace for trace in self._known if trace.keys == tuple(keys) and not trace.is_report), None)


class Forward:
    """One forward: what it saved, what its trace says about each save, and how far its backward has come."""

    def __init__(self, traces: Traces, *, ratio: float, window_bytes: int | None, counts: Counts) -> None:
        self.counts = counts
        self.ratio = ratio
        self.so_far = RatioSoFar(ratio, window_bytes)
        """Decides, and counts what leaves and what stays."""
        self.is_forward = True
        self.is_broken = False
        """Whether an interrupt may have left it half noted: then nothing more is done for it, or learned from it."""
        self.unwritten: list[tuple[Record, int]] = []
        """Records that are about to leave, and the node that saves them."""
        self._traces = traces
        self._window_bytes = window_bytes
        self._keys: list[SaveKey] = []
        self._records: list[weakref.ref[Record] | None] = []
        """For each key its record, or None where the save was left alone."""
        self._by_storage: dict[tuple[int, int, int], tuple[weakref.ref[Tensor], weakref.ref[Record]]] = {}
        self._held: set[int] = set()
        self._trace: Trace | None = None
        self._plan: Plan | None = None
        self._place = 0
        self._num_strangers = 0
        self._take(traces.beginning_with(()), place=0)
        self.task = -1
        """Autograd's number of the backward that asks for records now; -1 before the first."""
        self._order: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self._used: dict[int, int] = {}
        """What this backward has asked for, in the order of first requests, and the working bytes then."""
        self._cursor = 0
        self._forecast: Forecast | None = None

    # Forward

    def find(self, storage: torch.UntypedStorage, tensor: Tensor) -> Record | None:
        """Return the record of a tensor's storage at its version, if this forward has saved that already."""
        root = counted_by(tensor)
        found = self._by_storage.get((storage_key(storage), id(root), torch_private.version_of(tensor)))
        if found is None or found[0]() is not root:
            return None
        record = found[1]()
        return record if record is not None and record.original() is storage and record.num_handles > 0 else None

    def decide(self, key: SaveKey, asked: Action | None = None) -> Action | None:
        """Return what to do with the next first save; None to leave it alone, because to move it would free nothing.

        Args:
            asked: what somebody else has said on it.
        """
        if self.is_broken:
            return None
        index, place = len(self._keys), self._follow(key)
        self._keys.append(key)
        self._records.append(None)
        if asked is None and (place is _STRANGER or (self._trace is not None and place in self._trace.held)):
            self._held.add(index)
            return None
        return self.so_far.decide(key.num_bytes, place, asked)

    def pass_over(self, key: SaveKey) -> None:
        """Take note of a save that is left alone because of whose storage it is, which a report may have foretold."""
        trace = self._trace
        if trace is not None and self.follows_report and self._place in trace.held and trace.keys[self._place] == key:
            self._place += 1

    @property
    def follows_report(self) -> bool:
        """Whether a report foretells what is saved next."""
        return self._trace is not None and self._trace.is_report

    def _follow(self, key: SaveKey) -> int | None:
        """Return the place of a save in the trace that is followed; None without one, `_STRANGER` if it is not in there."""
        trace = self._trace
        if trace is None and self._keys:
            return None
        if trace is None or self._place == len(trace.keys) or trace.keys[self._place] != key:
            other = self._traces.beginning_with((*self._keys, key))
            if other is not None:
                if self._keys:
                    _LOGGER.debug("save %d is not that of the plan: another one is followed", len(self._keys))
                self._take(other, place=len(self._keys))
            elif (
                trace is not None and trace.is_report and self._place < len(trace.keys) and self._num_strangers < _MAX_STRANGERS
            ):
                self._num_strangers += 1
                return _STRANGER
            else:
                self._take(None, place=0)
                return None
        self._place += 1
        return self._place - 1

    def _take(self, trace: Trace | None, *, place: int) -> None:
        self._trace, self._place, self._num_strangers = trace, place, 0
        self._plan = None if trace is None else trace.plan(self.ratio, self._window_bytes)
        self.so_far.follow(self._plan, is_late=place > 0)

    def note_record(self, record: Record, storage: torch.UntypedStorage, tensor: Tensor) -> None:
        """Remember the record of the last first save."""
        root, reference = counted_by(tensor), weakref.ref(record)
        self._records[-1] = reference
        self._by_storage[storage_key(storage), id(root), torch_private.version_of(tensor)] = (weakref.ref(root), reference)

    @property
    def num_saves(self) -> int:
        """How many first saves it has seen."""
        return len(self._keys)

    def finish_forward(self, *, learn: bool) -> bool:
        """End the forward; file what it saved as a trace, unless it broke off. Tells whether a report was of no use."""
        assert self.is_forward
        self.is_forward = False
        self.counts.window_bytes = max(self.counts.window_bytes, self.so_far.window_bytes)
        if not learn or not self._keys or self.is_broken:
            return False
        trace = self._trace
        is_whole = trace is not None and self._place == len(trace.keys)
        was_misled = not (is_whole and trace is not None) and self._traces.has_report()
        if trace is None or not is_whole or trace.is_report:
            is_same = trace is not None and is_whole and self._num_strangers == 0 and len(trace.keys) == len(self._keys)
            order = trace.order if trace is not None and is_same else None
            held = set() if was_misled else set(self._held)  # a report of something else knows nothing about what is held
            trace = self._traces.learned(self._keys) or Trace(keys=tuple(self._keys), held=held, order=order)
            _LOGGER.debug("a new forward: %s", trace.plan(self.ratio, self._window_bytes))
        self._trace = trace
        self._traces.drop_report()
        self._traces.add(trace)
        return was_misled

    def break_off(self) -> None:
        """Something was broken off that may have had to do with this one: let what is left of it come as it may."""
        self.is_broken = True
        self._order = ()
        self._forecast = None

    def records(self) -> Iterator[Record]:
        """Yield the records that a graph may still ask for."""
        for reference in self._records:
            record = None if reference is None else reference()
            if record is not None and record.num_handles > 0:
                yield record

    def note_held(self, record: Record) -> None:
        """Learn that somebody else keeps a storage alive: from the next forward on it is left alone."""
        if self._trace is not None:
            self._trace.held.add(record.index)

    # Backward

    def begin_backward(self, task: int) -> None:
        """Start over: another backward asks, whose order is the last one seen, or the reverse of the saves."""
        self.task = task
        order = None if self._trace is None or len(self._trace.keys) != len(self._keys) else self._trace.order
        if self.is_broken:
            order = ()
        self._order = tuple(range(len(self._keys)))[::-1] if order is None else order
        self._places = {index: place for place, index in enumerate(self._order)}
        self._used = {}
        self._cursor = 0
        self._forecast = self._foresee()

    def is_used(self, record: Record) -> bool:
        """Tell whether this backward has asked for a record already."""
        return record.index in self._used

    def note_use(self, record: Record, working_bytes: int) -> None:
        """Note that the backward asks for a record for the first time.

        Args:
            working_bytes: what is allocated beside the records.
        """
        self._used[record.index] = working_bytes

    def place_of(self, record: Record) -> int:
        """Return the place of a record in the order of the backward."""
        return self._places.get(record.index, len(self._order))

    def upcoming(self) -> Iterator[Record]:
        """Yield the records that the backward will ask for next; `advance` says that one needs no more thought."""
        while self._cursor < len(self._order):
            reference = self._records[self._order[self._cursor]]
            record = None if reference is None else reference()
            if record is None or record.num_handles == 0 or record.index in self._used:
                self._cursor += 1
            else:
                yield record

    def advance(self) -> None:
        """Go on behind the record that `upcoming` yielded last."""
        self._cursor += 1

    @property
    def num_used(self) -> int:
        """How many records this backward has asked for."""
        return len(self._used)

    @property
    def forecast(self) -> Forecast | None:
        """How full the device will be in this backward; None unless one like it was seen."""
        return self._forecast

    def _foresee(self) -> Forecast | None:
        trace = None if self.is_broken else self._trace
        if trace is None or trace.order is None or not trace.working_bytes or len(trace.keys) != len(self._keys):
            return None
        sizes = [trace.keys[index].num_bytes for index in trace.order]
        stays = [self._plan is not None and self._plan.saves[index].action is Action.KEEP for index in trace.order]
        return Forecast(
            sizes, trace.working_bytes, stays, limit_bytes=self.so_far.limit_bytes, slack_bytes=self.so_far.window_bytes // 8
        )

    def end_backward(self) -> None:
        """Learn the order of a whole backward."""
        trace = None if self.is_broken else self._trace
        if trace is not None and len(trace.keys) == len(self._keys) and self._used and next(self.records(), None) is None:
            trace.order, trace.working_bytes = tuple(self._used), tuple(self._used.values())


_STRANGER = -1
