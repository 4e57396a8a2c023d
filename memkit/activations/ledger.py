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

from memkit.activations.counts import IterationCounts
from memkit.device.base import Device, Stream
from memkit.hooks import KeptHandle, nothing
from memkit.storages import tensor_over
from memkit.transfer.arena import Span
from memkit.transfer.lanes import Passage


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

    __slots__ = ("geometry", "is_awaiting", "record", "unpacker")

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
        self.handles: list[weakref.ref[Handle]] = []
        self.num_handles = 0
        self.num_awaiting = 0
        self.span: Span | None = None
        self.left: Passage | None = None
        self.came: Passage | None = None
        self.fetched: weakref.ref[torch.UntypedStorage] | None = None
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
        self.deaths: deque[tuple[Record | weakref.ref[Record], bool | None]] = deque()
        """What finalizers noted: a handle of a record, and whether it was awaiting; or (with None) a later copy."""

    # Saving

    def open_record(
        self, storage: torch.UntypedStorage, version: int, *, owner: object, index: int, counts: IterationCounts | None = None
    ) -> Record:
        """Return a new record: DEVICE."""
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

    # Dropping

    def drop(self, record: Record) -> None:
        """DEVICE or BACK -> DROPPED: let go of the bytes. Whoever was given them keeps them."""
        assert record.residency in (Residency.DEVICE, Residency.BACK)
        for handle in record.live_handles():
            handle.let_go()
        record.storage = None
        self._enter(record, Residency.DROPPED)

    def restore(self, record: Record, storage: torch.UntypedStorage) -> None:
        """DROPPED -> BACK: the bytes have been made again, by work on the current stream."""
        assert record.residency is Residency.DROPPED
        self.device.note_written(storage, 0)
        self._hold_copy(record, storage)
        self._enter(record, Residency.BACK)

    def expect(self, record: Record) -> None:
        """A backward begins that will ask for all handles of a record, perhaps again."""
        for handle in record.live_handles():
            if not handle.is_awaiting:
                handle.is_awaiting = True
                record.num_awaiting += 1

    def _hold_copy(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Hold another storage with the bytes of a record until each of its handles has been given it."""
        record.storage, record.fetched_on = storage, self.device.current_stream()
        record.lent = []
        gone = weakref.ref(record)
        record.fetched = weakref.ref(storage, lambda _: self.deaths.append((gone, None)))
        record.num_awaiting = 0
        for handle in record.live_handles():
            handle.is_awaiting = True
            record.num_awaiting += 1

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
        if handle.is_awaiting:
            handle.is_awaiting = False
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
            noted, was_awaiting = self.deaths.popleft()
            if isinstance(noted, Record):
                self._handle_died(noted, was_awaiting=bool(was_awaiting))
            else:
                self._copy_died(noted())

    def _handle_died(self, record: Record, *, was_awaiting: bool) -> None:
        record.num_handles -= 1
        if was_awaiting:
            record.num_awaiting -= 1
        if record.num_handles == 0:
            self.num_records -= 1
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

    def _enter(self, record: Record, residency: Residency) -> None:
        """Every change of residency goes through here: the bytes on the device are counted nowhere else."""
        was_live, is_live = record.residency in ON_DEVICE, residency in ON_DEVICE
        record.residency = residency
        if is_live != was_live:
            self.live_bytes += record.num_bytes if is_live else -record.num_bytes
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
