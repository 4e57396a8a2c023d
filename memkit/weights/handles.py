"""`StreamedHandle`: a saved tensor in a slot, for other contexts' hooks, and to know whether a graph is alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit.kept import KeptHandle, nothing
from memkit.storages import Geometry

if TYPE_CHECKING:
    from memkit.weights.streaming import Streamer


class StreamedHandle(KeptHandle):
    """A saved parameter in a slot, or a view of one. It does not keep the slot: the layer is fetched again when it is
    unpacked."""

    __slots__ = ("_chunk", "_geometry", "_num_changes", "_streamer")

    def __init__(self, streamer: Streamer, tensor: Tensor) -> None:
        super().__init__(tensor)
        slot = streamer.ring.at(tensor.untyped_storage())
        assert slot is not None
        assert slot.chunk is not None
        self._streamer = streamer
        if streamer.handles is not None:
            streamer.handles.add(self)
        self._chunk = slot.chunk
        self._num_changes = slot.chunk.num_changes
        self._geometry = Geometry.of(tensor)
        self.alias.data = nothing(tensor.dtype, tensor.device)

    @property
    def size(self) -> torch.Size:
        return self._geometry.size

    @property
    def version_now(self) -> int:
        return super().version_now + self._chunk.num_changes - self._num_changes

    def unpack(self) -> Tensor:
        self.check_version()
        return self._geometry.over(self._streamer.use(self._chunk).storage)
