"""Every step that the bytes of a saved storage take: between device and host, or away to be made again.

The ledger moves records from one `Residency` to the next and keeps each move safe; it decides nothing. What dies is noted when
it does, on whatever thread, and taken up in `Ledger.sweep`: no copy is ever issued by a finalizer. At whatever line an
interrupt comes, `Ledger.mend` can put right what it has left: see [Note: interrupts] in `memkit.interrupts`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from memkit.activations.counts import Counts
from memkit.activations.records import (
    ON_DEVICE,
    CopyReference,
    Handle,
    HandleReference,
    Maker,
    Record,
    Residency,
    Unpacker,
)
from memkit.device.base import Device, Event, Stream
from memkit.kept import KeptHandle, nothing
from memkit.labels import label
from memkit.transfer.arena import Arena
from memkit.transfer.lanes import Lanes
from memkit.transfer.spans import Span


class Ledger:
    """The records of one tag on one device, and their moves. Callers hold the lock of who owns the ledger.

    Args:
        device: where they are at first.
        lanes: what they leave and come back by.
        arena: where they are in between. Nobody else takes of it.
    """

    def __init__(self, device: Device, lanes: Lanes, arena: Arena) -> None:
        self.device = device
        self.arena = arena
        self.live_bytes = 0
        """Bytes of the records that are on the device."""
        self.moving_bytes = 0
        """Of these, the bytes of records that belong to a forward which moves some: the others can only be dropped."""
        self.peak_live_bytes = 0
        self.num_records = 0
        """Records that a graph may still ask for."""
        self.records = set[Record]()
        """All records that are not GONE."""
        self.deaths: deque[HandleReference | CopyReference] = deque()
        """What has died and was not taken up yet: handles of records, and later copies."""
        self.backlog: deque[Record] = deque()
        """Records that are LEAVING, in the order of their copies. Those whose handles have died wait here for the copy."""
        self.coming = set[Record]()
        """Records that are COMING."""
        self._lanes = lanes
        self._orphans: list[tuple[torch.UntypedStorage, Event, Stream]] = []
        """Storages that nobody needs any more but a copy that may be under way, and the stream that they go back to."""

    # Saving

    def open_record(
        self,
        storage: torch.UntypedStorage,
        version: int,
        *,
        owner: Any = None,
        index: int = -1,
        maker: Maker | None = None,
        value: int = -1,
        counts: Counts | None = None,
    ) -> Record:
        """Return a new record: DEVICE."""
        for older in self.backlog:
            if older.storage is storage and older.left is not None:
                # Written to while what was there is on its way, and the lane reads it.
                self.device.wait_event(self.device.current_stream(), older.left.done)
        record = Record(
            self,
            storage,
            version,
            owner=owner,
            index=index,
            counts=counts,
            maker=maker,
            value=value,
            stream=self.device.current_stream(),
        )
        self.device.note_written(storage, version)
        self.records.add(record)
        self.num_records += 1
        self._enter(record, Residency.DEVICE)
        return record

    def add_handle(self, record: Record, tensor: Tensor, unpacker: Unpacker, node: int) -> Handle:
        """Return a handle for one more save of a record's storage, by a node of the graph."""
        handle = Handle(tensor, record, unpacker, node)
        reference = handle.reference
        record.handles.append(reference)
        reference.is_counted = True
        record.num_handles += 1
        record.num_awaiting += 1
        if record.residency not in (Residency.DEVICE, Residency.LEAVING):
            handle.let_go()
        return handle

    # Leaving

    def leave(self, record: Record, storage: torch.UntypedStorage) -> None:
        """DEVICE, or BACK if it was made again -> LEAVING: put the copy to the host on its lane.

        Raises:
            HostMemoryError: there is no room for it; the record stays as it is.
        """
        assert record.residency in (Residency.DEVICE, Residency.BACK)
        record.span = span = self.arena.take(record.num_bytes)
        record.storage = storage  # held from here on, whatever comes: see [Note: interrupts]
        record.left = self._lanes.copy_out(storage, span, after=self.device.record_event(record.stream, timed=False))
        _counts(record).note_out(record.left)
        self._enter(record, Residency.LEAVING)
        self.backlog.append(record)

    def release_oldest(self) -> None:
        """LEAVING -> HOST for the record whose copy is the oldest: its stream waits for the copy, and we let go."""
        self._release(self.backlog.popleft())

    def release(self, record: Record) -> None:
        """LEAVING -> HOST for one record."""
        self.backlog.remove(record)
        self._release(record)

    def release_dead(self, *, wait: bool) -> None:
        """Release the records in the backlog that nobody can ask for any more: all, or those whose copy is done."""
        for record in [record for record in self.backlog if record.num_handles == 0]:
            assert record.left is not None
            if wait or record.left.done.is_reached():
                self.release(record)

    def _release(self, record: Record) -> None:
        assert record.residency is Residency.LEAVING
        assert record.left is not None
        _counts(record).stall_out.add(*self._wait(record.stream, record.left.done))
        self._enter(record, Residency.HOST)
        for handle in record.live_handles():
            handle.let_go()
        record.storage = None
        if record.num_handles == 0:
            self._close(record)

    def _wait(self, stream: Stream, event: Event) -> tuple[Event, Event]:
        """Let a stream wait, and return what tells how long it did."""
        with label("wait"):
            before = self.device.record_event(stream)
            self.device.wait_event(stream, event)
            return before, self.device.record_event(stream)

    # Dropping, and staying after all

    def drop(self, record: Record) -> None:
        """Any -> DROPPED: let go of the bytes, wherever they are. Whoever was given them keeps them."""
        if record.residency is Residency.LEAVING:
            self.release(record)
        elif record.residency is Residency.COMING:
            self.take_back(record)
        self._enter(record, Residency.DROPPED)
        for handle in record.live_handles():
            handle.let_go()
        record.storage = None
        self._give_back(record)

    def stay(self, record: Record) -> None:
        """LEAVING -> DEVICE, or BACK if it was made again: it does not leave after all."""
        assert record.residency is Residency.LEAVING
        assert record.storage is not None
        assert record.left is not None
        self.backlog.remove(record)
        self._orphans.append((record.storage, record.left.done, record.stream))
        is_original = all(handle.geometry is None for handle in record.live_handles())
        self._enter(record, Residency.DEVICE if is_original else Residency.BACK)
        if is_original:
            record.storage = None
        self._give_back(record)

    def adopt(self, record: Record, *, owner: Any, index: int, counts: Counts) -> None:
        """A record that could only be dropped belongs to a forward from now on, and may leave."""
        assert record.counts is None
        record.owner, record.index, record.counts = owner, index, counts
        if record.residency in ON_DEVICE:
            self.moving_bytes += record.num_bytes

    def restore(self, record: Record, storage: torch.UntypedStorage) -> None:
        """DROPPED -> BACK: the bytes were made again, by work on the current stream. HOST -> BACK: they were never gone."""
        assert record.residency in (Residency.DROPPED, Residency.HOST)
        self.device.note_written(storage, 0)
        self._hold_copy(record, storage)
        self._enter(record, Residency.BACK)

    # Fetching

    def fetch(self, record: Record) -> None:
        """HOST, or BACK if it has left -> COMING: put the copy back to the device on its lane, for the current stream.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing has changed.
        """
        assert record.residency in (Residency.HOST, Residency.BACK)
        assert record.span is not None
        assert record.left is not None
        record.storage = storage = self.device.allocate(record.num_bytes)
        stream = self.device.current_stream()
        after = (self.device.record_event(stream, timed=False), record.left.done)
        record.came = self._lanes.copy_back(record.span, storage, after=after)
        _counts(record).note_in(record.came)
        self._hold_copy(record, storage)
        self._enter(record, Residency.COMING)

    def land(self, record: Record) -> None:
        """COMING -> BACK: the current stream may use the fetched copy from here on."""
        assert record.residency is Residency.COMING
        assert record.came is not None
        assert record.fetched_on is not None
        _counts(record).stall_in.add(*self._wait(record.fetched_on, record.came.done))
        self._enter(record, Residency.BACK)

    def take_back(self, record: Record) -> None:
        """COMING -> HOST: give up a fetched copy that nobody has asked for. What is in host memory is whole."""
        assert record.residency is Residency.COMING
        self._give_up_copy(record)
        self._enter(record, Residency.HOST)

    def _give_up_copy(self, record: Record) -> None:
        """Let go of a copy that may still be under way; its bytes live on until its stream has waited, in `sweep`."""
        assert record.storage is not None
        assert record.came is not None
        assert record.fetched_on is not None
        self._orphans.append((record.storage, record.came.done, record.fetched_on))
        record.storage = record.fetched = None

    # Handing out

    def expect(self, record: Record) -> None:
        """A backward begins that will ask for all handles of a record, perhaps again."""
        for reference in record.handles:
            if reference.is_counted and not reference.is_awaiting:
                reference.is_awaiting = True
                record.num_awaiting += 1

    def _hold_copy(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Hold another storage with the bytes of a record until each of its handles has been given it."""
        record.storage, record.fetched_on = storage, self.device.current_stream()
        record.lent = []
        record.fetched = CopyReference(storage, record)
        self.expect(record)

    def hand_out(self, handle: Handle) -> Tensor:
        """COMING or BACK -> BACK: return the tensor over the copy that is there, which the current stream may then use."""
        record = handle.record
        if record.residency is Residency.COMING:
            self.land(record)
        assert record.residency is Residency.BACK
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
        """The backward was given the tensor of a handle."""
        reference = handle.reference
        if reference.is_awaiting:
            reference.is_awaiting = False
            handle.record.num_awaiting -= 1

    def fetched_copy(self, record: Record) -> torch.UntypedStorage | None:
        """Return the copy of a record that was made later, if it is alive and whole.

        A backward may write to what it was given, and a gradient that was saved may become a leaf's `grad`, which is written to
        later: such a copy is theirs from then on.
        """
        storage = None if record.fetched is None else record.fetched()
        if storage is None or all(lent.is_unchanged() for lent in record.lent):
            return storage
        record.storage = record.fetched = None
        self._copy_died(record)
        return None

    # Dying

    def sweep(self) -> None:
        """Take up what finalizers have noted since the last time, and free what waited for a copy that is done."""
        while self.deaths:
            dead = self.deaths.popleft()
            if isinstance(dead, CopyReference):
                self._copy_died(dead.record())
            elif dead.is_counted:
                self._handle_died(dead)
        if self._orphans:
            self._orphans = [orphan for orphan in self._orphans if not self._settle(*orphan)]

    def _settle(self, storage: torch.UntypedStorage, done: Event, stream: Stream) -> bool:
        if not done.is_reached():
            return False
        self.device.wait_event(stream, done)
        return True

    def settle_all(self) -> None:
        """Free what waits for copies, done or not: the streams wait."""
        for _, done, stream in self._orphans:
            self.device.wait_event(stream, done)
        self._orphans.clear()

    def _handle_died(self, dead: HandleReference) -> None:
        record, dead.is_counted = dead.record, False
        record.num_handles -= 1
        if dead.is_awaiting:
            record.num_awaiting -= 1
        if record.num_handles == 0:
            self.num_records -= 1
            record.handles.clear()  # they hold the record
            record.owner = record.maker = None  # it may wait for long, and a forward that lives counts in the limit
            if record.residency is not Residency.LEAVING:
                self._close(record)
        elif record.num_awaiting == 0 and record.residency is Residency.BACK:
            record.storage = None

    def _copy_died(self, record: Record | None) -> None:
        """BACK -> HOST or DROPPED: whoever had the copy has let it go."""
        if record is not None and record.residency is Residency.BACK and self.fetched_copy(record) is None:
            self._enter(record, Residency.DROPPED if record.span is None else Residency.HOST)

    def _close(self, record: Record) -> None:
        """Any -> GONE: nobody can ask for these bytes again."""
        if record.residency is Residency.COMING:
            self._give_up_copy(record)
        self._give_back(record)
        record.storage = None
        self._enter(record, Residency.GONE)
        self.records.discard(record)

    def _give_back(self, record: Record) -> None:
        """Give back the host memory of a record, to be used again when its last copy is done."""
        span, last = record.span, record.came or record.left
        if span is not None:
            self._give_back_span(span, None if last is None else last.done)
            record.span = record.left = record.came = None

    def _give_back_span(self, span: Span, last_use: Event | None) -> None:
        if self.arena.has(span):  # else an interrupt came when it had just been given back
            self.arena.give(span, last_use)

    # Interrupts

    def mend(self) -> None:
        """Put right what was broken off: see [Note: interrupts]. Makes the host wait for all that the device has to do."""
        self.arena.drain()
        self.device.synchronize()
        for record in tuple(self.records):
            for reference in record.handles:
                reference.is_counted = reference() is not None
            record.handles[:] = [reference for reference in record.handles if reference.is_counted]
            record.num_handles = len(record.handles)
            record.num_awaiting = sum(reference.is_awaiting for reference in record.handles)
            self._put_down(record)
            if record.num_handles == 0:
                record.owner = record.maker = None
                self._close(record)
        live = [record for record in self.records if record.residency in ON_DEVICE]
        self.live_bytes = sum(record.num_bytes for record in live)
        self.moving_bytes = sum(record.num_bytes for record in live if record.counts is not None)
        self.num_records = len(self.records)
        self.backlog.clear()
        self.coming.clear()
        self._orphans.clear()
        self.arena.give_all(but_for=[record.span for record in self.records if record.span is not None])

    def _put_down(self, record: Record) -> None:
        """Let go of what the ledger itself holds on the device: nothing is under way. DEVICE and DROPPED stay, and all else
        -> HOST, or DROPPED if it is not there. A copy is whole if it was noted that it leaves."""
        residency = record.residency
        if residency in (Residency.DEVICE, Residency.DROPPED) or record.left is None:
            if record.span is not None:
                self._give_back_span(record.span, None)
                record.span = record.left = record.came = None
            if residency is not Residency.DEVICE:
                self._enter(record, Residency.DROPPED)
        else:
            self._enter(record, Residency.HOST)
        record.storage = record.fetched = None
        if record.residency is not Residency.DEVICE:
            for handle in record.live_handles():
                handle.let_go()

    def _enter(self, record: Record, residency: Residency) -> None:
        """Every change of residency goes through here: the bytes on the device are counted nowhere else."""
        was_live, is_live = record.residency in ON_DEVICE, residency in ON_DEVICE
        if residency is Residency.COMING:
            self.coming.add(record)
        elif record.residency is Residency.COMING:
            self.coming.discard(record)
        record.residency = residency
        if is_live != was_live:
            change_bytes = record.num_bytes if is_live else -record.num_bytes
            self.live_bytes += change_bytes
            if record.counts is not None:
                self.moving_bytes += change_bytes
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)


def _counts(record: Record) -> Counts:
    assert record.counts is not None
    return record.counts
