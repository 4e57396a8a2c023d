"""`Forward`: one forward under a context and its backwards: its saves, and the order of their requests."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit.activations.saved.counts import Counts
from memkit.activations.saved.records import Handle, Record, SavedResidency
from memkit.core import torch_private
from memkit.core.tensors import counted_by
from memkit.plan import Action
from memkit.plan.ratio import Forecast

if TYPE_CHECKING:
    from memkit.activations.offloading.moving_stage import RatioDecider

Contents = tuple[int, int, int]
"""A key for a tensor's contents: the storage, the tensor that counts writes (one storage may have several), and their count."""


def contents_of(tensor: Tensor, storage: torch.UntypedStorage) -> Contents:
    """Return a key that is valid as long as the storage, and the tensor with its counter, are alive."""
    return torch_private.storage_address(storage), id(counted_by(tensor)), torch_private.version_of(tensor)


class NumberedSaves:
    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.is_forward = True
        self.task = -1
        self.by_number: dict[int, weakref.ref[Record]] = {}

    def record_of(self, value: int) -> Record | None:
        reference = self.by_number.get(value)
        record = None if reference is None else reference()
        return record if record is not None and record.num_handles > 0 else None

    def handle_of(self, value: int) -> Handle | None:
        record = self.record_of(value)
        if record is None or record.residency is SavedResidency.DROPPED:
            return None
        return next((handle for handle in record.live_handles() if handle.is_unchanged()), None)

    def records(self) -> Iterator[Record]:
        for value in list(self.by_number):
            record = self.record_of(value)
            if record is not None:
                yield record


class Forward(NumberedSaves):
    """The saves of one forward, each value once; where ops are recorded, only moved values (`RecordedForward.moving`)."""

    def __init__(self, share: RatioDecider, counts: Counts) -> None:
        self.share = share
        super().__init__(counts)
        self.is_broken = False
        """An interrupt may have left it half noted: then it does and teaches nothing more."""
        self.unwritten: list[tuple[Record, int]] = []
        self.forecast: Forecast | None = None
        self.known: dict[Contents, tuple[weakref.ref[Tensor], weakref.ref[Record]]] = {}
        """For saved contents, the tensor that counts their writes, and the record."""
        self.marks: dict[Contents, tuple[weakref.ref[Tensor], Action]] = {}
        self._order: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self.requests: list[int] = []
        self.backwards: list[tuple[int, ...]] = []
        self.is_spent = False
        """No backward is likely to ask for more: no requested value is left."""
        self.used: dict[int, int] = {}
        """The values that this backward has requested, in order, and the bytes beside the records then."""
        self.cursor = 0
        """Before this place in the order of the backward, no record needs to be fetched any more."""

    # Forward

    def look_up(self, storage: torch.UntypedStorage, tensor: Tensor) -> tuple[Contents, Tensor, Record | None]:
        base = torch_private.base_of(tensor)
        root = tensor if base is None else base
        contents = torch_private.storage_address(storage), id(root), torch_private.version_of(tensor)
        found = self.known.get(contents)
        record = found[1]() if found is not None and found[0]() is root else None
        is_here = record is not None and record.original() is storage and record.num_handles > 0
        return contents, root, record if is_here else None

    def note_record(self, record: Record, contents: Contents, root: Tensor, use_order: int) -> None:
        record.use_order = use_order
        self.by_number[record.index] = reference = weakref.ref(record)
        self.known[contents] = weakref.ref(root), reference

    def mark(self, storage: torch.UntypedStorage, tensor: Tensor, action: Action) -> None:
        self.marks[contents_of(tensor, storage)] = weakref.ref(counted_by(tensor)), action

    def marked(self, storage: torch.UntypedStorage, tensor: Tensor) -> Action | None:
        found = self.marks.get(contents_of(tensor, storage)) if self.marks else None
        return found[1] if found is not None and found[0]() is counted_by(tensor) else None

    def finish_forward(self, *, learn: bool) -> bool:
        """End the forward. With `learn`, file its saves as a trace. Return whether a followed report did not match."""
        assert self.is_forward
        self.is_forward = False
        self.counts.window_bytes = max(self.counts.window_bytes, self.share.window_bytes)
        return learn and not self.is_broken and self.share.finish()

    def break_off(self) -> None:
        """Stop following a known order, since an interrupt may have left this forward incomplete."""
        self.is_broken = True
        self._order = ()
        self.forecast = None

    def judge_waste(self) -> None:
        """Find moved storages that others hold beyond the forward, so that they stay in later steps."""
        trace = self.share.trace
        for record in self.records():
            if record.residency is SavedResidency.HOST and record.original() is not None:
                self.counts.wasted_bytes += record.num_bytes
                if trace is not None:
                    trace.held.add(record.index)

    # Backward

    def begin_backward(self, task: int) -> None:
        self.task = task
        self._order = () if self.is_broken else self.share.order()
        self._places = {value: place for place, value in enumerate(self._order)}
        self.used, self.requests, self.is_spent = {}, [], False
        self.cursor = 0
        self.forecast = None if self.is_broken else self.share.forecast()

    def place_of(self, record: Record) -> int:
        return self._places.get(record.index, len(self._order))

    def next_record(self) -> Record | None:
        order, records, used = self._order, self.by_number, self.used
        for cursor in range(self.cursor, len(order)):
            value = order[cursor]
            reference = None if value in used else records.get(value)
            record = None if reference is None else reference()
            if record is not None and record.num_handles > 0:
                self.cursor = cursor
                return record
        self.cursor = len(order)
        return None

    def end_backward(self) -> None:
        if self.is_broken or not self.used:
            return
        self.backwards.append(tuple(self.requests))
        left = {record.index for record in self.records()}
        self.is_spent = not left or left.isdisjoint(set().union(*self.backwards))
        if self.is_spent:
            self.share.learn(tuple(self.used), tuple(self.used.values()), tuple(self.backwards), is_whole=not left)
