"""What is known of one parameter whose states move."""

from __future__ import annotations

import weakref

from torch import Tensor

from memkit import torch_private
from memkit.torch_state import is_dtensor, local_of


class StateRecord:
    """What is known of one parameter.

    Args:
        name: what to call it.
        parameter: the user's.
        has_master: whether a copy of higher precision is stepped in its place.
    """

    __slots__ = (
        *(
            "__weakref__",
            "done",
            "group",
            "has_master",
            "index",
            "is_shard",
            "name",
            "numbers",
            "parameter",
            "position",
            "undo",
        ),
    )

    def __init__(self, name: str, parameter: Tensor, *, has_master: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.has_master = has_master
        self.is_shard = is_dtensor(parameter)
        """Whether the part of the parameter that this rank has is what is stepped: see `memkit.states.shards`."""
        self.index = 0
        """Which one of its piece it is."""
        self.group = self.position = -1
        """Where the optimizer has it: which group, and which parameter there; -1 where it has it no more."""
        self.undo: Tensor | None = None
        """The parameter as it was, while it is stepped."""
        self.numbers: list[tuple[Tensor, Tensor]] = []
        """States that do not leave, each with what it was before the step."""
        self.done: tuple[weakref.ref[Tensor], int] | None = None
        """With which gradient it was stepped in a step that was broken off."""

    def is_done(self) -> bool:
        """Tell whether a step that was broken off has stepped it with the gradient that it has now."""
        grad = self.parameter.grad
        if self.done is None or grad is None:
            return False
        ref, version = self.done
        return ref() is grad and version == (version_of(grad) if self.is_shard else torch_private.version_of(grad))


def mark_of(record: StateRecord) -> tuple[weakref.ref[Tensor], int] | None:
    """Return what tells the gradient of a parameter, as it is now, from others."""
    grad = record.parameter.grad
    if grad is None:
        return None
    return weakref.ref(grad), version_of(grad) if record.is_shard else torch_private.version_of(grad)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to. In a shard, an op on it counts there, and one on its local tensor there."""
    version = torch_private.version_of(tensor)
    return version + torch_private.version_of(local_of(tensor)) if is_dtensor(tensor) else version
