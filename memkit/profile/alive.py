"""What is on the device at each moment of a training step, storage by storage: a frozen value, to plain lists and back, and the
log that makes it during a run.

The peak in words, the list of what fills it and the timeline of a page are drawn from this one value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.tensors import storage_key, storages_of
from memkit.profile.calls import CallStack
from memkit.profile.step import ProfiledStep
from memkit.profile.tree import OUTSIDE_NAME, ROOT_NAME, ModuleTree

if TYPE_CHECKING:
    from memkit.core.torch_private import OpOverload
    from memkit.profile.sharded import GatheredParameters
    from memkit.profile.watch import ParamCasts


class MemoryCategory(str, Enum):
    """What bytes on the device are for. A storage has one category for its whole life."""

    PARAM = "param"
    """Parameters, and the slots that streamed weights share."""
    BUFFER = "buffer"
    INPUT = "input"
    """The model's inputs, which the caller holds."""
    OPTIMIZER_STATE = "optimizer state"
    GRAD = "grad"
    """A leaf's gradient at the end of the backward, from when it is made."""
    ACTIVATION = "activation"
    """Made in the step and saved by autograd for the backward, for its whole life."""
    PARAM_CAST = "param cast"
    """A saved copy of a parameter or buffer in another dtype, as made by autocast."""
    TEMP = "temp"
    """Everything else that ops make: values passed on to the next op, gradients of activations, the model's outputs."""


class Phase(str, Enum):
    """The part of a step that a moment is in."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One op of the step, just after it has made its outputs."""

    phase: Phase
    """The part of the step."""
    op: str
    """PyTorch's name, such as "aten.mm.default"; for the optimizer's step its class, such as "AdamW.step"."""
    module: str
    """The row of the report that the op counts to: "layer1.0.conv1", "(model)", "(outside modules)". In the backward, the
    module whose forward made the autograd node that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveStorage:
    """One storage, and the moments at which it exists: from `begin` up to, but not including, `end`."""

    category: MemoryCategory
    """What it holds."""
    module: str
    """Its row in the report: for parameters, buffers, their gradients and optimizer states the module that registers them; for
    activations the module that was running at the first save; for others the module whose op made it."""
    what: str
    """A name within the module: "weight", "weight.exp_avg", "input 0", or the op that made it, such as "convolution"."""
    num_bytes: int
    """Rounded up as the allocator does."""
    begin: int
    """The first moment at which it exists."""
    end: int
    """The first moment at which it is freed; the number of moments if it outlives the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveItem:
    """The storages of one category in one module at one moment."""

    category: MemoryCategory
    """What the storages hold."""
    module: str
    """The row of the report: see `AliveStorage.module`."""
    what: str
    """See `AliveStorage.what`; of several storages that of the largest, the first one of equals."""
    num_bytes: int
    """Bytes of all of them."""
    num_storages: int = 1
    """How many storages are put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """What an optimizer keeps on the device from its first step on."""

    name: str
    """Its class, such as "AdamW"."""
    state_bytes: int
    """Bytes of its states on the device."""
    there_bytes: int = 0
    """Those of `state_bytes` that were already on the device during the profile, and so are in its measured peaks."""
    room_bytes: int | None = None
    """The device memory that `memkit.StateOffload` would need for states in transfer, with all of them in host memory,
    estimated without stepping the optimizer. None if there are no states, or they can't leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The bytes on the device at each moment of a step, in storages: `MemoryReport.step_memory`.

    The sum over the categories is what is on the device at a moment, to the byte: of a report with a trace it is
    `StepTrace.base_bytes + StepTrace.live_bytes[moment]`, and the optimizer's states. A moment of the optimizer's step follows
    the last op where an optimizer was given. Workspaces inside kernels are no storages and not in it.

    Gradients are there from the op of the backward that makes them, as after `zero_grad()`. The optimizer's states are there
    all along, as in each step but the first.

    Example:
        >>> import torch, memkit
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
        ...     x = torch.empty(512, 256)
        >>> memory = memkit.profile_memory(model, x, backward=True, print_table=False).step_memory
        >>> memory.moments[memory.peak].phase.value
        'backward'
        >>> memory.alive_at(memory.peak)[0].num_bytes == 4 * 512 * 1024
        True
    """

    moments: tuple[Moment, ...]
    """All ops of the step, in order."""
    storages: tuple[AliveStorage, ...]
    """All storages that exist at any moment, in the order in which they were made."""
    levels: Mapping[MemoryCategory, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """For each category, in the order of `MemoryCategory`, its bytes at each moment."""
    total_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The bytes of all categories together at each moment."""

    def __post_init__(self) -> None:
        levels = _levels(self.storages, len(self.moments))
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "total_bytes", tuple(map(sum, zip(*levels.values(), strict=True))))

    @property
    def peak(self) -> int:
        """The moment with the most bytes: an index into `moments`, the first one of equals; 0 if nothing ran."""
        return max(range(len(self.moments)), key=self.total_bytes.__getitem__, default=0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once."""
        return max(self.total_bytes, default=0)

    def category_bytes(self, moment: int) -> dict[MemoryCategory, int]:
        """Return the bytes of each category that exists at a moment, largest first. IndexError: there is no such moment."""
        self._check(moment)
        found = {category: levels[moment] for category, levels in self.levels.items() if levels[moment]}
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def alive_at(self, moment: int) -> tuple[AliveItem, ...]:
        """Return what exists at a moment, storage by storage, largest first.

        Args:
            moment: an index into `moments`, such as `peak`.

        Raises:
            IndexError: there is no such moment.
        """
        self._check(moment)
        items = (
            AliveItem(category=found.category, module=found.module, what=found.what, num_bytes=found.num_bytes)
            for found in self.storages
            if found.begin <= moment < found.end
        )
        return tuple(sorted(items, key=lambda item: -item.num_bytes))

    def grouped_at(self, moment: int) -> tuple[AliveItem, ...]:
        """Return the same, with one item for each category in each module, largest first."""
        groups: dict[tuple[MemoryCategory, str], list[AliveItem]] = {}
        for item in self.alive_at(moment):
            groups.setdefault((item.category, item.module), []).append(item)
        items = (
            AliveItem(
                category=category,
                module=module,
                what=found[0].what,
                num_bytes=sum(item.num_bytes for item in found),
                num_storages=len(found),
            )
            for (category, module), found in groups.items()
        )
        return tuple(sorted(items, key=lambda item: -item.num_bytes))

    def to_plain(self) -> dict[str, Any]:
        """Return this as plain JSON values, each distinct text written once; `from_plain` reads it."""
        texts: dict[str, int] = {}
        phases, categories = list(Phase), list(MemoryCategory)

        def number(text: str) -> int:
            return texts.setdefault(text, len(texts))

        return {
            "moments": [[phases.index(at.phase), number(at.op), number(at.module)] for at in self.moments],
            "storages": [
                [categories.index(it.category), number(it.module), number(it.what), it.num_bytes, it.begin, it.end]
                for it in self.storages
            ],
            "phases": [phase.value for phase in phases],
            "categories": [category.value for category in categories],
            "texts": list(texts),
        }

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> StepMemory:
        """Return the value that `to_plain` was called on. Of other content raises KeyError, TypeError, ValueError or
        IndexError."""
        texts = [str(text) for text in content["texts"]]
        phases, categories = list(map(Phase, content["phases"])), list(map(MemoryCategory, content["categories"]))
        moments = tuple(
            Moment(phase=phases[phase], op=texts[op], module=texts[module]) for phase, op, module in content["moments"]
        )
        storages = tuple(
            AliveStorage(
                category=categories[category],
                module=texts[module],
                what=texts[what],
                num_bytes=num_bytes,
                begin=begin,
                end=end,
            )
            for category, module, what, num_bytes, begin, end in content["storages"]
        )
        for storage in storages:
            if not (0 <= storage.begin <= storage.end <= len(moments) and storage.num_bytes >= 0):
                raise ValueError(
                    f"a storage of {storage.num_bytes} bytes is there from {storage.begin} to {storage.end}, of "
                    f"{len(moments)} moments"
                )
        return cls(moments=moments, storages=storages)

    def _check(self, moment: int) -> None:
        if not 0 <= moment < len(self.moments):
            raise IndexError(f"there are {len(self.moments)} moments, from 0; found {moment}")


def _levels(storages: Iterable[AliveStorage], num_moments: int) -> dict[MemoryCategory, tuple[int, ...]]:
    changes = {category: [0] * (num_moments + 1) for category in MemoryCategory}
    for storage in storages:
        changes[storage.category][storage.begin] += storage.num_bytes
        changes[storage.category][storage.end] -= storage.num_bytes
    return {category: tuple(accumulate(steps))[:num_moments] for category, steps in changes.items()}


def short_name(op: str) -> str:
    """Return the name of an op without namespace and overload: "mm" for "aten.mm.default"."""
    parts = op.split(".")
    return parts[1] if len(parts) == 3 else op


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

    def follow(self, step: ProfiledStep, tree: ModuleTree, stack: CallStack) -> None:
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
        self._open[key] = len(self._entries)
        entry = _Entry(num_bytes, len(self._moments), module=self._module())
        shard = None if self._gathered is None else self._gathered.shard_of(key)
        if shard is not None:
            entry.module, name = self._names.get(id(shard), (entry.module, "parameter"))
            entry.category, entry.what, entry.is_gathered = MemoryCategory.PARAM, f"{name}, gathered", True
        self._entries.append(entry)

    def end(self, key: int) -> None:
        self._entries[self._open.pop(key)].end = len(self._moments)

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        """Note an op that has run, if it has made or written something. For an `OpWatch`, after its `LiveStorages`."""
        self.see_casts(op, args, outputs)
        if self._gathered is not None and str(op).startswith(_PACKING):
            self._note_packing(args)
        if len(self._entries) > self._num_named or torch_private.schema_of(op).is_mutable:
            self.note_op(str(op))

    def see_casts(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        if self._casts is not None:
            self._casts.saw(op, args, outputs)

    def note_op(self, name: str) -> None:
        """Note an op that has run: the maker of the storages since the last one."""
        what = short_name(name)
        for entry in self._entries[self._num_named :]:
            entry.what = entry.what or what
        self._num_named = len(self._entries)
        self._moments.append(Moment(phase=self._phase(), op=name, module=self._module()))

    def note_saved(self, tensor: Tensor) -> None:
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
        """Return the peak of gathered parameters, with their communication buffers."""
        changes = [0] * (len(self._moments) + 2)
        for entry in self._entries:
            if entry.is_gathered:
                changes[entry.begin] += entry.num_bytes
                changes[len(self._moments) + 1 if entry.end is None else entry.end] -= entry.num_bytes
        return max(accumulate(changes))

    def _note_packing(self, args: Sequence[Any]) -> None:
        """Note the buffer into which FSDP2 has packed shards for a gather."""
        for tensor in args:
            for storage in storages_of(tensor) if isinstance(tensor, Tensor) else ():
                entry = self._find(storage)
                if entry is not None and entry.category is MemoryCategory.TEMP:
                    entry.category, entry.what, entry.is_gathered = MemoryCategory.PARAM, "parameters on their way", True

    def finished(self, states: Iterable[AliveStorage] = (), *, optimizer: str | None = None) -> StepMemory:
        """Return the value. `states` are the optimizer's, there all the time; its step follows the last op."""
        self.leave()
        moments, num_ops = [*self._moments], len(self._moments)
        if optimizer is not None:
            moments.append(Moment(phase=Phase.OPTIMIZER_STEP, op=f"{optimizer}.step", module=OUTSIDE_NAME))
        storages = [self._told(entry, num_ops, len(moments)) for entry in self._entries]
        storages += [replace(state, begin=0, end=len(moments)) for state in states]
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


def parameter_names(step: ProfiledStep, tree: ModuleTree) -> dict[int, tuple[str, str]]:
    """Return each parameter's row and name where it is registered first, by its id."""
    names: dict[int, tuple[str, str]] = {}
    for tensor, category, module, what in _there_before(step, tree):
        if category is MemoryCategory.PARAM:
            names.setdefault(id(tensor), (module, what))
    return names


def _there_before(step: ProfiledStep, tree: ModuleTree) -> Iterator[tuple[Tensor, MemoryCategory, str, str]]:
    """Yield each tensor that exists before the step, with category, row, and name in the row."""
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
