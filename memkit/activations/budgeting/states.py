"""What optimizers keep on the device, and have not made yet."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.owners import with_offloaded_states
from memkit.storages import storage_bytes

UNKNOWN_STATE_BYTES = 8
"""What is left free for each element of a trainable parameter where no optimizer is known: two states in float32, as those of
`torch.optim.AdamW`."""


def coming_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the states that a step of an optimizer will make: of its parameters that have none yet.

    What it keeps is tried on one small parameter with its defaults. Where that fails, 8 bytes an element are counted. Of an
    optimizer with a `StateOffload` only what stays on the device counts: the room for the rest is taken already.
    """
    if optimizer in with_offloaded_states:
        return with_offloaded_states[optimizer]()
    waiting = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    ]
    ratios = {dtype: _state_ratio(optimizer, dtype) for dtype in {parameter.dtype for parameter in waiting}}
    return sum(round(ratios[parameter.dtype] * parameter.nbytes) for parameter in waiting)


def _state_ratio(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> float:
    """Return how many bytes of state an optimizer keeps for each byte of a parameter."""
    parameter = nn.Parameter(torch.zeros(32, 32, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    try:
        known = inspect.signature(type(optimizer)).parameters
        told = {name: value for name, value in optimizer.defaults.items() if name in known}  # AdamW adds one of its own
        tried = type(optimizer)([parameter], **told)
        tried.step()
    except Exception:  # one of another library, that wants to be made in another way
        return UNKNOWN_STATE_BYTES / dtype.itemsize
    state = [item for item in tried.state[parameter].values() if isinstance(item, Tensor) and item.numel() > 1]
    return storage_bytes(state) / parameter.nbytes


class ComingStates:
    """The bytes of the states that an optimizer will make, and has not yet.

    Args:
        optimizer: the user's; None if it is not known: then it is in the parameters that one has stepped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._num_bytes = 0 if optimizer is None else coming_state_bytes(optimizer)
        self._trained: tuple[weakref.ref[Tensor], int] | None = None
        """One of the parameters, and how often it was written to when it was seen first."""

    def is_of(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Tell whether it is that optimizer's."""
        return optimizer is (None if self.optimizer is None else self.optimizer())

    def note_trained(self, parameters: Iterable[Tensor]) -> None:
        """A first forward has read these."""
        found = [parameter for parameter in parameters if parameter.requires_grad]
        if self.optimizer is None and self._trained is None and found:
            self._num_bytes = sum(UNKNOWN_STATE_BYTES * parameter.numel() for parameter in found)
            self._trained = weakref.ref(found[-1]), torch_private.version_of(found[-1])

    def num_bytes(self) -> int:
        """Return the bytes. Cheap: it is asked ahead of each forward."""
        if self._num_bytes:
            optimizer = None if self.optimizer is None else self.optimizer()
            trained = None if self._trained is None else self._trained[0]()
            is_stepped = (
                trained is not None and self._trained is not None and torch_private.version_of(trained) != self._trained[1]
            )
            is_gone = self.optimizer is not None and optimizer is None
            if is_stepped or is_gone or (optimizer is not None and optimizer.state):
                self._num_bytes = 0
        return self._num_bytes
