"""What autograd is given to save while a streamed layer runs: handles for what lies in a slot, the rest as others want it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from memkit import torch_private
from memkit.hooks import SavedTensorHooks
from memkit.kept import FlattenedHandle, ForwardedHandle, KeptHandle
from memkit.torch_state import has_own_dispatch
from memkit.wrappers import parts_of

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class WeightHooks:
    """The saved-tensor hooks of one forward of a streamed layer, over those that were on top: another context's of memkit, a
    user's, those of a checkpoint.

    Args:
        slot_at: returns the slot that a storage is, None if it is none.
        handle_of: returns what stands for a tensor that lies in a slot, and holds none of its bytes.
        hands_on_weights: whether those, if there are any, are given the weights as well, which hold the slot then.
    """

    def __init__(
        self,
        slot_at: Callable[[torch.UntypedStorage], object],
        handle_of: Callable[[Tensor], KeptHandle],
        *,
        hands_on_weights: bool,
    ) -> None:
        self._slot_at = slot_at
        self._handle_of = handle_of
        self._hands_on_weights = hands_on_weights
        self._hooks = SavedTensorHooks(partial(WeightHooks.pack, self), _unpack, owner=self, hands_on=True)

    def begin(self) -> None:
        self._hooks.__enter__()

    def end(self) -> None:
        """Let those that were on top before be so again. Calling it again does nothing."""
        if hasattr(self, "_hooks"):
            self._hooks.__exit__()
            del self._hooks  # it holds this object

    def pack(self, tensor: Tensor) -> KeptHandle:
        """Take a tensor that autograd saves."""
        is_plain = type(tensor) in _PLAIN_TYPES or not has_own_dispatch(tensor)
        parts = [tensor] if is_plain else parts_of(tensor) if torch_private.is_wrapper(tensor) else []
        if any(map(self._is_in_slot, parts)):
            if self._hooks.outer is None or not self._hands_on_weights:
                if not is_plain:
                    return FlattenedHandle(tensor, self.pack)
                with torch_private.without_python_dispatch():  # it is no part of the forward
                    return self._handle_of(tensor)
            tensor = tensor.detach()  # the parameter itself leaves the slot before this is used
        if self._hooks.outer is not None:
            return ForwardedHandle(tensor, *self._hooks.outer, is_checked=False)
        return KeptHandle(tensor)

    def _is_in_slot(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and self._slot_at(tensor.untyped_storage()) is not None


def _unpack(packed: KeptHandle) -> Tensor:
    return packed.unpack()
