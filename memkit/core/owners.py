"""Storages that are overwritten while tensors of the user may still refer to them, such as slots: their owners, and the
parameters that stream through them. `GradientStandIn` replaces the `grad` of a parameter stepped within the backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.tensors import storage_key

if TYPE_CHECKING:
    from memkit.errors import MemkitError


class Owner(Protocol):
    """Owner of storages that it overwrites: a saved tensor must not keep a plain reference to one."""

    def lend(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the tensor with its current bytes, or raises autograd's error if it was written to."""

    def streamed(self) -> StreamedWeights: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedWeights:
    layers: tuple[nn.Module, ...] = ()  # the modules whose parameters are copied together
    parameters: tuple[Tensor, ...] = ()
    slots: tuple[torch.UntypedStorage, ...] = ()  # device memory that holds one layer at a time


NOTHING_STREAMED = StreamedWeights()
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


def own(storage: torch.UntypedStorage, owner: Owner) -> None:
    _owners[torch_private.storage_address(storage)] = owner


def disown(storage: torch.UntypedStorage) -> None:
    _owners.pop(torch_private.storage_address(storage), None)


def owners() -> list[Owner]:
    return list(dict.fromkeys(_owners.values()))


def owner_of(storage: torch.UntypedStorage) -> Owner | None:
    return _owners.get(torch_private.storage_address(storage)) if _owners else None


def find_streamed(modules: Iterable[nn.Module]) -> StreamedWeights:
    parameters = {id(parameter) for module in modules for parameter in module.parameters()}
    everywhere = [owner.streamed() for owner in owners()]
    here = [found for found in everywhere if any(id(parameter) in parameters for parameter in found.parameters)]
    return StreamedWeights(
        layers=tuple(layer for found in here for layer in found.layers),
        parameters=tuple(parameter for found in here for parameter in found.parameters if id(parameter) in parameters),
        slots=tuple(slot for found in here for slot in found.slots),
    )


with_offloaded_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], int]] = weakref.WeakKeyDictionary()
"""Optimizers that step in pieces, each with a function for the bytes of states that its first step makes on the device."""


class ModelStorages:
    """The storages of parameters and buffers, including temporary ones, such as slots."""

    def __init__(self, keys: Iterable[int], gathered: Container[torch.UntypedStorage] = ()) -> None:
        self._keys = frozenset(keys)
        self._gathered = gathered

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage_key(storage) in self._keys or storage in self._gathered or owner_of(storage) is not None


class _Aside(threading.local):
    is_set = False


aside = _Aside()  # whether this thread runs such a model: read as `aside.is_set`


@contextmanager
def owners_set_aside() -> Iterator[None]:
    before, aside.is_set = aside.is_set, True
    try:
        yield
    finally:
        aside.is_set = before


_Own = TypeVar("_Own", bound="GradientStandIn")


class GradientStandIn(Tensor):
    """The `grad` of a parameter that was stepped within the backward: using it raises. Each feature has a subclass."""

    error: ClassVar[type[MemkitError]]
    advice: ClassVar[str]

    @staticmethod
    def __new__(cls: type[_Own], size: torch.Size, dtype: torch.dtype, device: torch.device) -> _Own:
        return torch.zeros((), dtype=dtype, device=device).expand(size).as_subclass(cls)

    @classmethod
    def of(cls: type[_Own], parameter: Tensor) -> _Own:
        return cls(parameter.size(), parameter.dtype, parameter.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(size={tuple(self.size())})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow reading attributes and moves with the parameter, make `zero_grad`'s calls do nothing, and refuse all else."""
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
