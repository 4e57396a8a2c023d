"""Saved-tensor hooks in a layer's forward: a weight is saved as a reference to its layer."""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.hooks import HookPair, SavedTensorHooks
from memkit.core.kept import FlattenedHandle, ForwardedHandle, KeptHandle, modified_error, nothing
from memkit.core.tensors import PLAIN_TYPES, Geometry, parts_of
from memkit.core.torch_state import has_own_dispatch
from memkit.plan.chunks import Residency

if TYPE_CHECKING:
    from memkit.weights.chunks import LayerChunk
    from memkit.weights.slots import Slot
    from memkit.weights.streaming import Streamer


class StreamedHandle(KeptHandle):
    """A saved parameter in a slot, or a view of one. It does not keep the slot: unpacking fetches the layer again."""

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


_STRIDED = torch.strided
_DIRTY = Residency.DIRTY
_MOST_VIEWS = 1024
"""At most this many views of a slot are kept for the next use."""


class SavedWeight(tuple[Any, ...]):
    """A weight in a slot, as autograd saves it: (layer, parameter, its version plus `num_changes`, geometry)."""

    __slots__ = ()


class Lying(NamedTuple):
    chunk: LayerChunk
    slot: Slot
    stream_number: int
    """Of the stream that has waited for the slot."""
    state: object
    """The slot's `state` when this was made: while that is the identical object, the slot was not filled again."""


class _HandedOn(tuple[Any, ...]):
    """(unpack hook, result of the pack hook) for a tensor that was given to outer hooks."""

    __slots__ = ()


class _Saves:
    """Pack and unpack hooks of streamed layers' forwards; `outer` hooks get weights as well if `hands_on_weights`."""

    def __init__(self, streamer: Streamer, outer: HookPair | None, *, hands_on_weights: bool) -> None:
        self._streamer = streamer
        self._ring = streamer.ring
        self._outer = outer
        self._hands_on_weights = outer is not None and hands_on_weights
        self._stream_number, self._takes_notes = streamer.device.stream_number, streamer.device.takes_notes

    def pack(self, tensor: Tensor) -> Any:
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not _STRIDED:
            return self._pack_any(tensor)
        address, slot = tensor.data_ptr(), None  # 0 where there are no bytes
        if not address or bisect(self._ring.bounds, address) % 2:
            slot = self._ring.slots.get(torch_private.storage_address(tensor.untyped_storage()))
        if slot is None:
            if self._outer is None:
                return tensor.detach(), torch_private.version_of(tensor)
            pack, unpack = self._outer
            return _HandedOn((unpack, pack(tensor)))
        chunk, parameter = slot.chunk, torch_private.base_of(tensor)
        if parameter is None:
            parameter = tensor
        is_any = self._hands_on_weights or self._streamer.handles is not None
        if is_any or chunk is None or id(parameter) not in chunk.binding.known:
            return self._pack_any(tensor)
        version = torch_private.version_of(parameter) + chunk.num_changes
        place = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
        return SavedWeight((chunk, parameter, version, place))

    def unpack(self, packed: Any) -> Any:
        kind = type(packed)
        if kind is tuple:
            alias, version = packed
            if torch_private.version_of(alias) != version:
                raise modified_error(alias, version)
            return alias
        if kind is _HandedOn:
            return packed[0](packed[1])
        if kind is not SavedWeight:
            return packed.unpack()
        chunk, parameter, version, place = packed
        version_now, streamer = torch_private.version_of(parameter) + chunk.num_changes, self._streamer
        if version_now != version:
            alias = nothing(place[3], streamer.device.torch_device)
            raise modified_error(alias, version, lambda: place[0], version_now)
        with streamer.lock:
            lying = streamer.lying
            if lying is not None and lying.chunk is chunk and not torch_private.num_dispatch_modes():
                slot = lying.slot
                if lying.stream_number == self._stream_number() and (
                    chunk.residency is _DIRTY or slot.state is lying.state or slot.state == chunk.state()
                ):
                    view = slot.tensors.get(place)
                    if view is not None or len(slot.tensors) < _MOST_VIEWS:
                        if self._takes_notes and (slot.stepped is None or chunk.residency is _DIRTY):
                            streamer.device.note_read(slot.storage)  # else no step writes to these bytes
                        return (slot.view(Geometry(*place)) if view is None else view).data
            return Geometry(*place).over(streamer.use(chunk).storage)

    def _pack_any(self, tensor: Tensor) -> KeptHandle:
        is_plain = type(tensor) in PLAIN_TYPES or not has_own_dispatch(tensor)
        parts = [tensor] if is_plain else parts_of(tensor) if torch_private.is_wrapper(tensor) else []
        if any(map(self._is_in_slot, parts)):
            if not self._hands_on_weights:
                if not is_plain:
                    return FlattenedHandle(tensor, self._pack_any)
                with torch_private.without_python_dispatch():  # it is no part of the forward
                    return StreamedHandle(self._streamer, tensor)
            tensor = tensor.detach()  # the parameter itself leaves the slot before this is used
        if self._outer is not None:
            return ForwardedHandle(tensor, *self._outer, is_checked=False)
        return KeptHandle(tensor)

    def _is_in_slot(self, tensor: Tensor) -> bool:
        return tensor.layout is _STRIDED and self._streamer.ring.at(tensor.untyped_storage()) is not None


class WeightHooks(SavedTensorHooks):
    """The saved-tensor hooks of a streamed layer's forward, over the top ones. For the arguments see `_Saves`."""

    def __init__(self, streamer: Streamer, outer: HookPair | None = None, *, hands_on_weights: bool = False) -> None:
        saves = _Saves(streamer, outer, hands_on_weights=hands_on_weights)
        super().__init__(saves.pack, saves.unpack, owner=saves, hands_on=True)
