"""`OpCall`: one recorded op with its arguments and results, without the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.tensors import PLAIN_TYPES, Geometry, is_dense, is_range_of_bytes, tensor_over
from memkit.core.torch_state import has_own_dispatch

if TYPE_CHECKING:
    from memkit.core.torch_private import OpOverload

_STRIDED = torch.strided
Source = tuple[Any, int, torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype, bool, bool]
"""A tensor argument: its position or name (in a list, with the index), its value, and its `Geometry` in the storage."""


def source_of(key: Any, value: int, tensor: Tensor) -> Source:
    return (key, value, *Geometry.of(tensor))


def tensor_of(source: Source, storage: torch.UntypedStorage) -> Tensor:
    _, _, size, stride, offset, dtype, is_conj, is_neg = source
    return tensor_over(storage, dtype, offset=offset, size=size, stride=stride, is_conj=is_conj, is_neg=is_neg)


class OpClass(Enum):
    VIEW = auto()  # it makes no value, and is never run again
    REPLAYED = auto()  # it can run again, and then makes the same bytes
    OPAQUE = auto()  # it is not run again: its values are roots
    BORDER = auto()  # it makes nothing; see `memkit.recording.borders`
    UNKNOWN = auto()  # it is not run again: it may have side effects, write unnamed tensors, and return an older tensor


@dataclass(frozen=True, slots=True)
class OpTraits:
    op_class: OpClass
    written: tuple[int | str, ...] = ()  # the arguments that it writes to, by position or, if keyword-only, by name
    is_random: bool = False
    overwrites: bool = False  # it overwrites all old contents of the written arguments, if these cover their storages
    statistics: tuple[int, ...] = ()  # positions of running statistics that it updates, perhaps unseen by schema or version
    training_at: int = -1
    replayed_by: OpOverload | None = None  # the overload for replays without statistics, if this one needs them
    may_cross: bool = False  # it may copy to another device: such copies are not recomputed
    why_kept: str = ""  # the reason for users why its values are roots
    hides_state: bool = False  # a module with it can't be a region either

    @property
    def is_plain(self) -> bool:
        """It only makes new values from its arguments, unless it copies to another device."""
        return self._only_computes and not self.written

    @property
    def is_in_place(self) -> bool:
        return self._only_computes and self.written == (0,) and not (self.overwrites or self.may_cross)

    @property
    def _only_computes(self) -> bool:
        return self.op_class is OpClass.REPLAYED and not (self.statistics or self.is_random)


CostKey = tuple[Any, int, int]


def cost_key(func: Any, args: Sequence[Any], results: Any) -> CostKey:
    first = args[0] if args else None
    result = results[0] if type(results) is tuple and results else results
    return (
        func,
        first.nbytes if isinstance(first, Tensor) and first.layout is _STRIDED else 0,
        result.nbytes if isinstance(result, Tensor) and result.layout is _STRIDED else 0,
    )


class OpCall(NamedTuple):
    """One op that can be run again. `args` has None in place of tensors."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any] | None
    sources: Sequence[Source]
    first: int  # the number of the first value that it makes
    outs_bytes: tuple[int, ...]
    kind: OpTraits | None = None  # None for an op that only computes
    places: tuple[int, ...] = (0,)  # the index among the returned tensors of each value that is not written over an argument
    written: tuple[int, ...] = ()  # the values that it overwrites. The new values over them are the last ones that it makes
    is_whole: bool = False
    generator: torch.Generator | None = None
    state: Tensor | None = None  # the generator's state before the op drew from it


def tensors_in(argument: Any) -> list[Tensor]:
    """Return the strided tensors in arguments or results of an op: their storages are ranges of bytes."""
    if isinstance(argument, Tensor):
        return [argument] if _is_plain(argument) else []
    if isinstance(argument, list | tuple):
        found: list[Tensor] = []
        for item in argument:
            if isinstance(item, Tensor):
                if _is_plain(item):
                    found.append(item)
            elif item is not None:
                found += tensors_in(item)
        return found
    return []


def _is_plain(tensor: Tensor) -> bool:
    if type(tensor) not in PLAIN_TYPES and has_own_dispatch(tensor):
        return False
    return is_range_of_bytes(tensor)


def has_tensors(kwargs: dict[str, Any]) -> bool:
    return any(isinstance(argument, Tensor | list | tuple) for argument in kwargs.values())


def written_by(kind: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
    """Return the tensors that an op writes to, one for each storage."""
    found: dict[int, Tensor] = {}
    for key in kind.written:
        argument = (kwargs or {}).get(key) if isinstance(key, str) else args[key] if key < len(args) else None
        for tensor in tensors_in(argument):
            found.setdefault(torch_private.storage_address(Tensor.untyped_storage(tensor)), tensor)
    return list(found.values())


def has_odd(arguments: Iterable[Any]) -> bool:
    for argument in arguments:
        if isinstance(argument, Tensor):
            if not is_range_of_bytes(argument):
                return True
        elif isinstance(argument, list | tuple) and has_odd(argument):
            return True
    return False


def covers(tensor: Tensor) -> bool:
    is_whole = tensor.numel() * tensor.itemsize == Tensor.untyped_storage(tensor).nbytes()
    return is_whole and is_dense(tensor.size(), tensor.stride())


def crosses(one: Any, other: Any) -> bool:
    return len({tensor.device for tensor in (*tensors_in(one), *tensors_in(other))}) > 1
