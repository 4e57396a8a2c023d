"""Autograd's handles of saved tensors that stay, were passed to outer hooks, or wrap others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private

_Parameter = nn.Parameter


class KeptHandle:
    """A saved tensor that stays, by an alias that shares the version counter: the tensor itself may hold the graph."""

    __slots__ = ("__weakref__", "alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        kind = type(tensor)
        if kind is Tensor or kind is _Parameter:
            self.alias, self.version = tensor.detach(), torch_private.version_of(tensor)
        else:  # torch gives back no class that only has functions of its own, and it may refuse these
            with torch_private.without_subclass_functions():
                self.alias, self.version = tensor.detach(), torch_private.version_of(tensor)

    def unpack(self) -> Tensor:
        if torch_private.version_of(self.alias) != self.version:
            self.check_version()
        return self.alias

    def is_unchanged(self) -> bool:
        return self.version_now == self.version

    def check_version(self) -> None:
        if not self.is_unchanged():
            raise modified_error(self.alias, self.version, lambda: self.size, self.version_now)

    @property
    def size(self) -> torch.Size:
        return self.alias.size()

    @property
    def version_now(self) -> int:
        return torch_private.version_of(self.alias)


class ScheduledHandle(tuple[Any, ...]):
    """Of a forward by a schedule: the object that keeps it alive, the action, an alias with the version counter, a version."""

    __slots__ = ()


class ForwardedHandle(KeptHandle):
    """A saved tensor that outer hooks have, without its bytes. If `is_checked`, a later write to it is an error here."""

    __slots__ = ("_is_checked", "_packed", "_size", "_unpack")

    def __init__(
        self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], *, is_checked: bool
    ) -> None:
        if is_checked:
            super().__init__(tensor)
            self._size = tensor.size()
            self.alias.data = nothing(tensor.dtype, tensor.device)
        self._is_checked = is_checked
        self._packed = pack(tensor)
        self._unpack = unpack

    @property
    def size(self) -> torch.Size:
        return self._size

    def is_unchanged(self) -> bool:
        return not self._is_checked or super().is_unchanged()

    def unpack(self) -> Tensor:
        self.check_version()
        return self._unpack(self._packed)


class FlattenedHandle(KeptHandle):
    """A saved tensor that wraps others: `pack` takes the inner ones that `leaves` picks by name; the others are kept."""

    __slots__ = ("_context", "_inner", "_kind", "_size", "_stride")

    def __init__(
        self, tensor: Any, pack: Callable[[Tensor], KeptHandle], leaves: Callable[[Tensor, str], bool] | None = None
    ) -> None:
        with torch_private.without_subclass_functions(), torch_private.without_python_dispatch():
            super().__init__(tensor)  # the alias wraps nothing, and counts writes by the wrapper's own ops
        names, self._context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}  # tensors, and in newer DTensors a mesh
        self._inner = {
            name: pack(part) if isinstance(part, Tensor) and (leaves is None or leaves(tensor, name)) else part
            for name, part in parts.items()
        }
        self._kind, self._size, self._stride = type(tensor), tensor.size(), tensor.stride()

    def unpack(self) -> Tensor:
        self.check_version()
        inner = {name: part.unpack() if isinstance(part, KeptHandle) else part for name, part in self._inner.items()}
        made: Tensor = self._kind.__tensor_unflatten__(inner, self._context, self._size, self._stride)
        return made


def modified_error(
    tensor: Tensor, version: int, size: Callable[[], torch.Size] | None = None, version_now: int | None = None
) -> RuntimeError:
    try:
        described = f"{tensor.type()} {list((size or tensor.size)())}"
    except RuntimeError:  # not every layout has these
        described = f"{'nested ' * tensor.is_nested}{tensor.dtype}, {tensor.layout}"
    now = torch_private.version_of(tensor) if version_now is None else version_now
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{described}] is at version {now}; expected version {version} instead. Hint: the "
        "backtrace of the operation that failed to compute its gradient is shown by torch.autograd.set_detect_anomaly(True)."
    )


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without elements, whose storage is shared by all aliases that hold no bytes."""
    with torch_private.without_dispatch_modes():  # one of them might make it a tensor of its own kind, for good
        return torch.empty(0, dtype=dtype, device=device)
