"""Reading numbers of tensors that have no data, where only sizes are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memkit.core import torch_private
from memkit.core.modes import Mode

if TYPE_CHECKING:
    from memkit.core.torch_private import OpOverload


class NumbersWithoutData(Mode):
    """While active, a number read of a meta tensor is 1 and a truth False. `draws`: whether an op has drawn random numbers."""

    draws = False

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if op in torch_private.known("local_scalar") and args[0].is_meta:
            return False if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in op.tags
        return op(*args, **(kwargs or {}))
