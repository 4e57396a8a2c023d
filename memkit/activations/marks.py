"""The user's word on single tensors: what to do with them, whatever the ratio or the budget."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memkit import torch_private
from memkit.activations.context import Mover
from memkit.activations.remat_entry import Entry
from memkit.hooks import stacked_owners
from memkit.plan import Action
from memkit.torch_state import has_own_dispatch


def _mark(tensor: Tensor, action: Action, name: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"memkit.{name} takes one tensor; found {type(tensor).__name__}")
    _mark_in(tensor, action, [owner for owner in reversed(stacked_owners()) if isinstance(owner, Entry | Mover)])
    return tensor


def _mark_in(tensor: Tensor, action: Action, entries: Sequence[Entry | Mover]) -> None:
    """Mark a tensor, or what it wraps: that is never made again, and so it concerns those who move it."""
    if not entries:
        return
    if has_own_dispatch(tensor) and torch_private.is_wrapper(tensor):
        movers = [entry for entry in entries if isinstance(entry, Mover)]
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # of wrapper subclasses only
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor) and action is not Action.RECOMPUTE:
                _mark_in(part, action, movers)
        return
    entries[0].mark(tensor, action)


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
