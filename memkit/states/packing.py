"""States packed side by side: plain tensors, and tensors that wrap others, as 8-bit states do."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, NoReturn

import torch
import torch.utils.dlpack
from torch import Tensor

from memkit.core import torch_private
from memkit.core.tensors import PLAIN_TYPES, is_dense, parts_of, tensor_over
from memkit.core.torch_state import is_dtensor, local_of
from memkit.errors import StateOffloadError
from memkit.plan.states import aligned
from memkit.transfer.host_memory import Span

MASTER = "master"
_READ = (
    "StateOffload(disk=...) keeps it there between steps. optimizer.state_dict() reads it, load_state_dict() writes it, and "
    "close() brings it back"
)
_BITS = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True, slots=True)
class PackedTensor:
    name: str
    offset: int
    num_bytes: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def is_like(self, tensor: object) -> bool:
        return (
            isinstance(tensor, Tensor)
            and _is_plain(tensor)
            and tensor.dtype == self.dtype
            and tensor.size() == self.size
            and tensor.stride() == self.stride
        )

    def offsets(self) -> Iterator[int]:
        yield self.offset

    def is_at(self, tensor: Any, address: int) -> bool:
        """Tell whether a tensor still has these bytes of its piece, which begins at `address`: its `data` may have been set."""
        return bool(tensor.data_ptr() == address + self.offset)

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        return tensor_over(storage, self.dtype, offset=self.offset // self.dtype.itemsize, size=self.size, stride=self.stride)

    def on_host(self, span: Span) -> Tensor:
        """Return the tensor in host memory, over a storage of its own, so that saving it writes no more than its bytes."""
        storage = storage_of_part(span.whole[self.offset : self.offset + self.num_bytes])
        return tensor_over(storage, self.dtype, offset=0, size=self.size, stride=self.stride)


@dataclass(frozen=True, slots=True)
class PackedWrapper:
    name: str
    num_bytes: int
    kind: type[Any]
    inner: tuple[PackedTensor | PackedWrapper, ...]
    others: tuple[tuple[str, Any], ...]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def is_like(self, tensor: object) -> bool:
        if not isinstance(tensor, Tensor) or type(tensor) is not self.kind or tensor.size() != self.size:
            return False
        return all(packed.is_like(getattr(tensor, packed.name, None)) for packed in self.inner)

    def offsets(self) -> Iterator[int]:
        for packed in self.inner:
            yield from packed.offsets()

    def is_at(self, tensor: Any, address: int) -> bool:
        for packed in self.inner:
            inner = getattr(tensor, packed.name, None)
            if not isinstance(inner, Tensor):
                return False
            if isinstance(packed, PackedTensor):  # most are: a call less
                if inner.data_ptr() != address + packed.offset:
                    return False
            elif not packed.is_at(inner, address):
                return False
        return True

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        return self._made({packed.name: packed.over(storage) for packed in self.inner})

    def on_host(self, span: Span) -> Tensor:
        return self._made({packed.name: packed.on_host(span) for packed in self.inner})

    def _made(self, inner: Mapping[str, Tensor]) -> Tensor:
        made: Tensor = self.kind.__tensor_unflatten__({**inner, **dict(self.others)}, self.context, self.size, self.stride)
        return made


Packed = PackedTensor | PackedWrapper
PackedRows = tuple[tuple[Packed, ...], ...]


class OnDisk:
    """Stands in `optimizer.state` for a state on a disk. Any use but its repr raises an error that says what to do."""

    __slots__ = ("_name", "_owner", "_parameter")

    def __init__(self, name: str, parameter: str, owner: object) -> None:
        self._name, self._parameter, self._owner = name, parameter, weakref.ref(owner)

    def is_of(self, owner: object, name: object) -> bool:
        return self._owner() is owner and self._name == name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"{self} has no {attribute}: {_READ}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateOffloadError(f"{self} can't be copied or pickled: {_READ}")

    def __repr__(self) -> str:
        return f'<"{self._name}" of {self._parameter}, on the disk>'


def is_number(value: object) -> bool:
    return not isinstance(value, OnDisk) and (not isinstance(value, Tensor) or not value.dim())


def is_number_on_host(value: object) -> bool:
    return type(value) is Tensor and not value.dim() and value.device.type == "cpu"


def are_same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one.values(), other.values())) and [*one] == [*other]


def are_same_number(one: Any, other: Any) -> bool:
    """Tell whether two counts are the same, as far as the host knows without waiting for the device."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.device.type != "cpu":
            return True
        if one.dtype != other.dtype:
            return False
        # unlike item(), this lets no other thread have the interpreter
        one, other = local_of(one).tolist(), local_of(other).tolist()
    if type(one) is not type(other):
        return False
    return not isinstance(one, int | float | complex) or one == other or (one != one and other != other)


def pack(states: Iterable[Mapping[str, Tensor]]) -> tuple[PackedRows, int]:
    """Return layouts of states side by side, and their bytes in all. Float32 copies come first, for one copy of all."""
    states, offset = list(states), 0
    rows: list[list[Packed]] = [[] for _ in states]
    for has_copies in (True, False):
        for row, tensors in zip(rows, states, strict=True):
            for name, tensor in tensors.items():
                if (name == MASTER) is has_copies:
                    row.append(_packed(name, tensor, offset))
                    offset += row[-1].num_bytes if isinstance(row[-1], PackedWrapper) else aligned(row[-1].num_bytes)
    return tuple(map(tuple, rows)), offset


def _packed(name: str, tensor: Tensor, offset: int) -> Packed:
    if not torch_private.is_wrapper(tensor):
        return PackedTensor(name, offset, tensor.nbytes, tensor.size(), tensor.stride(), tensor.dtype)
    tensors, others, context = _inside(tensor)
    inner, begin = [], offset
    for part, value in tensors.items():
        inner.append(_packed(part, value, offset))
        offset += inner[-1].num_bytes if isinstance(inner[-1], PackedWrapper) else aligned(inner[-1].num_bytes)
    kept = tuple(others.items())
    return PackedWrapper(name, offset - begin, type(tensor), tuple(inner), kept, context, tensor.size(), tensor.stride())


def _inside(wrapper: Tensor) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    names, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]  # of wrappers only
    found = {name: getattr(wrapper, name) for name in names}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in found.items() if name not in tensors}, context


def local_packed(packed: Packed) -> Packed:
    if isinstance(packed, PackedWrapper) and packed.kind.__name__ == "DTensor":
        return replace(packed.inner[0], name=packed.name)
    return packed


def bytes_of(tensor: Tensor) -> int:
    return sum(aligned(part.nbytes) for part in parts_of(tensor))


def copy_state(target: Tensor, source: Tensor) -> None:
    for mine, other in zip(parts_of(target), parts_of(source), strict=True):
        mine.copy_(other)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if len(targets) > 1 and {*map(type, sources)} <= {*PLAIN_TYPES}:
        torch_private.foreach_copy(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def moved_state(source: Tensor, torch_device: torch.device) -> Tensor:
    if not torch_private.is_wrapper(source):
        made = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=torch_device)
        return made.copy_(source.detach())
    tensors, others, context = _inside(source)
    inner = {name: moved_state(value, torch_device) for name, value in tensors.items()} | others
    moved: Tensor = type(source).__tensor_unflatten__(inner, context, source.size(), source.stride())  # type: ignore[attr-defined]
    return moved


def storage_of_part(host: Tensor) -> torch.UntypedStorage:
    """Return a storage over host memory, which it holds. By a DLPack capsule: else pinned memory claims to be a GPU's."""
    return torch.utils.dlpack.from_dlpack(host.__dlpack__()).untyped_storage()


def may_leave(tensor: object) -> bool:
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return False
    if type(tensor) in PLAIN_TYPES:
        return _is_plain(tensor)
    if not torch_private.is_wrapper(tensor):
        return False
    return all(map(_is_plain, parts_of(tensor)))


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not tensor.is_quantized
        and (tensor.is_contiguous() or is_dense(tensor.size(), tensor.stride()))
    )


def follow(master: Tensor, parameter: Tensor) -> None:
    """Copy elements of a parameter that somebody has written to, which bits alone tell, to its float32 copy, without a wait."""
    bits = _BITS[parameter.dtype.itemsize]
    kept = master.to(parameter.dtype).view(bits) == parameter.detach().view(bits)
    written = parameter.detach()
    torch.where(kept, master, written if bits is torch.int16 else written.to(torch.float32), out=master)


def local_gradient(parameter: Tensor) -> Tensor | None:
    grad = parameter.grad
    return None if grad is None else local_of(grad)


def shard_over(local: Tensor, like: Tensor) -> Tensor:
    """Return a `DTensor` with the size and placements of another one, over a local tensor of any device and dtype."""
    with torch.inference_mode(False), torch.no_grad():
        empty: Any = torch.empty_like(like.detach(), dtype=local.dtype, device="meta")
        names, context = empty.__tensor_flatten__()
        inner = {name: getattr(empty, name) for name in names}  # newer DTensors name their mesh as well
        inner = {name: local.detach() if isinstance(value, Tensor) else value for name, value in inner.items()}
        made: Tensor = type(empty).__tensor_unflatten__(inner, context, like.size(), like.stride())
    return made


def shard_like(parameter: Tensor, local: Tensor) -> Tensor:
    return shard_over(local, parameter) if is_dtensor(parameter) else local


def write_local(parameter: Tensor, values: Tensor) -> None:
    local_of(parameter).copy_(values)
    note_written(parameter)


def note_written(parameter: Tensor) -> None:
    """Raise the version of a `DTensor` whose local tensor was written to: a write there does not count in the `DTensor`."""
    if is_dtensor(parameter):
        torch.autograd.graph.increment_version(parameter)


def are_one(one: Tensor, other: Tensor) -> bool:
    return local_of(one).data_ptr() == local_of(other).data_ptr()


def lie_alike(one: Any, other: Any) -> bool:
    if not is_dtensor(one) or not is_dtensor(other):
        return False
    return bool(one.device_mesh == other.device_mesh and tuple(one.placements) == tuple(other.placements))


def described(tensor: Any) -> str:
    split = f" with placements {tuple(tensor.placements)}" if is_dtensor(tensor) else ""
    return f"{type(tensor).__name__}{split}"
