"""What is done in steps that are not recorded any more, and how much they save, by which a larger one is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memkit import torch_private

if TYPE_CHECKING:
    from memkit.activations.recomputing.budget import RematOptions
    from memkit.activations.recomputing.region_plan import RegionPlan

_Parameter = nn.Parameter


class SizesSeen:
    """Adds up what a step saves, each storage once, as far as that shows without its ops: parameters are left out.

    Args:
        min_bytes: smaller storages are left out.
    """

    __slots__ = ("_min_bytes", "made_bytes", "other_bytes", "seen")

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes
        self.seen = set[int]()
        """Addresses of storages: what was saved lives on, and so its address is its own."""
        self.made_bytes = 0
        """Of what the graph has made."""
        self.other_bytes = 0
        """Of all else: inputs, and what was made without a graph. The budget may count it or not."""

    def note(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Note a tensor that is saved, if its storage was not seen before."""
        address = torch_private.storage_address(storage)
        if address in self.seen:
            return
        self.seen.add(address)
        num_bytes = storage.nbytes()
        if num_bytes < self._min_bytes or type(tensor) is _Parameter or type(torch_private.base_of(tensor)) is _Parameter:
            return
        if tensor.grad_fn is None:
            self.other_bytes += num_bytes
        else:
            self.made_bytes += num_bytes

    def exceed(self, budget_bytes: int, known: SizesSeen) -> bool:
        """Tell whether this may be more than a budget allows, given that it allows what is known."""
        is_more = self.made_bytes > known.made_bytes or self.other_bytes > known.other_bytes
        return is_more and self.made_bytes + self.other_bytes > budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What the next steps do that are like the last recorded one, with no op recorded."""

    options: RematOptions
    """What was asked for."""
    budget_bytes: float
    sizes: SizesSeen | None = None
    """What was saved, where a larger step is to be noticed."""
    regions: RegionPlan | None = None
    """Which calls of modules are recomputed as a whole; None where nothing is dropped."""
