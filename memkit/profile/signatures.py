"""Shapes and dtypes of the inputs and outputs of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.hooks import HookSet
from memkit.profile.records import Shapes
from memkit.profile.tree import ModuleTree


class Signatures:
    """The inputs and outputs of each module: shapes and dtype at its first call, and the number of different signatures."""

    def __init__(self) -> None:
        self._kinds: dict[int, dict[tuple[Shapes, Shapes], str]] = {}

    def hook(self, tree: ModuleTree, hooks: HookSet) -> None:
        """Note the calls of every module that `CallStack.hook` hooks."""
        for index, node in tree.hookable():
            hooks.after_forward(node.module, self._after(index))

    def note(self, index: int, inputs: Any, output: Any) -> None:
        """Note one call of the module at `index`."""
        kind = (shapes_of(inputs), shapes_of(output))
        self._kinds.setdefault(index, {}).setdefault(kind, first_dtype(output))

    def first(self, index: int) -> tuple[Shapes, Shapes, str]:
        """Return the input shapes, output shapes and output dtype of the first call; empty if there was none."""
        for (inputs, outputs), dtype in self._kinds.get(index, {}).items():
            return inputs, outputs, dtype
        return (), (), ""

    def num_kinds(self, index: int) -> int:
        """Return how many different pairs of input and output shapes the module was called with."""
        return len(self._kinds.get(index, {}))

    def _after(self, index: int) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.note(index, (args, kwargs), output)

        return after


def shapes_of(nested: Any) -> Shapes:
    """Return the shapes of the tensors in a nested structure, in its order; -1 for sizes that vary within a tensor."""
    return tuple(_shape_of(leaf) for leaf in torch_private.tree_leaves(nested) if isinstance(leaf, Tensor))


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_nested and tensor.layout == torch.strided:
        return (-1,) * tensor.dim()
    return tuple(size if type(size) is int else -1 for size in tensor.shape)


def first_dtype(nested: Any) -> str:
    """Return the dtype ("float32") of the first tensor in a nested structure, or "" if there is none."""
    return next((dtype_name(leaf.dtype) for leaf in torch_private.tree_leaves(nested) if isinstance(leaf, Tensor)), "")


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
