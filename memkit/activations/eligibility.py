"""Which saved tensors may be moved, as far as a tensor itself can tell."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memkit import torch_private

_MAX_VIEWS = 8
_STRIDED = torch.strided


def is_range_of_bytes(tensor: Tensor) -> bool:
    """Tell whether all that a tensor is are bytes of one storage, and how it lies in them: such a one can leave, or be dropped,
    and what comes back is the same. For tensors of a class without dispatch of its own.

    The others are kept as they are: sparse ones and those in a layout of oneDNN, nested ones (strided; those of the jagged
    layout are of a class that says what it is made of), quantized ones, and the zeros without bytes of forward-mode autograd.
    """
    return tensor.layout is _STRIDED and not (tensor.is_nested or tensor.is_quantized or torch_private.is_zero_tensor(tensor))


def leaves_with(wrapper: Tensor, name: str) -> bool:
    """Tell whether one of the tensors that a wrapper is made of may leave with it.

    Tensors of the jagged layout have the same shape if they have the very same offsets, so these stay: their values leave.
    """
    return not wrapper.is_nested or name == torch_private.JAGGED_VALUES


def counted_by(tensor: Tensor) -> Tensor:
    """Return the tensor whose version counter a tensor shares: the base of a view. One storage may have several counters, which
    know nothing of each other's writes (`Tensor.data`, `Tensor.set_`, the parts of `unsafe_chunk`)."""
    base = torch_private.base_of(tensor)
    return tensor if base is None else base


def is_from_leaf(tensor: Tensor) -> bool:
    """Tell whether a tensor is a parameter or another leaf that requires grad, a view of one, or a cast of one.

    A linear layer saves `weight.t()`, which is no parameter; autocast saves `weight.to(dtype).t()`. Their owner keeps the first
    anyway, and autocast's cache the second, so to move them frees nothing.
    """
    if isinstance(tensor, nn.Parameter) or isinstance(torch_private.base_of(tensor), nn.Parameter):
        return True
    if not tensor.requires_grad:
        return False
    if tensor.is_leaf:
        return True
    node = tensor.grad_fn
    for _ in range(_MAX_VIEWS):
        name = type(node).__name__
        if name == torch_private.LEAF_NODE:
            return True
        if name == torch_private.CAST_NODE:
            return _is_leaf(_first_input(node))
        if name not in torch_private.VIEW_NODES:
            return False
        node = _first_input(node)
    return False


def _first_input(node: torch.autograd.graph.Node | None) -> torch.autograd.graph.Node | None:
    return node.next_functions[0][0] if node is not None and node.next_functions else None


def _is_leaf(node: torch.autograd.graph.Node | None) -> bool:
    return type(node).__name__ == torch_private.LEAF_NODE
