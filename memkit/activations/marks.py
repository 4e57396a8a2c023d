"""The user's word on single tensors: what to do with them, whatever the ratio or the budget."""

from __future__ import annotations

from torch import Tensor

from memkit.activations.context import Mover
from memkit.activations.remat_entry import Entry
from memkit.hooks import stacked_owners
from memkit.plan import Action


def _mark(tensor: Tensor, action: Action, name: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"memkit.{name} takes one tensor; found {type(tensor).__name__}")
    entry = next((owner for owner in reversed(stacked_owners()) if isinstance(owner, Entry | Mover)), None)
    if entry is not None:
        entry.mark(tensor, action)
    return tensor


def keep(tensor: Tensor) -> Tensor:
    """Return the tensor, and have the contexts around keep it on the device if it is saved. Without one, nothing happens.

    What is meant is all that is in the tensor's storage now; what is written there later is another value. The word counts for
    this forward. What is no range of bytes, such as a sparse tensor, always stays.

    Raises:
        TypeError: it is no tensor.
    """
    return _mark(tensor, Action.KEEP, "keep")


def offload(tensor: Tensor) -> Tensor:
    """Return the tensor, and have the context around move it to host memory when it is saved, whatever the ratio or the budget.
    Without one around, or on the CPU, nothing happens. See `keep` for what is meant, and how long the word counts.

    Raises:
        TypeError: it is no tensor.
    """
    return _mark(tensor, Action.OFFLOAD, "offload")


def recompute(tensor: Tensor) -> Tensor:
    """Return the tensor, and have the context around drop it when it is saved, whatever the ratio or the budget, and make it
    again. Without one around, nothing happens. See `keep` for what is meant, and how long the word counts.

    Where that is a `CPUOffload` alone, which records no ops, the word counts from the next forward on: then its forwards are
    recorded as under a `Rematerialize` inside of it that drops nothing else.

    Raises:
        TypeError: it is no tensor.
    """
    return _mark(tensor, Action.RECOMPUTE, "recompute")
