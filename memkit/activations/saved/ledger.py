"""`Ledger`: every change of a saved storage's residency, and the copies that go with it.

The ledger makes each change safe; it decides nothing. The death of a handle or copy is noted at once, on any thread, and
handled in `Ledger.sweep`: a finalizer never issues a copy. After an exception at any line, `mend` derives totals and queues
anew from the records: see [Note: interrupts] in `memkit.core.interrupts`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit.activations.saved.records import ON_DEVICE, CopyReference, Handle, HandleReference, Record, SavedResidency, Unpacker
from memkit.core import torch_private
from memkit.core.kept import KeptHandle, nothing
from memkit.core.tensors import Geometry
from memkit.core.torch_state import NO_LABEL, label
from memkit.device.base import Device, Event, Stream
from memkit.transfer.arena import Arena
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes

if TYPE_CHECKING:
    from memkit.activations.saved.counts import Counts
    from memkit.activations.saved.forward import Forward


class Ledger:
    def __init__(self, device: Device, lanes: Lanes, arena: Arena) -> None:
        self.device = device
        self.arena = arena
        self.live_bytes = 0
        self.moving_bytes = 0
        """Of these, the bytes of records whose forward moves some: the others can only be dropped."""
        self.peak_live_bytes = 0
        self.records = set[Record]()
        self.deaths: deque[HandleReference | CopyReference] = deque()
        self.note_death = self.deaths.append
        self.backlog: deque[Record] = deque()
        """LEAVING records in the order of their copies. Those whose handles have died wait here for the copy."""
        self.coming: dict[Record, None] = {}
        """Records that are COMING, in the order of their copies."""
        self._lanes = lanes
        self.orphans: list[tuple[torch.UntypedStorage, Event, Stream]] = []
        """Storages that only a copy needs, which may be under way, and the stream that they go back to."""

    @property
    def num_records(self) -> int:
        return sum(record.num_handles > 0 for record in self.records)

    # Saving

    def open(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        unpacker: Unpacker,
        node: int,
        owner: Forward | None = None,
        index: int = -1,
    ) -> Handle:
        stream = self.device.current_stream()
        for older in self.backlog:
            if older.storage is storage and older.left is not None:  # it would be written to while the lane reads
                self.device.wait_event(stream, older.left.done)
        for waiting, done, _ in self.orphans:
            if waiting is storage:  # the same for a copy that nobody needs any more
                self.device.wait_event(stream, done)
        record = Record(self, storage, torch_private.version_of(tensor), stream, owner, index)
        handle = record.add_handle(tensor, unpacker, node)
        self.device.note_written(storage, record.version)
        self.records.add(record)
        self.enter(record, SavedResidency.DEVICE)
        return handle

    def add_handle(self, record: Record, tensor: Tensor, unpacker: Unpacker, node: int) -> Handle:
        handle = record.add_handle(tensor, unpacker, node)
        if record.residency not in (SavedResidency.DEVICE, SavedResidency.LEAVING):
            _let_go(handle)
            handle.sources = next(record.live_handles()).sources
        return handle

    # Leaving

    def leave(self, record: Record, storage: torch.UntypedStorage) -> None:
        """DEVICE, or BACK if it was recomputed -> LEAVING. Without room nothing changes, and `HostMemoryError` is raised."""
        assert record.residency in (SavedResidency.DEVICE, SavedResidency.BACK)
        record.span = span = self.arena.take(record.num_bytes)
        record.storage = storage  # held from here on even after an interrupt: see [Note: interrupts]
        record.left = self._lanes.copy_out(storage, span, after=self.device.record_event(record.stream, timed=False))
        _counts(record).moved_out.alone.append(record.left)
        self.enter(record, SavedResidency.LEAVING)
        self.backlog.append(record)

    def release_oldest(self) -> None:
        self.release(self.backlog[0])

    def release_dead(self, *, wait: bool) -> None:
        for record in [record for record in self.backlog if record.num_handles == 0]:
            assert record.left is not None
            if wait or record.left.done.is_reached():
                self.release(record)

    def release(self, record: Record) -> None:
        assert record.residency is SavedResidency.LEAVING
        assert record.left is not None
        self.backlog.remove(record)
        _counts(record).moved_out.waits.append(self._wait(record.stream, record.left.done))
        self.enter(record, SavedResidency.HOST)
        self.let_go(record)
        if record.num_handles == 0:
            self.close(record)

    def let_go(self, record: Record) -> None:
        for reference in record.handles:
            handle = reference()
            if handle is not None:
                _let_go(handle)
        record.storage = None

    def _wait(self, stream: Stream, event: Event) -> tuple[Event, Event]:
        device = self.device
        with label("wait") if torch_private.profiler_is_on() else NO_LABEL:
            before = device.record_event(stream)
            device.wait_event(stream, event)
            return before, device.record_event(stream)

    # Dropping, and staying after all

    def drop(self, record: Record) -> None:
        """Any -> DROPPED: free the bytes, wherever they are. A tensor in a backward's hands stays as it is."""
        if record.residency is SavedResidency.LEAVING:
            self.release(record)
        elif record.residency is SavedResidency.COMING:
            self.take_back(record)
        self.enter(record, SavedResidency.DROPPED)
        self.let_go(record)
        self._give_back(record)

    def stay(self, record: Record) -> None:
        """LEAVING -> DEVICE, or BACK if it was recomputed."""
        assert record.residency is SavedResidency.LEAVING
        assert record.storage is not None
        assert record.left is not None
        self.backlog.remove(record)
        self.orphans.append((record.storage, record.left.done, record.stream))
        is_original = all(handle.geometry is None for handle in record.live_handles())
        self.enter(record, SavedResidency.DEVICE if is_original else SavedResidency.BACK)
        if is_original:
            record.storage = None
        self._give_back(record)

    def count_moves(self, record: Record, counts: Counts) -> None:
        """Let a record that could only be dropped be moved as well."""
        assert record.counts is None
        record.counts = counts
        if record.residency in ON_DEVICE:
            self.moving_bytes += record.num_bytes

    def restore(self, record: Record, storage: torch.UntypedStorage) -> None:
        """DROPPED -> BACK: recomputed on the current stream. HOST -> BACK: the original storage is alive."""
        assert record.residency in (SavedResidency.DROPPED, SavedResidency.HOST)
        self.device.note_written(storage, 0)
        self._hold_copy(record, storage)
        self.enter(record, SavedResidency.BACK)

    # Fetching

    def fetch(self, record: Record) -> None:
        """HOST, or BACK if it has left -> COMING. Without room nothing changes, and `torch.OutOfMemoryError` is raised."""
        assert record.residency in (SavedResidency.HOST, SavedResidency.BACK)
        assert record.span is not None
        assert record.left is not None
        record.storage = storage = self.device.allocate(record.num_bytes)
        stream = self.device.current_stream()
        after = (self.device.record_event(stream, timed=False), record.left.done)
        record.came = self._lanes.copy_back(record.span, storage, after=after)
        _counts(record).moved_in.alone.append(record.came)
        self._hold_copy(record, storage)
        self.enter(record, SavedResidency.COMING)

    def land(self, record: Record) -> None:
        """COMING -> BACK: the current stream may use the fetched copy from here on."""
        assert record.residency is SavedResidency.COMING
        assert record.came is not None
        assert record.fetched_on is not None
        _counts(record).moved_in.waits.append(self._wait(record.fetched_on, record.came.done))
        self.enter(record, SavedResidency.BACK)

    def take_back(self, record: Record) -> None:
        assert record.residency is SavedResidency.COMING
        self._give_up_copy(record)
        self.enter(record, SavedResidency.HOST)

    def _give_up_copy(self, record: Record) -> None:
        """Give up a copy that may still be under way. Its storage is held until its stream has waited for it, in `sweep`."""
        assert record.storage is not None
        assert record.came is not None
        assert record.fetched_on is not None
        self.orphans.append((record.storage, record.came.done, record.fetched_on))
        record.storage = record.fetched = None

    # Handing out

    def expect(self, record: Record) -> None:
        """A backward begins: expect a request, perhaps another one, for each handle of a record."""
        for reference in record.handles:
            if reference.is_counted and not reference.is_awaiting:
                reference.is_awaiting = True
                record.num_awaiting += 1

    def _hold_copy(self, record: Record, storage: torch.UntypedStorage) -> None:
        record.storage, record.fetched_on = storage, self.device.current_stream()
        record.lent = []
        record.fetched = CopyReference(storage, record)
        self.expect(record)

    def hand_out(self, handle: Handle) -> Tensor:
        """COMING or BACK -> BACK: return a handle's tensor over the record's copy, for work on the current stream."""
        record = handle.record
        if record.residency is SavedResidency.COMING:
            self.land(record)
        assert record.residency is SavedResidency.BACK
        storage = self.fetched_copy(record)
        assert storage is not None
        assert handle.geometry is not None
        self.device.note_read(storage)
        self.serve(handle)
        if record.num_awaiting == 0:
            record.storage = None
        tensor = handle.geometry.over(storage)
        lent = KeptHandle(tensor)
        lent.alias.data = nothing(tensor.dtype, tensor.device)
        record.lent.append(lent)
        return tensor

    def serve(self, handle: Handle) -> None:
        reference = handle.reference
        if reference.is_awaiting:
            reference.is_awaiting = False
            handle.record.num_awaiting -= 1

    def fetched_copy(self, record: Record) -> torch.UntypedStorage | None:
        """Return the living copy; None if a backward has written to it, or to a saved gradient that is now a leaf's `grad`."""
        storage = None if record.fetched is None else record.fetched()
        if storage is None or all(lent.is_unchanged() for lent in record.lent):
            return storage
        record.storage = record.fetched = None
        self._copy_died(record)
        return None

    # Dying

    def sweep(self) -> None:
        while self.deaths:
            dead = self.deaths.popleft()
            if isinstance(dead, CopyReference):
                self._copy_died(dead.record())
            elif dead.is_counted:
                self._handle_died(dead)
        if self.orphans:
            self.settle(wait=False)

    def settle(self, *, wait: bool) -> None:
        """Free storages whose copies are done; with `wait`, let the streams wait for the others, and free all."""
        under_way = []
        for storage, done, stream in self.orphans:
            if wait or done.is_reached():
                self.device.wait_event(stream, done)
            else:
                under_way.append((storage, done, stream))
        self.orphans = under_way

    def _handle_died(self, dead: HandleReference) -> None:
        record, dead.is_counted = dead.record, False
        record.num_handles -= 1
        if dead.is_awaiting:
            record.num_awaiting -= 1
        if record.num_handles == 0:
            record.handles.clear()  # they hold the record
            record.owner = record.maker = None  # it may wait for long, and a living forward counts in the limit
            if record.residency is not SavedResidency.LEAVING:
                self.close(record)
        elif record.num_awaiting == 0 and record.residency is SavedResidency.BACK:
            record.storage = None

    def _copy_died(self, record: Record | None) -> None:
        """BACK -> HOST or DROPPED: the last reference to the copy is gone."""
        if record is not None and record.residency is SavedResidency.BACK and self.fetched_copy(record) is None:
            self.enter(record, SavedResidency.DROPPED if record.span is None else SavedResidency.HOST)

    def close(self, record: Record) -> None:
        if record.residency is SavedResidency.COMING:
            self._give_up_copy(record)
        self._give_back(record)
        record.storage = None
        self.enter(record, SavedResidency.GONE)
        self.records.discard(record)

    def _give_back(self, record: Record) -> None:
        span, last = record.span, record.came or record.left
        if span is not None:
            self.give_back_span(span, None if last is None else last.done)
            record.span = record.left = record.came = None

    def give_back_span(self, span: Span, last_use: Event | None) -> None:
        if self.arena.has(span):  # else an interrupt came when it had just been given back
            self.arena.give(span, last_use)

    def enter(self, record: Record, residency: SavedResidency) -> None:
        was_live, is_live = record.residency in ON_DEVICE, residency in ON_DEVICE
        if residency is SavedResidency.COMING:
            self.coming[record] = None
        elif record.residency is SavedResidency.COMING:
            self.coming.pop(record, None)
        record.residency = residency
        if is_live != was_live:
            change_bytes = record.num_bytes if is_live else -record.num_bytes
            self.live_bytes += change_bytes
            if record.counts is not None:
                self.moving_bytes += change_bytes
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)


def _let_go(handle: Handle) -> None:
    """The alias then only shares the version counter of the saved tensor."""
    alias = handle.alias
    if handle.geometry is None:
        handle.geometry = Geometry.of(alias)
        handle.alias = alias = alias.detach()  # another thread may be handing the old alias to autograd
        alias.data = nothing(alias.dtype, alias.device)


def _counts(record: Record) -> Counts:
    assert record.counts is not None
    return record.counts


def mend(ledger: Ledger, others: Sequence[Span] = ()) -> None:
    """Repair the state after an interrupt: see [Note: interrupts]. The host waits for the device."""
    ledger.arena.drain()
    ledger.device.synchronize()
    for record in tuple(ledger.records):
        for reference in record.handles:
            reference.is_counted = reference() is not None
        record.handles[:] = [reference for reference in record.handles if reference.is_counted]
        record.num_handles = len(record.handles)
        record.num_awaiting = sum(reference.is_awaiting for reference in record.handles)
        _put_down(ledger, record)
        if record.num_handles == 0:
            record.owner = record.maker = None
            ledger.close(record)
    live = [record for record in ledger.records if record.residency in ON_DEVICE]
    ledger.live_bytes = sum(record.num_bytes for record in live)
    ledger.moving_bytes = sum(record.num_bytes for record in live if record.counts is not None)
    ledger.backlog.clear()
    ledger.coming.clear()
    ledger.orphans.clear()
    ledger.arena.give_all(but_for=[*others, *(record.span for record in ledger.records if record.span is not None)])


def _put_down(ledger: Ledger, record: Record) -> None:
    """Let go of what the ledger holds on the device: all but DEVICE -> HOST if a copy was noted (so whole), else DROPPED."""
    residency = record.residency
    if residency in (SavedResidency.DEVICE, SavedResidency.DROPPED) or record.left is None:
        if record.span is not None:
            ledger.give_back_span(record.span, None)
            record.span = record.left = record.came = None
        if residency is not SavedResidency.DEVICE:
            ledger.enter(record, SavedResidency.DROPPED)
    else:
        ledger.enter(record, SavedResidency.HOST)
    record.storage = record.fetched = None
    if record.residency is not SavedResidency.DEVICE:
        ledger.let_go(record)
