"""What one op does, found from its tensors: its kind, its FLOPs, and the bytes that it reads and writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device.ceilings import flops_of
from memkit.plan import OpKind, OpWork
from memkit.profile.signatures import dtype_name
from memkit.profile.watch import tensors_in
from memkit.recording.ops import op_kinds
from memkit.storages import storage_key, storages_of

if TYPE_CHECKING:
    from memkit.torch_private import OpOverload

_KINDS = (  # the first that matches
    (OpKind.ATTENTION, re.compile(r"scaled_dot_product|(flash|efficient)_attention")),
    (OpKind.CONVOLUTION, re.compile(r"conv(?!ert)")),
    (OpKind.MATMUL, re.compile(r"^_?(int_|scaled_|grouped_)*(add)?(mm|bmm|mv|r|bmm_dtype)(_v2)?_?$|baddbmm|^v?dot$|^linear$")),
    (OpKind.NORM, re.compile(r"(batch|layer|group|instance|rms)_norm")),
    (OpKind.POOL, re.compile(r"_pool\d?d|max_pool|avg_pool")),
)
_FEW_CHANNELS = 3
_UNFILLED = re.compile(r"^(new_)?empty")
_SPARSE_READERS = frozenset({"embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss2d_forward"})
"""Ops that read at most as many bytes of their first argument as they write."""


def work_of(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> OpWork:
    """Return what an op does that has run.

    Bytes are those of its tensors, each storage once: broadcast dimensions are read once, of several views of one storage the
    largest counts, and an argument that the op writes over is both read and written.

    Args:
        op: any overload.
        args, kwargs: its arguments.
        outputs: its results.

    Source: `flops_of`.
    """
    name = str(torch_private.schema_of(op).name).rpartition("::")[2]
    given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    made = list(tensors_in(outputs))
    return OpWork(
        name=str(op),
        kind=OpKind.CONVOLUTION_OF_FEW if _has_few_channels(name, given) else kind_of(name),
        flops=flops_of(op, args, kwargs, outputs),
        num_bytes=_num_bytes(op, name, args, kwargs, given, made),
        dtype=dtype_name(_computed_in(given or made)),
    )


def _has_few_channels(name: str, given: Sequence[Tensor]) -> bool:
    """Tell whether an op is the forward of a convolution whose input, [batch, channels, ...], has few channels."""
    return name == "convolution" and given[0].dim() > 2 and given[0].shape[1] <= _FEW_CHANNELS


def kind_of(name: str) -> OpKind:
    """Return the kind of an op, which says what limits it, by its name without namespace and overload, such as "mm"."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), OpKind.POINTWISE)


def _computed_in(tensors: Sequence[Tensor]) -> torch.dtype:
    floating = (tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
    return next(floating, tensors[0].dtype if tensors else torch.get_default_dtype())


def _num_bytes(
    op: OpOverload,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    given: Sequence[Tensor],
    made: Sequence[Tensor],
) -> int:
    if _UNFILLED.search(name) or torch.Tag.inplace_view in op.tags:
        return 0
    kind = op_kinds().of(op)
    written = [kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None for key in kind.written]
    over = list(tensors_in(written))
    if kind.overwrites:
        read = _bytes_by_storage(tensor for tensor in given if not any(tensor is target for target in over))
    else:
        read = _bytes_by_storage(given)
    writes = _bytes_by_storage([*made, *over])
    if name in _SPARSE_READERS and args and isinstance(args[0], Tensor):
        for storage in storages_of(args[0]):
            read[storage_key(storage)] = min(read.get(storage_key(storage), 0), sum(writes.values()))
    return sum(read.values()) + sum(writes.values())


def _bytes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    found: dict[int, int] = {}
    for tensor in tensors:
        for storage in storages_of(tensor):
            key, whole = storage_key(storage), storage.nbytes()
            num_bytes = min(whole, _distinct_bytes(tensor)) if tensor.layout is torch.strided else whole
            found[key] = max(found.get(key, 0), num_bytes)
    return found


def _distinct_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, those of broadcast dimensions once."""
    if torch_private.is_wrapper(tensor) or tensor.is_nested or tensor.numel() == 0:
        return tensor.numel() * tensor.itemsize
    numel = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.itemsize
