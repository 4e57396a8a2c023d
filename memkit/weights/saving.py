"""What autograd is given to save while a streamed layer runs: what stands for bytes that lie in a slot, the rest as others want
it."""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from memkit import torch_private
from memkit.hooks import HookPair, SavedTensorHooks
from memkit.kept import FlattenedHandle, ForwardedHandle, KeptHandle, modified_error, nothing
from memkit.plan.chunks import Residency
from memkit.storages import Geometry
from memkit.torch_state import has_own_dispatch
from memkit.wrappers import parts_of

if TYPE_CHECKING:
    from memkit.weights.chunks import LayerChunk
    from memkit.weights.slots import Slot
    from memkit.weights.streaming import Streamer

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_DIRTY = Residency.DIRTY
_MOST_VIEWS = 1024
"""So many views of a slot are kept for the next time."""


class SavedWeight(tuple[Any, ...]):
    """A plain parameter that lies in a slot, or a view of one, as autograd saves it: its layer, the parameter, what its version
    counter and the layer's changes came to, and how it lies in the slot. It holds none of the bytes.

    It is made, and taken apart, without a call of a Python function.
    """

    __slots__ = ()


class Lying(NamedTuple):
    """Where a layer lies whose backward is going on."""

    chunk: LayerChunk
    slot: Slot
    stream_number: int
    """The stream that has waited for the slot."""
    state: object
    """What the slot's `state` was. As long as it is this very object, the slot has what was brought there, and what was written
    to the parameters since, which lie there: whether one was written to since it was saved is asked of its own counter."""


class _HandedOn(tuple[Any, ...]):
    """What the hooks outside have made of a tensor, behind what unpacks it."""

    __slots__ = ()


class _Saves:
    """Takes what autograd saves in the forwards of streamed layers, and gives it back.

    Args:
        streamer: who streams the layers.
        outer: the hooks that were on top before: another context's of memkit, a user's, those of a checkpoint.
        hands_on_weights: whether those, if there are any, are given the weights as well, which hold the slot then.
    """

    def __init__(self, streamer: Streamer, outer: HookPair | None, *, hands_on_weights: bool) -> None:
        self._streamer = streamer
        self._ring = streamer.ring
        self._outer = outer
        self._hands_on_weights = outer is not None and hands_on_weights
        self._stream_number, self._takes_notes = streamer.device.stream_number, streamer.device.takes_notes

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that autograd saves."""
        if type(tensor) not in _PLAIN_TYPES or tensor.layout is not _STRIDED:
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
        """Return a tensor that was saved.

        Raises:
            RuntimeError: it was written to since.
        """
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
                            streamer.device.note_read(slot.storage)  # else no step writes to what is read
                        return (slot.view(Geometry(*place)) if view is None else view).data
            return Geometry(*place).over(streamer.use(chunk).storage)

    def _pack_any(self, tensor: Tensor) -> KeptHandle:
        is_plain = type(tensor) in _PLAIN_TYPES or not has_own_dispatch(tensor)
        parts = [tensor] if is_plain else parts_of(tensor) if torch_private.is_wrapper(tensor) else []
        if any(map(self._is_in_slot, parts)):
            if not self._hands_on_weights:
                if not is_plain:
                    return FlattenedHandle(tensor, self._pack_any)
                with torch_private.without_python_dispatch():  # it is no part of the forward
                    return self._streamer.handle_of(tensor)
            tensor = tensor.detach()  # the parameter itself leaves the slot before this is used
        if self._outer is not None:
            return ForwardedHandle(tensor, *self._outer, is_checked=False)
        return KeptHandle(tensor)

    def _is_in_slot(self, tensor: Tensor) -> bool:
        return tensor.layout is _STRIDED and self._streamer.ring.at(tensor.untyped_storage()) is not None


class WeightHooks(SavedTensorHooks):
    """The saved-tensor hooks of a forward of a streamed layer, over those that are on top: see `_Saves`, whose arguments these
    are."""

    def __init__(self, streamer: Streamer, outer: HookPair | None = None, *, hands_on_weights: bool = False) -> None:
        saves = _Saves(streamer, outer, hands_on_weights=hands_on_weights)
        super().__init__(saves.pack, saves.unpack, owner=saves, hands_on=True)
