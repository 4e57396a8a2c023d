"""Bytes of tensors, each storage counted once, and how tensors lie in them.

The unit is the storage (`torch.UntypedStorage`): a view keeps all of its storage alive. Identity is the storage object, never
`data_ptr`, because addresses are used again. A tensor may wrap others, as a quantized weight wraps integers and scales: these
stay the same objects when they get other bytes, and the wrapper says on which device it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memkit.core import torch_private

_STRIDED = torch.strided
_NO_CONTEXT = nullcontext()
_SPARSE_PARTS = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

PLAIN_TYPES = (Tensor, nn.Parameter)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor's elements: of sparse and wrapping tensors several, of an opaque layout none."""
    if torch_private.is_wrapper(tensor):
        for inner in _inner(tensor):
            yield from storages_of(inner)
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield from storages_of(torch_private.sparse_indices(tensor))
        yield from storages_of(torch_private.sparse_values(tensor))
    else:
        for part in _SPARSE_PARTS.get(tensor.layout, ()):
            yield from storages_of(getattr(tensor, part)())


def is_parameter(tensor: Tensor) -> bool:
    """Tell whether a tensor is a parameter or a view of one, as FSDP2 gathers them in the forward."""
    return type(tensor) is nn.Parameter or type(torch_private.base_of(tensor)) is nn.Parameter


def is_range_of_bytes(tensor: Tensor) -> bool:
    """Tell whether a storage's bytes and a geometry describe a tensor: not if it is sparse, opaque, nested or quantized."""
    return tensor.layout is _STRIDED and not (tensor.is_nested or tensor.is_quantized or torch_private.is_zero_tensor(tensor))


def counted_by(tensor: Tensor) -> Tensor:
    """Return the tensor whose version counter a tensor shares: the base of a view. One storage may have several of these."""
    base = torch_private.base_of(tensor)
    return tensor if base is None else base


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that is unique while a strong or weak reference to the storage is held."""
    return torch_private.storage_address(storage)


def unique_storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for storage in storages_of(tensor):
            found.setdefault(storage_key(storage), storage)
    return found


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(storage.nbytes() for storage in unique_storages(tensors).values())


def byte_view(storage: torch.UntypedStorage) -> Tensor:
    if torch_private.num_dispatch_modes():
        return tensor_over(storage, torch.uint8, offset=0, size=(storage.nbytes(),), stride=(1,))
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Geometry(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        size, stride, offset, dtype, is_conj, is_neg = self
        return tensor_over(storage, dtype, offset=offset, size=size, stride=stride, is_conj=is_conj, is_neg=is_neg)


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    *,
    offset: int | torch.SymInt,
    size: Sequence[int],
    stride: Sequence[int],
    is_conj: bool = False,
    is_neg: bool = False,
) -> Tensor:
    """Return a tensor with this geometry over a storage. No dispatch mode sees it; nothing is read or written."""
    # `set_` says that it writes. CUDA's stream sanitizer, such a mode, would take it for a write to the bytes.
    with torch_private.without_python_dispatch() if torch_private.num_dispatch_modes() else _NO_CONTEXT:
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
        if is_conj:
            torch_private.set_conj(tensor, True)
        if is_neg:
            torch_private.set_neg(tensor, True)
        return tensor


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether elements are adjacent without overlap: contiguous, except for the order of dimensions."""
    expected = 1
    for step, length in sorted((step, length) for length, step in zip(size, stride, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first one to the last, where there is any."""
    last: int = sum(map(operator.mul, size, stride)) - sum(stride)  # without a frame for each dimension
    return 1 + last


def chunk_bytes(tensor: Tensor) -> int:
    return 0 if tensor.numel() == 0 else int(extent(tensor.size(), tensor.stride())) * tensor.dtype.itemsize


def overlapping(tensors: Iterable[Tensor]) -> Iterator[list[tuple[Tensor, int, int]]]:
    """Yield groups of plain tensors that share bytes, each with its first byte and the end of its bytes in the storage."""
    ranges: dict[int, list[tuple[Tensor, int, int]]] = {}
    for tensor in tensors:
        low = int(tensor.storage_offset()) * tensor.dtype.itemsize
        found = ranges.setdefault(storage_key(tensor.untyped_storage()), [])
        found.append((tensor, low, low + chunk_bytes(tensor)))
    for found in ranges.values():
        found.sort(key=lambda item: item[1:])
        group: list[tuple[Tensor, int, int]] = []
        for item in found:
            if group and item[1] >= max(high for _, _, high in group):
                yield group
                group = []
            group.append(item)
        yield group


def parts_of(tensor: Tensor) -> list[Tensor]:
    if not torch_private.is_wrapper(tensor):
        return [tensor]
    return [part for inner in _inner(tensor) for part in parts_of(inner)]


def wrappers_in(tensor: Tensor) -> list[Tensor]:
    if not torch_private.is_wrapper(tensor):
        return []
    return [tensor, *(wrapper for inner in _inner(tensor) for wrapper in wrappers_in(inner))]


def _inner(wrapper: Any) -> list[Tensor]:
    names, _ = wrapper.__tensor_flatten__()
    found = (getattr(wrapper, name) for name in names)
    return [inner for inner in found if isinstance(inner, Tensor)]  # DTensor also names its mesh


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a parameter or a buffer is a range of bytes, and wraps no other tensors."""
    return type(tensor.data) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def has_plain_parts(tensor: Tensor) -> bool:
    """Tell whether a parameter or a buffer is plain, or wraps plain tensors, always the same ones and on its own device."""
    if not torch_private.is_wrapper(tensor):
        return is_plain(tensor)
    parts = parts_of(tensor)
    are_same = all(one is other for one, other in zip(parts, parts_of(tensor), strict=True))
    are_plain = all(is_plain(part) and part.device == tensor.device and not part.requires_grad for part in parts)
    return are_same and are_plain and tensor.layout is torch.strided


def set_reported_device(wrapper: Tensor, torch_device: torch.device) -> None:
    """Make a wrapper report the device that its inner tensors are on by now. It stays the same object."""
    if wrapper.device == torch_device:
        return
    with torch_private.without_subclass_functions(), torch_private.without_python_dispatch():
        # Setting `data` takes over a tensor's metadata, and no Python attributes.
        wrapper.data = torch_private.make_wrapper_subclass(
            type(wrapper),
            wrapper.size(),
            strides=wrapper.stride(),
            storage_offset=wrapper.storage_offset(),
            dtype=wrapper.dtype,
            device=torch_device,
        )
