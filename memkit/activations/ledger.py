"""Where the bytes of each saved storage are, and every step they take between device and host.

A `Record` stands for one version of one storage, however many tensors autograd saved of it; a `Handle` is what autograd holds
for one save. The ledger moves records from one `Residency` to the next and keeps each move safe; it decides nothing. What dies
is noted when it does, on whatever thread, and taken up in `Ledger.sweep`: no copy is ever issued by a finalizer. At whatever
line an interrupt comes, `Ledger.mend` can put right what it has left: see [Note: interrupts] in `memkit.interrupts`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from memkit.activations.counts import IterationCounts
from memkit.device.base import Device, Stream
from memkit.kept import KeptHandle, nothing
from memkit.storages import tensor_over
from memkit.transfer.arena import Span
from memkit.transfer.lanes import Transfer


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
    DROPPED = "dropped"
    """Nowhere: what it was made from can make it again."""
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
        return tensor_over(
            storage,
            self.dtype,
            offset=self.offset,
            size=self.size,
            stride=self.stride,
            is_conj=self.is_conj,
            is_neg=self.is_neg,
        )


class Unpacker(Protocol):
    """Who brings a handle's tensor back."""

    def unpack(self, handle: Handle) -> Tensor: ...


class Handle(KeptHandle):
    """One save of a tensor whose storage has a record.

    Once the record has left the device, the alias is an empty tensor that only shares the version counter.
    """

    __slots__ = ("geometry", "record", "reference", "unpacker")

    def __init__(self, tensor: Tensor, record: Record, unpacker: Unpacker) -> None:
        super().__init__(tensor)
        self.record = record
        self.unpacker = unpacker
        self.geometry: Geometry | None = None
        self.reference = HandleReference(self, record)

    def unpack(self) -> Tensor:
        self.check_version()
        return self.unpacker.unpack(self)

    @property
    def size(self) -> torch.Size:
        return self.alias.size() if self.geometry is None else self.geometry.size

    def over_original(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor over the storage that it was saved from. Writes to it count as writes to the saved tensor."""
        assert self.geometry is not None
        tensor = self.alias.detach()
        tensor.data = self.geometry.over(storage)
        return tensor

    def let_go(self) -> None:
        """Keep the version counter of the tensor, and none of its bytes."""
        if self.geometry is None:
            self.geometry = Geometry.of(self.alias)
            self.alias.data = nothing(self.alias.dtype, self.alias.device)


class HandleReference(weakref.ref[Handle]):
    """What a record knows of one of its handles, also after that has died."""

    __slots__ = ("is_awaiting", "is_counted", "record")

    def __new__(cls, handle: Handle, record: Record) -> HandleReference:
        return super().__new__(cls, handle, record.ledger.deaths.append)

    def __init__(self, handle: Handle, record: Record) -> None:
        self.record = record
        self.is_awaiting = True
        """Whether the backward has not been given this tensor yet, since the record was last fetched."""
        self.is_counted = False
        """Whether it is one of the record's `num_handles`."""


class CopyReference(weakref.ref[torch.UntypedStorage]):
    """What a record knows of a later copy of its bytes."""

    __slots__ = ("record",)

    def __new__(cls, storage: torch.UntypedStorage, record: Record) -> CopyReference:
        return super().__new__(cls, storage, record.ledger.deaths.append)

    def __init__(self, storage: torch.UntypedStorage, record: Record) -> None:
        self.record = weakref.ref(record)


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
        "lent",
        "num_awaiting",
        "num_bytes",
        "num_handles",
        "original",
        "owner",
        "residency",
        "span",
        "storage",
        "stream",
        "tick",
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
        counts: IterationCounts | None,
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
        self.tick = 0
        """When in the forward it was saved: see [Note: one queue for all] in `memkit.transfer.lanes`."""
        self.stream = stream
        """The stream that was current when the storage was saved first: it has written the storage, and waits for the copy."""
        self.residency = Residency.GONE
        self.original = weakref.ref(storage)
        self.storage: torch.UntypedStorage | None = None
        """What the ledger itself holds: the original while LEAVING, the fetched copy while COMING and perhaps while BACK."""
        self.handles: list[HandleReference] = []
        self.num_handles = 0
        self.num_awaiting = 0
        self.span: Span | None = None
        self.left: Transfer | None = None
        self.came: Transfer | None = None
        self.fetched: CopyReference | None = None
        self.fetched_on: Stream | None = None
        self.lent: list[KeptHandle] = []
        """What was handed out over the later copy, without its bytes: tells whether somebody has written to them."""

    def live_handles(self) -> Iterable[Handle]:
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                yield handle


class Ledger:
    """The records of one tag on one device, and their moves. Callers hold the lock of who owns the ledger.

    This one knows how to drop a record and to have it back. `CopyLedger` also moves records to the host.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.live_bytes = 0
        """Bytes of the records that are on the device."""
        self.peak_live_bytes = 0
        self.num_records = 0
        """Records that a graph may still ask for."""
        self.records = set[Record]()
        """All records that are not GONE."""
        self.deaths: deque[HandleReference | CopyReference] = deque()
        """What has died and was not taken up yet: handles of records, and later copies."""

    # Saving

    def open_record(
        self, storage: torch.UntypedStorage, version: int, *, owner: object, index: int, counts: IterationCounts | None = None
    ) -> Record:
        """Return a new record: DEVICE."""
        record = Record(self, storage, version, owner=owner, index=index, counts=counts, stream=self.device.current_stream())
        self.device.note_written(storage, version)
        self.records.add(record)
        self.num_records += 1
        self._enter(record, Residency.DEVICE)
        return record

    def add_handle(self, record: Record, tensor: Tensor, unpacker: Unpacker) -> Handle:
        """Return a handle for one more save of a record's storage."""
        handle = Handle(tensor, record, unpacker)
        reference = handle.reference
        record.handles.append(reference)
        reference.is_counted = True
        record.num_handles += 1
        record.num_awaiting += 1
        if record.residency not in (Residency.DEVICE, Residency.LEAVING):
            handle.let_go()
        return handle

    # Dropping

    def drop(self, record: Record) -> None:
        """DEVICE or BACK -> DROPPED: let go of the bytes. Whoever was given them keeps them."""
        assert record.residency in (Residency.DEVICE, Residency.BACK)
        self._enter(record, Residency.DROPPED)
        for handle in record.live_handles():
            handle.let_go()
        record.storage = None

    def restore(self, record: Record, storage: torch.UntypedStorage) -> None:
        """DROPPED -> BACK: the bytes have been made again, by work on the current stream."""
        assert record.residency is Residency.DROPPED
        self.device.note_written(storage, 0)
        self._hold_copy(record, storage)
        self._enter(record, Residency.BACK)

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
        """BACK: return the tensor over the copy that is there, which the current stream may then use."""
        record = handle.record
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
        """Take up what finalizers have noted since the last time."""
        while self.deaths:
            dead = self.deaths.popleft()
            if isinstance(dead, CopyReference):
                self._copy_died(dead.record())
            elif dead.is_counted:
                self._handle_died(dead)

    def _handle_died(self, dead: HandleReference) -> None:
        record, dead.is_counted = dead.record, False
        record.num_handles -= 1
        if dead.is_awaiting:
            record.num_awaiting -= 1
        if record.num_handles == 0:
            self.num_records -= 1
            record.handles.clear()  # they hold the record
            record.owner = None  # it may wait for a copy for long: a pass must not count in the limit for that
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
        record.storage = None
        self._enter(record, Residency.GONE)
        self.records.discard(record)

    def mend(self) -> None:
        """Put right what was broken off: see [Note: interrupts]. Makes the host wait for all that the device has to do."""
        self.device.synchronize()
        for record in tuple(self.records):
            for reference in record.handles:
                reference.is_counted = reference() is not None
            record.handles[:] = [reference for reference in record.handles if reference.is_counted]
            record.num_handles = len(record.handles)
            record.num_awaiting = sum(reference.is_awaiting for reference in record.handles)
            self._put_down(record)
            if record.num_handles == 0:
                record.owner = None
                self._close(record)
        self.live_bytes = sum(record.num_bytes for record in self.records if record.residency in ON_DEVICE)
        self.num_records = len(self.records)

    def _put_down(self, record: Record) -> None:
        """Let go of what the ledger itself holds on the device: nothing is under way. BACK -> DROPPED."""
        if record.residency is Residency.BACK:
            self._enter(record, Residency.DROPPED)
        record.storage = record.fetched = None
        if record.residency is not Residency.DEVICE:
            for handle in record.live_handles():
                handle.let_go()

    def _enter(self, record: Record, residency: Residency) -> None:
        """Every change of residency goes through here: the bytes on the device are counted nowhere else."""
        was_live, is_live = record.residency in ON_DEVICE, residency in ON_DEVICE
        record.residency = residency
        if is_live != was_live:
            self.live_bytes += record.num_bytes if is_live else -record.num_bytes
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
