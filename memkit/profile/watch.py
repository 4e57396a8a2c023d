"""`Watch`, the one dispatch mode of a run that watches memory; it is never on when time is measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.hooks import HookSet, SavedTensorHooks, in_checkpoint, receiving_pack
from memkit.core.kept import KeptHandle
from memkit.core.modes import Mode
from memkit.core.owners import ModelStorages
from memkit.core.sizes import rounded
from memkit.core.tensors import storage_key, storages_of, unique_storages
from memkit.device.base import Device, Event, MemoryCounter
from memkit.plan.step import short_name
from memkit.plan.timeline import Levels
from memkit.profile.alive import AliveStorage, MemoryCategory, Moment, Phase, StepMemory
from memkit.profile.calls import CallStack, Gauge, PeakGauge
from memkit.profile.report import SavedCategory, SavedTensorRecord
from memkit.profile.step import ProfiledStep, nothing, say_where
from memkit.profile.tree import OUTSIDE_NAME, ROOT_NAME, Mark, ModuleTree, Signatures, dtype_name, shapes_of

if TYPE_CHECKING:
    from memkit.core.torch_private import OpOverload

_PACKING = "fsdp.all_gather_copy_in"


@dataclass(slots=True)
class _Entry:
    """A storage during the step; becomes an `AliveStorage`."""

    num_bytes: int
    begin: int
    place: int  # its number; a storage whose size has changed keeps its first one
    category: MemoryCategory = MemoryCategory.TEMP
    module: str = OUTSIDE_NAME
    what: str = ""
    end: int | None = None
    is_gathered: bool = False  # whether it holds whole parameters, or is a communication buffer for them


class StorageLog(MemoryCounter):
    """Counts live storages of one type of device, or of any, and the ops at which each exists. The log holds no tensor."""

    def __init__(self, step: ProfiledStep, *, rounding_bytes: int = 1, only: str | None = None) -> None:
        self._rounding_bytes = rounding_bytes
        self._only = only
        self._elsewhere = unique_storages(step.streamed.parameters)
        self._shards = step.sharded
        self._entries: list[_Entry] = []
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Entry]] = {}
        self._moments: list[Moment] = []
        self._num_named = 0
        self._names: dict[int, tuple[str, str]] = {}
        self._casts: ParamCasts | None = None
        self._stack: CallStack | None = None
        self._allocated_bytes = 0  # of `_live`, kept by hand since every edge of a call reads it
        self._peak_bytes = 0
        for storage in step.storages():
            self._add(storage)
        self._num_before = len(self._entries)

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

    def __len__(self) -> int:
        return len(self._entries)

    def place_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the place in the log of a storage that was made in the step; None for others. It stays, whatever its size."""
        _, entry = self._live.get(storage_key(storage), (None, None))
        return None if entry is None or entry.place < self._num_before else entry.place

    def ends(self) -> dict[int, int]:
        ends = {entry.place: entry.end for entry in self._entries}  # the last one of equal places counts
        return {place: end for place, end in ends.items() if end is not None}

    def gauge(self) -> PeakGauge:
        return PeakGauge(self)

    def recorded(self) -> AbstractContextManager[object]:
        """Return a context for the run, within which the watch is on."""
        return nullcontext()

    def end_forward(self) -> None: ...

    def follow(self, step: ProfiledStep, tree: ModuleTree, stack: CallStack, casts: ParamCasts) -> None:
        self._stack, self._casts = stack, casts
        for tensor, category, module, what in step.named_tensors(tree):
            if category is not MemoryCategory.BUFFER:  # only leaves have gradients
                self._names.setdefault(id(tensor), (module, what))
            for storage in storages_of(tensor):
                self._tell(storage, category, module, what)
        for number, slot in enumerate(step.streamed.slots):
            self._tell(slot, MemoryCategory.PARAM, OUTSIDE_NAME, f"slot {number} of LayerOffload")
        self._num_named = len(self._entries)

    def leave(self) -> None:
        """Count what has changed at last, and let go of the model: storages that live on still report their end."""
        self.look()
        self._stack = self._casts = None
        self._names = {}

    def look(self) -> None:
        for storage in self._shards.gathered.resized() if self._shards else ():
            if storage.nbytes() or storage_key(storage) in self._live:
                self._add(storage)

    def see(self, outputs: Any) -> None:
        self.look()
        for storage in storages_in(outputs):
            self._add(storage)

    def saw(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
        self.see(outputs)
        if self._shards and str(op).startswith(_PACKING):
            for storage in storages_in([tensor for tensor in args if isinstance(tensor, Tensor)]):  # the buffer for a gather
                self._tell(storage, MemoryCategory.PARAM, what="parameters on their way", is_gathered=True)
        if len(self._entries) > self._num_named or torch_private.schema_of(op).is_mutable:
            self.note_op(str(op))

    def note_op(self, name: str) -> None:
        what = short_name(name)
        for entry in self._entries[self._num_named :]:
            entry.what = entry.what or what
        self._num_named = len(self._entries)
        self._moments.append(Moment(phase=self._phase(), op=name, module=self._module()))

    def pack(self, saves: SavedStorages, tensor: Tensor) -> Any:
        self.note_saved(tensor)
        return saves.pack(tensor)

    def unpack(self, saves: SavedStorages, packed: Any) -> Tensor:
        return saves.unpack(packed)

    def note_saved(self, tensor: Tensor) -> None:
        for storage in storages_of(tensor):
            is_cast = self._casts is not None and storage in self._casts
            self._tell(storage, MemoryCategory.PARAM_CAST if is_cast else MemoryCategory.ACTIVATION, self._module())

    def note_grads(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if leaf.grad is None:
                continue
            module, what = self._names.get(id(leaf), (ROOT_NAME, "input"))
            for storage in storages_of(leaf.grad):
                self._tell(storage, MemoryCategory.GRAD, module, f"{what}.grad")

    def gathered_bytes(self) -> int:
        levels = Levels(len(self._moments) + 1)
        for entry in self._entries:
            if entry.is_gathered:
                levels.add(entry.begin, len(self._moments) + 1 if entry.end is None else entry.end, entry.num_bytes)
        return levels.peak_bytes

    def finished(self, states: Iterable[AliveStorage] = (), *, optimizer: str | None = None) -> StepMemory:
        """Return the `StepMemory`. `states` are the optimizer's, there all the time; its step follows the last op."""
        moments, num_ops = [*self._moments], len(self._moments)
        if optimizer is not None:
            moments.append(Moment(phase=Phase.OPTIMIZER_STEP, op=f"{optimizer}.step", module=OUTSIDE_NAME))
        storages = [replace(state, begin=0, end=len(moments)) for state in states]
        outlive = (MemoryCategory.PARAM, MemoryCategory.BUFFER, MemoryCategory.INPUT, MemoryCategory.GRAD)
        own = list[AliveStorage]()
        for it in self._entries:
            end = num_ops if it.end is None else it.end
            if end == num_ops and it.category in outlive and not (it.is_gathered and it.end is not None):
                end = len(moments)
            size, begin = it.num_bytes, it.begin
            own.append(AliveStorage(category=it.category, module=it.module, what=it.what, num_bytes=size, begin=begin, end=end))
        alive = tuple(it for it in [*own, *storages] if it.begin < it.end and it.num_bytes)
        return StepMemory(moments=tuple(moments), storages=alive)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._elsewhere or (self._only is not None and storage.device.type != self._only):
            return
        num_bytes = rounded(storage.nbytes(), self._rounding_bytes)
        known = self._live.get(key)
        if known is None:
            reference = weakref.ref(storage, self._forget(key))
        elif known[1].num_bytes == num_bytes:
            return
        else:  # resized in place
            reference = known[0]
            self._end(known[1])
        place = len(self._entries) if known is None else known[1].place
        entry = _Entry(num_bytes, len(self._moments), place, module=self._module())
        shard = self._shards.gathered.shard_of(key) if self._shards and self._names else None
        if shard is not None:
            entry.module, name = self._names.get(id(shard), (entry.module, "parameter"))
            entry.category, entry.what, entry.is_gathered = MemoryCategory.PARAM, f"{name}, gathered", True
        self._entries.append(entry)
        self._live[key] = reference, entry
        self._allocated_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)

    def _end(self, entry: _Entry) -> None:
        entry.end = len(self._moments)
        self._allocated_bytes -= entry.num_bytes

    def _forget(self, key: int) -> Callable[[Any], None]:
        # The reference back is weak: the callbacks live as long as the storages, which may outlive the profile.
        weak_self = weakref.ref(self)

        def forget(_: Any) -> None:
            log = weak_self()
            if log is not None:
                log._end(log._live.pop(key)[1])

        return forget

    def _tell(
        self, storage: torch.UntypedStorage, category: MemoryCategory, row: str = "", what: str = "", is_gathered: bool = False
    ) -> None:
        """Say what a storage is for, if that is not known."""
        _, entry = self._live.get(storage_key(storage), (None, None))
        if entry is not None and entry.category is MemoryCategory.TEMP:
            entry.category, entry.module, entry.what = category, row or entry.module, what or entry.what
            entry.is_gathered = is_gathered

    def _module(self) -> str:
        return OUTSIDE_NAME if self._stack is None else self._stack.row

    def _phase(self) -> Phase:
        if self._stack is None or self._stack.in_backward:
            return Phase.BACKWARD
        return Phase.LOSS if self._stack.current == self._stack.outside else Phase.FORWARD


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


def tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def storages_in(value: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(value):
        yield from storages_of(tensor)


@dataclass(slots=True)
class _Save:
    what: dict[str, Any]  # fields of its record
    packs: list[int] = field(default_factory=list)
    ordinals: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    needed_position: int | None = None


class _Packed(KeptHandle):
    __slots__ = ("saves", "traced")

    def __init__(self, tensor: Tensor, saves: tuple[_Save, ...]) -> None:
        super().__init__(tensor)
        self.saves = saves
        self.traced: tuple[int, int] | None = None  # its value and its node in a trace, if it counts there


class SavedStorages:
    """Lists every storage that autograd saves but resident ones, once per version; holds weak references only."""

    def __init__(self, *, resident: ModelStorages, inputs: Iterable[Tensor], casts: ParamCasts, stack: CallStack) -> None:
        self._resident = resident
        self._inputs = set(unique_storages(inputs))
        self._casts = casts
        self._stack = stack
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._saves: dict[tuple[int, int], _Save] = {}
        self._num_storages = self._num_packs = self._num_saves = self._num_uses = 0

    def pack(self, tensor: Tensor) -> _Packed:
        # cuDNN's BatchNorm saves a workspace that is often empty.
        counted = (storage for storage in storages_of(tensor) if storage.nbytes() > 0 and storage not in self._resident)
        saves = tuple(self._note(storage, tensor) for storage in counted)
        self._num_packs += 1
        self._num_saves += bool(saves)
        return _Packed(tensor, saves)

    def unpack(self, packed: _Packed) -> Tensor:
        """Note a use; return the tensor after checking that it was not written to."""
        tensor = packed.unpack()
        if self._stack.in_backward:
            for save in packed.saves:
                if save.needed_position is None:
                    save.needed_position = self._num_uses
            self._num_uses += bool(packed.saves)
        return tensor

    def records(self, times: SaveTimes | None = None) -> tuple[SavedTensorRecord, ...]:
        if times is not None and times.num_saves != self._num_packs:
            times = None  # that run took another path
        return tuple(
            SavedTensorRecord(
                **save.what,
                save_ordinals=tuple(save.ordinals),
                shapes=tuple(save.shapes),
                saved_at_s=None if times is None else times.saved_at_s(save.packs),
                needed_position=save.needed_position,
                needed_at_s=None if times is None else times.needed_at_s(save.packs),
            )
            for save in self._saves.values()
        )

    def _note(self, storage: torch.UntypedStorage, tensor: Tensor) -> _Save:
        key, version = storage_key(storage), torch_private.version_of(tensor)
        if key not in self._seen or self._seen[key][0]() is not storage:
            self._seen[key] = weakref.ref(storage), self._num_storages, version
            self._num_storages += 1
        _, number, first_version = self._seen[key]
        version -= first_version
        save = self._saves.get((number, version))
        if save is None:
            category = SavedCategory.PARAM_CAST if storage in self._casts else SavedCategory.ACTIVATION
            what = {
                "storage": number,
                "version": version,
                "storage_bytes": storage.nbytes(),
                "category": SavedCategory.INPUT if key in self._inputs else category,
                "module": self._stack.row,
                "dtype": dtype_name(tensor.dtype),
            }
            save = self._saves[number, version] = _Save(what)
        save.packs.append(self._num_packs)
        save.ordinals.append(self._num_saves)
        save.shapes.extend(shapes_of(tensor))
        return save


class Watch(Mode):
    """Notes memory in a run; as a dispatch mode it sees each operation after it ran."""

    def __init__(self, step: ProfiledStep, tree: ModuleTree, gauge: Gauge, log: StorageLog | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._step = step
        self._tree = tree
        self.log = log
        self.gauge = gauge
        self.stack = CallStack(tree, gauge)
        self.signatures = Signatures()
        resident = ModelStorages(unique_storages(step.resident_tensors()), step.sharded.gathered)  # with gathered parameters
        self._casts = ParamCasts(resident)
        self.saves = SavedStorages(resident=resident, inputs=step.input_tensors(), casts=self._casts, stack=self.stack)
        if log is not None:
            log.follow(step, tree, self.stack, self._casts)
        self._names = step.names_of_storages()
        self.written: dict[str, None] = {}  # the parameters and inputs that were written to in place
        self.marked = {mark: set[int]() for mark in (Mark.CHECKPOINTED, Mark.OTHER_HOOKS, Mark.BACKEND_DEPENDENT)}
        self.forward_peak_bytes: int | None = None
        self.backward_peak_bytes: int | None = None

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        outputs = op(*args, **(kwargs or {}))
        if self.log is not None:
            self.log.saw(op, args, kwargs or {}, outputs)
        self._casts.saw(op, args, outputs)
        pack = receiving_pack()  # ours can't see what is saved under another
        if not self.stack.in_backward and not (pack == self.pack and torch.is_grad_enabled()):
            if in_checkpoint():
                self.marked[Mark.CHECKPOINTED].add(self.stack.current)
            elif pack is not None and pack != self.pack:
                self.marked[Mark.OTHER_HOOKS].add(self.stack.current)
        schema = torch_private.schema_of(op)
        if schema.is_mutable:
            given = zip(schema.arguments, args, strict=False)
            over = [value for it, value in given if it.alias_info is not None and it.alias_info.is_write]
            keys = (storage_key(storage) for storage in storages_in(over))
            self.written.update((self._names[key], None) for key in keys if key in self._names)
        return outputs

    def pack(self, tensor: Tensor) -> Any:
        return self.saves.pack(tensor) if self.log is None else self.log.pack(self.saves, tensor)

    def unpack(self, packed: Any) -> Tensor:
        return self.saves.unpack(packed) if self.log is None else self.log.unpack(self.saves, packed)

    def marks(self, index: int) -> list[str]:
        return [mark.value for mark, rows in self.marked.items() if index in rows]

    def note_backend_dependent(self) -> None:
        self.marked[Mark.BACKEND_DEPENDENT].add(self.stack.current)

    def run(self, *, at_node: Callable[[], None] | None = None, explain: Callable[[Exception, str], None] = say_where) -> None:
        def forward_done() -> None:
            self.forward_peak_bytes = self.gauge.take_highest()
            if self.log is not None:
                self.log.end_forward()

        with HookSet() as hooks:
            self.signatures.hook(self._tree, hooks)
            self._step.run(
                self.stack,
                packing=SavedTensorHooks(self.pack, self.unpack),
                forward_done=forward_done,
                backward_done=nothing if self.log is None else self.log.note_grads,
                at_node=at_node,
                explain=explain,
            )
        if self._step.backward:
            self.backward_peak_bytes = self.gauge.take_highest()
        if self.log is not None:
            self.log.leave()


class SaveTimes:
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
        return self._forward_start.elapsed_s(self._saved[numbers[0]])

    def needed_at_s(self, numbers: Sequence[int]) -> float | None:
        used = [self._needed[number] for number in numbers if number in self._needed]
        if self._backward_start is None or not used:
            return None
        return min(self._backward_start.elapsed_s(event) for event in used)
