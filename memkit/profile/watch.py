"""Sees what happens in a run: what autograd saves, live storages, casts of parameters, and code whose saved tensors are hidden,
such as a checkpoint.

One dispatch mode calls a few observers after every operation. It is on in the memory run only, never when time is measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.hooks import in_checkpoint, receiving_pack
from memkit.core.modes import Mode
from memkit.core.owners import ModelStorages
from memkit.core.tensors import storage_key, storages_of, unique_storages
from memkit.device.base import Device, Event, MemoryCounter
from memkit.profile.calls import CallStack
from memkit.profile.report import SavedCategory, SavedTensorRecord
from memkit.profile.tree import dtype_name, shapes_of

if TYPE_CHECKING:
    from memkit.core.torch_private import OpOverload
    from memkit.profile.alive import StorageLog


class OpObserver(Protocol):
    """Sees every operation that runs under an `OpWatch`."""

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None: ...


class OpWatch(Mode):
    """Reports each operation to its observers, after it ran."""

    def __init__(self, *observers: OpObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._observers = observers

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = op(*args, **(kwargs or {}))
        for observer in self._observers:
            observer.saw(op, args, outputs)
        return outputs


class LiveStorages(MemoryCounter):
    """Counts the bytes of live storages: the `initial` ones, and others from the op that made them until nothing refers to
    them. Scratch memory inside a kernel is not seen. `elsewhere` has tensors in host memory, `only` the type of the device that
    counts; `resized` returns storages whose sizes have changed without an op."""

    def __init__(
        self,
        initial: Iterable[torch.UntypedStorage],
        *,
        elsewhere: Iterable[Tensor] = (),
        rounding_bytes: int = 1,
        observer: StorageLog | None = None,
        only: str | None = None,
        resized: Callable[[], Iterable[torch.UntypedStorage]] = tuple,
    ) -> None:
        self._observer = observer
        self._resized = resized
        self._only = only
        self._elsewhere = unique_storages(elsewhere)
        self._rounding_bytes = rounding_bytes
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._allocated_bytes = 0  # of `_live`, kept by hand: it is read at every edge of a call
        self._peak_bytes = 0
        for storage in initial:
            self._add(storage)

    def allocated_bytes(self) -> int:
        self.look()
        return self._allocated_bytes

    def peak_bytes(self) -> int:
        self.look()
        return self._peak_bytes

    def peak_reserved_bytes(self) -> None:
        return None

    def reset_peak(self) -> None:
        self.look()
        self._peak_bytes = self._allocated_bytes

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        self.look()
        for tensor in tensors_in(outputs):
            self.add(tensor)

    def look(self) -> None:
        """Count storages anew whose sizes have changed."""
        for storage in self._resized():
            if storage.nbytes() or storage_key(storage) in self._live:
                self._add(storage)

    def add(self, tensor: Tensor) -> None:
        for storage in storages_of(tensor):
            self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._elsewhere or (self._only is not None and storage.device.type != self._only):
            return
        known = self._live.get(key)
        num_bytes = -(-storage.nbytes() // self._rounding_bytes) * self._rounding_bytes
        if known is not None and known[1] == num_bytes:
            return
        if known is not None:  # resized in place
            self._allocated_bytes -= known[1]
            self._live[key] = (known[0], num_bytes)
            if self._observer is not None:
                self._observer.end(key)
        else:
            self._live[key] = (weakref.ref(storage, self._forget(key)), num_bytes)
        if self._observer is not None:
            self._observer.begin(key, num_bytes)
        self._allocated_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)

    def _forget(self, key: int) -> Callable[[Any], None]:
        # The reference back is weak: the callbacks live as long as the storages, which may outlive the profile.
        weak_self = weakref.ref(self)

        def forget(_: Any) -> None:
            counter = weak_self()
            if counter is not None:
                counter._allocated_bytes -= counter._live.pop(key)[1]
                if counter._observer is not None:
                    counter._observer.end(key)

        return forget


class ParamCasts:
    """Recognizes storages that hold a parameter or buffer in another dtype, as made by autocast."""

    def __init__(self, resident: ModelStorages) -> None:
        self._resident = resident
        self._casts: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        if op in torch_private.known("to_copy") and any(
            source in self._resident or source in self for source in storages_of(args[0])
        ):
            for storage in storages_of(outputs):
                self._casts[storage_key(storage)] = weakref.ref(storage)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        reference = self._casts.get(storage_key(storage))
        return reference is not None and reference() is storage


class Writes:
    """Notes by name which of some storages, told by their keys, are written to in place."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.written: dict[str, None] = {}

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        if not torch_private.schema_of(op).is_mutable:
            return
        for argument, value in zip(torch_private.schema_of(op).arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tensors_in(value):
                for storage in storages_of(tensor):
                    if storage_key(storage) in self._names:
                        self.written[self._names[storage_key(storage)]] = None


class HiddenRegions:
    """Notes the modules that ran ops whose saved tensors `pack`, our own hook, can't see."""

    def __init__(self, pack: Callable[..., Any], stack: CallStack) -> None:
        self._pack = pack
        self._stack = stack
        self.checkpointed: set[int] = set()
        self.under_other_hooks: set[int] = set()
        """Modules in which the innermost saved-tensor hooks were others, not a checkpoint's."""

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        pack = receiving_pack()
        if self._stack.in_backward or (pack == self._pack and torch.is_grad_enabled()):
            return
        if in_checkpoint():
            self.checkpointed.add(self._stack.current)
        elif pack is not None and pack != self._pack:
            self.under_other_hooks.add(self._stack.current)


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Yield the tensors in an op's outputs or arguments: one, or nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


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
    """Lists every storage that autograd saves, once per version, and which module saved it first; empty and resident ones
    (parameters, buffers) are left out. Holds weak references only: what the model drops is freed as in a run that is not
    watched."""

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
        """Note a use. With hooks set, autograd does not check for writes: this does."""
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
        """Return the list as values; `times` are from another run of the same step."""
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
        return len(self._saved)

    def pack(self, tensor: Tensor) -> tuple[int, Tensor]:
        self._saved.append(self._device.record_event())
        return len(self._saved) - 1, tensor.detach()

    def unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        number, alias = packed
        if self._backward_start is not None and number not in self._needed:
            self._needed[number] = self._device.record_event()
        return alias

    def start_backward(self) -> None:
        self._backward_start = self._device.record_event()

    def saved_at_s(self, numbers: Sequence[int]) -> float:
        """Return the seconds from the start of the forward to the first of some saves. The device must be synchronized."""
        return self._forward_start.elapsed_s(self._saved[numbers[0]])

    def needed_at_s(self, numbers: Sequence[int]) -> float | None:
        """Return the seconds from the start of the backward to the first use of some saves, None without a use."""
        used = [self._needed[number] for number in numbers if number in self._needed]
        if self._backward_start is None or not used:
            return None
        return min(self._backward_start.elapsed_s(event) for event in used)
