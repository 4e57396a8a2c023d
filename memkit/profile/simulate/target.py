"""The operations that a target's backend replaces, done its way on the meta device.

[Note: inside torch's Python functions]
A function mode is off while it is being asked, so one that simply called `multi_head_attention_forward` would not see the
attention inside it. Functions of `torch.nn.functional` that are written in Python therefore run as a private copy, whose only
difference is that it does not ask for function modes again: the mode stays on for all that the copy calls.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memkit.core import torch_private
from memkit.profile.simulate.attention import fused_broadcast_heads, fused_take_three_dims, scaled_dot_product_attention
from memkit.profile.tree import dtype_name

if TYPE_CHECKING:
    from memkit.core.torch_private import OpOverload

_FLOAT32_RESULT = {
    "cuda": {"prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum", "norm"},
    "cpu": set(),
}
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
Outputs = Any  # a tensor, or several
Operation = Callable[..., Outputs]


class Rule(Enum):
    LOWER = "floating-point tensors to the autocast dtype"
    FLOAT32 = "floating-point tensors to float32"
    FLOAT32_RESULT = "a float32 result is asked for, unless the caller named a dtype"
    PROMOTE = "floating-point tensors to the widest dtype among them"


_LOWER = {
    "cuda": {
        *("_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "convolution", "prelu", "linear", "matmul", "einsum"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "addmm", "addmv", "addr", "mm", "mv", "bmm"),
        *("linalg_vecdot", "addbmm", "baddbmm", "chain_matmul", "linalg_multi_dot", "scaled_dot_product_attention"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_cudnn_rnn"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"),
        *("cudnn_convolution", "cudnn_convolution_transpose"),
    },
    "cpu": {
        *("_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "prelu", "linear", "matmul", "mm", "bmm", "baddbmm"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "addmm", "addbmm", "_addmm_activation"),
        *("linalg_vecdot", "scaled_dot_product_attention", "_native_multi_head_attention", "mkldnn_rnn_layer"),
    },
}
_PROMOTE = {
    "cuda": {
        *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
        "scatter_add",
    },
    "cpu": {"stack", "cat", "index_copy"},
}
# Python's names of operations that the dispatcher knows by another.
_ALIASES = {"nll_loss_nd": "nll_loss", "rmatmul": "matmul", "rpow": "pow"}
# Operations that are made of others, and which of these decides.
_MADE_OF = {
    "cuda": {"cross_entropy_loss": "nll_loss"},
    "cpu": {
        "einsum": "bmm",
        "tensordot": "mm",
        "chain_matmul": "mm",
        **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), "linear"),
    },
}


def rule_for(function_name: str, target: str) -> Rule | None:
    """Return what autocast on `target` does to the operation behind a function of torch; None if it leaves it alone."""
    name = function_name.strip("_") if function_name.startswith("__") else function_name
    name = _ALIASES.get(name, name)
    name = _MADE_OF[target].get(name, name)
    if name not in autocast_ops(target):
        return None
    for rule, table in ((Rule.LOWER, _LOWER), (Rule.FLOAT32_RESULT, _FLOAT32_RESULT), (Rule.PROMOTE, _PROMOTE)):
        if name in table[target]:
            return rule
    return Rule.FLOAT32


@functools.cache
def autocast_ops(target: str) -> frozenset[str]:
    registered = torch_private.dispatch_registrations({"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}[target])
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in registered if name.startswith("aten::"))


class MetaAutocast:
    """Applies the rules to arguments; until the outermost autocast ends, a leaf that requires grad is cast once."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def forget(self) -> None:
        self._casts.clear()

    def dtype(self) -> torch.dtype | None:
        for device_type in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device_type):
                return torch.get_autocast_dtype(device_type)
        if self._casts:  # the nesting can only be read by changing it
            is_inside = torch.autocast_increment_nesting() > 1
            torch.autocast_decrement_nesting()
            if not is_inside:
                self.forget()
        return None

    def apply(
        self, rule: Rule, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if rule is Rule.FLOAT32_RESULT:
            half = any(_is_eligible(leaf) and leaf.dtype != torch.float32 for leaf in args[:1])
            return args, {**kwargs, "dtype": torch.float32} if half and kwargs.get("dtype") is None else kwargs
        if rule is Rule.PROMOTE:
            dtypes = [leaf.dtype for leaf in torch_private.arg_tree_leaves(*args, **kwargs) if _is_eligible(leaf)]
            dtype = torch.float32 if torch.float32 in dtypes else dtype
        elif rule is Rule.FLOAT32:
            dtype = torch.float32
        cast: tuple[tuple[Any, ...], dict[str, Any]]
        cast = torch_private.tree_map(lambda leaf: self._cast(leaf, dtype), (args, kwargs))
        return cast

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not _is_eligible(value) or value.dtype == dtype:
            return value
        cacheable = value.is_leaf and value.requires_grad and value.dtype == torch.float32 and dtype != torch.float32
        if not cacheable or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        key = (id(value), torch.is_grad_enabled())
        if key not in self._casts:
            self._casts[key] = (value, value.to(dtype))
        return self._casts[key][1]


def _is_eligible(value: Any) -> bool:
    # Constants have data, on the CPU.
    on_target = isinstance(value, Tensor) and (value.is_meta or value.is_cpu)
    return on_target and value.is_floating_point() and value.dtype != torch.float64


class MixedDtypesError(RuntimeError):
    """Raised where a run with data would raise a RuntimeError: an operation does not take these dtypes together."""

    def __init__(
        self, message: str, advice: str = "Cast the model or its inputs (--dtype), or run under torch.autocast (--autocast)"
    ) -> None:
        super().__init__(message)
        self.advice = advice


def check_dtypes(op: OpOverload, args: Sequence[Any], target: str) -> None:
    positions = _ALIKE.get(op)
    if positions is not None:
        if op is _aten.convolution.default and target == "cpu" and not uses_onednn(*args):
            positions = positions[:-1]  # the CPU's own convolutions add any bias
        dtypes = _dtypes_at(args, positions)
        if len(dtypes) > 1:
            raise _refusal(op, dtypes)
        if op in _CLASS_DTYPES and args[1].dtype not in _CLASS_DTYPES[op]:
            needed = " or ".join(map(dtype_name, _CLASS_DTYPES[op]))
            raise MixedDtypesError(
                f"{_name_of(op)} needs classes of {needed}; found {dtype_name(args[1].dtype)}", "Cast them: targets.long()"
            )
        return
    positions = _NORMALIZATIONS[target].get(op)
    if positions is not None:
        tensor, parameters = args[0], _dtypes_at(args, positions)
        # CUDA's batch norm takes float32 parameters beside half precision, as the CPU's normalizations do.
        mixes = target == "cpu" or op is _aten.native_batch_norm.default
        mixed = mixes and tensor.dtype in _HALF_DTYPES and parameters == [torch.float32]
        if parameters not in ([], [tensor.dtype]) and not mixed:
            raise _refusal(op, [tensor.dtype, *(dtype for dtype in parameters if dtype != tensor.dtype)])


def uses_onednn(tensor: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> bool:
    """Tell whether the CPU would leave a convolution to oneDNN; `how` are its further arguments."""
    # Of the tensors only shapes and dtypes matter: one element is enough.
    on_cpu = [None if it is None else it.new_empty((), device="cpu").expand(it.shape) for it in (tensor, weight, bias)]
    backend = torch_private.select_conv_backend(*on_cpu, *how, bias_sizes=None)
    return "Slow" not in str(backend)  # torch has not given all of oneDNN's a name


def _dtypes_at(args: Sequence[Any], positions: Sequence[int]) -> list[torch.dtype]:
    found = (args[position] for position in positions if position < len(args))
    return list(dict.fromkeys(value.dtype for value in found if isinstance(value, Tensor)))


def _refusal(op: OpOverload, dtypes: Sequence[torch.dtype]) -> MixedDtypesError:
    names = " and ".join(map(dtype_name, dtypes))
    return MixedDtypesError(f"{_name_of(op)} needs tensors of one dtype; found {names}")


def _name_of(op: OpOverload) -> str:
    return str(torch_private.schema_of(op).name).removeprefix("aten::")


_CLASS_DTYPES: dict[OpOverload, tuple[torch.dtype, ...]] = {
    _aten.nll_loss_forward.default: (torch.int64, torch.uint8),
    _aten.nll_loss2d_forward.default: (torch.int64,),
}  # whose second argument names classes, and the dtypes that it may have
# Of these operations all tensors at these positions have the same dtype.
_ALIKE: dict[OpOverload, tuple[int, ...]] = {
    getattr(_aten, name).default: positions
    for positions, names in (
        ((0, 1), "mm bmm mv dot linalg_cross binary_cross_entropy grid_sampler_2d grid_sampler_3d"),
        ((0, 1, 2), "addmm addmv addbmm baddbmm convolution"),
        ((0, 2), "nll_loss_forward nll_loss2d_forward index_put index_put_ put put_"),
        ((0, 3), "index_add index_add_ index_copy index_copy_ index_reduce index_reduce_"),
    )
    for name in names.split()
}
_ALIKE |= dict.fromkeys(torch_private.known("prelu_kernel", "euclidean_dist", "cdist_forward", "grouped_mm"), (0, 1))
_ALIKE |= dict.fromkeys(torch_private.known("index_put_impl", "unsafe_index_put"), (0, 2))
# And of these the parameters, and on the CPU the running statistics, at these positions, go with the input.
_OF_GROUPS_AND_LAYERS = {_aten.native_group_norm.default: (1, 2), _aten.native_layer_norm.default: (2, 3)}
_NORMALIZATIONS: dict[str, dict[OpOverload, tuple[int, ...]]] = {
    "cuda": {_aten.native_batch_norm.default: (1, 2), **_OF_GROUPS_AND_LAYERS},
    "cpu": {_aten.native_batch_norm.default: (1, 2, 3, 4), **_OF_GROUPS_AND_LAYERS},
}


def run_as_on(target: str, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[..., Outputs]) -> Outputs:
    """Run an op by `run(kernel, args, kwargs)`, unless a target refuses it, with the outputs that it has there."""
    check_dtypes(op, args, target)
    place = _CLASSES_AT.get(op)
    if place is not None and args[place].dtype is torch.uint8:
        args = (*args[:place], args[place].long(), *args[place + 1 :])
    outputs = run(_OWN_KERNELS.get(op, op), args, kwargs)
    rule = _RULES[target].get(op)
    return outputs if rule is None else rule(outputs, *args)


def format_of(tensor: Tensor) -> torch.memory_format:
    """Return the memory format that a kernel sees in a tensor, by its strides alone: gaps are allowed."""
    # Source: Tensor::suggest_memory_format, and is_channels_last_strides_2d and _3d in c10/core/MemoryFormat.h.
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


def _contiguous(output: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(output, memory_format=torch.contiguous_format)


def _as_first(output: Tensor, first: Tensor, *_: Any) -> Tensor:
    is_alike = output.dim() == first.dim()
    return torch.empty_like(output, memory_format=format_of(first) if is_alike else torch.contiguous_format)


def _convolution_format(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    # Source: _conv_suggest_memory_format_impl in aten/src/ATen/native/ConvUtils.h. Sequences are made contiguous.
    formats = (format_of(tensor), format_of(weight))
    return next((found for found in formats if found is not torch.contiguous_format), torch.contiguous_format)


def _convolution_cuda(output: Tensor, tensor: Tensor, weight: Tensor, *_: Any) -> Tensor:
    if not torch.backends.cudnn.enabled or torch.float64 in (tensor.dtype, weight.dtype):
        return _contiguous(output)
    return torch.empty_like(output, memory_format=_convolution_format(tensor, weight))


def _convolution_cpu(output: Tensor, tensor: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    # Source: determine_backend_memory_format in aten/src/ATen/native/Convolution.cpp.
    memory_format = _convolution_format(tensor, weight)
    if memory_format is torch.channels_last_3d and not uses_onednn(tensor, weight, bias, *how):
        return _contiguous(output)
    return torch.empty_like(output, memory_format=memory_format)


def _group_norm(outputs: Sequence[Tensor], tensor: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    output, *statistics = _with_statistics(outputs, _dtype_beside(tensor, *parameters[:2]))
    return (_as_first(output, tensor), *statistics)


def _batch_norm_cpu(outputs: Sequence[Tensor], tensor: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *parameters, training = given[:5]
    output, *statistics = _with_statistics(outputs, _dtype_beside(tensor, *parameters), keep=training)
    return (_as_first(output, tensor), *statistics)


def _batch_norm_cuda(outputs: Sequence[Tensor], tensor: Tensor, *given: Any) -> tuple[Tensor, ...]:
    # cuDNN, where it is used, keeps statistics of a batch only in training.
    keep = given[4] or not uses_cudnn_batch_norm(tensor, given[0])
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


def _dtype_beside(tensor: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """Return the dtype of statistics: the input's, but float32 for half precision with float32 parameters ("mixed")."""
    beside = next((parameter.dtype for parameter in parameters if parameter is not None), tensor.dtype)
    mixed = tensor.dtype in _HALF_DTYPES and beside == torch.float32
    return torch.float32 if mixed else tensor.dtype


def _with_statistics(outputs: Sequence[Tensor], dtype: torch.dtype, *, keep: bool = True) -> tuple[Tensor, ...]:
    output, *statistics = outputs
    return (output, *(tensor.new_empty(tensor.shape if keep else 0, dtype=dtype) for tensor in statistics))


def _grouped_mm(mat_a: Tensor, mat_b: Tensor, *others: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply groups, as experts do: meta's kernel takes bfloat16 alone, and is asked for the size with that."""
    (grouped_mm,) = torch_private.known("grouped_mm")
    if mat_a.dtype not in (torch.float32, torch.float16):
        made: Tensor = grouped_mm(mat_a, mat_b, *others, out_dtype=out_dtype)
        return made

    def as_bfloat16(tensor: Tensor) -> Tensor:
        stride = [step if step == 1 else step * tensor.itemsize // 2 for step in tensor.stride()]
        return tensor.new_empty_strided(tensor.size(), stride, dtype=torch.bfloat16)

    size = grouped_mm(as_bfloat16(mat_a), as_bfloat16(mat_b), *others).size()
    alignment = 16 // mat_a.itemsize  # of rows
    pitch = -(-size[-1] // alignment) * alignment
    return mat_a.new_empty_strided(size, (size[-2] * pitch, pitch, 1)[-len(size) :])


# Ops whose meta kernel does not take what those with data take (source: GroupedMMUtils.h in aten/src/ATen/native), and which
# argument names classes, of ops that take them in uint8 as well, but for their meta kernel.
_OWN_KERNELS: dict[OpOverload, Callable[..., Tensor]] = dict.fromkeys(torch_private.known("grouped_mm"), _grouped_mm)
_CLASSES_AT: dict[OpOverload, int] = {_aten.nll_loss_forward.default: 1, _aten.nll_loss_backward.default: 2}
# Source: the kernels in aten/src/ATen/native (Convolution.cpp, Normalization.cpp, group_norm.cpp, layer_norm.cpp,
# Activation.cpp, ReflectionPad.cpp, ReplicationPadding.cpp, MaxUnpooling.cpp, PixelShuffle.cpp, ChanelShuffle.cpp,
# TensorTransformations.cpp), and those in its folder cuda.
_FORMATTED = ["max_unpool2d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "roll"]
_FORMATTED += [f"{way}_pad{dims}d" for way in ("reflection", "replication") for dims in (2, 3)]
_KEEP_THE_FORMAT = [getattr(_aten, name).default for name in _FORMATTED]  # on the CPU
_RULES: dict[str, dict[OpOverload, Operation]] = {
    "cpu": {
        _aten.convolution.default: _convolution_cpu,
        _aten.native_batch_norm.default: _batch_norm_cpu,
        _aten.native_group_norm.default: _group_norm,
        _aten.native_layer_norm.default: lambda outputs, tensor, _, *parameters: _with_statistics(
            outputs, _dtype_beside(tensor, *parameters[:2])
        ),
        _aten.log_sigmoid_forward.default: lambda outputs, *_: tuple(map(_contiguous, outputs)),
        **dict.fromkeys(_KEEP_THE_FORMAT, _as_first),
    },
    "cuda": {
        _aten.convolution.default: _convolution_cuda,
        _aten.native_batch_norm.default: _batch_norm_cuda,
        _aten.native_group_norm.default: _group_norm,
        _aten.log_sigmoid_forward.default: lambda outputs, tensor: (outputs[0], tensor.new_empty(0)),  # no buffer
        **dict.fromkeys(_KEEP_THE_FORMAT, _contiguous),
    },
}

# What these save is decided inside cuDNN, MIOpen or oneDNN.
BACKEND_DEPENDENT = frozenset(
    {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "quantized_lstm"}
)


class TargetMode(TorchFunctionMode):
    """While active, operations on meta tensors save and allocate what they would on `target`."""

    def __init__(self, target: str, *, backend_dependent: Callable[[], None]) -> None:
        super().__init__()
        self._target = target
        self._backend_dependent = backend_dependent
        self._autocast = MetaAutocast()
        self._routes: dict[Any, tuple[Rule | None, Operation]] = {}
        # asked of torch once, and here, where what that allocates is not counted
        fused_broadcast_heads()
        fused_take_three_dims()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        route = self._routes.get(function)
        if route is None:
            route = self._routes[function] = self._route(function)
        rule, operation = route
        kwargs = kwargs or {}
        dtype = self._autocast.dtype()
        if rule is not None and dtype is not None:
            args, kwargs = self._autocast.apply(rule, dtype, args, kwargs)
        return operation(*args, **kwargs)

    def resume(self) -> None:
        """Become active in an autograd node that is about to run: the engine runs each node without function modes."""
        self.__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def close(self) -> None:
        self._routes.clear()
        self._autocast.forget()

    def _route(self, function: Any) -> tuple[Rule | None, Operation]:
        if isinstance(function, types.FunctionType) and function.__module__ in ("torch.nn.functional", "torch.functional"):
            asks = {name for name in function.__code__.co_names if name.startswith("has_torch_function")}
            if asks:
                return None, self._inside(function, asks)
        name = getattr(function, "__name__", "")
        return rule_for(name, self._target), self._operation(name, function)

    def _operation(self, name: str, function: Operation) -> Operation:
        if name == "scaled_dot_product_attention":
            return functools.partial(scaled_dot_product_attention, target=self._target)
        if name == "pad":
            return self._pad
        if name in BACKEND_DEPENDENT:
            return lambda *args, **kwargs: (self._backend_dependent(), function(*args, **kwargs))[1]
        return _REPLACED[self._target].get(name, function)

    def _pad(self, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:  # noqa: A002
        # Which operation it is made of, and so what autocast does, depends on an argument.
        name = {"reflect": "reflection", "replicate": "replication"}.get(mode)
        padding = getattr(torch_private.nn_functions, f"{name}_pad{len(pad) // 2}d", None)
        if padding is None:
            constant: Tensor = torch_private.nn_functions.pad(input, pad, mode, value)
            return constant
        with self:
            padded: Tensor = padding(input, pad)
            return padded

    def _inside(self, function: types.FunctionType, asks: set[str]) -> Operation:
        """See [Note: inside torch's Python functions]."""
        names = {**function.__globals__, **dict.fromkeys(asks, lambda *_: False)}
        copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return copy(*args, **kwargs)

        return inside


def _cuda_dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002 - torch's own name
    # Source: is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp.
    if train and 0 < p < 1 and input.numel() and torch.is_grad_enabled() and input.requires_grad:
        return torch.native_dropout(input, p, train)[0]
    return torch.dropout(input, p, train)


def _cuda_rms_norm(
    input: Tensor,  # noqa: A002 - torch's own name
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    # Source: rms_norm_symint in aten/src/ATen/native/layer_norm.cpp.
    if weight is not None and weight.dtype != input.dtype:
        return functional.rms_norm(input, list(normalized_shape), weight, eps)
    output: Tensor = _FusedRmsNorm.apply(input, weight, len(normalized_shape))
    return output


def _cuda_batch_norm(input: Tensor, weight: Tensor | None, *how: Any) -> Tensor:  # noqa: A002 - torch's own name
    # Source: _batch_norm_impl_index in aten/src/ATen/native/Normalization.cpp: cuDNN gets, and saves, a tensor without gaps.
    if uses_cudnn_batch_norm(input, weight):
        input = input.contiguous(memory_format=format_of(input))  # noqa: A001
    return torch.batch_norm(input, weight, *how)


def _cpu_group_norm(
    input: Tensor,  # noqa: A002 - torch's own name
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *cudnn: bool,
) -> Tensor:
    # Source: group_norm in aten/src/ATen/native/group_norm.cpp: not every device takes, and saves, what is in channels_last.
    memory_format = format_of(input)
    if memory_format is torch.contiguous_format:
        return torch.group_norm(input, num_groups, weight, bias, eps, *cudnn)
    size = (input.shape[0], input.shape[1], math.prod(input.shape[2:]))
    input = input.contiguous(memory_format=memory_format)  # noqa: A001
    output: Tensor = torch.ops.aten.native_group_norm(input, weight, bias, *size, num_groups, eps)[0]
    return output


class _FusedRmsNorm(torch.autograd.Function):
    """`aten._fused_rms_norm`, which keeps one number per row; on the meta device torch decomposes it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:  # noqa: A002 - torch's own name
        rstd_dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
        rstd = input.new_empty((*input.shape[:-num_dims], *[1] * num_dims), dtype=rstd_dtype)
        ctx.save_for_backward(input, weight, rstd)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors  # noqa: A001 - torch's own name
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight), None


_REPLACED: dict[str, dict[str, Operation]] = {
    "cuda": {"dropout": _cuda_dropout, "rms_norm": _cuda_rms_norm, "batch_norm": _cuda_batch_norm},
    "cpu": {"group_norm": _cpu_group_norm},
}
