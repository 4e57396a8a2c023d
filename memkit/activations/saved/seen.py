"""What a save looks like to those forwards that follow a schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memkit.storages import Geometry

NO_VALUE = -1
"""The number of what stays because of what it is: too small, a parameter, the caller's."""


@dataclass(frozen=True, slots=True)
class SeenSave:
    """One tensor that autograd has saved."""

    shape: torch.Size | None
    """None for a tensor that is not told from others: one of a class of its own, or without a shape."""
    dtype: torch.dtype | None
    value: int
    """The number of the saved value, which several may be of; `NO_VALUE` if it counts for nothing."""
    geometry: Geometry | None
    """How it lies in its storage, if it counts."""
    num_bytes: int
    """Of its storage, if it counts."""
    is_written: bool
    """Whether the storage has been written when it is saved: see [Note: saved before it is written]."""
    node: int
    """The number of the node that saves it, from the first one on: equal for what is saved at once."""
    num_values: int
    """How many values, counted or let pass, had been noted after it."""
    before: int
    """The value that the same storage was saved as before, if this one is saved for the first time; else `NO_VALUE`."""
    seen_bytes: int
    """What it adds to the bytes that could leave by their kind."""

    def is_like(self, tensor: Tensor) -> bool:
        """Tell whether a tensor may be saved here, by what shows at once."""
        kind = type(tensor)
        if (kind is not Tensor and kind is not nn.Parameter) or tensor.is_nested:
            return self.shape is None
        return tensor.shape == self.shape and tensor.dtype is self.dtype
