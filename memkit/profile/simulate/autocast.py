"""What autocast does to an operation's arguments on a target.

Autocast never touches tensors on the meta device, so it is done here by hand. Which operations it touches is asked of torch's
dispatcher; which way they go is in the three tables below. Source: aten/src/ATen/autocast_mode.h and autocast_mode.cpp; the
page "Automatic Mixed Precision package" of torch's documentation.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from memkit import torch_private


class Rule(Enum):
    """How autocast changes the arguments of an operation."""

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
_FLOAT32_RESULT = {
    "cuda": {
        *("prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum", "norm"),
    },
    "cpu": set(),
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
        "lstm_cell": "linear",
        "gru_cell": "linear",
        "rnn_tanh_cell": "linear",
        "rnn_relu_cell": "linear",
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


def autocast_ops(target: str) -> frozenset[str]:
    """Return the names of the operations for which this torch has an autocast kernel on `target`."""
    if target not in _autocast_ops:
        key = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}[target]
        _autocast_ops[target] = frozenset(
            name.removeprefix("aten::").partition(".")[0]
            for name in torch_private.dispatch_registrations(key)
            if name.startswith("aten::")
        )
    return _autocast_ops[target]


_autocast_ops: dict[str, frozenset[str]] = {}


class MetaAutocast:
    """Applies the rules to arguments, with autocast's cache: until its outermost context ends, a leaf that requires grad is
    cast once."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def forget(self) -> None:
        """Empty the cache."""
        self._casts.clear()

    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the autocast in force, on whichever device type it was asked for; None if it is off."""
        for device_type in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device_type):
                return torch.get_autocast_dtype(device_type)
        if self._casts and not _inside_autocast():
            self.forget()
        return None

    def apply(
        self, rule: Rule, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the operation runs with."""
        if rule is Rule.FLOAT32_RESULT:
            half = any(_is_eligible(leaf) and leaf.dtype != torch.float32 for leaf in args[:1])
            return args, {**kwargs, "dtype": torch.float32} if half and kwargs.get("dtype") is None else kwargs
        if rule is Rule.PROMOTE:
            dtypes = [leaf.dtype for leaf in torch_private.arg_tree_leaves(*args, **kwargs) if _is_eligible(leaf)]
            dtype = torch.float32 if torch.float32 in dtypes else dtype
        elif rule is Rule.FLOAT32:
            dtype = torch.float32

        def cast(leaf: Any) -> Any:
            return self._cast(leaf, dtype)

        new_args, new_kwargs = torch_private.tree_map(cast, (args, kwargs))
        return new_args, new_kwargs

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


def _inside_autocast() -> bool:
    # The nesting can only be read by changing it.
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0


def _is_eligible(value: Any) -> bool:
    # Constants have data, on the CPU.
    on_target = isinstance(value, Tensor) and (value.is_meta or value.is_cpu)
    return on_target and value.is_floating_point() and value.dtype != torch.float64
