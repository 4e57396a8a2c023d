"""A reference device whose counter counts, as a GPU's allocator does, all storages that ops make, also in a backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memkit.device import MemoryCounter, ReferenceDevice

_HOST_BYTES = 2**30
"""An arena's range of addresses is larger."""


class Allocator(MemoryCounter):
    """Counts storages from their announcement until their death."""

    def __init__(self) -> None:
        self._bytes, self._peak_bytes = dict[int, int](), 0
        self._now_bytes = self.num_resets = 0
        self.step_peak_bytes = 0
        """The peak since `begin`, even if others reset the other one."""

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if storage.device.type == "cpu" and key not in self._bytes and storage.nbytes() < _HOST_BYTES:
            self._bytes[key] = storage.nbytes()
            self._now_bytes += storage.nbytes()
            self._peak_bytes = max(self._peak_bytes, self._now_bytes)
            self.step_peak_bytes = max(self.step_peak_bytes, self._now_bytes)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now_bytes -= self._bytes.pop(key)

    def begin(self) -> None:
        self.step_peak_bytes = self._now_bytes

    def allocated_bytes(self) -> int:
        return self._now_bytes

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def peak_reserved_bytes(self) -> None:
        return None

    def reset_peak(self) -> None:
        self.num_resets += 1
        self._peak_bytes = self._now_bytes


class _Noting(TorchDispatchMode):
    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self._allocator = allocator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._allocator.note(leaf.untyped_storage())
        return found


class CountingDevice(ReferenceDevice):
    """See the module's docstring. Ops count within `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator()

    def memory_counter(self) -> MemoryCounter:
        return self.allocator

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        storage = super().allocate(num_bytes)
        self.allocator.note(storage)
        return storage

    def note_written(self, storage: torch.UntypedStorage, version: int) -> None:
        super().note_written(storage, version)
        self.allocator.note(storage)  # it may have been recomputed, where no mode is on

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[Allocator]:
        for tensor in (*model.parameters(), *model.buffers()):
            self.allocator.note(tensor.untyped_storage())
        with _Noting(self.allocator):
            yield self.allocator
