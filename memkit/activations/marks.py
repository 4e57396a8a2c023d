"""Marks of the user's on single tensors, which precede the ratio and the budget."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memkit.activations.saved.entry import Stage, entries_around
from memkit.core import torch_private
from memkit.core.torch_state import has_own_dispatch
from memkit.plan import Action


def _mark(tensor: Tensor, action: Action, name: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"memkit.{name} takes one tensor; found {type(tensor).__name__}")
    stages = [stage for entry in entries_around() for stage in entry.stages]
    _mark_in(tensor, action, stages)
    return tensor


def _mark_in(tensor: Tensor, action: Action, stages: Sequence[Stage]) -> None:
    if not stages:
        return
    if has_own_dispatch(tensor) and torch_private.is_wrapper(tensor):
        moving = [stage for stage in stages if stage.moves]
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # of wrapper subclasses only
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor) and action is not Action.RECOMPUTE:
                _mark_in(part, action, moving)
        return
    stages[0].mark(tensor, action)


def keep(tensor: Tensor) -> Tensor:
    """Return the tensor, marked: the contexts around keep it on the device if it is saved. Outside of one, nothing happens.

    The mark covers the present contents of the tensor's storage, not later writes to it, and holds for this forward. Tensors
    that are not one range of bytes, such as sparse ones, always stay.

    Raises:
        TypeError: it is not a tensor.
    """
    return _mark(tensor, Action.KEEP, "keep")


def offload(tensor: Tensor) -> Tensor:
    """Return the tensor, marked: the context around moves it to host memory when it is saved, whatever the ratio or the budget.
    Outside of one, or on the CPU, nothing happens. See `keep` for what the mark covers, and for how long.

    Raises:
        TypeError: it is not a tensor.
    """
    return _mark(tensor, Action.OFFLOAD, "offload")


def recompute(tensor: Tensor) -> Tensor:
    """Return the tensor, marked: the context around drops it when it is saved, whatever the ratio or the budget, and recomputes
    it. Outside of one, nothing happens. See `keep` for what the mark covers, and for how long.

    A `CPUOffload` alone records no ops, so there the mark takes effect from the next forward on: its forwards are then recorded
    as under a `Rematerialize` inside it that drops nothing else.

    Raises:
        TypeError: it is not a tensor.
    """
    return _mark(tensor, Action.RECOMPUTE, "recompute")
