"""Chooses the `activation_memory_budget` of each class of compiled blocks, before the first call compiles it. For a few
budgets, the compiler's partitioner tells what a block would save and recompute inside. The plan later moves what blocks save,
or recomputes whole blocks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memkit.core.compiled import module_inside
from memkit.core.torch_state import has_gathered, num_compiled

if TYPE_CHECKING:
    from torch import nn

    from memkit.profile.partitions import Partition

_LOGGER = logging.getLogger(__name__)
_VALUES = (1.0, 0.5, 0.3)
_HIDDEN = 0.5
"""Copies are assumed to run beside this fraction of the blocks' forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    num_bytes: float
    bytes_per_s: float
    flops_per_s: float
    memory_bytes_per_s: float


RoomOf = Callable[[torch.device, torch.dtype], "Room | None"]


def num_like(block: nn.Module, others: Iterable[nn.Module]) -> float:
    """Return how many blocks like `block` would save as much as all of its class among `others`. From stage to stage, models
    often double the width and halve the resolution: such a block saves half as much and has four times the parameters. So a
    block with more parameters counts as the square root of the ratio. One with fewer counts as one: the block called first is
    mostly of an early stage."""
    alike = (other for other in (block, *others) if type(other) is type(block))
    own_numel, *numels = [sum(parameter.numel() for parameter in each.parameters()) for each in alike]
    return sum(min(1.0, math.sqrt(own_numel / max(numel, 1))) for numel in numels)


def best_partition(partitions: Sequence[Partition], num_blocks: float, room: Room) -> Partition:
    """Return the first partition with the least time for so many blocks, estimated from FLOPs and bytes. Saved bytes beyond the
    room move to the host, hidden behind part of the forward; for the rest, the step waits for the copies or recomputes whole
    blocks."""

    def more_s(partition: Partition) -> float:
        forward_s = partition.forward_flops / room.flops_per_s + 2 * partition.saved_bytes / room.memory_bytes_per_s
        again_s = (partition.backward_flops - partitions[0].backward_flops) / room.flops_per_s
        hidden_bytes = _HIDDEN * num_blocks * forward_s * room.bytes_per_s
        rest_bytes = max(num_blocks * partition.saved_bytes - room.num_bytes - hidden_bytes, 0.0)
        gained_bytes = partition.saved_bytes - partition.given_bytes
        num_whole = math.ceil(rest_bytes / gained_bytes) if gained_bytes > 0 else num_blocks + 1
        whole_s = num_whole * forward_s if num_whole <= num_blocks else math.inf
        return num_blocks * again_s + min(whole_s, rest_bytes / room.bytes_per_s)

    return min(partitions, key=more_s)


class InsideBudgets:
    def __init__(self) -> None:
        self.chosen: dict[type[nn.Module], float | None] = {}

    @property
    def are_alike(self) -> bool:
        return len(set(self.chosen.values())) <= 1

    def for_all(self) -> AbstractContextManager[object]:
        value = next(iter(self.chosen.values()), None) if self.are_alike else None
        if value is None:
            return nullcontext()
        from functorch.compile import config  # type: ignore[import-untyped]  # the compiler has loaded it

        found: AbstractContextManager[object] = config.patch(activation_memory_budget=value)
        return found

    @contextmanager
    def setting(
        self, module: nn.Module, args: Any, kwargs: Any, found: Collection[nn.Module], *, room: RoomOf
    ) -> Iterator[None]:
        """Around one call of a compiled module: if this compiles it, it is compiled with its budget."""
        from functorch.compile import config  # the module's compiler loads it

        block = module_inside(module) or module
        kind = type(block)
        is_first = kind not in self.chosen
        if is_first:
            has_own = config.activation_memory_budget != _VALUES[0]  # the user's
            num_blocks = num_like(block, (module_inside(other) or other for other in found))
            self.chosen[kind] = None if has_own else _choose(block, args, kwargs, num_blocks, room)
        value = self.chosen[kind]
        if value is None:
            yield
            return
        num_before = num_compiled()
        with config.patch(activation_memory_budget=value):
            yield
        if is_first and num_compiled() == num_before:
            _LOGGER.info("MemoryBudget: %s was compiled before, and stays as it is", kind.__name__)
            self.chosen[kind] = None


def _choose(block: nn.Module, args: Any, kwargs: Any, num_blocks: float, room_of: RoomOf) -> float | None:
    own = next((tensor for tensor in block.parameters() if tensor.is_floating_point()), None)
    # FSDP2 gathers by hooks of the block: to trace it ahead would have them run on tensors without data
    if own is None or has_gathered(block.modules()):
        return None
    is_cast = torch.is_autocast_enabled(own.device.type)
    try:
        room = room_of(own.device, torch.get_autocast_dtype(own.device.type) if is_cast else own.dtype)
    except torch.OutOfMemoryError:  # there is nothing to measure the device with
        return None
    if room is None:
        return None
    from memkit.profile.partitions import partitions  # imported here, since it loads the tracer

    name = type(block).__name__
    try:
        found = partitions(block, args, kwargs, _VALUES)
    except RuntimeError as error:  # it is compiled as without a budget
        _LOGGER.info("MemoryBudget: no activation_memory_budget is chosen for %s: %s", name, error)
        return None
    best = best_partition(found, num_blocks, room)
    _LOGGER.info("MemoryBudget: %s is compiled with activation_memory_budget=%s, of %s, %s", name, best.budget, found, room)
    return best.budget
