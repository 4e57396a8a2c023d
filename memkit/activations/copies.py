"""The ledger of who moves records between device and host: every step of their copies."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from memkit.activations.counts import IterationCounts
from memkit.activations.ledger import Handle, Ledger, Record, Residency
from memkit.device.base import Device, Event, Stream
from memkit.transfer.arena import Arena, Span
from memkit.transfer.lanes import Lanes


class CopyLedger(Ledger):
    """A ledger whose records may go to the host and come back.

    Args:
        arena: where they are then. Nobody else takes of it.
    """

    def __init__(self, device: Device, lanes: Lanes, arena: Arena) -> None:
        super().__init__(device)
        self.arena = arena
        self._lanes = lanes
        self.backlog: deque[Record] = deque()
        """Records that are LEAVING, in the order of their copies. Those whose handles have died wait here for the copy."""
        self.coming: set[Record] = set()
        """Records that are COMING."""
        self._orphans: list[tuple[torch.UntypedStorage, Event, Stream]] = []

    def open_record(
        self, storage: torch.UntypedStorage, version: int, *, owner: object, index: int, counts: IterationCounts | None = None
    ) -> Record:
        for older in self.backlog:
            if older.storage is storage and older.left is not None:
                # Written to while what was there is on its way, and the lane reads it.
                self.device.wait_event(self.device.current_stream(), older.left.done)
        return super().open_record(storage, version, owner=owner, index=index, counts=counts)

    def leave(self, record: Record, storage: torch.UntypedStorage) -> None:
        """DEVICE -> LEAVING: put the copy to the host on its lane.

        Raises:
            HostMemoryError: there is no room for it; the record stays as it is.
        """
        assert record.residency is Residency.DEVICE
        record.span = span = self.arena.take(record.num_bytes)
        record.storage = storage  # held from here on, whatever comes: see [Note: interrupts]
        record.left = self._lanes.copy_out(storage, span, after=self.device.record_event(record.stream, timed=False))
        _counts(record).note_out(record.left)
        self._enter(record, Residency.LEAVING)
        self.backlog.append(record)

    def release_oldest(self) -> None:
        """LEAVING -> HOST for the record whose copy is the oldest: its stream waits for the copy, and we let go."""
        self._release(self.backlog.popleft())

    def release_dead(self, *, wait: bool) -> None:
        """Release the records in the backlog that nobody can ask for any more: all, or those whose copy is done."""
        for record in [record for record in self.backlog if record.num_handles == 0]:
            assert record.left is not None
            if wait or record.left.done.is_reached():
                self.backlog.remove(record)
                self._release(record)

    def _release(self, record: Record) -> None:
        assert record.residency is Residency.LEAVING
        assert record.left is not None
        _counts(record).note_stall_out(self._wait(record.stream, record.left.done))
        self._enter(record, Residency.HOST)
        for handle in record.live_handles():
            handle.let_go()
        record.storage = None
        if record.num_handles == 0:
            self._close(record)

    def _wait(self, stream: Stream, event: Event) -> tuple[Event, Event]:
        """Let a stream wait, and return what tells how long it did."""
        before = self.device.record_event(stream)
        self.device.wait_event(stream, event)
        return before, self.device.record_event(stream)

    # Fetching

    def fetch(self, record: Record) -> None:
        """HOST or BACK -> COMING: put the copy back to the device on its lane, for the current stream.

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

    def hand_out(self, handle: Handle) -> Tensor:
        """COMING or BACK -> BACK: return the tensor over the fetched copy, which the current stream may then use."""
        record = handle.record
        if record.residency is Residency.COMING:
            assert record.came is not None
            assert record.fetched_on is not None
            _counts(record).note_stall_in(self._wait(record.fetched_on, record.came.done))
            self._enter(record, Residency.BACK)
        return super().hand_out(handle)

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

    # Dying

    def sweep(self) -> None:
        """Take up what finalizers have noted since the last time, and free what waited for a copy that is done."""
        super().sweep()
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

    def _close(self, record: Record) -> None:
        if record.residency is Residency.COMING:
            self._give_up_copy(record)
        if record.span is not None:
            last = record.came or record.left
            self._give_back(record.span, None if last is None else last.done)
            record.span = None
        super()._close(record)

    def _give_back(self, span: Span, last_use: Event | None) -> None:
        if self.arena.has(span):  # else an interrupt came when it had just been given back
            self.arena.give(span, last_use)

    def mend(self) -> None:
        self.arena.drain()
        super().mend()
        self.backlog.clear()
        self._orphans.clear()
        self.arena.give_all(but_for=[record.span for record in self.records if record.span is not None])

    def _put_down(self, record: Record) -> None:
        """DEVICE, or anything else -> HOST. A copy is whole if its record is LEAVING or has left."""
        if record.residency is not Residency.DEVICE:
            self._enter(record, Residency.HOST)
        elif record.span is not None:
            self._give_back(record.span, None)
            record.span = record.left = None
        super()._put_down(record)

    def _enter(self, record: Record, residency: Residency) -> None:
        super()._enter(record, residency)
        if residency is Residency.COMING:
            self.coming.add(record)
        else:
            self.coming.discard(record)


def _counts(record: Record) -> IterationCounts:
    assert record.counts is not None
    return record.counts
