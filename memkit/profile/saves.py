"""What autograd saves, and when: pairs of saved-tensor hooks that change nothing and keep a list."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device.base import Device, Event
from memkit.owners import ModelStorages
from memkit.profile.calls import CallStack
from memkit.profile.records import SavedCategory, SavedTensorRecord
from memkit.profile.signatures import dtype_name, shapes_of
from memkit.storages import storage_key, storages_of


@dataclass(slots=True)
class _Save:
    """One version of a storage during the run; becomes a `SavedTensorRecord`."""

    storage: int
    first: bool
    version: int
    storage_bytes: int
    category: SavedCategory
    module: int
    dtype: str
    ordinals: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    packs: list[int] = field(default_factory=list)
    needed_position: int | None = None


@dataclass(frozen=True, slots=True)
class _Packed:
    """What autograd holds in place of a saved tensor."""

    alias: Tensor
    version: int
    saves: tuple[_Save, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A storage that was saved: its number, and its version at that time."""

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

    Holds weak references only: what the model drops is freed as in a run that is not watched.

    Args:
        resident: the storages that are there anyway (parameters and buffers): not listed.
        inputs: keys of the storages of the model's inputs.
        is_param_cast: tells whether a storage is a parameter or buffer in another dtype.
        stack: tells which module is running.
    """

    def __init__(
        self,
        *,
        resident: ModelStorages,
        inputs: set[int],
        is_param_cast: Callable[[torch.UntypedStorage], bool],
        stack: CallStack,
    ) -> None:
        self._resident = resident
        self._inputs = inputs
        self._is_param_cast = is_param_cast
        self._stack = stack
        self._seen: dict[int, _Seen] = {}
        self._saves: dict[tuple[int, int], _Save] = {}
        self._num_storages = 0
        self._num_packs = 0
        self._num_saves = 0
        self._num_uses = 0
        self._in_backward = False

    def pack(self, tensor: Tensor) -> _Packed:
        """Note a save; keep an alias (the tensor itself would hold the node that holds it: a cycle)."""
        saves = tuple(self._note(storage, tensor) for storage in storages_of(tensor) if self._counts(storage))
        self._num_packs += 1
        self._num_saves += bool(saves)
        return _Packed(tensor.detach(), torch_private.version_of(tensor), saves)

    def unpack(self, packed: _Packed) -> Tensor:
        """Note a use; return the tensor after checking that it was not written to (with hooks set, autograd doesn't check)."""
        if torch_private.version_of(packed.alias) != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {shapes_of(packed.alias)[0]} was saved at version {packed.version} and is at version "
                f"{torch_private.version_of(packed.alias)}"
            )
        if self._in_backward:
            for save in packed.saves:
                if save.needed_position is None:
                    save.needed_position = self._num_uses
            self._num_uses += bool(packed.saves)
        return packed.alias

    def start_backward(self) -> None:
        """Count uses from here."""
        self._in_backward = True

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

    def records(self, fqn: Callable[[int], str], times: SaveTimes | None = None) -> tuple[SavedTensorRecord, ...]:
        """Return the list as values; `fqn` names a module, `times` are from another run of the same step."""
        if times is not None and times.num_saves != self._num_packs:
            times = None  # that run took another path
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
                saved_at_s=None if times is None else times.saved_at_s(save.packs),
                needed_position=save.needed_position,
                needed_at_s=None if times is None else times.needed_at_s(save.packs),
            )
            for save in self._saves.values()
        )

    def _note(self, storage: torch.UntypedStorage, tensor: Tensor) -> _Save:
        seen = self._seen.get(storage_key(storage))
        first = seen is None or seen.reference() is not storage
        if seen is None or first:
            seen = _Seen(weakref.ref(storage), self._num_storages, torch_private.version_of(tensor))
            self._seen[storage_key(storage)] = seen
            self._num_storages += 1
        version = torch_private.version_of(tensor) - seen.first_version
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
            )
            self._saves[seen.number, version] = save
        save.packs.append(self._num_packs)
        save.ordinals.append(self._num_saves)
        save.shapes.extend(shapes_of(tensor))
        return save

    def _category(self, storage: torch.UntypedStorage) -> SavedCategory:
        if storage_key(storage) in self._inputs:
            return SavedCategory.INPUT
        return SavedCategory.PARAM_CAST if self._is_param_cast(storage) else SavedCategory.ACTIVATION

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        # cuDNN's BatchNorm saves a workspace that is often empty.
        return storage.nbytes() > 0 and storage not in self._resident


class SaveTimes:
    """The times of saves and uses on the device's clock, from a run in which only these are noted."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._forward_start = device.record_event()
        self._saved: list[Event] = []
        self._backward_start: Event | None = None
        self._needed: dict[int, Event] = {}

    @property
    def num_saves(self) -> int:
        """How many tensors were saved, parameters among them."""
        return len(self._saved)

    def pack(self, tensor: Tensor) -> tuple[int, Tensor]:
        """Note when a tensor is saved."""
        self._saved.append(self._device.record_event())
        return len(self._saved) - 1, tensor.detach()

    def unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        """Note when it is used for the first time."""
        number, alias = packed
        if self._backward_start is not None and number not in self._needed:
            self._needed[number] = self._device.record_event()
        return alias

    def start_backward(self) -> None:
        """Count the seconds to each use from here."""
        self._backward_start = self._device.record_event()

    def saved_at_s(self, numbers: Sequence[int]) -> float:
        """Return the seconds from the start of the forward to the first of some saves. The device must be synchronized."""
        return self._forward_start.elapsed_s(self._saved[numbers[0]])

    def needed_at_s(self, numbers: Sequence[int]) -> float | None:
        """Return the seconds from the start of the backward to the first use of any of some saves, None without a use."""
        used = [self._needed[number] for number in numbers if number in self._needed]
        if self._backward_start is None or not used:
            return None
        return min(self._backward_start.elapsed_s(event) for event in used)
