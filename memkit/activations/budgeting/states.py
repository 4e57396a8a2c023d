"""Bytes of the states that optimizers have yet to make."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from memkit import torch_private
from memkit.optimizers import kept_states
from memkit.owners import with_offloaded_states
from memkit.torch_state import local_of

UNKNOWN_STATE_BYTES = 8
"""Bytes left free for each element of a trainable parameter if no optimizer is known: two float32 states, as those of
`torch.optim.AdamW`."""


def coming_state_bytes(optimizer: torch.optim.Optimizer, kind: str | None = None) -> int:
    """Return the bytes of the states that the next step of an optimizer will make, for its parameters that have none yet.

    A step of a copy tells their size (`kept_states`). If that fails, 8 bytes per element are counted. Of a sharded parameter
    (`DTensor`), this rank's part counts. With a `StateOffload`, only states that stay on the device count, since the memory for
    the others is already allocated.

    Args:
        kind: the type of device whose states count, such as "cuda"; None for all.
    """
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
    """The bytes of the states that an optimizer has yet to make.

    Args:
        optimizer: the user's; None if it is not known. Then a change of the parameters tells that one has stepped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._num_bytes = dict[str | None, int]()
        """Bytes by type of device."""
        self._trained: list[tuple[weakref.ref[Tensor], int]] | None = None
        """Two of the parameters, each with its version when it was first seen. They are checked before each forward until an
        optimizer has stepped; not every loop has one."""
        self._is_over = False

    def is_of(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Tell whether this is for the given optimizer."""
        return optimizer is (None if self.optimizer is None else self.optimizer())

    def note_trained(self, parameters: Iterable[Tensor]) -> None:
        """Note the parameters that a first forward has read. Of sharded ones, this rank's part counts."""
        found = [parameter for parameter in parameters if parameter.requires_grad]
        if self.optimizer is not None or self._trained is not None or not found:
            return
        for parameter in found:
            num_bytes, kind = UNKNOWN_STATE_BYTES * local_of(parameter).numel(), parameter.device.type
            for each in (None, kind):
                self._num_bytes[each] = self._num_bytes.get(each, 0) + num_bytes
        # In a shard, an op on it counts there, and one on its local tensor there.
        few = found[0], found[-1]
        watched = {id(tensor): tensor for parameter in few for tensor in (parameter, local_of(parameter))}
        self._trained = [(weakref.ref(tensor), torch_private.version_of(tensor)) for tensor in watched.values()]

    def num_bytes(self, kind: str | None = None) -> int:
        """Return the bytes on a type of device. Cheap once the states exist, since this is called before each forward."""
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
        for reference, version in self._trained or ():
            tensor = reference()
            if tensor is not None and torch_private.version_of(tensor) != version:
                return True
        return False
