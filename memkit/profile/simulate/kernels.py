"""Operations whose meta kernel gives back other dtypes than the target's kernel does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_HALF_DTYPES = (torch.float16, torch.bfloat16)


class TargetKernels(TorchDispatchMode):
    """Gives the statistics of normalizations the dtype that `target` keeps them in, and drops those it does not keep.

    Source: layer_norm.cpp, group_norm.cpp and Normalization.cpp in aten/src/ATen/native, and the CUDA kernels beside them.
    """

    def __init__(self, target: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._target = target

    def __torch_dispatch__(
        self, op: torch._ops.OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.native_group_norm.default:
            return _with_statistics(outputs, _dtype_beside(args[0], args[1]))
        if self._target == "cpu" and op is torch.ops.aten.native_layer_norm.default:
            return _with_statistics(outputs, _dtype_beside(args[0], args[2]))
        if op is torch.ops.aten.native_batch_norm.default:
            return self._batch_norm(outputs, *args[:6])
        return outputs

    def _batch_norm(
        self,
        outputs: Sequence[Tensor],
        tensor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
    ) -> tuple[Tensor, ...]:
        if self._target == "cpu":
            return _with_statistics(outputs, _dtype_beside(tensor, weight), keep=training)
        # cuDNN, where it is used, keeps statistics of a batch only in training.
        cudnn = (
            torch.backends.cudnn.enabled
            and weight is not None
            and torch.bfloat16 not in (tensor.dtype, weight.dtype)
            and (tensor.dtype != torch.float16 or weight.dtype == torch.float32)
            and tensor.dim() >= 3
        )
        return _with_statistics(outputs, outputs[1].dtype, keep=training or not cudnn)


def _dtype_beside(tensor: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return the dtype of statistics: the input's, but float32 for half precision with float32 weights ("mixed")."""
    mixed = tensor.dtype in _HALF_DTYPES and weight is not None and weight.dtype == torch.float32
    return torch.float32 if mixed else tensor.dtype


def _with_statistics(outputs: Sequence[Tensor], dtype: torch.dtype, *, keep: bool = True) -> tuple[Tensor, ...]:
    output, *statistics = outputs
    return (output, *(tensor.new_empty(tensor.shape if keep else 0, dtype=dtype) for tensor in statistics))
