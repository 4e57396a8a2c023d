"""One op as it is remembered to be run again: what it does, what it was given and has made, without the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.storages import Geometry, is_range_of_bytes, tensor_over
from memkit.torch_state import has_own_dispatch

if TYPE_CHECKING:
    from memkit.torch_private import OpOverload

_PLAIN_TYPES = (Tensor, nn.Parameter)
_STRIDED = torch.strided

Source = tuple[Any, int, torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype, bool, bool]
"""One tensor among the arguments of a call: its position or its name (in a list: with the place there), the value that it is,
and its `Geometry` in that value's storage, item by item."""


def source_of(key: Any, value: int, tensor: Tensor) -> Source:
    """Return what is remembered of a tensor among the arguments of a call."""
    return (key, value, *Geometry.of(tensor))


def tensor_of(source: Source, storage: torch.UntypedStorage) -> Tensor:
    """Return the tensor that a call is given, over the storage that its value is in now."""
    _, _, size, stride, offset, dtype, is_conj, is_neg = source
    return tensor_over(storage, dtype, offset=offset, size=size, stride=stride, is_conj=is_conj, is_neg=is_neg)


class OpClass(Enum):
    """How the recorder treats an op."""

    VIEW = auto()
    """Gives its input another shape: makes no value, and is never run again."""
    REPLAYED = auto()
    """Can be run again, and then makes the same bytes."""
    OPAQUE = auto()
    """Is not run again: its values are roots."""
    BORDER = auto()
    """Makes nothing, but what it is given is not recomputed: see `memkit.recording.borders`."""
    UNKNOWN = auto()
    """Is not run again either: it may have effects, write to what it does not name, and return what it has returned before."""


@dataclass(frozen=True, slots=True)
class OpKind:
    """What is known of one overload."""

    op_class: OpClass
    written: tuple[int | str, ...] = ()
    """The arguments that it writes to, by position or, if they are keyword-only, by name."""
    is_random: bool = False
    """Whether it draws from a random number generator."""
    overwrites: bool = False
    """Whether nothing of what was in the written arguments before remains, if they cover their storages."""
    statistics: tuple[int, ...] = ()
    """Positions of running statistics that it updates in training mode, though its schema or a version counter may not tell."""
    training_at: int = -1
    """The position of the flag for training mode."""
    replayed_by: OpOverload | None = None
    """The overload without statistics, where they cannot be None."""
    may_cross: bool = False
    """Whether it may copy from one device to another: such copies are not recomputed."""
    why_kept: str = ""
    """Why its values are roots, where a user may wonder."""
    hides_state: bool = False
    """Whether it reads or changes what its arguments do not show, so that not even its Python may run again."""

    @property
    def is_plain(self) -> bool:
        """Whether it makes new values from old ones, and does nothing else, unless it copies to another device."""
        return self._only_computes and not self.written

    @property
    def is_in_place(self) -> bool:
        """Whether it makes a new value of its first argument, where that was, and does nothing else."""
        return self._only_computes and self.written == (0,) and not (self.overwrites or self.may_cross)

    @property
    def _only_computes(self) -> bool:
        return self.op_class is OpClass.REPLAYED and not (self.statistics or self.is_random)


CostKey = tuple[Any, int, int]


def cost_key(func: Any, args: Sequence[Any], results: Any) -> CostKey:
    """Return what ops have in common that take about as long: the op, and the bytes of its first argument and first result."""
    first = args[0] if args else None
    result = results[0] if type(results) is tuple and results else results
    return (
        func,
        first.nbytes if isinstance(first, Tensor) and first.layout is _STRIDED else 0,
        result.nbytes if isinstance(result, Tensor) and result.layout is _STRIDED else 0,
    )


class Call(NamedTuple):
    """One op to repeat."""

    func: Callable[..., Any]
    args: Sequence[Any]
    """Its arguments, None in the place of tensors."""
    kwargs: dict[str, Any] | None
    sources: Sequence[Source]
    """Its tensors."""
    first: int
    """The first of the values that it makes."""
    outs_bytes: tuple[int, ...]
    """The bytes of the values that it makes."""
    notes: CallNotes | None = None


class CallNotes(NamedTuple):
    """What is remarkable about a call."""

    kind: OpKind
    places: tuple[int, ...]
    """For each value that it makes, but those that it writes over an argument, its place among the tensors it returns."""
    written: tuple[int, ...] = ()
    """The values that it writes over. What they become are the last of the values that it makes."""
    is_whole: bool = False
    """Whether it needs nothing of what it writes over."""
    generator: torch.Generator | None = None
    state: Tensor | None = None
    """The state of the generator before the op drew from it."""


def tensors_in(argument: Any) -> list[Tensor]:
    """Return the plain tensors in what an op was given, or has returned: those that are ranges of bytes."""
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
    if type(tensor) not in _PLAIN_TYPES and has_own_dispatch(tensor):
        return False
    return is_range_of_bytes(tensor)


def has_tensors(kwargs: dict[str, Any]) -> bool:
    """Tell whether there may be a tensor among the keyword arguments."""
    return any(isinstance(argument, Tensor | list | tuple) for argument in kwargs.values())


def written_by(kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
    """Return the tensors that an op writes to, one for each storage."""
    found: dict[int, Tensor] = {}
    for key in kind.written:
        argument = (kwargs or {}).get(key) if isinstance(key, str) else args[key] if key < len(args) else None
        for tensor in tensors_in(argument):
            found.setdefault(torch_private.storage_address(Tensor.untyped_storage(tensor)), tensor)
    return list(found.values())


def has_odd(arguments: Iterable[Any]) -> bool:
    """Tell whether a tensor among the arguments is no range of bytes."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            if not is_range_of_bytes(argument):
                return True
        elif isinstance(argument, list | tuple) and has_odd(argument):
            return True
    return False


def covers(tensor: Tensor) -> bool:
    """Tell whether a tensor is all of its storage, each byte once."""
    if tensor.numel() * tensor.itemsize != Tensor.untyped_storage(tensor).nbytes():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def crosses(one: Any, other: Any) -> bool:
    """Tell whether what an op reads and what it makes are on different devices."""
    return len({tensor.device for tensor in (*tensors_in(one), *tensors_in(other))}) > 1
