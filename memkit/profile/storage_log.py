"""`StorageLog`: makes a `StepMemory` during a step, from storages that are made and freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.profile.alive import AliveStorage, MemoryCategory, Moment, Phase, StepMemory, short_name
from memkit.profile.calls import CallStack
from memkit.profile.step import Step
from memkit.profile.tree import OUTSIDE_NAME, ROOT_NAME, ModuleTree
from memkit.storages import storage_key, storages_of

if TYPE_CHECKING:
    from memkit.profile.sharded import GatheredParameters
    from memkit.profile.watch import ParamCasts
    from memkit.torch_private import OpOverload


@dataclass(slots=True)
class _Entry:
    """A storage during the step; becomes an `AliveStorage`."""

    num_bytes: int
    begin: int
    category: MemoryCategory = MemoryCategory.TEMP
    module: str = OUTSIDE_NAME
    what: str = ""
    end: int | None = None
    is_gathered: bool = False
    """Whether it is of whole parameters, or a communication buffer for these."""


class StorageLog:
    """Notes which storages exist at each op. It is the observer of a `LiveStorages`, and holds no tensor.

    Storages from before the step are named by `follow`, once the step is known.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._open: dict[int, int] = {}
        self._moments: list[Moment] = []
        self._num_named = 0
        self._names: dict[int, tuple[str, str]] = {}
        self._casts: ParamCasts | None = None
        self._stack: CallStack | None = None
        self._tree: ModuleTree | None = None
        self._gathered: GatheredParameters | None = None

    def follow(self, step: Step, tree: ModuleTree, stack: CallStack) -> None:
        """Called before a step: name the existing storages, and ask `stack` from now on which module is running."""
        self._stack, self._tree = stack, tree
        from memkit.profile.watch import ParamCasts  # beside a dispatch mode: its base is a private class of torch

        self._casts = ParamCasts(step.resident_storages())
        self._gathered = step.sharded.gathered if step.sharded else None
        for tensor, category, module, what in _there_before(step, tree):
            if category is not MemoryCategory.BUFFER:  # only leaves have gradients
                self._names.setdefault(id(tensor), (module, what))
            for storage in storages_of(tensor):
                self._name_first(storage, category, module, what)
        for number, slot in enumerate(step.streamed.slots):
            self._name_first(slot, MemoryCategory.PARAM, OUTSIDE_NAME, f"slot {number} of LayerOffload")
        self._num_named = len(self._entries)

    def leave(self) -> None:
        """Called after the step: let go of the model, since storages that live on still report their end."""
        self._stack = self._tree = self._casts = self._gathered = None
        self._names = {}

    def begin(self, key: int, num_bytes: int) -> None:
        """A storage exists from now on."""
        self._open[key] = len(self._entries)
        entry = _Entry(num_bytes, len(self._moments), module=self._module())
        shard = None if self._gathered is None else self._gathered.shard_of(key)
        if shard is not None:
            entry.module, name = self._names.get(id(shard), (entry.module, "parameter"))
            entry.category, entry.what, entry.is_gathered = MemoryCategory.PARAM, f"{name}, gathered", True
        self._entries.append(entry)

    def end(self, key: int) -> None:
        """A storage was freed."""
        self._entries[self._open.pop(key)].end = len(self._moments)

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        """Note an op that has run, if it has made or written something. For an `OpWatch`, after its `LiveStorages`."""
        self.see_casts(op, args, outputs)
        if self._gathered is not None and str(op).startswith(_PACKING):
            self._note_packing(args)
        if len(self._entries) > self._num_named or torch_private.schema_of(op).is_mutable:
            self.note_op(str(op))

    def see_casts(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        """Note if an op has cast a parameter or buffer to another dtype."""
        if self._casts is not None:
            self._casts.saw(op, args, outputs)

    def note_op(self, name: str) -> None:
        """Note an op that has run, as the maker of the storages since the last one."""
        what = short_name(name)
        for entry in self._entries[self._num_named :]:
            entry.what = entry.what or what
        self._num_named = len(self._entries)
        self._moments.append(Moment(phase=self._phase(), op=name, module=self._module()))

    def note_saved(self, tensor: Tensor) -> None:
        """Note a tensor that autograd has saved."""
        for storage in storages_of(tensor):
            entry = self._find(storage)
            if entry is None or entry.category is not MemoryCategory.TEMP:
                continue
            is_cast = self._casts is not None and storage in self._casts
            entry.category = MemoryCategory.PARAM_CAST if is_cast else MemoryCategory.ACTIVATION
            entry.module = self._module()

    def note_grads(self, leaves: Iterable[Tensor]) -> None:
        """Called after the backward: mark the gradients of the leaves."""
        for leaf in leaves:
            if leaf.grad is None:
                continue
            module, what = self._names.get(id(leaf), (ROOT_NAME, "input"))
            for storage in storages_of(leaf.grad):
                entry = self._find(storage)
                if entry is not None and entry.category is MemoryCategory.TEMP:
                    entry.category, entry.module, entry.what = MemoryCategory.GRAD, module, f"{what}.grad"

    def gathered_bytes(self) -> int:
        """Return the most bytes of whole parameters that were gathered at once, with the communication buffers."""
        changes = [0] * (len(self._moments) + 2)
        for entry in self._entries:
            if entry.is_gathered:
                changes[entry.begin] += entry.num_bytes
                changes[len(self._moments) + 1 if entry.end is None else entry.end] -= entry.num_bytes
        return max(accumulate(changes))

    def _note_packing(self, args: Sequence[Any]) -> None:
        """Note the buffer that FSDP2 has packed shards into, through which whole parameters are gathered."""
        for tensor in args:
            for storage in storages_of(tensor) if isinstance(tensor, Tensor) else ():
                entry = self._find(storage)
                if entry is not None and entry.category is MemoryCategory.TEMP:
                    entry.category, entry.what, entry.is_gathered = MemoryCategory.PARAM, "parameters on their way", True

    def finished(self, states: Iterable[AliveStorage] = (), *, optimizer: str | None = None) -> StepMemory:
        """Return what was noted.

        Args:
            states: the optimizer's states, which are there all the time; their moments are filled in.
            optimizer: its class, if there is one: its step follows the last op.
        """
        self.leave()
        moments, num_ops = [*self._moments], len(self._moments)
        if optimizer is not None:
            moments.append(Moment(phase=Phase.OPTIMIZER_STEP, op=f"{optimizer}.step", module=OUTSIDE_NAME))
        storages = [self._told(entry, num_ops, len(moments)) for entry in self._entries]
        storages += [
            AliveStorage(
                category=state.category,
                module=state.module,
                what=state.what,
                num_bytes=state.num_bytes,
                begin=0,
                end=len(moments),
            )
            for state in states
        ]
        return StepMemory(moments=tuple(moments), storages=tuple(it for it in storages if it.begin < it.end and it.num_bytes))

    def _told(self, entry: _Entry, num_ops: int, num_moments: int) -> AliveStorage:
        end = num_ops if entry.end is None else entry.end
        if end == num_ops and entry.category in _OUTLIVE_THE_STEP and not (entry.is_gathered and entry.end is not None):
            end = num_moments
        return AliveStorage(
            category=entry.category,
            module=entry.module,
            what=entry.what,
            num_bytes=entry.num_bytes,
            begin=entry.begin,
            end=end,
        )

    def _name_first(self, storage: torch.UntypedStorage, category: MemoryCategory, module: str, what: str) -> None:
        entry = self._find(storage)
        if entry is not None and not entry.what:
            entry.category, entry.module, entry.what = category, module, what

    def _find(self, storage: torch.UntypedStorage) -> _Entry | None:
        place = self._open.get(storage_key(storage))
        return None if place is None else self._entries[place]

    def _module(self) -> str:
        return OUTSIDE_NAME if self._tree is None or self._stack is None else self._tree.fqn(self._stack.current)

    def _phase(self) -> Phase:
        if self._stack is None or self._stack.in_backward:
            return Phase.BACKWARD
        return Phase.LOSS if self._stack.current == self._stack.outside else Phase.FORWARD


_PACKING = "fsdp.all_gather_copy_in"
_OUTLIVE_THE_STEP = (MemoryCategory.PARAM, MemoryCategory.BUFFER, MemoryCategory.INPUT, MemoryCategory.GRAD)


def parameter_names(step: Step, tree: ModuleTree) -> dict[int, tuple[str, str]]:
    """Return the row and the name of each parameter, by its id: where it is registered first."""
    names: dict[int, tuple[str, str]] = {}
    for tensor, category, module, what in _there_before(step, tree):
        if category is MemoryCategory.PARAM:
            names.setdefault(id(tensor), (module, what))
    return names


def _there_before(step: Step, tree: ModuleTree) -> Iterator[tuple[Tensor, MemoryCategory, str, str]]:
    """Yield the tensors that exist before a step: tensor, category, row, and name in the row."""
    loss = step.modules()[1:]
    for index, node in enumerate(tree.nodes):
        for name, parameter in node.module.named_parameters(recurse=False):
            yield parameter, MemoryCategory.PARAM, tree.fqn(index), name
    for module in loss:
        for name, parameter in module.named_parameters():
            yield parameter, MemoryCategory.PARAM, OUTSIDE_NAME, name
    for index, node in enumerate(tree.nodes):
        for name, buffer in node.module.named_buffers(recurse=False):
            yield buffer, MemoryCategory.BUFFER, tree.fqn(index), name
    for module in loss:
        for name, buffer in module.named_buffers():
            yield buffer, MemoryCategory.BUFFER, OUTSIDE_NAME, name
    for number, tensor in enumerate(step.input_tensors()):
        yield tensor, MemoryCategory.INPUT, ROOT_NAME, f"input {number}"
