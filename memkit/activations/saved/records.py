"""A forward's saves (`Forward`), saved storages (`Record`) with their `Handle`s, and each change of their residency (`Ledger`).

The ledger makes each change safe; it decides nothing. The death of a handle or copy is noted at once, on any thread, and
handled in `Ledger.sweep`: a finalizer never issues a copy. After an exception at any line, `mend` derives totals and queues
anew from the records: see [Note: interrupts] in `memkit.core.interrupts`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from memkit.activations.saved.counts import Counts
from memkit.core import torch_private
from memkit.core.kept import KeptHandle, nothing
from memkit.core.tensors import Geometry, counted_by
from memkit.core.torch_state import NO_LABEL, label
from memkit.device.base import Device, Event, Stream
from memkit.plan import Action
from memkit.plan.ratio import Forecast
from memkit.transfer.host_memory import Arena, Span
from memkit.transfer.lanes import Lanes, Transfer

if TYPE_CHECKING:
    from memkit.activations.offloading.moving_stage import RatioDecider
    from memkit.activations.recomputing.recorded_forward import RecordedForward


class SavedResidency(Enum):
    DEVICE = "device"  # on the device only, held by the handles
    LEAVING = "leaving"  # on the device, held by the ledger; a copy to the host is under way or done
    HOST = "host"  # in host memory; the ledger has let go of the device's storage, though the caller may still hold it
    COMING = "coming"  # in host memory; a copy to the device is under way or done, held by the ledger for the backward
    BACK = "back"  # on the device in a later copy, held by its receivers, and by the ledger while other handles wait for theirs
    DROPPED = "dropped"  # nowhere: its maker can recompute it
    GONE = "gone"  # nowhere: the last handle has died


_NONE: list[KeptHandle] = []
ON_DEVICE = frozenset({SavedResidency.DEVICE, SavedResidency.LEAVING, SavedResidency.COMING, SavedResidency.BACK})


class Unpacker(Protocol):
    def unpack(self, handle: Handle) -> Tensor:
        """Return the tensor, for work on the current stream."""

    def lend(self, handle: Handle) -> torch.UntypedStorage:
        """Return a storage with its bytes, to be read by work on the current stream, while the handle goes on waiting."""

    def change(self, record: Record, storage: torch.UntypedStorage, action: Action) -> None:
        """Do something else with a record, whose bytes are also in a storage of the user's."""


class Handle(KeptHandle):
    """One save of a tensor with a record. Once that has left, the alias is empty and only shares the version counter."""

    __slots__ = ("geometry", "node", "record", "reference", "sources", "unpacker")

    def __init__(self, tensor: Tensor, record: Record, unpacker: Unpacker, node: int) -> None:
        if type(tensor) is Tensor:  # as `KeptHandle` does, at less cost
            self.alias, self.version = tensor.detach(), torch_private.version_of(tensor)
        else:
            super().__init__(tensor)
        self.record = record
        self.unpacker = unpacker
        self.node = node
        self.geometry: Geometry | None = None
        self.sources: Sequence[object] = ()  # sources of its record, held for it if its maker cannot recompute them
        self.reference = HandleReference(self, record)

    def unpack(self) -> Tensor:
        if torch_private.version_of(self.alias) != self.version:
            self.check_version()
        maker = self.record.maker
        if maker is None:
            return self.unpacker.unpack(self)
        with maker.lock:  # before the other context's lock, in the order of a save
            return self.unpacker.unpack(self)

    @property
    def size(self) -> torch.Size:
        return self.alias.size() if self.geometry is None else self.geometry.size

    def in_place(self) -> Tensor | None:
        """Return the tensor over its original storage, if alive: writes to it count as writes to the saved tensor."""
        if self.geometry is None:
            return self.alias
        original = self.record.original()
        if original is None:
            return None
        tensor = self.alias.detach()
        tensor.data = self.geometry.over(original)
        return tensor


class HandleReference(weakref.ref[Handle]):
    __slots__ = ("is_awaiting", "is_counted", "record")

    record: Record
    is_awaiting: bool  # the backward has not got this tensor yet, since the record was last fetched
    is_counted: bool

    def __new__(cls, handle: Handle, record: Record) -> HandleReference:
        self = super().__new__(cls, handle, record.ledger.note_death)
        self.record, self.is_awaiting, self.is_counted = record, True, False
        return self


class CopyReference(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("record",)

    record: weakref.ref[Record]

    def __new__(cls, storage: torch.UntypedStorage, record: Record) -> CopyReference:
        self = super().__new__(cls, storage, record.ledger.note_death)
        self.record = weakref.ref(record)
        return self


class Record:
    def __init__(
        self, ledger: Ledger, storage: torch.UntypedStorage, version: int, stream: Stream, owner: Forward | None, index: int
    ) -> None:
        self.ledger = ledger
        self.owner = owner  # the forward that moves it, if any: kept alive while a graph may ask for the record
        self.index = index
        self.counts = None if owner is None else owner.counts
        self.maker: RecordedForward | None = None  # kept alive as well; None if nothing can recompute it
        self.value = -1
        self.num_bytes = storage.nbytes()
        self.version = version
        self.use_order = 0  # when in the forward it was saved: see [Note: one queue for all] in `memkit.transfer.lanes`
        self.stream = stream  # current at the storage's first save: it has written the storage, and waits for the copy
        self.residency = SavedResidency.GONE
        self.original = weakref.ref(storage)
        self.storage: torch.UntypedStorage | None = None  # the original while LEAVING, the later copy while COMING or BACK
        self.handles: list[HandleReference] = []
        self.num_handles = self.num_awaiting = 0
        self.span: Span | None = None
        self.left: Transfer | None = None
        self.came: Transfer | None = None
        self.fetched: CopyReference | None = None
        self.fetched_on: Stream | None = None
        self.lent: list[KeptHandle] = _NONE  # tensors handed out over the later copy, without bytes: they tell of writes since

    def add_handle(self, tensor: Tensor, unpacker: Unpacker, node: int) -> Handle:
        handle = Handle(tensor, self, unpacker, node)
        reference = handle.reference
        self.handles.append(reference)
        reference.is_counted = True
        self.num_handles += 1
        self.num_awaiting += 1
        return handle

    def hold(self, sources: Sequence[object]) -> None:
        for handle in self.live_handles():
            handle.sources = sources

    def live_handles(self) -> Iterator[Handle]:
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                yield handle


class Ledger:
    def __init__(self, device: Device, lanes: Lanes, arena: Arena) -> None:
        self.device = device
        self.arena = arena
        self.live_bytes = 0
        self.moving_bytes = 0
        self.records = set[Record]()
        self.deaths: deque[HandleReference | CopyReference] = deque()
        self.note_death = self.deaths.append
        self.backlog: deque[Record] = deque()  # LEAVING, in the order of their copies, also once their handles have died
        self.coming: dict[Record, None] = {}
        self._lanes = lanes
        self.orphans: list[tuple[torch.UntypedStorage, Event, Stream]] = []  # held only for a copy; goes back to the stream

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
        record.span = span = self.arena.take(record.num_bytes)
        record.storage = storage  # held from here on even after an interrupt: see [Note: interrupts]
        record.left = self._lanes.copy_out(storage, span, after=self.device.record_event(record.stream, timed=False))
        _counts(record).moved_out.alone.append(record.left)
        self.enter(record, SavedResidency.LEAVING)
        self.backlog.append(record)

    def release_dead(self, *, wait: bool) -> None:
        for record in [record for record in self.backlog if record.num_handles == 0]:
            assert record.left is not None
            if wait or record.left.done.is_reached():
                self.release(record)

    def release(self, record: Record) -> None:
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
        assert record.counts is None
        record.counts = counts
        if record.residency in ON_DEVICE:
            self.moving_bytes += record.num_bytes

    def restore(self, record: Record, storage: torch.UntypedStorage) -> None:
        """DROPPED -> BACK: recomputed on the current stream. HOST -> BACK: the original storage is alive."""
        self.device.note_written(storage, 0)
        self._hold_copy(record, storage)
        self.enter(record, SavedResidency.BACK)

    # Fetching

    def fetch(self, record: Record) -> None:
        """HOST, or BACK if it has left -> COMING. Without room nothing changes, and `torch.OutOfMemoryError` is raised."""
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
        assert record.came is not None
        assert record.fetched_on is not None
        _counts(record).moved_in.waits.append(self._wait(record.fetched_on, record.came.done))
        self.enter(record, SavedResidency.BACK)

    def take_back(self, record: Record) -> None:
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


Contents = tuple[int, int, int]  # of a tensor: its storage, the tensor that counts writes (not always the same), their count


def contents_of(tensor: Tensor, storage: torch.UntypedStorage) -> Contents:
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
        self.is_broken = False  # an interrupt may have left it half noted: then it does and teaches nothing more
        self.unwritten: list[tuple[Record, int]] = []
        self.forecast: Forecast | None = None
        self.known: dict[Contents, tuple[weakref.ref[Tensor], weakref.ref[Record]]] = {}
        self.marks: dict[Contents, tuple[weakref.ref[Tensor], Action]] = {}
        self._order: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self.requests: list[int] = []
        self.backwards: list[tuple[int, ...]] = []
        self.is_spent = False  # no backward is likely to ask for more: no requested value is left
        self.used: dict[int, int] = {}  # values that this backward has requested, in order, and the bytes beside the records
        self.cursor = 0  # before this place in the order of the backward, no record needs to be fetched any more

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
        assert self.is_forward
        self.is_forward = False
        self.counts.window_bytes = max(self.counts.window_bytes, self.share.window_bytes)
        return learn and not self.is_broken and self.share.finish()

    def break_off(self) -> None:
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
