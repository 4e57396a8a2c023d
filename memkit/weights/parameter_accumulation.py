"""Gradients of streamed parameters, each handed over as soon as it is complete.

While a backward runs, `Parameter.grad` holds nothing of them but within the moment in which the engine adds to it. For when a
gradient is complete, see [Note: when a gradient is complete] in `memkit.weights.accumulation`.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device.base import Device
from memkit.hooks import HookSet
from memkit.weights.accumulation import Accumulation, Made, accumulating_node, are_modes_on, refuse_graph, sum_of
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


class ParameterAccumulation(Accumulation):
    """Hands over each gradient when it is complete.

    Args:
        device: where they are made.
    """

    _steps = False
    """Whether parameters are written to when their gradients are handed over."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._sums: dict[StreamedParameter, _Sum] = {}

    @abstractmethod
    def _set_aside(self, streamed: StreamedParameter, grad: Tensor) -> None:
        """A backward is about to bring a gradient of a parameter whose `grad` was this; it is None now."""

    @abstractmethod
    def _take(self, streamed: StreamedParameter, made: Tensor) -> None:
        """The gradient that a backward has made is complete. It is on the device."""

    def watch(self, chunk: LayerChunk) -> None:
        for streamed in chunk.binding.parameters:
            parameter, known = streamed.parameter, self._sums.get(streamed)
            if parameter.requires_grad and (known is None or known.parameter is not parameter or not known.is_watched):
                if known is not None:
                    known.hooks.remove()
                made = self._sums[streamed] = _Sum(parameter)
                before, after = partial(self._before, streamed), partial(self._after, streamed)
                made.hooks.around_accumulation(parameter, before=before, after=after, steps=self._steps)
                made.is_watched = True

    def unwatch(self, chunk: LayerChunk) -> None:
        for streamed in chunk.parameters:
            known = self._sums.get(streamed)
            if known is not None:
                known.hooks.remove()
                del self._sums[streamed]

    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        for known in self._sums.values():
            known.hooks.remove()
        self._sums.clear()
        return super().close()

    def note_forward(self, chunk: LayerChunk, *, is_followed: bool) -> None:
        has_modes = are_modes_on()
        for streamed in chunk.binding.parameters:
            known, parameter = self._sums.get(streamed), streamed.parameter
            if known is None or not parameter.requires_grad:
                continue
            node = accumulating_node(parameter, has_modes=has_modes)
            if _TOKEN not in node.metadata:
                token = _Token()
                known.tokens.add(token)
                node.register_prehook(token)
                node.metadata[_TOKEN] = token

    # In a backward

    def _before(self, streamed: StreamedParameter, made: Tensor) -> None:
        """The engine has a gradient of a parameter, and is about to add it to `grad`."""
        if self._is_on_host(made):
            self._refuse_host(streamed)
        task = torch_private.backward_task()
        if task == self._refused_task:
            self._refuse_more()
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
            refuse_graph([Made(streamed, made)])
        part = known.parts.get(task)
        known.parts[task] = made if part is None else sum_of(part, made)
        if known.is_complete(task):
            self._take(streamed, known.parts.pop(task))

    def _ask_each(self, task: int) -> None:
        pass  # that is done for each gradient

    def _forget_parts(self, task: int) -> None:
        for streamed, known in self._sums.items():
            known.parts.pop(task, None)
            if known.due == task:
                streamed.parameter.grad, known.due = None, -1

    def _take_left(self, task: int) -> None:
        for streamed, known in self._sums.items():
            part = known.parts.pop(task, None)
            if part is not None:
                self._take(streamed, part)
