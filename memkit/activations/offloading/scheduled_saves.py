"""The pack hook for forwards that go like an earlier one: what is done with each save is known ahead."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.activations.offloading.scheduled_sends import Life
from memkit.kept import KeptHandle, ScheduledHandle
from memkit.torch_state import is_saved_by_compiled_code

if TYPE_CHECKING:
    from memkit.activations.offloading.schedule import ScheduledSave
    from memkit.activations.offloading.scheduled import ScheduledForward

_Parameter = nn.Parameter


class _NoForward:
    """A forward without saves, for when no forward follows a schedule."""

    num_saves = 0
    is_forward = False


class ScheduledSaves:
    """Takes what autograd saves in a context, as long as each save is the one that the schedule has next.

    Args:
        take: takes every other tensor. It may call `follow` to have a forward followed from this tensor on.
    """

    def __init__(self, take: Callable[[Tensor], Any]) -> None:
        self.forward: Any = _NoForward
        self.life: Life | None = None
        self.rest: Life | None = None
        """What its handles hold, and those of what no backward asks for."""
        self._num_saves = 0
        self._take = take

    def follow(self, forward: ScheduledForward) -> None:
        """Take the saves of a forward from the next one on."""
        self.forward, self.life, self.rest = forward, Life(forward), Life(forward)
        forward.life, forward.rest, forward.saves = weakref.ref(self.life), weakref.ref(self.rest), weakref.ref(self)
        self._device = forward.device
        self._torch_device = forward.device.torch_device
        self._notes = forward.device.takes_notes
        self._stream = forward.device.stream_number()
        self._saves, self._num_saves = forward.schedule.saves, len(forward.schedule.saves)
        self._addresses: dict[int, int] = {}
        """For the address of a storage, the last value that it was held for."""

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd is to keep for a tensor. This is the pack hook."""
        forward = self.forward
        place = forward.num_saves
        if place < self._num_saves and forward.is_forward:
            save, kind = self._saves[place], type(tensor)
            try:
                is_due = (
                    (kind is Tensor or kind is _Parameter)
                    and tensor.shape == save.shape
                    and tensor.dtype is save.dtype
                    and torch_private.backward_task() == -1
                )
            except RuntimeError:  # it has no shape
                is_due = False
            if is_due:
                if self._notes and save.value >= 0 and self._is_here(tensor):
                    self._device.note_written(tensor.untyped_storage(), torch_private.version_of(tensor))
                if save.stays and save.num_sent == forward.num_sent and save.num_released == forward.num_released:
                    forward.num_saves = place + 1
                    return tensor.detach(), torch_private.version_of(tensor)
                packed = self._pack(save, tensor)
                if packed is not None:
                    return packed
            elif save.shape is None:
                forward.num_saves = place + 1
                return KeptHandle(tensor)
        if forward.is_forward and torch_private.backward_task() == -1:
            forward.stop()
        return self._take(tensor)

    def _is_here(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is a plain one on the device."""
        return tensor.device == self._torch_device and tensor.layout is torch.strided

    def _pack(self, save: ScheduledSave, tensor: Tensor) -> Any:
        """Return the handle of a save for which, or at which, something is due; None if it is not the save that is due."""
        forward = self.forward
        with forward.lock:
            if forward.is_broken:
                forward.mend()
            if not forward.is_forward:
                return None
            try:
                if save.num_pauses >= 0 and save.num_pauses != forward.num_pauses:
                    return None  # no region of `no_offload` begins or ends here
                version = torch_private.version_of(tensor)
                if save.is_moved:
                    if not self._hold(save, tensor, version):
                        return None
                    alias = tensor.detach()
                    alias.data = save.nothing  # type: ignore[assignment]  # of one that leaves
                else:
                    alias = tensor.detach()
                forward.num_saves += 1
                if save.num_sent > forward.num_sent or save.num_released > forward.num_released:
                    if save.is_moved:  # on the stream that it is held for
                        forward.keep_up(save.num_sent, save.num_released)
                    else:
                        with forward.at_home():
                            forward.keep_up(save.num_sent, save.num_released)
                if save.is_kept:
                    return alias, version
                return tuple.__new__(ScheduledHandle, (self.rest if save.is_rest else self.life, save, alias, version))
            except BaseException:
                forward.is_broken = True
                raise

    def _hold(self, save: ScheduledSave, tensor: Tensor, version: int) -> bool:
        """Hold the storage of a value that leaves. Return whether it is the one that is due."""
        if tensor.device != self._torch_device or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        if (
            tensor.stride() != save.stride
            or tensor.storage_offset() != save.offset
            or storage.nbytes() != save.num_bytes
            or type(tensor) is not Tensor
            or (tensor.requires_grad != save.is_written and not (save.is_written and is_saved_by_compiled_code()))
            or tensor.is_conj() != save.is_conj
            or tensor.is_neg() != save.is_neg
            or torch_private.is_zero_tensor(tensor)
            or self._device.stream_number() != self._stream
        ):
            return False
        forward, value, address = self.forward, save.value, torch_private.storage_address(storage)
        base = torch_private.base_of(tensor)
        if not save.is_first:
            counter, was = forward.counters[value]
            is_same = forward.originals[value]() is storage and counter() is (tensor if base is None else base)
            return is_same and bool(was == version)
        known = self._addresses.get(address)
        if known is not None and forward.originals[known]() is not storage:
            known = None  # another one had that address
        if known != save.before:
            return False
        forward.originals[value] = weakref.ref(storage)
        forward.counters[value] = (weakref.ref(tensor if base is None else base), version)
        self._addresses[address] = value
        if forward.use_orders is not None:
            forward.use_orders[value] = forward.window.lanes.next_use()
        if not save.is_written:
            forward.nodes[value] = torch_private.node_number()
        forward.held[value] = storage
        return True
