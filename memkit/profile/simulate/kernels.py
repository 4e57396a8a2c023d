"""Operations whose meta kernel gives back other dtypes or another memory format than the target's kernel does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.modes import Mode
from memkit.profile.simulate.dtypes import check_dtypes, uses_onednn

if TYPE_CHECKING:
    from memkit.torch_private import OpOverload

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten

Outputs = Any  # a tensor, or several
Rule = Callable[..., Outputs]


class TargetKernels(Mode):
    """Gives outputs the memory format and the dtypes that they have on `target`, and refuses what `target` refuses.

    Statistics of normalizations that the target does not keep become empty.
    """

    def __init__(self, target: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._target = target
        self._rules = _CUDA_RULES if target == "cuda" else _CPU_RULES

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_dtypes(op, args, self._target)
        place = _CLASSES_AT.get(op)
        if place is not None and args[place].dtype is torch.uint8:
            args = (*args[:place], args[place].long(), *args[place + 1 :])
        kernel: Callable[..., Any] = _OWN_KERNELS.get(op, op)
        outputs = kernel(*args, **(kwargs or {}))
        rule = self._rules.get(op)
        return outputs if rule is None else rule(outputs, *args)


def format_of(tensor: Tensor) -> torch.memory_format:
    """Return the memory format that a kernel sees in a tensor, by its strides alone: gaps are allowed.

    Source: Tensor::suggest_memory_format, and is_channels_last_strides_2d and _3d in c10/core/MemoryFormat.h.
    """
    shape, strides = tensor.shape, tensor.stride()
    if tensor.dim() not in (4, 5) or strides[1] == 0:
        return torch.contiguous_format
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        # of one channel, a contiguous tensor is told from a channels_last one by its first stride
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return torch.contiguous_format
        least = strides[dim] * max(shape[dim], 1)
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def _in_format(output: Tensor, memory_format: torch.memory_format) -> Tensor:
    return torch.empty_like(output, memory_format=memory_format)


def _contiguous(output: Tensor, *_: Any) -> Tensor:
    return _in_format(output, torch.contiguous_format)


def _as_first(output: Tensor, first: Tensor, *_: Any) -> Tensor:
    """Give an output the memory format of the first argument."""
    if output.dim() != first.dim():
        return _contiguous(output)
    return _in_format(output, format_of(first))


def _convolution_format(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    # Source: _conv_suggest_memory_format_impl in aten/src/ATen/native/ConvUtils.h. Sequences are made contiguous.
    formats = (format_of(tensor), format_of(weight))
    return next((found for found in formats if found is not torch.contiguous_format), torch.contiguous_format)


def _convolution_cuda(output: Tensor, tensor: Tensor, weight: Tensor, *_: Any) -> Tensor:
    if not torch.backends.cudnn.enabled or torch.float64 in (tensor.dtype, weight.dtype):
        return _contiguous(output)
    return _in_format(output, _convolution_format(tensor, weight))


def _convolution_cpu(output: Tensor, tensor: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    # Source: determine_backend_memory_format in aten/src/ATen/native/Convolution.cpp.
    memory_format = _convolution_format(tensor, weight)
    if memory_format is torch.channels_last_3d and not uses_onednn(tensor, weight, bias, *how):
        return _contiguous(output)
    return _in_format(output, memory_format)


def _group_norm(
    outputs: Sequence[Tensor], tensor: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    output, *statistics = _with_statistics(outputs, _dtype_beside(tensor, weight, bias))
    return (_as_first(output, tensor), *statistics)


def _layer_norm_cpu(
    outputs: Sequence[Tensor], tensor: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    return _with_statistics(outputs, _dtype_beside(tensor, weight, bias))


def _batch_norm_cpu(
    outputs: Sequence[Tensor],
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    dtype = _dtype_beside(tensor, weight, bias, running_mean, running_var)
    output, *statistics = _with_statistics(outputs, dtype, keep=training)
    return (_as_first(output, tensor), *statistics)


def _batch_norm_cuda(
    outputs: Sequence[Tensor],
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    # cuDNN, where it is used, keeps statistics of a batch only in training.
    keep = training or not uses_cudnn_batch_norm(tensor, weight)
    return _with_statistics(outputs, outputs[1].dtype, keep=keep)


def uses_cudnn_batch_norm(tensor: Tensor, weight: Tensor | None) -> bool:
    """Tell whether CUDA would leave a batch norm to cuDNN."""
    # Source: _select_batch_norm_backend in aten/src/ATen/native/Normalization.cpp.
    return (
        torch.backends.cudnn.enabled
        and weight is not None
        and torch.bfloat16 not in (tensor.dtype, weight.dtype)
        and (tensor.dtype != torch.float16 or weight.dtype == torch.float32)
        and tensor.dim() >= 3
    )


def _log_sigmoid_cpu(outputs: Sequence[Tensor], tensor: Tensor) -> tuple[Tensor, ...]:
    return tuple(_contiguous(output) for output in outputs)


def _log_sigmoid_cuda(outputs: Sequence[Tensor], tensor: Tensor) -> tuple[Tensor, ...]:
    # The buffer is for the CPU's backward.
    return (outputs[0], tensor.new_empty(0))


def _dtype_beside(tensor: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """Return the dtype of statistics: the input's, but float32 for half precision with float32 parameters ("mixed")."""
    beside = next((parameter.dtype for parameter in parameters if parameter is not None), tensor.dtype)
    mixed = tensor.dtype in _HALF_DTYPES and beside == torch.float32
    return torch.float32 if mixed else tensor.dtype


def _with_statistics(outputs: Sequence[Tensor], dtype: torch.dtype, *, keep: bool = True) -> tuple[Tensor, ...]:
    output, *statistics = outputs
    return (output, *(tensor.new_empty(tensor.shape if keep else 0, dtype=dtype) for tensor in statistics))


def _grouped_mm(mat_a: Tensor, mat_b: Tensor, *others: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply groups, as experts do. Kernels take float32 and half precision, and the one of the meta device bfloat16 alone:
    with that it is asked for the size, about tensors whose rows have as many bytes."""
    (grouped_mm,) = torch_private.known("grouped_mm")
    if mat_a.dtype not in (torch.float32, torch.float16):
        made: Tensor = grouped_mm(mat_a, mat_b, *others, out_dtype=out_dtype)
        return made
    size = grouped_mm(*map(_as_bfloat16, (mat_a, mat_b)), *others).size()
    alignment = 16 // mat_a.itemsize  # of rows
    pitch = -(-size[-1] // alignment) * alignment
    return mat_a.new_empty_strided(size, (size[-2] * pitch, pitch, 1)[-len(size) :])


def _as_bfloat16(tensor: Tensor) -> Tensor:
    stride = [step if step == 1 else step * tensor.itemsize // 2 for step in tensor.stride()]
    return tensor.new_empty_strided(tensor.size(), stride, dtype=torch.bfloat16)


_OWN_KERNELS: dict[OpOverload, Callable[..., Tensor]] = dict.fromkeys(torch_private.known("grouped_mm"), _grouped_mm)
"""Operations whose meta kernel does not take what those with data take. Source: GroupedMMUtils.h in aten/src/ATen/native."""

_CLASSES_AT: dict[OpOverload, int] = {_aten.nll_loss_forward.default: 1, _aten.nll_loss_backward.default: 2}
"""Which argument names classes, of operations that take them in uint8 as well, but for their meta kernel."""

# Source: the kernels in aten/src/ATen/native (Convolution.cpp, Normalization.cpp, group_norm.cpp, layer_norm.cpp,
# Activation.cpp, ReflectionPad.cpp, ReplicationPadding.cpp, MaxUnpooling.cpp, PixelShuffle.cpp, ChanelShuffle.cpp,
# TensorTransformations.cpp), and those in its folder cuda.
_CPU_RULES: dict[OpOverload, Rule] = {
    _aten.convolution.default: _convolution_cpu,
    _aten.native_batch_norm.default: _batch_norm_cpu,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_layer_norm.default: _layer_norm_cpu,
    _aten.log_sigmoid_forward.default: _log_sigmoid_cpu,
    _aten.reflection_pad2d.default: _as_first,
    _aten.reflection_pad3d.default: _as_first,
    _aten.replication_pad2d.default: _as_first,
    _aten.replication_pad3d.default: _as_first,
    _aten.max_unpool2d.default: _as_first,
    _aten.pixel_shuffle.default: _as_first,
    _aten.pixel_unshuffle.default: _as_first,
    _aten.channel_shuffle.default: _as_first,
    _aten.roll.default: _as_first,
}
_CUDA_RULES: dict[OpOverload, Rule] = {
    _aten.convolution.default: _convolution_cuda,
    _aten.native_batch_norm.default: _batch_norm_cuda,
    _aten.native_group_norm.default: _group_norm,
    _aten.log_sigmoid_forward.default: _log_sigmoid_cuda,
    _aten.reflection_pad2d.default: _contiguous,
    _aten.reflection_pad3d.default: _contiguous,
    _aten.replication_pad2d.default: _contiguous,
    _aten.replication_pad3d.default: _contiguous,
    _aten.max_unpool2d.default: _contiguous,
    _aten.pixel_shuffle.default: _contiguous,
    _aten.pixel_unshuffle.default: _contiguous,
    _aten.channel_shuffle.default: _contiguous,
    _aten.roll.default: _contiguous,
}
