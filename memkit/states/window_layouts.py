"""How the states of a large parameter lie where windows of them move: whole in host memory, apart in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from memkit.plan import aligned
from memkit.states.packing import Packed, PackedTensor, local_packed
from memkit.states.pieces import Layout
from memkit.torch_state import local_of


def lie_like(parameter: Tensor, tensors: Sequence[Packed]) -> bool:
    """Tell whether the elements of states lie in memory as those of their parameter."""
    size, stride = parameter.size(), parameter.stride()
    return all(isinstance(one, PackedTensor) and (one.size, one.stride) == (size, stride) for one in map(local_packed, tensors))


def tensors_of_part(whole: Sequence[Packed], elements: slice) -> tuple[PackedTensor, ...]:
    """Return the layout of a window's states in a slot: one behind the other."""
    tensors, offset = [], 0
    for tensor in map(local_packed, whole):
        assert isinstance(tensor, PackedTensor)
        start, end, _ = elements.indices(tensor.size.numel())
        num_bytes = (end - start) * tensor.dtype.itemsize
        tensors.append(PackedTensor(tensor.name, offset, num_bytes, torch.Size([end - start]), (1,), tensor.dtype))
        offset += aligned(num_bytes)
    return tuple(tensors)


def part_of(layout: Layout, elements: slice) -> Layout:
    """Return the layout of a window's states within that of all states, each of which has as many elements as the parameter.

    In a slot the states of a window are one behind the other. In host memory each is a range of the whole state, so that a copy
    has as many ranges as there are states.
    """
    span = layout.span
    assert span is not None
    assert span.whole is not None
    tensors, ranges = tensors_of_part(layout.tensors[0], elements), []
    for tensor, part in zip(map(local_packed, layout.tensors[0]), tensors, strict=True):
        assert isinstance(tensor, PackedTensor)
        begin = tensor.offset + elements.start * tensor.dtype.itemsize
        ranges.append(span.whole[begin : begin + aligned(part.num_bytes)])
    host = {part.name: local_of(layout.host[0][part.name]).view(-1)[elements] for part in tensors}
    span = replace(span, num_bytes=sum(map(len, ranges)), pieces=tuple(ranges), ranges=(), whole=None)
    return Layout(span, (tensors,), (host,))
