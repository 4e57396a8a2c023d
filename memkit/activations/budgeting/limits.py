"""`Limits`: what the user asks of a budget, and how many bytes of it a step may allocate."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from memkit.plan import MemoryPlan

_RESERVED_PER_ALLOCATED = 1.10
"""Ratio of reserved to allocated bytes, until it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The user's budget."""

    budget: int | float
    """Bytes, or a share of the plain step's peak."""
    is_of_reserved: bool
    """Whether the budget limits reserved rather than allocated bytes."""
    optimizer: weakref.ref[torch.optim.Optimizer] | None
    min_bytes: int
    plan: MemoryPlan | None
    """The plan that the user passed."""
    raises: bool
    """Whether to raise if the budget can't be kept."""

    def budget_bytes(self, plain_peak_bytes: int | None) -> int | None:
        """Return the budget in bytes; None if it is a share of a peak that is not known yet."""
        if isinstance(self.budget, int):
            return self.budget
        return None if plain_peak_bytes is None else int(self.budget * plain_peak_bytes)

    def allocated_bytes(self, budget_bytes: int) -> int:
        """Return how many bytes of tensors a budget allows."""
        return int(budget_bytes / _RESERVED_PER_ALLOCATED) if self.is_of_reserved else budget_bytes
