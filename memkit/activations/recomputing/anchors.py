"""`Anchors`: values that autograd did not save and that a plan holds, because others are recomputed from them. They have
records like saved values."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit import torch_private
from memkit.activations.saved.records import Handle, SavedResidency
from memkit.storages import Geometry
from memkit.torch_state import sharing_counters

if TYPE_CHECKING:
    from memkit.activations.offloading.window import OffloadWindow

_NO_NODE = -1


class Anchors:
    """The anchors of one forward. Their handles are held here, as those of saved tensors are held by the graph.

    Args:
        window: the window that holds their records.
    """

    def __init__(self, window: OffloadWindow) -> None:
        self.window = window
        self._handles: dict[int, Handle] = {}
        self._known: dict[int, weakref.ref[Handle]] = {}
        """Handles, including released ones, which values recomputed from them may still hold."""

    @property
    def last(self) -> int:
        """The latest value that is held, -1 if none is."""
        return next(reversed(self._handles), -1)

    def hold(self, value: int, tensor: Tensor) -> Handle:
        """See `memkit.recording.recording.RootHolder`."""
        handle = self._open(tensor)
        self._handles[value] = handle
        self._known[value] = weakref.ref(handle)
        return handle

    def copy(self, value: int) -> None:
        """See `memkit.recording.recording.RootHolder`."""
        handle = self._handles.get(value)
        if handle is not None and handle.record.residency is SavedResidency.LEAVING:
            self.window.ledger.release(handle.record)  # the lane reads what is about to be written to
        if handle is not None and handle.geometry is None:
            alias = handle.alias
            self._handles[value] = self._open(Geometry.of(alias).over(alias.untyped_storage().clone()))

    def release(self, value: int) -> None:
        """See `memkit.recording.recording.RootHolder`."""
        self._handles.pop(value, None)

    def handle(self, value: int) -> Handle | None:
        """Return the handle of a value that is held and was not written to, else None."""
        handle, known = self._handles.get(value), self._known.get(value)
        if handle is None and known is not None:
            handle = known()
        return handle if handle is not None and (handle.version is None or handle.is_unchanged()) else None

    def find(self, value: int) -> torch.UntypedStorage | None:
        """Return a storage with the bytes of a held value, for reads by work on the current stream; None if there is none."""
        handle = self.handle(value)
        if handle is None:
            return None
        window = self.window
        if handle.geometry is not None:  # it has left
            return window.lend(handle)
        storage = handle.alias.untyped_storage()
        window.device.note_read(storage)
        return storage

    def _open(self, tensor: Tensor) -> Handle:
        window = self.window
        with window.lock:
            try:
                with sharing_counters(), torch_private.without_python_dispatch(), torch.no_grad():
                    return window.ledger.open(tensor, tensor.untyped_storage(), window, _NO_NODE)
            except BaseException:  # as `mended` does
                window.is_broken = True
                raise
