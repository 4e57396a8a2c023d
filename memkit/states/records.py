"""`StateRecord`: what is known of one parameter of an optimizer whose states move."""

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
        has_master: whether a float32 copy is stepped instead of it.
    """

    __slots__ = (
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
    )

    def __init__(self, name: str, parameter: Tensor, *, has_master: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.has_master = has_master
        self.is_shard = is_dtensor(parameter)
        """Whether it is a `DTensor`, whose local tensor is stepped: see `memkit.states.shards`."""
        self.index = 0
        """Its position in its piece."""
        self.group = self.position = -1
        """The number of its group, and its position there; -1 once the optimizer does not have it any more."""
        self.undo: Tensor | None = None
        """A copy of the parameter from before the step, while it is stepped."""
        self.numbers: list[tuple[Tensor, Tensor]] = []
        """States that are not copied (counts of steps), each with a copy from before the step."""
        self.done: tuple[weakref.ref[Tensor], int] | None = None
        """The gradient that it was stepped with last, and the version of that: see `mark_of`."""

    def is_done(self) -> bool:
        """Tell whether a step that was broken off has stepped it with the gradient that it has now."""
        grad = self.parameter.grad
        if self.done is None or grad is None:
            return False
        ref, version = self.done
        return ref() is grad and version == (version_of(grad) if self.is_shard else torch_private.version_of(grad))


def mark_of(record: StateRecord) -> tuple[weakref.ref[Tensor], int] | None:
    """Return a weak reference to the gradient of a parameter, and its version; None if there is no gradient."""
    grad = record.parameter.grad
    if grad is None:
        return None
    return weakref.ref(grad), version_of(grad) if record.is_shard else torch_private.version_of(grad)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to. A `DTensor` and its local tensor count apart: the sum of both."""
    version = torch_private.version_of(tensor)
    return version + torch_private.version_of(local_of(tensor)) if is_dtensor(tensor) else version
