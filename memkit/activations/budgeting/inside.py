"""What compiled blocks recompute inside: which `activation_memory_budget` each kind of them is compiled with.

That is chosen ahead of the first call of a kind, and so of its compile, by the graphs that the compiler would make: what a
block saves and what it computes again, for each of a few values. What it saves then is moved, or the block is recomputed as a
whole, as a plan or a measurement says later.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memkit.compiled import module_inside
from memkit.torch_state import has_gathered, num_compiled

if TYPE_CHECKING:
    from torch import nn

    from memkit.profile.partitions import Partition

_LOGGER = logging.getLogger(__name__)
_VALUES = (1.0, 0.5, 0.3)
"""Those that are compared."""
_HIDDEN = 0.5
"""For so much of the forward of the blocks something is taken to leave beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is for the compiled blocks of a step."""

    num_bytes: float
    """What they may save on the device."""
    bytes_per_s: float
    """Of the link, both ways at once."""
    flops_per_s: float
    """Of the device."""
    memory_bytes_per_s: float
    """Of its memory."""


RoomOf = Callable[[torch.device, torch.dtype], "Room | None"]
"""Returns what there is on a device, for blocks that compute in a dtype; None if that is not known."""


def num_like(block: nn.Module, others: Iterable[nn.Module]) -> float:
    """Return how many blocks such as one would save what all of its kind do.

    Where the resolution is halved from one stage to the next, the width is doubled: half as much is saved, of four times the
    parameters. So one with more of these counts for less, by their root; one with fewer counts as one, since the first that is
    called is mostly of an early stage.

    Args:
        others: blocks, itself among them.
    """
    own_numel = _num_parameters(block)
    numels = [_num_parameters(other) for other in others if type(other) is type(block)]
    return sum(min(1.0, math.sqrt(own_numel / max(numel, 1))) for numel in numels)


def _num_parameters(block: nn.Module) -> int:
    return sum(parameter.numel() for parameter in block.parameters())


def best_partition(partitions: Sequence[Partition], num_blocks: float, room: Room) -> Partition:
    """Return with which of some partitions a step with so many blocks of a kind takes least, as far as FLOPs and bytes tell.

    What the blocks save beyond the room leaves as far as it hides behind their forward; the rest leaves and is waited for, or
    as many blocks are recomputed as a whole. What a block saves it writes, and reads at least once in its forward.

    Args:
        partitions: for falling budgets, so that the largest of several that are alike is chosen.
    """

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
    """The values that were chosen under one tag, by the classes of the blocks."""

    def __init__(self) -> None:
        self.chosen: dict[type[nn.Module], float | None] = {}
        """None for those that are compiled as they would be without."""

    @property
    def are_alike(self) -> bool:
        """Whether all kinds are compiled with the same value."""
        return len(set(self.chosen.values())) <= 1

    def for_all(self) -> AbstractContextManager[object]:
        """Return a context in which all kinds are compiled as was chosen, should any be, where that is the same for all: for a
        whole forward, where nobody stands around the blocks."""
        value = next(iter(self.chosen.values()), None) if self.are_alike else None
        if value is None:
            return nullcontext()
        from functorch.compile import config  # type: ignore[import-untyped]  # loaded by what has compiled them

        found: AbstractContextManager[object] = config.patch(activation_memory_budget=value)
        return found

    @contextmanager
    def setting(
        self, module: nn.Module, args: Any, kwargs: Any, found: Collection[nn.Module], *, room: RoomOf
    ) -> Iterator[None]:
        """A context for one call of a compiled module, in which it is compiled as was chosen, should it be.

        Args:
            found: the compiled modules that are known, itself among them.
        """
        from functorch.compile import config  # loaded by what compiles the module

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
    except torch.OutOfMemoryError:  # there is none to measure the device with
        return None
    if room is None:
        return None
    from memkit.profile.partitions import partitions  # only now: it loads what traces

    name = type(block).__name__
    try:
        found = partitions(block, args, kwargs, _VALUES)
    except RuntimeError as error:  # it is compiled as it would be without
        _LOGGER.info("MemoryBudget: no activation_memory_budget is chosen for %s: %s", name, error)
        return None
    best = best_partition(found, num_blocks, room)
    _LOGGER.info("MemoryBudget: %s is compiled with activation_memory_budget=%s, of %s, %s", name, best.budget, found, room)
    return best.budget
