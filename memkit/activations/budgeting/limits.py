"""The part of a device budget that saved tensors may take, beside other bytes, the step's own and coming optimizer states."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.kept import KeptHandle, nothing
from memkit.core.owners import with_offloaded_states
from memkit.core.torch_state import has_own_dispatch, local_of
from memkit.optimizers import kept_states

if TYPE_CHECKING:
    from memkit.device.base import MemoryCounter
    from memkit.plan import MemoryPlan


_RESERVED_PER_ALLOCATED = 1.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    budget: int | float
    is_of_reserved: bool
    optimizer: weakref.ref[torch.optim.Optimizer] | None
    min_bytes: int
    plan: MemoryPlan | None
    raises: bool

    def budget_bytes(self, plain_peak_bytes: int | None) -> int | None:
        if isinstance(self.budget, int):
            return self.budget
        return None if plain_peak_bytes is None else int(self.budget * plain_peak_bytes)

    def allocated_bytes(self, budget_bytes: int) -> int:
        return int(budget_bytes / _RESERVED_PER_ALLOCATED) if self.is_of_reserved else budget_bytes


class StepPeak:
    """The most bytes on the device from the entry of a step to the end of its backward, when it is read. The counter is the
    user's as well: only steps that teach something reset it. In others the peak is known only where it exceeds all before."""

    def __init__(self, counter: MemoryCounter, *, resets: bool) -> None:
        if resets:
            counter.reset_peak()
        self._counter, self._resets = counter, resets
        self._before_bytes = -1 if resets else counter.peak_bytes()
        self._base_bytes = counter.allocated_bytes() if resets else 0
        self._held_bytes = 0
        self.num_bytes: int | None = None
        """None before the backward has ended, and where the peak is not known."""
        self.is_over = False

    def end_forward(self) -> None:
        if self._resets and not self.is_over:
            self._held_bytes = self._counter.allocated_bytes()

    def foretold_bytes(self) -> int | None:
        """Predict a peak once a forward is over: the known peak, scaled by the bytes left; None if unknown."""
        own_bytes = self._held_bytes - self._base_bytes
        if self.num_bytes is None or own_bytes <= 0:
            return None
        growth = (self._counter.allocated_bytes() - self._base_bytes) / own_bytes
        return int(self._base_bytes + growth * (self.num_bytes - self._base_bytes))

    def end_backward(self) -> None:
        if not self.is_over:
            peak_bytes, self.is_over = self._counter.peak_bytes(), True
            if peak_bytes >= self._held_bytes and peak_bytes != self._before_bytes:
                self.num_bytes = peak_bytes


UNKNOWN_STATE_BYTES = 8
"""Bytes for each element of a trainable parameter without a known optimizer: two float32 states, as in `torch.optim.AdamW`."""


def coming_state_bytes(optimizer: torch.optim.Optimizer, kind: str | None = None) -> int:
    """Return the bytes of the states that an optimizer's next step will make, on a `kind` of device or on all: by a step of a
    copy (`kept_states`), or 8 bytes per element if that fails. A `DTensor` counts with this rank's part; with a `StateOffload`,
    only states that stay on the device count."""
    if optimizer in with_offloaded_states:
        return with_offloaded_states[optimizer]()
    waiting = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter) and kind in (None, parameter.device.type)
    ]
    try:
        kept = kept_states(optimizer).of if waiting else {}
    except Exception:  # no copy of it can step by itself
        return sum(UNKNOWN_STATE_BYTES * local_of(parameter).numel() for parameter in waiting)
    return sum(state.num_bytes for parameter in waiting for state in kept[id(parameter)] if state.is_there)


class ComingStates:
    """The bytes of the states yet to be made. Of an unknown optimizer, changed parameters tell that it has stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._num_bytes = dict[str | None, int]()
        self._trained: list[KeptHandle] | None = None
        """Two parameters without bytes, checked before each forward until an optimizer has stepped, if ever."""
        self._is_over = False

    def is_of(self, optimizer: torch.optim.Optimizer | None) -> bool:
        return optimizer is (None if self.optimizer is None else self.optimizer())

    def note_trained(self, parameters: Iterable[Tensor]) -> None:
        """Note the parameters that a first forward has read. Sharded ones count with this rank's part."""
        found = [parameter for parameter in parameters if parameter.requires_grad]
        if self.optimizer is not None or self._trained is not None or not found:
            return
        for parameter in found:
            num_bytes, kind = UNKNOWN_STATE_BYTES * local_of(parameter).numel(), parameter.device.type
            for each in (None, kind):
                self._num_bytes[each] = self._num_bytes.get(each, 0) + num_bytes
        # A sharded tensor and its local tensor each count the writes to themselves.
        few = found[0], found[-1]
        watched = {id(tensor): tensor for parameter in few for tensor in (parameter, local_of(parameter))}
        self._trained = [_counting(tensor) for tensor in watched.values()]

    def num_bytes(self, kind: str | None = None) -> int:
        """Return the bytes on a type of device: cheap once the states exist, since each forward calls this."""
        self._is_over = self._is_over or self._have_come()
        if self._is_over:
            return 0
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is not None and kind not in self._num_bytes:
            self._num_bytes[kind] = coming_state_bytes(optimizer, kind)
        return self._num_bytes.get(kind, 0)

    def _have_come(self) -> bool:
        if self.optimizer is not None:
            optimizer = self.optimizer()
            return optimizer is None or bool(optimizer.state)
        return not all(handle.is_unchanged() for handle in self._trained or ())


def _counting(tensor: Tensor) -> KeptHandle:
    with torch_private.without_python_dispatch():  # a wrapper's detached tensor then wraps nothing
        handle = KeptHandle(tensor)
    if not has_own_dispatch(tensor):
        handle.alias.data = nothing(tensor.dtype, tensor.device)
    return handle
