"""Hooks on the gradients of streamed parameters while a backward runs, and when a gradient is complete.

[Note: when a gradient is complete] A parameter that is bound to a slot and back gets a new `AccumulateGrad` node each time. A
layer that is used twice in one graph then has two nodes, and each brings a part of the gradient. The engine would have added
the parts before it adds their sum to `grad`, and floating-point sums depend on that order. So a part is held, on the device,
until all others have come; if some do not, until the backward is over.

[Note: gradients from the host] Code outside of a layer that computes with its parameters has their host copies, so the engine
adds their gradients in its thread for the host, to the `grad` that its thread for the device adds to. Such a backward is
refused: first all hooks refuse further gradients; then a backward within this one has the device's thread come to the end of
its node (see [Note: backwards that have failed and are not over]); then the backward is ended as a failed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from memkit.core import backwards, torch_private
from memkit.core.backwards import BackwardEnd
from memkit.device.base import Device
from memkit.errors import LayerOffloadError
from memkit.weights.chunks import LayerChunk, StreamedParameter


class Accumulation(ABC):
    """Sees the gradients of streamed parameters as a backward computes them, and hands over each when it is complete."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.d2h_bytes = 0
        self._tasks: dict[int, BackwardEnd] = {}
        """The backwards under way, each inside of the one before; also those whose end was interrupted."""
        self._is_on_host: Callable[[Tensor], bool] = attrgetter("is_cpu") if device.torch_device.type != "cpu" else _never
        """Tells whether a gradient comes from the host, where a parameter lies while its layer does not run."""
        self._refused_task, self._refusal = _NONE, ""

    @abstractmethod
    def watch(self, chunk: LayerChunk) -> None:
        """Set hooks on those parameters of a layer that require grad now."""

    @abstractmethod
    def unwatch(self, chunk: LayerChunk) -> None:
        """Remove the hooks of a layer. No backward may be running."""

    @abstractmethod
    def _take_left(self, task: int) -> None:
        """Hand over the rest of an ended backward's gradients."""

    @abstractmethod
    def _forget_parts(self, task: int) -> None:
        """Drop the parts of a backward that is over."""

    @abstractmethod
    def _finish(self, has_failed: bool) -> None:
        """End: no backward is running any more. Called again, with `has_failed`, if an interrupt broke it off."""

    @abstractmethod
    def _reset(self) -> None:
        """Drop the gradients of an earlier failed backward whose `_finish` was interrupted."""

    def _ask_each(self, task: int) -> None:  # noqa: B027  # some are asked for each gradient anyway
        """From now on call `_refuse_more` ahead of each gradient of a refused backward."""

    def begin(self, chunks: Sequence[LayerChunk]) -> None:
        for chunk in chunks:
            self.watch(chunk)

    @abstractmethod
    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """Remove all hooks; return storages of host memory that the caller holds, each with a copy that outlives it."""

    def watch_recomputes(self, model: nn.Module) -> None:  # noqa: B027  # not all want to know
        """Call `note_recompute` for modules that do not stream, too. Calling it again does nothing."""

    def note_recompute(self) -> None:  # noqa: B027
        """A forward begins within a backward: a checkpoint may run another backward inside of this one."""

    def note_call(self, chunk: LayerChunk) -> object:
        """Return an object for the graph behind a layer's output to keep alive."""
        return None

    @abstractmethod
    def note_forward(self, chunk: LayerChunk, *, is_followed: bool) -> None:
        """Note the nodes of a layer's forward, while its parameters are in a slot; `is_followed`: its backward is seen."""

    def begin_backward(self, chunk: LayerChunk) -> None:  # noqa: B027
        """A backward reaches an output of a layer."""

    # In a backward

    def _enter_backward(self) -> None:
        task = torch_private.backward_task()
        if task not in self._tasks:
            if task == self._refused_task:
                self._refuse_more()
            self._tasks[task] = backwards.on_end(partial(self._end_backward, task))

    def _refuse_host(self, streamed: StreamedParameter) -> NoReturn:
        task = torch_private.backward_task()
        if task != self._refused_task:
            self._refusal = (
                f'"{streamed.name}" streams, and was computed with outside of its layer, where it lies in host memory: its '
                "gradient comes from there. Do that in the layer's forward (a penalty on its weights), have an optimizer do it "
                "(weight decay), or have this layer stay on the device: name the others by layers="
            )
            self._refused_task = task
            self._ask_each(task)
            backwards.pass_through(self._device.torch_device)
            self._end_backward(task, True)
        self._refuse_more()

    def _refuse_more(self) -> NoReturn:
        raise LayerOffloadError(self._refusal)

    def _end_backward(self, task: int, has_failed: bool) -> None:
        """Hand over the rest when a backward has ended well. If this raises, the backward fails, and this is called again."""
        if task not in self._tasks:
            return
        if not has_failed:
            self._take_left(task)
        self._forget_parts(task)
        if len(self._tasks) == 1:
            self._finish(has_failed)
        del self._tasks[task]

    def reset_interrupted(self) -> None:
        if backwards.join(self._tasks.values()) and self._tasks:
            for task in self._tasks:
                self._forget_parts(task)
            self._reset()
            self._tasks.clear()


def accumulating_node(parameter: Tensor, *, has_modes: bool) -> Any:
    """Return the `AccumulateGrad` node of a parameter: a new one if no live graph has used the parameter as it is now."""
    if not has_modes:
        return get_gradient_edge(parameter).node
    with torch.enable_grad(), torch_private.without_dispatch_modes():
        return get_gradient_edge(parameter).node


def are_modes_on() -> bool:
    return torch_private.num_dispatch_modes() > 0 or not torch.is_grad_enabled()


def refuse_graph(streamed: StreamedParameter) -> NoReturn:
    raise LayerOffloadError(
        f'"{streamed.name}" streams, and its gradient was asked for with create_graph=True, which streamed weights do not '
        "support. Use torch.autograd.grad, or leave this layer on the device"
    )


def sum_of(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two parts of a gradient, in the engine's order: torch adds no dense one to a sparse one."""
    return other + one if one.layout is not torch.strided and other.layout is torch.strided else one + other


_NONE = -2
_never = ().__contains__
"""Returns False without a frame of its own."""
TOKEN = "memkit"
