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
    """What a backward has made of a parameter's gradient."""

    streamed: StreamedParameter
    gradient: Tensor


class Accumulation(ABC):
    """Sees the gradients of streamed parameters as they are made, and hands over each when it is complete."""

    def __init__(self) -> None:
        self._tasks: dict[int, BackwardEnd] = {}
        """The backwards that run, each within the one before, or have ended by an interrupt of what was done then."""

    @abstractmethod
    def watch(self, chunk: LayerChunk) -> None:
        """See the gradients of a layer, of those of its parameters that require one now."""

    @abstractmethod
    def unwatch(self, chunk: LayerChunk) -> None:
        """Leave the gradients of a layer to autograd and the caller. No backward runs."""

    @abstractmethod
    def _take_left(self, task: int) -> None:
        """A backward has come to its end: hand over what it has made and is held still."""

    @abstractmethod
    def _forget_parts(self, task: int) -> None:
        """A backward is over: what is held of it is not to be used."""

    @abstractmethod
    def _finish(self, has_failed: bool) -> None:
        """No backward runs any more. What an interrupt has kept from being done here is done with `has_failed`."""

    @abstractmethod
    def _reset(self) -> None:
        """A backward has failed, some time ago, and `_finish` has not come to its end: what is left of it is not to be used."""

    def begin(self, chunks: Sequence[LayerChunk]) -> None:
        """See the gradients of layers from now on."""
        for chunk in chunks:
            self.watch(chunk)

    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """See no gradients any more. No backward runs. Calling it again does what an interrupt has kept from being done.

        Returns:
            Storages of host memory that the caller holds, each with one of the same bytes.
        """
        return []

    def watch_recomputes(self, model: nn.Module) -> None:  # noqa: B027  # not all want to know
        """See the forwards within backwards of what does not stream as well. Calling it again does nothing."""

    def note_recompute(self) -> None:  # noqa: B027
        """A forward begins within a backward, which a checkpoint may run another backward of before that one is over."""

    def note_call(self, chunk: LayerChunk) -> object:
        """A layer's forward has an output, and is about to end.

        Returns:
            What is to live as long as the graph behind the output.
        """
        return None

    @abstractmethod
    def note_forward(self, chunk: LayerChunk, *, is_followed: bool) -> None:
        """A layer's forward is over, and its parameters are bound to a slot still: note the nodes that it may have made.

        Args:
            is_followed: whether what `note_call` has returned lives as long as the graph, and `begin_backward` is called.
        """

    def begin_backward(self, chunk: LayerChunk) -> None:  # noqa: B027
        """The backward has come to an output of a layer."""

    # In a backward

    def _enter_backward(self) -> int:
        """Return the backward that runs; the first time, have its end seen."""
        task = torch_private.backward_task()
        if task not in self._tasks:
            self._tasks[task] = backwards.on_end(partial(self._end_backward, task))
        return task

    def _end_backward(self, task: int, has_failed: bool) -> None:
        """A backward has ended: what is left is handed over now.

        Where it has failed, gradients are as the engine leaves them: of some parameters with what it has made. If this raises,
        the backward has failed by that, and this is called again.
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
        """Drop what is left of backwards that were interrupted, and again when they ended. No forward runs, nor a backward in
        this thread."""
        if self._tasks and all(end.is_over for end in self._tasks.values()):
            for task in self._tasks:
                self._forget_parts(task)
            self._reset()
            self._tasks.clear()


def accumulating_node(parameter: Tensor, *, has_modes: bool) -> Any:
    """Return the node that adds to a parameter's gradient: a new one if no graph that is alive has used it as it is now.

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
