"""Tensors that do not stream: how they get to the device and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.storages import byte_view, overlapping, tensor_over, unique_storages
from memkit.wrappers import has_plain_parts, parts_of, set_reported_device, wrappers_in


def move(tensors: Sequence[Tensor], torch_device: torch.device) -> None:
    """Move tensors, each in place; those that have bytes in common still have them in common then."""
    with torch.inference_mode(False), torch.no_grad(), torch_private.without_dispatch_modes():
        movable = [tensor for tensor in tensors if has_plain_parts(tensor)]
        for tensor in tensors:
            if not has_plain_parts(tensor):
                tensor.data = tensor.data.to(torch_device)
        for group in overlapping([part for tensor in movable for part in parts_of(tensor)]):
            first, last = min(low for _, low, _ in group), max(high for _, _, high in group)
            source = byte_view(group[0][0].untyped_storage())[first:last]
            storage = torch.empty(last - first, dtype=torch.uint8, device=torch_device).untyped_storage()
            byte_view(storage).copy_(source)
            for tensor, low, _ in group:
                offset = (low - first) // tensor.dtype.itemsize
                tensor.data = tensor_over(storage, tensor.dtype, offset=offset, size=tensor.size(), stride=tensor.stride())
        for wrapper in (wrapper for tensor in movable for wrapper in wrappers_in(tensor)):
            set_reported_device(wrapper, torch_device)
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                tensor.grad = tensor.grad.to(torch_device)


class Placement:
    """Has tensors on the device, and knows where they were found."""

    def __init__(self) -> None:
        self._found: dict[torch.device, list[Tensor]] = {}

    def place(self, tensors: Iterable[Tensor], torch_device: torch.device) -> None:
        """Move tensors to the device, but for those that are there."""
        found: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.device != torch_device:
                found.setdefault(tensor.device, []).append(tensor)
        for device, moved in found.items():
            self._found.setdefault(device, []).extend(moved)
            move(moved, torch_device)

    def restore(self) -> None:
        """Move them back."""
        for torch_device, moved in self._found.items():
            move(moved, torch_device)
        self._found.clear()


def shared_between(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[int, list[str]]:
    """Return the storages that parameters of several layers have in common, or of one and of what is no layer, or a parameter
    and a buffer, by key, with the names of what is there."""
    layers_of: dict[int, set[int]] = {}
    for number, layer in enumerate(layers.values()):
        for module in layer.modules():
            layers_of.setdefault(id(module), set()).add(number)
    homes: dict[int, set[int]] = {}
    names: dict[int, list[str]] = {}
    of_buffers = unique_storages(model.buffers())
    for prefix, module in model.named_modules():
        for key, tensor in (*torch_private.parameters_of(module).items(), *torch_private.buffers_of(module).items()):
            for storage in () if tensor is None else unique_storages([tensor]):
                if isinstance(tensor, nn.Parameter):
                    homes.setdefault(storage, set()).update(layers_of.get(id(module), {-1}))
                names.setdefault(storage, []).append(f"{prefix}.{key}" if prefix else key)
    return {storage: names[storage] for storage, found in homes.items() if len(found) > 1 or storage in of_buffers}
