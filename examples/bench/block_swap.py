"""A block-swap loop, as training scripts have one of their own: what streaming layers is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.hooks import HookSet
from memkit.core.tensors import byte_view, tensor_over
from memkit.device import Device, Event


class BlockSwap:
    """Frozen weights of layers in pinned host memory, each layer's copied to the device one ahead of its use.

    A hook ahead of each layer's forward waits for its weights, lets go of the others, and begins to copy those of the layer
    that comes next: of the one before it in a backward, where layers that are checkpointed run again. Without a checkpoint
    around each layer nothing fetches weights for the backward, which then fails on CUDA.

    Args:
        layers: in the order in which they run. What of them requires grad is not moved.
        device: where they run.

    Raises:
        ValueError: there is nothing frozen in the layers.
    """

    def __init__(self, layers: Sequence[nn.Module], device: Device) -> None:
        self._device, self._stream = device, device.new_stream("block swap")
        frozen = [[parameter for parameter in layer.parameters() if not parameter.requires_grad] for layer in layers]
        if not any(frozen):
            raise ValueError("it moves frozen weights only; found none in the layers")
        self._hosts = [[(parameter, _pinned(parameter.data, device)) for parameter in found] for found in frozen]
        self._ready: dict[int, Event] = {}
        """For each layer whose weights are on the device, or on their way to it, the event behind their copies."""
        self._hooks = HookSet()
        for number, layer in enumerate(layers):
            self._bind_host(number)
            self._hooks.around_forward(layer, before=partial(self._before, number), after=_nothing)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is moved."""
        return [parameter for hosts in self._hosts for parameter, _ in hosts]

    def close(self) -> None:
        """Leave all weights in host memory, and no hooks."""
        self._hooks.remove()
        for number in list(self._ready):
            self._let_go(number)

    def _before(self, number: int, *_: Any) -> None:
        for other in [other for other in self._ready if other != number]:
            self._let_go(other)
        self._fetch(number)
        self._device.wait_event(self._device.current_stream(), self._ready[number])
        ahead = self._ahead_of(number)
        if ahead is not None:
            self._fetch(ahead)

    def _ahead_of(self, number: int) -> int | None:
        """Return the layer that comes next. At the turn to the backward, and to the next step, that is the same once more."""
        if torch_private.backward_task() != -1:
            return number - 1 if number else None
        if number + 1 < len(self._hosts):
            return number + 1
        return None if torch.is_grad_enabled() else 0

    def _fetch(self, number: int) -> None:
        if number in self._ready:
            return
        found = [(parameter, host, self._device.allocate(host.nbytes)) for parameter, host in self._hosts[number]]
        # The memory may be what work that is still to run on this stream has just left.
        self._device.wait_event(self._stream, self._device.record_event(timed=False))
        for parameter, host, storage in found:
            self._device.copy(byte_view(storage), byte_view(host.untyped_storage()), self._stream)
            parameter.data = tensor_over(storage, host.dtype, offset=0, size=host.size(), stride=host.stride())
        self._ready[number] = self._device.record_event(self._stream, timed=False)

    def _let_go(self, number: int) -> None:
        # Its memory goes back to this stream, also where nobody has used it.
        self._device.wait_event(self._device.current_stream(), self._ready.pop(number))
        self._bind_host(number)

    def _bind_host(self, number: int) -> None:
        for parameter, host in self._hosts[number]:
            parameter.data = host


def _pinned(tensor: Tensor, device: Device) -> Tensor:
    """Return a copy in pinned memory, by the means that scripts use."""
    is_cuda = device.torch_device.type == "cuda"
    host = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=is_cuda).copy_(tensor)
    if not is_cuda:
        device.pin(byte_view(host.untyped_storage()))
    return host


def _nothing(*_: Any) -> None:
    """Do nothing after a forward."""
