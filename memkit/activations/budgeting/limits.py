"""What a user asks of a budget, and what of that is left for a step: less what comes later, and what may be missed by."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from memkit.plan import MemoryPlan

_RESERVED_PER_ALLOCATED = 1.10
"""What the allocator takes from the device for what tensors take, until it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is asked for."""

    budget: int | float
    """Bytes, or a share of the plain step's peak."""
    is_of_reserved: bool
    """Whether it is held against what the allocator has taken from the device."""
    optimizer: weakref.ref[torch.optim.Optimizer] | None
    min_bytes: int
    plan: MemoryPlan | None
    """Given by the user."""
    raises: bool
    """Whether to raise where the budget cannot be kept to."""

    def budget_bytes(self, plain_peak_bytes: int | None) -> int | None:
        """Return the budget in bytes; None for a share of what is not known yet."""
        if isinstance(self.budget, int):
            return self.budget
        return None if plain_peak_bytes is None else int(self.budget * plain_peak_bytes)

    def allocated_bytes(self, budget_bytes: int) -> int:
        """Return what tensors may take under a budget."""
        return int(budget_bytes / _RESERVED_PER_ALLOCATED) if self.is_of_reserved else budget_bytes
