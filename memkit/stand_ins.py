"""`GradientStandIn`: the `grad` of a parameter that was stepped within the backward, so that it isn't mistaken for no
gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from memkit import torch_private

if TYPE_CHECKING:
    from memkit.errors import MemkitError

_Own = TypeVar("_Own", bound="GradientStandIn")


class GradientStandIn(Tensor):
    """The `grad` of a parameter that was stepped within the backward: using it raises. It takes the memory of one element.

    Each feature that steps in the backward has a subclass, with the error and the advice.
    """

    error: ClassVar[type[MemkitError]]
    advice: ClassVar[str]
    """What cannot be done with gradients, and what to do instead."""

    @staticmethod
    def __new__(cls: type[_Own], size: torch.Size, dtype: torch.dtype, device: torch.device) -> _Own:
        return torch.zeros((), dtype=dtype, device=device).expand(size).as_subclass(cls)

    @classmethod
    def of(cls: type[_Own], parameter: Tensor) -> _Own:
        """Return the stand-in for a parameter's gradient."""
        return cls(parameter.size(), parameter.dtype, parameter.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(size={tuple(self.size())})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let attributes be read, and it be moved with its parameter; what `zero_grad` does has no effect; all else raises."""
        name = func.__name__
        if name in _ZERO_GRAD:
            return args[0]
        if name in _MOVES:
            moved = func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **(kwargs or {}))
            return cls(args[0].size(), moved.dtype, moved.device)
        if name in ("__get__", "__set__") or name in _READS:
            with torch_private.without_subclass_functions():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor):  # as `data` is
                return found
            name = func.__self__.__name__
        raise cls.error(f"{name}: this gradient was consumed by the step within the backward. {cls.advice}")


_READS = {"size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous"}
_READS |= {"untyped_storage", "storage_offset", "data_ptr", "is_inference", "is_conj", "is_neg", "__hash__"}
_READS |= torch_private.READ_BY_MODULES
_MOVES = {"to", "cpu", "cuda", "half", "bfloat16", "float", "double"}
_ZERO_GRAD = {"zero_", "detach_", "requires_grad_", torch_private.ZEROING_ALL}
