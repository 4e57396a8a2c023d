"""The inputs of a region's call, held until it is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.kept import KeptHandle


class NoRegion(Exception):  # noqa: N818  # it is no error
    """Raised if a call can't be recomputed. Its message says why."""


class Inputs:
    """The arguments of a module call: handles for tensors, and containers that are rebuilt for each recompute.

    Raises:
        NoRegion: an argument is of a kind that a forward may change.
    """

    __slots__ = ("_handles", "_indices", "_kwargs", "_leaves", "_needs_grad", "_spec", "devices")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], keep: Callable[[Tensor], KeptHandle]) -> None:
        leaves: list[Any] = [*args, *kwargs.values()]
        self._kwargs = tuple(kwargs)
        self._spec = None
        for leaf in leaves:
            if type(leaf) not in _SINGLE:
                leaves, self._spec = torch_private.tree_flatten((args, kwargs))
                break
        self._handles: list[KeptHandle] = []
        self._needs_grad: list[bool] = []
        self._indices: list[int] = []
        """For each leaf, the index of its tensor; -1 if it is none. A tensor that is passed twice is one tensor in a recompute
        as well."""
        self.devices: list[torch.device] = []
        """The CUDA devices of the tensors."""
        found: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                if type(leaf) not in _SINGLE and not isinstance(leaf, _CONSTANTS):
                    raise NoRegion(f"it is called with a {type(leaf).__name__}, which its forward may change")
                self._indices.append(-1)
                continue
            index = found.get(id(leaf), -1)
            if index < 0:
                index = found[id(leaf)] = len(found)
                self._handles.append(KeptHandle(leaf) if type(leaf) is nn.Parameter else keep(leaf))
                self._needs_grad.append(leaf.requires_grad)
                if leaf.is_cuda:
                    self.devices.append(leaf.device)
            self._indices.append(index)
            leaves[place] = None
        self._leaves = leaves

    def rebuild(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments for a recompute.

        Raises:
            RuntimeError: one of the tensors was written to since.
        """
        tensors = []
        for handle, needs_grad in zip(self._handles, self._needs_grad, strict=True):
            tensor = handle.unpack().detach()
            if needs_grad:
                tensor.requires_grad_()
            tensors.append(tensor)
        leaves = self._leaves.copy()
        for place, index in enumerate(self._indices):
            if index >= 0:
                leaves[place] = tensors[index]
        if self._spec is not None:
            args, kwargs = torch_private.tree_unflatten(leaves, self._spec)
            return args, kwargs
        num_args = len(leaves) - len(self._kwargs)
        return leaves[:num_args], dict(zip(self._kwargs, leaves[num_args:], strict=True))


_SINGLE = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})
"""Types that contain no others and never change."""
_CONSTANTS = (
    *(int, float, complex, str, bytes, type(None), type(...), slice, range, Enum, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""The same, and types made of these."""
