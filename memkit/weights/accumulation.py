"""Hooks that see the gradients of streamed parameters while a backward runs, and what is done when that ends.

[Note: when a gradient is complete] A parameter that is bound to a slot and back changes its device, which makes torch give it a
new `AccumulateGrad` node each time. A layer that is used twice in one graph then has two nodes, and each brings a part of the
gradient. The engine would have added the parts before it adds their sum to what `grad` had, and floating-point sums depend on
that. So a part is held, on the device, until all others have come; if some do not (another graph is alive, a branch has no
gradient), until the backward is over.

`memkit.weights.layer_accumulation` takes the gradients of a layer together, `memkit.weights.parameter_accumulation` each by
itself. For how a backward ends, and what is done if that is interrupted, see [Note: interrupts of streaming] in
`memkit.weights.streaming`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from memkit import backwards, torch_private
from memkit.backwards import BackwardEnd
from memkit.errors import LayerOffloadError
from memkit.weights.binding import StreamedParameter
from memkit.weights.chunks import LayerChunk


class Made(NamedTuple):
    """A gradient of a parameter, or a part of one, that a backward has computed."""

    streamed: StreamedParameter
    gradient: Tensor


class Accumulation(ABC):
    """Sees the gradients of streamed parameters as a backward computes them, and hands over each when it is complete."""

    def __init__(self) -> None:
        self._tasks: dict[int, BackwardEnd] = {}
        """The backwards under way, each inside of the one before; also those whose end was interrupted."""

    @abstractmethod
    def watch(self, chunk: LayerChunk) -> None:
        """Set hooks on those parameters of a layer that require grad now."""

    @abstractmethod
    def unwatch(self, chunk: LayerChunk) -> None:
        """Remove the hooks of a layer. No backward may be running."""

    @abstractmethod
    def _take_left(self, task: int) -> None:
        """Hand over what is still held of a backward that has ended."""

    @abstractmethod
    def _forget_parts(self, task: int) -> None:
        """Drop what is held of a backward that is over."""

    @abstractmethod
    def _finish(self, has_failed: bool) -> None:
        """Called when no backward is running any more; again, with `has_failed`, if an interrupt broke it off."""

    @abstractmethod
    def _reset(self) -> None:
        """Drop what is left of a backward that has failed some time ago, and for which `_finish` was interrupted."""

    def begin(self, chunks: Sequence[LayerChunk]) -> None:
        """Set hooks on layers."""
        for chunk in chunks:
            self.watch(chunk)

    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """Remove all hooks. No backward may be running. Calling it again finishes a call that was interrupted.

        Returns:
            Pairs of a storage of host memory that the caller still holds, and a copy of it that outlives the host memory.
        """
        return []

    def watch_recomputes(self, model: nn.Module) -> None:  # noqa: B027  # not all want to know
        """Have `note_recompute` called for modules that do not stream as well. Calling it again does nothing."""

    def note_recompute(self) -> None:  # noqa: B027
        """Called when a forward begins within a backward: a checkpoint may run another backward inside of this one."""

    def note_call(self, chunk: LayerChunk) -> object:
        """Called when a layer's forward has an output, before it ends.

        Returns:
            An object that the graph behind the output is to keep alive.
        """
        return None

    @abstractmethod
    def note_forward(self, chunk: LayerChunk, *, is_followed: bool) -> None:
        """Called when a layer's forward is over, while its parameters are still in a slot: note the nodes that it made.

        Args:
            is_followed: whether the output has a graph, which keeps what `note_call` returned and calls `begin_backward`.
        """

    def begin_backward(self, chunk: LayerChunk) -> None:  # noqa: B027
        """Called when a backward reaches an output of a layer."""

    # In a backward

    def _enter_backward(self) -> int:
        """Return the number of the backward that is running; the first time, register for its end."""
        task = torch_private.backward_task()
        if task not in self._tasks:
            self._tasks[task] = backwards.on_end(partial(self._end_backward, task))
        return task

    def _end_backward(self, task: int, has_failed: bool) -> None:
        """Hand over what is left when a backward has ended.

        Where it has failed, gradients are as the engine leaves them: some parameters have theirs, others not. If this raises,
        the backward fails with that error, and this is called again.
        """
        if task not in self._tasks:
            return
        if not has_failed:
            self._take_left(task)
        self._forget_parts(task)
        if len(self._tasks) == 1:
            self._finish(has_failed)
        del self._tasks[task]

    def reset_interrupted(self) -> None:
        """Drop what is left of backwards that were interrupted, and whose end was, too. No forward, nor a backward in this
        thread, may be running."""
        if self._tasks and all(end.is_over for end in self._tasks.values()):
            for task in self._tasks:
                self._forget_parts(task)
            self._reset()
            self._tasks.clear()


def accumulating_node(parameter: Tensor, *, has_modes: bool) -> Any:
    """Return the `AccumulateGrad` node of a parameter: a new one if no live graph has used the parameter as it is now.

    Args:
        has_modes: whether grad mode is off, or a dispatch mode on.
    """
    return backwards.gradient_node(parameter) if has_modes else get_gradient_edge(parameter).node


def are_modes_on() -> bool:
    """Tell whether grad mode is off, or a dispatch mode on."""
    return torch_private.num_dispatch_modes() > 0 or not torch.is_grad_enabled()


def refuse_graph(made: Sequence[Made]) -> None:
    """Raise LayerOffloadError for the first gradient that has a graph of its own, if there is one."""
    for streamed, gradient in made:
        if gradient.requires_grad:
            raise LayerOffloadError(
                f'"{streamed.name}" streams, and its gradient was asked for with create_graph=True, which streamed weights '
                "do not support. Use torch.autograd.grad, or leave this layer on the device"
            )


def sum_of(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two parts of a gradient, as the engine adds them: torch adds no dense one to a sparse one."""
    return other + one if one.layout is not torch.strided and other.layout is torch.strided else one + other
