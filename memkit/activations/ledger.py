"""Where the bytes of each saved storage are, and every step they take between device and host.

A `Record` stands for one version of one storage, however many tensors autograd saved of it; a `Handle` is what autograd holds
for one save. The ledger moves records from one `Residency` to the next and keeps each move safe; it decides nothing. What dies
is noted by finalizers, on whatever thread, and taken up in `Ledger.sweep`: no copy is ever issued by a finalizer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from memkit.activations.stats import IterationCounts
from memkit.device.base import Device, Event, Stream
from memkit.sizes import tensor_over
from memkit.transfer.arena import Arena, Span
from memkit.transfer.lanes import Lanes, Passage


class Residency(Enum):
    """Where the bytes of a record are."""

    DEVICE = "device"
    """On the device only, held by the handles."""
    LEAVING = "leaving"
    """On the device, held by the ledger; a copy to the host is under way or done."""
    HOST = "host"
    """In host memory; the ledger has let go of the device's storage, though somebody else may still hold it."""
    COMING = "coming"
    """In host memory; a copy to the device is under way or done, held by the ledger for the backward."""
    BACK = "back"
    """In host memory, and on the device in a copy that was handed out: held by who got it, and by the ledger for as long as
    other handles of the record wait for theirs."""
    GONE = "gone"
    """Nowhere: the last handle has died."""


ON_DEVICE = frozenset({Residency.DEVICE, Residency.LEAVING, Residency.COMING, Residency.BACK})


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor with this geometry over a storage."""
        tensor = tensor_over(storage, self.dtype, offset=self.offset, size=self.size, stride=self.stride)
        if self.is_conj:
            torch._C._set_conj(tensor, True)
        if self.is_neg:
            torch._C._set_neg(tensor, True)
        return tensor


class KeptHandle:
    """A saved tensor that stays as it is.

    Saved-tensor hooks switch off autograd's check that nobody wrote to a saved tensor; this does it again. The alias shares
    the version counter of the tensor, so it counts writes through any view. It is not the tensor itself, which may hold the
    graph.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was written to since it was saved.
        """
        self.check_version()
        return self.alias

    def check_version(self) -> None:
        """Raise autograd's own error if the tensor was written to since it was saved."""
        if self.alias._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.alias.type()} {list(self.size)}] is at version {self.alias._version}; expected version "
                f"{self.version} instead. Hint: the backtrace of the operation that failed to compute its gradient is shown "
                "by torch.autograd.set_detect_anomaly(True)."
            )

    @property
    def size(self) -> torch.Size:
        return self.alias.size()


class Unpacker(Protocol):
    """Who brings a handle's tensor back."""

    def unpack(self, handle: Handle) -> Tensor: ...


class Handle(KeptHandle):
    """One save of a tensor whose storage has a record.

    Once the record has left the device, the alias is an empty tensor that only shares the version counter.
    """

    __slots__ = ("__weakref__", "geometry", "is_awaiting", "record", "unpacker")

    def __init__(self, tensor: Tensor, record: Record, unpacker: Unpacker) -> None:
        super().__init__(tensor)
        self.record = record
        self.unpacker = unpacker
        self.geometry: Geometry | None = None
        self.is_awaiting = True
        """Whether the backward has not been given this tensor yet, since the record was last fetched."""

    def unpack(self) -> Tensor:
        self.check_version()
        return self.unpacker.unpack(self)

    @property
    def size(self) -> torch.Size:
        return self.alias.size() if self.geometry is None else self.geometry.size

    def let_go(self) -> None:
        """Keep the version counter of the tensor, and none of its bytes."""
        if self.geometry is None:
            self.geometry = Geometry.of(self.alias)
            self.alias.data = torch.empty(0, dtype=self.alias.dtype, device=self.alias.device)

    def __del__(self) -> None:
        self.record.ledger.deaths.append((self.record, self.is_awaiting))


class Record:
    """One version of one storage that autograd saved."""

    __slots__ = (
        "__weakref__",
        "came",
        "counts",
        "fetched",
        "fetched_on",
        "handles",
        "index",
        "ledger",
        "left",
        "num_awaiting",
        "num_bytes",
        "num_handles",
        "original",
        "owner",
        "residency",
        "span",
        "storage",
        "stream",
        "version",
    )

    def __init__(
        self,
        ledger: Ledger,
        storage: torch.UntypedStorage,
        version: int,
        *,
        owner: object,
        index: int,
        counts: IterationCounts,
        stream: Stream,
    ) -> None:
        self.ledger = ledger
        self.owner = owner
        """Who made the record: kept alive for as long as a graph may ask for it."""
        self.index = index
        """Its number among its owner's records."""
        self.counts = counts
        self.num_bytes = storage.nbytes()
        self.version = version
        self.stream = stream
        """The stream that was current when the storage was saved first: it has written the storage, and waits for the copy."""
        self.residency = Residency.GONE
        self.original = weakref.ref(storage)
        self.storage: torch.UntypedStorage | None = None
        """What the ledger itself holds: the original while LEAVING, the fetched copy while COMING and perhaps while BACK."""
        self.handles: list[weakref.ref[Handle]] = []
        self.num_handles = 0
        self.num_awaiting = 0
        self.span: Span | None = None
        self.left: Passage | None = None
        self.came: Passage | None = None
        self.fetched: weakref.ref[torch.UntypedStorage] | None = None
        self.fetched_on: Stream | None = None

    def live_handles(self) -> Iterable[Handle]:
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                yield handle


class Ledger:
    """The records of one tag on one device, and their moves. Callers hold the lock of who owns the ledger."""

    def __init__(self, device: Device, lanes: Lanes, arena: Arena) -> None:
        self.device = device
        self.arena = arena
        self._lanes = lanes
        self.live_bytes = 0
        """Bytes of the records that are on the device."""
        self.peak_live_bytes = 0
        self.num_records = 0
        """Records that a graph may still ask for."""
        self.backlog: deque[Record] = deque()
        """Records that are LEAVING, in the order of their copies. Those whose handles have died wait here for the copy."""
        self.coming: set[Record] = set()
        """Records that are COMING."""
        self.deaths: deque[tuple[Record | weakref.ref[Record], bool | None]] = deque()
        """What finalizers noted: a handle of a record, and whether it was awaiting; or (with None) a fetched copy."""
        self._orphans: list[tuple[torch.UntypedStorage, Event, Stream]] = []

    # Saving

    def open_record(
        self, storage: torch.UntypedStorage, version: int, *, owner: object, index: int, counts: IterationCounts
    ) -> Record:
        """Return a new record: DEVICE."""
        for older in self.backlog:
            if older.storage is storage and older.left is not None:
                # Written to while what was there is on its way, and the lane reads it.
                self.device.wait_event(self.device.current_stream(), older.left.done)
        record = Record(self, storage, version, owner=owner, index=index, counts=counts, stream=self.device.current_stream())
        self.device.note_written(storage, version)
        self.num_records += 1
        self._enter(record, Residency.DEVICE)
        return record

    def add_handle(self, record: Record, tensor: Tensor, unpacker: Unpacker) -> Handle:
        """Return a handle for one more save of a record's storage."""
        handle = Handle(tensor, record, unpacker)
        record.handles.append(weakref.ref(handle))
        record.num_handles += 1
        record.num_awaiting += 1
        if record.residency not in (Residency.DEVICE, Residency.LEAVING):
            handle.let_go()
        return handle

    def leave(self, record: Record, storage: torch.UntypedStorage) -> None:
        """DEVICE -> LEAVING: put the copy to the host on its lane.

        Raises:
            HostMemoryError: there is no room for it; the record stays as it is.
        """
        assert record.residency is Residency.DEVICE
        span = self.arena.take(record.num_bytes)
        record.span, record.storage = span, storage
        record.left = self._lanes.copy_out(storage, span, after=self.device.record_event(record.stream, timed=False))
        record.counts.note_out(record.left)
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
        record.counts.note_stall_out(self._wait(record.stream, record.left.done))
        for handle in record.live_handles():
            handle.let_go()
        record.storage = None
        self._enter(record, Residency.HOST)
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
        storage = self.device.allocate(record.num_bytes)
        stream = self.device.current_stream()
        after = (self.device.record_event(stream, timed=False), record.left.done)
        record.came = self._lanes.copy_back(record.span, storage, after=after)
        record.counts.note_in(record.came)
        record.storage, record.fetched_on = storage, stream
        gone = weakref.ref(record)
        record.fetched = weakref.ref(storage, lambda _: self.deaths.append((gone, None)))
        record.num_awaiting = 0
        for handle in record.live_handles():
            handle.is_awaiting = True
            record.num_awaiting += 1
        self._enter(record, Residency.COMING)

    def hand_out(self, handle: Handle) -> Tensor:
        """COMING or BACK -> BACK: return the tensor over the fetched copy, which the current stream may then use."""
        record = handle.record
        assert record.residency in (Residency.COMING, Residency.BACK)
        storage = self.fetched_copy(record)
        assert storage is not None
        assert record.came is not None
        assert record.fetched_on is not None
        assert handle.geometry is not None
        if record.residency is Residency.COMING:
            record.counts.note_stall_in(self._wait(record.fetched_on, record.came.done))
            self._enter(record, Residency.BACK)
        self.device.note_read(storage)
        if handle.is_awaiting:
            handle.is_awaiting = False
            record.num_awaiting -= 1
        if record.num_awaiting == 0:
            record.storage = None
        return handle.geometry.over(storage)

    def fetched_copy(self, record: Record) -> torch.UntypedStorage | None:
        """Return the fetched copy of a record if it is alive."""
        return None if record.fetched is None else record.fetched()

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
        while self.deaths:
            noted, was_awaiting = self.deaths.popleft()
            if isinstance(noted, Record):
                self._handle_died(noted, was_awaiting=bool(was_awaiting))
            else:
                self._copy_died(noted())
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

    def _handle_died(self, record: Record, *, was_awaiting: bool) -> None:
        record.num_handles -= 1
        if was_awaiting:
            record.num_awaiting -= 1
        if record.num_handles == 0:
            self.num_records -= 1
            record.owner = None  # it may wait in the backlog for long: a pass must not count in the limit for that
            if record.residency is not Residency.LEAVING:
                self._close(record)
        elif record.num_awaiting == 0 and record.residency is Residency.BACK:
            record.storage = None

    def _copy_died(self, record: Record | None) -> None:
        """BACK -> HOST: whoever had the fetched copy has let it go."""
        if record is not None and record.residency is Residency.BACK and self.fetched_copy(record) is None:
            self._enter(record, Residency.HOST)

    def _close(self, record: Record) -> None:
        """Any -> GONE: nobody can ask for these bytes again."""
        if record.residency is Residency.COMING:
            self._give_up_copy(record)
        record.storage = None
        if record.span is not None:
            last = record.came or record.left
            self.arena.give(record.span, None if last is None else last.done)
            record.span = None
        self._enter(record, Residency.GONE)

    def _enter(self, record: Record, residency: Residency) -> None:
        """Every change of residency goes through here: the bytes on the device are counted nowhere else."""
        was_live, is_live = record.residency in ON_DEVICE, residency in ON_DEVICE
        record.residency = residency
        if residency is Residency.COMING:
            self.coming.add(record)
        else:
            self.coming.discard(record)
        if is_live != was_live:
            self.live_bytes += record.num_bytes if is_live else -record.num_bytes
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
