"""`Record`: one version of a saved storage; `Handle`: one save of it, which autograd holds; `SavedResidency`: where it is."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.kept import KeptHandle
from memkit.core.tensors import Geometry
from memkit.device.base import Stream
from memkit.plan import Action
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Transfer

if TYPE_CHECKING:
    from memkit.activations.recomputing.recorded_forward import RecordedForward
    from memkit.activations.saved.forward import Forward
    from memkit.activations.saved.ledger import Ledger


class SavedResidency(Enum):
    DEVICE = "device"
    """On the device only, held by the handles."""
    LEAVING = "leaving"
    """On the device, held by the ledger; a copy to the host is under way or done."""
    HOST = "host"
    """In host memory; the ledger has let go of the device's storage, though the caller may still hold it."""
    COMING = "coming"
    """In host memory; a copy to the device is under way or done, held by the ledger for the backward."""
    BACK = "back"
    """On the device in a later copy, held by its receivers, and by the ledger while other handles wait for theirs."""
    DROPPED = "dropped"
    """Nowhere: its maker can recompute it."""
    GONE = "gone"
    """Nowhere: the last handle has died."""


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
        self.sources: Sequence[object] = ()
        """Sources of its record, held for it if its maker cannot recompute them."""
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
    is_awaiting: bool
    """The backward has not got this tensor yet, since the record was last fetched."""
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
        self.owner = owner
        """The forward that moves it, if any: kept alive while a graph may ask for the record."""
        self.index = index
        self.counts = None if owner is None else owner.counts
        self.maker: RecordedForward | None = None
        """Kept alive as well; None if nothing can recompute it."""
        self.value = -1
        self.num_bytes = storage.nbytes()
        self.version = version
        self.use_order = 0
        """When in the forward it was saved: see [Note: one queue for all] in `memkit.transfer.lanes`."""
        self.stream = stream
        """The stream that was current at the storage's first save: it has written the storage, and waits for the copy."""
        self.residency = SavedResidency.GONE
        self.original = weakref.ref(storage)
        self.storage: torch.UntypedStorage | None = None
        """The ledger's own storage: the original while LEAVING, the later copy while COMING and perhaps while BACK."""
        self.handles: list[HandleReference] = []
        self.num_handles = self.num_awaiting = 0
        self.span: Span | None = None
        self.left: Transfer | None = None
        self.came: Transfer | None = None
        self.fetched: CopyReference | None = None
        self.fetched_on: Stream | None = None
        self.lent: list[KeptHandle] = _NONE
        """Handed-out tensors over the later copy, without their bytes: they tell of writes since."""

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
