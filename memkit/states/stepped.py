"""What is in `grad` of a parameter that was stepped within the backward, so that it is not taken for no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.errors import StateOffloadError


class ConsumedGradient(Tensor):
    """In `grad` of a parameter that was stepped: whatever would use it raises. It is one element large."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> ConsumedGradient:
        one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        return one.expand(parameter.size()).as_subclass(cls)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ConsumedGradient(size={tuple(self.size())})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let attributes be read; what `zero_grad` does has no effect; all else raises."""
        name = func.__name__
        if name in _ZERO_GRAD:
            return args[0]
        if name in ("__get__", "__set__") or name in _READS:
            with torch_private.without_subclass_functions():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor):
                return found
            name = func.__self__.__name__
        raise StateOffloadError(
            f'{name}: this gradient was consumed by the step within the backward. With when="backward" gradients cannot be '
            'clipped, scaled or read. Use when="step"'
        )


_READS = {"size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous"}
_READS |= {"untyped_storage", "storage_offset", "data_ptr", "is_inference", "is_conj", "is_neg", "__hash__"}
_READS |= torch_private.READ_BY_MODULES
_ZERO_GRAD = {"zero_", "detach_", "requires_grad_", torch_private.ZEROING_ALL}
