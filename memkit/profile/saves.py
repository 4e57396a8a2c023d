"""What autograd saves: a pair of saved-tensor hooks that changes nothing and keeps a list."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memkit.device.base import Device, Event
from memkit.profile.calls import CallStack, dtype_name, shapes_of
from memkit.profile.records import SavedCategory, SavedTensorRecord
from memkit.sizes import storage_key, storages_of


@dataclass(slots=True)
class _Save:
    """One version of a storage while the run goes on; becomes a `SavedTensorRecord`."""

    storage: int
    first: bool
    version: int
    storage_bytes: int
    category: SavedCategory
    module: int
    dtype: str
    saved_at: Event | None
    ordinals: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    needed_position: int | None = None
    needed_at: Event | None = None


@dataclass(frozen=True, slots=True)
class _Packed:
    """What autograd holds in the place of a saved tensor."""

    alias: Tensor
    version: int
    saves: tuple[_Save, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A storage that was saved: its number, and how often it had been written to by then."""

    reference: weakref.ref[torch.UntypedStorage]
    number: int
    first_version: int


@dataclass(slots=True)
class SavedCount:
    """What one module saved first."""

    num_bytes: int = 0
    num_storages: int = 0
    num_saves: int = 0


class SavedStorages:
    """Lists every storage that autograd saves, once per version, and which module saved it first; empty ones are left out.

    Holds weak references only: what the model drops is freed as if nobody had looked.

    Args:
        resident: keys of the storages that are there anyway (parameters and buffers): not listed.
        inputs: keys of the storages of the model's inputs.
        is_param_cast: tells whether a storage is a parameter or buffer in another dtype.
        stack: tells which module is running.
        device: whose events time the saves; None where there is no clock (meta).
    """

    def __init__(
        self,
        *,
        resident: set[int],
        inputs: set[int],
        is_param_cast: Callable[[torch.UntypedStorage], bool],
        stack: CallStack,
        device: Device | None,
    ) -> None:
        self._resident = resident
        self._inputs = inputs
        self._is_param_cast = is_param_cast
        self._stack = stack
        self._device = device
        self._seen: dict[int, _Seen] = {}
        self._saves: dict[tuple[int, int], _Save] = {}
        self._num_storages = 0
        self._num_packs = 0
        self._num_unpacks = 0
        self._forward_start = self._mark()
        self._backward_start: Event | None = None
        self._in_backward = False

    def pack(self, tensor: Tensor) -> _Packed:
        """Note a save; keep an alias (the tensor itself would hold the node that holds it: a cycle)."""
        saves = tuple(self._note(storage, tensor) for storage in storages_of(tensor) if self._counts(storage))
        self._num_packs += bool(saves)
        return _Packed(tensor.detach(), tensor._version, saves)

    def unpack(self, packed: _Packed) -> Tensor:
        """Note a use; give the tensor back, if it is still what was saved (with hooks set, autograd does not look)."""
        if packed.alias._version != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {shapes_of(packed.alias)[0]} was saved at version {packed.version} and is at version "
                f"{packed.alias._version}"
            )
        if self._in_backward:
            for save in packed.saves:
                if save.needed_position is None:
                    save.needed_position = self._num_unpacks
                    save.needed_at = self._mark()
            self._num_unpacks += bool(packed.saves)
        return packed.alias

    def start_backward(self) -> None:
        """Count uses, and the seconds to each, from here."""
        self._in_backward = True
        self._backward_start = self._mark()

    def counts(self) -> dict[int, SavedCount]:
        """Return per module what counts as activation: each storage once, where it was saved first."""
        owners: dict[int, int] = {}
        counts: dict[int, SavedCount] = {}
        for save in self._saves.values():
            if save.category is SavedCategory.PARAM_CAST:
                continue
            count = counts.setdefault(owners.setdefault(save.storage, save.module), SavedCount())
            count.num_saves += len(save.ordinals)
            if save.first:
                count.num_bytes += save.storage_bytes
                count.num_storages += 1
        return counts

    def records(self, fqn: Callable[[int], str]) -> tuple[SavedTensorRecord, ...]:
        """Return the list as values. The device must be synchronized; `fqn` names a module."""
        return tuple(
            SavedTensorRecord(
                storage=save.storage,
                version=save.version,
                storage_bytes=save.storage_bytes,
                category=save.category,
                module=fqn(save.module),
                dtype=save.dtype,
                save_ordinals=tuple(save.ordinals),
                shapes=tuple(save.shapes),
                saved_at_s=_seconds(self._forward_start, save.saved_at),
                needed_position=save.needed_position,
                needed_at_s=_seconds(self._backward_start, save.needed_at),
            )
            for save in self._saves.values()
        )

    def _note(self, storage: torch.UntypedStorage, tensor: Tensor) -> _Save:
        seen = self._seen.get(storage_key(storage))
        first = seen is None or seen.reference() is not storage
        if seen is None or first:
            seen = _Seen(weakref.ref(storage), self._num_storages, tensor._version)
            self._seen[storage_key(storage)] = seen
            self._num_storages += 1
        version = tensor._version - seen.first_version
        save = self._saves.get((seen.number, version))
        if save is None:
            save = _Save(
                storage=seen.number,
                first=first,
                version=version,
                storage_bytes=storage.nbytes(),
                category=self._category(storage),
                module=self._stack.current,
                dtype=dtype_name(tensor.dtype),
                saved_at=self._mark(),
            )
            self._saves[seen.number, version] = save
        save.ordinals.append(self._num_packs)
        save.shapes.extend(shapes_of(tensor))
        return save

    def _category(self, storage: torch.UntypedStorage) -> SavedCategory:
        if storage_key(storage) in self._inputs:
            return SavedCategory.INPUT
        return SavedCategory.PARAM_CAST if self._is_param_cast(storage) else SavedCategory.ACTIVATION

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        # cuDNN's BatchNorm saves a workspace that is often empty.
        return storage.nbytes() > 0 and storage_key(storage) not in self._resident

    def _mark(self) -> Event | None:
        return None if self._device is None else self._device.record_event()


def _seconds(start: Event | None, end: Event | None) -> float | None:
    return None if start is None or end is None else start.elapsed_s(end)
