"""`Call`: one recorded op: what it does, its arguments and results, without the tensors themselves."""

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
"""A tensor among the arguments of a call: its position or name (for a list: with the index in it), its value, and its
`Geometry` in the value's storage, field by field."""


def source_of(key: Any, value: int, tensor: Tensor) -> Source:
    return (key, value, *Geometry.of(tensor))


def tensor_of(source: Source, storage: torch.UntypedStorage) -> Tensor:
    _, _, size, stride, offset, dtype, is_conj, is_neg = source
    return tensor_over(storage, dtype, offset=offset, size=size, stride=stride, is_conj=is_conj, is_neg=is_neg)


class OpClass(Enum):
    VIEW = auto()
    """Returns a view: makes no value, and is never run again."""
    REPLAYED = auto()
    """Can be run again, and then makes the same bytes."""
    OPAQUE = auto()
    """Is not run again: its values are roots."""
    BORDER = auto()
    """Makes nothing, but its arguments are not recomputed: see `memkit.recording.borders`."""
    UNKNOWN = auto()
    """Is not run again either: it may have side effects, write to tensors that its schema doesn't name, and return a tensor
    again."""


@dataclass(frozen=True, slots=True)
class OpTraits:
    op_class: OpClass
    written: tuple[int | str, ...] = ()
    """The arguments that it writes to, by position or, if keyword-only, by name."""
    is_random: bool = False
    """Whether it draws from a random number generator."""
    overwrites: bool = False
    """Whether it overwrites all old contents of the written arguments, if they cover their storages."""
    statistics: tuple[int, ...] = ()
    """Positions of running statistics that it updates in training mode, which its schema or a version counter may not show."""
    training_at: int = -1
    """The position of the training flag."""
    replayed_by: OpOverload | None = None
    """The overload to replay without statistics, if they can't be None in this one."""
    may_cross: bool = False
    """Whether it may copy from one device to another: such copies are not recomputed."""
    why_kept: str = ""
    """Why its values are roots, for users who wonder."""
    hides_state: bool = False
    """Whether it has hidden state, so that a module with it can't be a region either."""

    @property
    def is_plain(self) -> bool:
        """Whether it only makes new values from its arguments, unless it copies to another device."""
        return self._only_computes and not self.written

    @property
    def is_in_place(self) -> bool:
        """Whether it only makes a new value of its first argument, in place."""
        return self._only_computes and self.written == (0,) and not (self.overwrites or self.may_cross)

    @property
    def _only_computes(self) -> bool:
        return self.op_class is OpClass.REPLAYED and not (self.statistics or self.is_random)


CostKey = tuple[Any, int, int]


def cost_key(func: Any, args: Sequence[Any], results: Any) -> CostKey:
    """Return what ops of about the same duration share: the op, and the bytes of its first argument and first result."""
    first = args[0] if args else None
    result = results[0] if type(results) is tuple and results else results
    return (
        func,
        first.nbytes if isinstance(first, Tensor) and first.layout is _STRIDED else 0,
        result.nbytes if isinstance(result, Tensor) and result.layout is _STRIDED else 0,
    )


class OpCall(NamedTuple):
    """One op that can be run again."""

    func: Callable[..., Any]
    args: Sequence[Any]
    """Its arguments, with None in place of tensors."""
    kwargs: dict[str, Any] | None
    sources: Sequence[Source]
    """Its tensor arguments."""
    first: int
    """The number of the first value that it makes."""
    outs_bytes: tuple[int, ...]
    """The bytes of each value that it makes."""
    notes: CallNotes | None = None


class CallNotes(NamedTuple):
    """What is particular about a call."""

    kind: OpTraits
    places: tuple[int, ...]
    """For each value that it makes, without those written over an argument, its index among the returned tensors."""
    written: tuple[int, ...] = ()
    """The values that it overwrites. The values that it writes over them are the last ones that it makes."""
    is_whole: bool = False
    """Whether it doesn't depend on the old contents of what it overwrites."""
    generator: torch.Generator | None = None
    state: Tensor | None = None
    """The state of the generator before the op drew from it."""


def tensors_in(argument: Any) -> list[Tensor]:
    """Return the strided tensors in arguments or results of an op, whose storages are ranges of bytes."""
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
    """Tell whether a tensor among the arguments has no range of bytes as its storage."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            if not is_range_of_bytes(argument):
                return True
        elif isinstance(argument, list | tuple) and has_odd(argument):
            return True
    return False


def covers(tensor: Tensor) -> bool:
    """Tell whether a tensor has each byte of its storage, once."""
    is_whole = tensor.numel() * tensor.itemsize == Tensor.untyped_storage(tensor).nbytes()
    return is_whole and is_dense(tensor.size(), tensor.stride())


def crosses(one: Any, other: Any) -> bool:
    return len({tensor.device for tensor in (*tensors_in(one), *tensors_in(other))}) > 1
