"""Tensors that are made of others (a quantized weight: of its integers and its scales): what they are made of, and how they say
where that is. And which tensors are ranges of bytes.

The inner tensors are plain ones, and are given other bytes as a plain parameter is: they stay the same objects, so nothing has
to know how a class holds them. A wrapper has no bytes, but says on which device it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memkit import torch_private


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor is made of: itself, if it wraps no others."""
    if not torch_private.is_wrapper(tensor):
        return [tensor]
    return [part for inner in _inner(tensor) for part in parts_of(inner)]


def wrappers_in(tensor: Tensor) -> list[Tensor]:
    """Return the wrappers among a tensor and those that it is made of."""
    if not torch_private.is_wrapper(tensor):
        return []
    return [tensor, *(wrapper for inner in _inner(tensor) for wrapper in wrappers_in(inner))]


def _inner(wrapper: Any) -> list[Tensor]:
    names, _ = wrapper.__tensor_flatten__()
    found = (getattr(wrapper, name) for name in names)
    return [inner for inner in found if isinstance(inner, Tensor)]  # DTensor also names its mesh


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a parameter or a buffer is a range of bytes, and no tensor that wraps others."""
    return type(tensor.data) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def has_plain_parts(tensor: Tensor) -> bool:
    """Tell whether a parameter or a buffer is plain, or wraps tensors that are: the same at any time, and where it says."""
    if not torch_private.is_wrapper(tensor):
        return is_plain(tensor)
    parts = parts_of(tensor)
    are_same = all(one is other for one, other in zip(parts, parts_of(tensor), strict=True))
    are_plain = all(is_plain(part) and part.device == tensor.device and not part.requires_grad for part in parts)
    return are_same and are_plain and tensor.layout is torch.strided


def set_reported_device(wrapper: Tensor, torch_device: torch.device) -> None:
    """Let a wrapper say that it is on a device, as those that it wraps are by now. It stays the same object."""
    if wrapper.device == torch_device:
        return
    with torch_private.without_subclass_functions(), torch_private.without_python_dispatch():
        # Setting `data` takes over what a tensor says of itself, and nothing that Python has put on it.
        wrapper.data = torch_private.make_wrapper_subclass(
            type(wrapper),
            wrapper.size(),
            strides=wrapper.stride(),
            storage_offset=wrapper.storage_offset(),
            dtype=wrapper.dtype,
            device=torch_device,
        )
