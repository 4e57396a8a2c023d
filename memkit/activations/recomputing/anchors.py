"""Values that autograd did not save, and that a plan holds because others are made from them: records as any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit import torch_private
from memkit.activations.saved.records import Handle
from memkit.storages import Geometry
from memkit.torch_state import sharing_counters

if TYPE_CHECKING:
    from memkit.activations.offloading.window import OffloadWindow

_NO_NODE = -1


class Anchors:
    """The anchors of one forward. Their handles are held here, where those of a saved tensor are held by the graph.

    Args:
        window: where their records are.
    """

    def __init__(self, window: OffloadWindow) -> None:
        self._window = window
        self._handles: dict[int, Handle] = {}

    @property
    def last(self) -> int:
        """The latest value that is held, -1 if none is."""
        return next(reversed(self._handles), -1)

    def hold(self, value: int, tensor: Tensor) -> Handle:
        """See `memkit.recording.roots.Holder`."""
        handle = self._open(tensor)
        self._handles[value] = handle
        return handle

    def copy(self, value: int) -> None:
        """See `memkit.recording.roots.Holder`."""
        handle = self._handles.get(value)
        if handle is not None:
            alias = handle.alias
            self._handles[value] = self._open(Geometry.of(alias).over(alias.untyped_storage().clone()))

    def release(self, value: int) -> None:
        """See `memkit.recording.roots.Holder`."""
        self._handles.pop(value, None)

    def find(self, value: int) -> torch.UntypedStorage | None:
        """Return the storage of a value that is held and was not written to."""
        handle = self._handles.get(value)
        is_there = handle is not None and (handle.version is None or handle.is_unchanged())
        return handle.alias.untyped_storage() if handle is not None and is_there else None

    def _open(self, tensor: Tensor) -> Handle:
        window = self._window
        with window.lock:
            try:
                with sharing_counters(), torch_private.without_python_dispatch(), torch.no_grad():
                    return window.ledger.open(tensor, tensor.untyped_storage(), window, _NO_NODE)
            except BaseException:  # as `mended` does
                window.is_broken = True
                raise
