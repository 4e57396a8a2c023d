"""What autograd is given to save while a streamed layer runs: what stands for bytes that lie in a slot, the rest as others want
it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.hooks import HookPair, SavedTensorHooks
from memkit.kept import FlattenedHandle, ForwardedHandle, KeptHandle, modified_error, nothing
from memkit.torch_state import has_own_dispatch
from memkit.weights.streaming import StreamedHandle, Streamer
from memkit.wrappers import parts_of

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


class _SavedWeight(tuple[Any, ...]):
    """A plain parameter that lies in a slot, or a view of one, as autograd saves it: who streams it, its layer, the parameter,
    what its version counter and the layer's changes came to, and how it lies in the slot. It holds none of the bytes.

    It is made, and taken apart, without a call of a Python function.
    """

    __slots__ = ()


class _Saves:
    """Takes what autograd saves in one forward of a streamed layer.

    Args:
        streamer: who streams the layer.
    """

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._slots = streamer.ring.slots
        self.outer: HookPair | None = None
        """The hooks that were on top before: another context's of memkit, a user's, those of a checkpoint."""
        self.hands_on_weights = False
        """Whether those, if there are any, are given the weights as well, which hold the slot then."""

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that autograd saves."""
        if type(tensor) not in _PLAIN_TYPES or self.outer is not None or tensor.layout is not _STRIDED:
            return self._pack_any(tensor)
        slot = self._slots.get(torch_private.storage_address(tensor.untyped_storage()))
        if slot is None:
            return tensor.detach(), torch_private.version_of(tensor)
        chunk, base = slot.chunk, torch_private.base_of(tensor)
        parameter = tensor if base is None else base
        if chunk is None or id(parameter) not in chunk.binding.known or self._streamer.handles is not None:
            return self._pack_any(tensor)
        version = torch_private.version_of(parameter) + chunk.num_changes
        place = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
        return _SavedWeight((self._streamer, chunk, parameter, version, place))

    def _pack_any(self, tensor: Tensor) -> KeptHandle:
        is_plain = type(tensor) in _PLAIN_TYPES or not has_own_dispatch(tensor)
        parts = [tensor] if is_plain else parts_of(tensor) if torch_private.is_wrapper(tensor) else []
        if any(map(self._is_in_slot, parts)):
            if self.outer is None or not self.hands_on_weights:
                if not is_plain:
                    return FlattenedHandle(tensor, self._pack_any)
                with torch_private.without_python_dispatch():  # it is no part of the forward
                    return StreamedHandle(self._streamer, tensor)
            tensor = tensor.detach()  # the parameter itself leaves the slot before this is used
        if self.outer is not None:
            return ForwardedHandle(tensor, *self.outer, is_checked=False)
        return KeptHandle(tensor)

    def _is_in_slot(self, tensor: Tensor) -> bool:
        return tensor.layout is _STRIDED and self._streamer.ring.at(tensor.untyped_storage()) is not None


def _unpack(packed: Any) -> Any:
    kind = type(packed)
    if kind is tuple:
        alias, version = packed
        if torch_private.version_of(alias) != version:
            raise modified_error(alias, version)
        return alias
    if kind is not _SavedWeight:
        return packed.unpack()
    streamer, chunk, parameter, version, place = packed
    version_now = torch_private.version_of(parameter) + chunk.num_changes
    if version_now != version:
        alias = nothing(place[3], streamer.device.torch_device)
        raise modified_error(alias, version, lambda: place[0], version_now)
    return streamer.bring(chunk, place)


class WeightHooks:
    """The saved-tensor hooks of the forwards of a streamed layer, over those that were on top.

    Args:
        streamer: who streams the layer.
    """

    def __init__(self, streamer: Streamer) -> None:
        self._saves = _Saves(streamer)
        self._hooks = SavedTensorHooks(self._saves.pack, _unpack, owner=self._saves, hands_on=True)
        self.is_on = False

    def begin(self, *, hands_on_weights: bool) -> None:
        self.is_on = True
        self._saves.hands_on_weights = hands_on_weights
        self._hooks.__enter__()
        self._saves.outer = self._hooks.outer

    def end(self) -> None:
        """Let those that were on top before be so again. Calling it again does nothing."""
        self._hooks.__exit__()
        self._saves.outer = None
        self.is_on = False
