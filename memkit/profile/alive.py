"""The storages on the device at each moment of a training step: one frozen value, to plain lists and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from memkit.plan.timeline import Levels


class MemoryCategory(str, Enum):
    """The purpose of bytes on the device. A storage has one category for its whole life."""

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
    """See `AliveStorage.what`; of several storages, the first largest one's."""
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

    The sum over the categories is the total on the device at a moment, to the byte: of a report with a trace it is
    `StepTrace.base_bytes + StepTrace.live_bytes[moment]`, and the optimizer's states. If an optimizer was given, a moment of
    its step follows the last op. Workspaces inside kernels are no storages and not included.

    Gradients exist from the op of the backward that makes them, as after `zero_grad()`. The optimizer's states exist all along,
    as in each step but the first.

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
        levels = {category: Levels(len(self.moments)) for category in MemoryCategory}
        for storage in self.storages:
            levels[storage.category].add(storage.begin, storage.end, storage.num_bytes)
        each = {category: tuple(found.each()[: len(self.moments)]) for category, found in levels.items()}
        object.__setattr__(self, "levels", each)
        object.__setattr__(self, "total_bytes", tuple(map(sum, zip(*each.values(), strict=True))))

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
        return tuple(
            AliveItem(category=found.category, module=found.module, what=found.what, num_bytes=found.num_bytes)
            for found in sorted(self.storages, key=lambda storage: -storage.num_bytes)
            if found.begin <= moment < found.end
        )

    def grouped_at(self, moment: int) -> tuple[AliveItem, ...]:
        """Return the same, with one item for each category in each module, largest first."""
        return tuple(item for item, _ in grouped(self.alive_at(moment), lambda item: item.module))

    def to_plain(self) -> dict[str, Any]:
        """Return this as plain JSON values, each distinct text written once; `from_plain` reads it."""
        texts: dict[str, int] = defaultdict(lambda: len(texts))
        phases, categories = list(Phase), list(MemoryCategory)
        return {
            "moments": [[phases.index(at.phase), texts[at.op], texts[at.module]] for at in self.moments],
            "storages": [
                [categories.index(it.category), texts[it.module], texts[it.what], it.num_bytes, it.begin, it.end]
                for it in self.storages
            ],
            "phases": [phase.value for phase in phases],
            "categories": [category.value for category in categories],
            "texts": list(texts),
        }

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> StepMemory:
        """Return the value that `to_plain` was called on. Raises KeyError, TypeError, ValueError, IndexError: of others."""
        texts = [str(text) for text in content["texts"]]
        phases, categories = list(map(Phase, content["phases"])), list(map(MemoryCategory, content["categories"]))
        moments = tuple(Moment(phase=phases[phase], op=texts[op], module=texts[at]) for phase, op, at in content["moments"])
        storages = []
        for kind, at, what, num_bytes, begin, end in content["storages"]:
            if not (0 <= begin <= end <= len(moments) and num_bytes >= 0):
                raise ValueError(f"a storage of {num_bytes} bytes is there from {begin} to {end}, of {len(moments)} moments")
            storages.append(
                AliveStorage(
                    category=categories[kind], module=texts[at], what=texts[what], num_bytes=num_bytes, begin=begin, end=end
                )
            )
        return cls(moments=moments, storages=tuple(storages))

    def _check(self, moment: int) -> None:
        if not 0 <= moment < len(self.moments):
            raise IndexError(f"there are {len(self.moments)} moments, from 0; found {moment}")


def grouped(items: Iterable[AliveItem], key: Callable[[AliveItem], Hashable]) -> list[tuple[AliveItem, list[str]]]:
    """Return one item per category and key, named like its first, with the modules that it covers; largest first."""
    groups: dict[Hashable, list[AliveItem]] = {}
    for item in items:
        groups.setdefault((item.category, key(item)), []).append(item)
    found = [
        (
            replace(group[0], num_bytes=sum(it.num_bytes for it in group), num_storages=sum(it.num_storages for it in group)),
            list(dict.fromkeys(item.module for item in group)),
        )
        for group in groups.values()
    ]
    return sorted(found, key=lambda pair: -pair[0].num_bytes)
