"""What a whole forward has given the hooks, save by save: what later forwards are held against that follow a schedule."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.activations.saved.records import Handle
from memkit.activations.saved.seen import NO_VALUE, SeenSave
from memkit.kept import KeptHandle
from memkit.storages import Geometry
from memkit.torch_state import is_saved_by_compiled_code


class Capture:
    """Notes what the hooks of one entry are given, and what becomes of it."""

    def __init__(self) -> None:
        self.saves: list[SeenSave] = []
        self.paused: list[int] = []
        """Before which saves a region of `no_offload` began, or ended."""
        self._first_node = 0
        self._numbers = set[int]()
        """The values that were saved."""
        self._values: dict[int, tuple[int, Any]] = {}
        """By address, the last value that a storage was saved as, and a weak reference to that."""
        self.is_whole = True
        """Whether all was noted that may leave, and all of it may be told from other things."""

    def note(self, tensor: Tensor, packed: KeptHandle, num_values: int, seen_bytes: int) -> None:
        """Note one save.

        Args:
            packed: what autograd holds for it.
            num_values: how many values the forward has noted by now.
            seen_bytes: what the save has added to the bytes that could leave.
        """
        kind = type(packed)
        value = packed.record.index if isinstance(packed, Handle) and kind is Handle else NO_VALUE
        is_plain = self.add(tensor, value, num_values, seen_bytes)
        if kind is not KeptHandle and not (value != NO_VALUE and is_plain):
            self.is_whole = False

    def add(self, tensor: Tensor, value: int, num_values: int, seen_bytes: int) -> bool:
        """Note one save of a value, `NO_VALUE` for none; tell whether it may be told from others by its shape.

        Args:
            num_values, seen_bytes: see `note`.
        """
        geometry, num_bytes, before = None, 0, NO_VALUE
        if value != NO_VALUE:
            storage = tensor.untyped_storage()
            geometry, num_bytes, before = Geometry.of(tensor), storage.nbytes(), self._before(storage, value)
        is_plain = (type(tensor) is Tensor or type(tensor) is nn.Parameter) and not tensor.is_nested
        shape, dtype = (tensor.shape, tensor.dtype) if is_plain else (None, None)
        is_written = not is_plain or tensor.requires_grad or is_saved_by_compiled_code()
        number = torch_private.node_number()
        if not self.saves:
            self._first_node = number
        node = number - self._first_node
        self.saves.append(SeenSave(shape, dtype, value, geometry, num_bytes, is_written, node, num_values, before, seen_bytes))
        return is_plain

    def _before(self, storage: torch.UntypedStorage, value: int) -> int:
        """Return the value that the storage of a new value was saved as before; `NO_VALUE` if there is none."""
        if value in self._numbers:
            return NO_VALUE
        self._numbers.add(value)
        address = torch_private.storage_address(storage)
        before, original = self._values.get(address, (NO_VALUE, None))
        self._values[address] = value, weakref.ref(storage)
        return before if original is not None and original() is storage else NO_VALUE
