"""The operations that a target's backend replaces, done its way on the meta device.

[Note: inside torch's Python functions]
A function mode is off while it is being asked, so one that simply called `multi_head_attention_forward` would not see the
attention inside it. Functions of `torch.nn.functional` that are written in Python therefore run as a private copy, whose only
difference is that it does not ask for function modes again: the mode stays on for all that the copy calls.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memkit import torch_private
from memkit.profile.simulate.attention import (
    fused_broadcast_heads,
    fused_take_three_dims,
    scaled_dot_product_attention,
)
from memkit.profile.simulate.autocast import MetaAutocast, Rule, rule_for
from memkit.profile.simulate.kernels import format_of, uses_cudnn_batch_norm

Operation = Callable[..., Any]

# What these save is decided inside cuDNN, MIOpen or oneDNN.
BACKEND_DEPENDENT = frozenset(
    {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "quantized_lstm"}
)


class TargetMode(TorchFunctionMode):
    """While active, operations on meta tensors save and allocate what they would on `target`.

    Args:
        target: "cuda" or "cpu".
        backend_dependent: called whenever an operation runs of which only the backend knows what it saves.
    """

    def __init__(self, target: str, *, backend_dependent: Callable[[], None]) -> None:
        super().__init__()
        self._target = target
        self._backend_dependent = backend_dependent
        self._autocast = MetaAutocast()
        self._routes: dict[Any, tuple[Rule | None, Operation]] = {}
        # asked of torch once, and here, where what that allocates is not counted
        fused_broadcast_heads()
        fused_take_three_dims()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        """Become active in an autograd node that is about to run.

        The autograd engine runs each node without function modes, and drops what the node leaves active: a checkpoint's
        recomputation in the backward would otherwise not be imitated.
        """
        self.__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def close(self) -> None:
        """Forget what was kept for the run; the routes refer back to this object."""
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
            return lambda *args, **kwargs: scaled_dot_product_attention(*args, target=self._target, **kwargs)
        if name == "pad":
            return self._pad
        if name in BACKEND_DEPENDENT:
            return self._marked(function)
        if self._target == "cuda" and name == "dropout":
            return _cuda_dropout
        if self._target == "cuda" and name == "rms_norm":
            return _cuda_rms_norm
        if self._target == "cuda" and name == "batch_norm":
            return _cuda_batch_norm
        if self._target == "cpu" and name == "group_norm":
            return _cpu_group_norm
        return function

    def _marked(self, function: Operation) -> Operation:
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._backend_dependent()
            return function(*args, **kwargs)

        return marked

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
        names = {**function.__globals__, **dict.fromkeys(asks, _no_torch_function)}
        copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return copy(*args, **kwargs)

        return inside


def _no_torch_function(*_: Any) -> bool:
    return False


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
