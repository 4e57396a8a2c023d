"""When the gradient of a streamed parameter is complete, so that it may be taken to the host, or stepped with.

[Note: when a gradient is complete] A parameter that is bound to a slot and back changes its device, which makes torch give it a
new `AccumulateGrad` node each time. A layer that is used twice in one graph then has two nodes, and each brings a part of the
gradient. The parts are added on the device, as the engine would have done, until each node of the graphs that are alive has
brought its own; if some do not (another graph is alive, a branch has no gradient), until the backward is over.

For how a backward ends, and what is done if that is interrupted, see [Note: interrupts of streaming] in
`memkit.weights.streaming`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from memkit import backwards, torch_private
from memkit.backwards import BackwardEnd
from memkit.errors import LayerOffloadError
from memkit.hooks import HookSet
from memkit.weights.binding import StreamedParameter
from memkit.weights.chunks import LayerChunk

_TOKEN = "memkit"


class _Token:
    """Stands for one node that brings gradients: it lives as long as that, and is called when it is about to bring some."""

    task = -1
    """The last backward in which the node has brought some."""

    def __call__(self, _: Any) -> None:
        self.task = torch_private.backward_task()


class _Sum:
    """What has come of one parameter's gradient."""

    __slots__ = ("due", "hooks", "is_watched", "parameter", "parts", "tokens")

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        """The one that is watched."""
        self.hooks = HookSet()
        self.is_watched = False
        """Whether all hooks are set."""
        self.due = -1
        """The backward that is about to put a gradient to `grad`, or has done so; -1 once it is taken."""
        self.tokens = weakref.WeakSet[_Token]()
        self.parts: dict[int, Tensor] = {}
        """On the device: what each backward has made so far."""

    def is_complete(self, task: int) -> bool:
        """See [Note: when a gradient is complete]."""
        for token in self.tokens:  # noqa: SIM110  # a generator would be one more frame, for each gradient
            if token.task != task:
                return False
        return True


class Accumulation(ABC):
    """Sees the gradients of streamed parameters as they are made, and hands over each when it is complete.

    `Parameter.grad` holds nothing of them meanwhile.
    """

    _steps = False
    """Whether parameters are written to when their gradients are handed over."""

    def __init__(self) -> None:
        self._sums: dict[StreamedParameter, _Sum] = {}
        self._tasks: dict[int, BackwardEnd] = {}
        """The backwards that run, each within the one before, or have ended by an interrupt of what was done then."""

    @abstractmethod
    def _admit(self, streamed: StreamedParameter) -> None:
        """A parameter is watched from now on."""

    @abstractmethod
    def _set_aside(self, streamed: StreamedParameter, grad: Tensor) -> None:
        """A backward is about to bring a gradient of a parameter whose `grad` was this; it is None now."""

    @abstractmethod
    def _take(self, streamed: StreamedParameter, made: Tensor) -> None:
        """The gradient that a backward has made is complete. It is on the device."""

    @abstractmethod
    def _finish(self, has_failed: bool) -> None:
        """No backward runs any more. What an interrupt has kept from being done here is done with `has_failed`."""

    @abstractmethod
    def _reset(self) -> None:
        """A backward has failed, some time ago, and `_finish` has not come to its end: what is left of it is not to be used."""

    def watch_recomputes(self, model: nn.Module) -> None:  # noqa: B027  # not all want to know
        """See the forwards within backwards of what does not stream as well. Calling it again does nothing."""

    def note_recompute(self) -> None:  # noqa: B027
        """A forward begins within a backward, which a checkpoint may run another backward of before that one is over."""

    def watch(self, chunk: LayerChunk) -> None:
        """See the gradients of a layer, of those of its parameters that require one now."""
        for streamed in chunk.binding.parameters:
            parameter, known = streamed.parameter, self._sums.get(streamed)
            if parameter.requires_grad and (known is None or known.parameter is not parameter or not known.is_watched):
                if known is None:
                    self._admit(streamed)
                else:
                    known.hooks.remove()
                made = self._sums[streamed] = _Sum(parameter)
                before, after = partial(self._before, streamed), partial(self._after, streamed)
                made.hooks.around_accumulation(parameter, before=before, after=after, steps=self._steps)
                made.is_watched = True

    def unwatch(self, chunk: LayerChunk) -> None:
        """Leave the gradients of a layer to autograd and the caller. No backward runs."""
        for streamed in chunk.parameters:
            known = self._sums.get(streamed)
            if known is not None:
                known.hooks.remove()
                del self._sums[streamed]

    def begin(self, chunks: Sequence[LayerChunk]) -> None:
        """See the gradients of layers from now on."""
        for chunk in chunks:
            self.watch(chunk)

    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """See no gradients any more. No backward runs. Calling it again does what an interrupt has kept from being done.

        Returns:
            Storages of host memory that the caller holds, each with one of the same bytes.
        """
        for known in self._sums.values():
            known.hooks.remove()
        self._sums.clear()
        return []

    def note_forward(self, chunk: LayerChunk) -> None:
        """A layer's forward is over, and its parameters are bound to a slot still: note the nodes that it may have made."""
        has_modes = torch_private.num_dispatch_modes() > 0 or not torch.is_grad_enabled()
        for streamed in chunk.binding.parameters:
            known, parameter = self._sums.get(streamed), streamed.parameter
            if known is None or not parameter.requires_grad:
                continue
            node: Any = backwards.gradient_node(parameter) if has_modes else get_gradient_edge(parameter).node
            if _TOKEN not in node.metadata:
                token = _Token()
                known.tokens.add(token)
                node.register_prehook(token)
                node.metadata[_TOKEN] = token

    # In a backward

    def _enter_backward(self) -> int:
        """Return the backward that runs; the first time, have its end seen."""
        task = torch_private.backward_task()
        if task not in self._tasks:
            self._tasks[task] = backwards.on_end(partial(self._end_backward, task))
        return task

    def _before(self, streamed: StreamedParameter, _: Tensor) -> None:
        """The engine has a gradient of a parameter, and is about to add it to `grad`."""
        task = torch_private.backward_task()
        if task not in self._tasks:
            self._enter_backward()
        grad = streamed.parameter.grad
        if grad is not None:
            self._set_aside(streamed, grad)
            streamed.parameter.grad = None
        self._sums[streamed].due = task

    def _after(self, streamed: StreamedParameter, _: Tensor) -> None:
        """The engine has put a gradient, or a part of one, to `grad`."""
        task, known, made = torch_private.backward_task(), self._sums[streamed], streamed.parameter.grad
        streamed.parameter.grad = None
        known.due = -1
        if made is None:
            return
        if made.requires_grad:
            raise LayerOffloadError(
                f'"{streamed.name}" streams, and its gradient was asked for with create_graph=True, which streamed weights '
                "do not support. Use torch.autograd.grad, or leave this layer on the device"
            )
        part = known.parts.get(task)
        known.parts[task] = made if part is None else sum_of(part, made)
        if known.is_complete(task):
            self._take(streamed, known.parts.pop(task))

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

    def _forget_parts(self, task: int) -> None:
        for streamed, known in self._sums.items():
            known.parts.pop(task, None)
            if known.due == task:
                streamed.parameter.grad, known.due = None, -1

    def reset_interrupted(self) -> None:
        """Drop what is left of backwards that were interrupted, and again when they ended. No forward runs, nor a backward in
        this thread."""
        if self._tasks and all(end.is_over for end in self._tasks.values()):
            for task in self._tasks:
                self._forget_parts(task)
            self._reset()
            self._tasks.clear()

    def _take_left(self, task: int) -> None:
        """Hand over what a backward has made of gradients of which there might have come more."""
        for streamed, known in self._sums.items():
            part = known.parts.pop(task, None)
            if part is not None:
                self._take(streamed, part)


def sum_of(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two parts of a gradient, as the engine adds them: torch adds no dense one to a sparse one."""
    return other + one if one.layout is not torch.strided and other.layout is torch.strided else one + other
