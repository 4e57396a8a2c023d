"""Gradients of streamed parameters: taken to host memory as they are made, where an optimizer finds them.

While a backward runs, the engine adds to `Parameter.grad` on the device. So what was there before is set aside, what is made is
taken away, and only when the backward is over the sum is put there, on the host as the parameter itself then.

[Note: when a gradient is complete] A parameter that is bound to a slot and back changes its device, which makes torch give it a
new `AccumulateGrad` node each time. A layer that is used twice in one graph then has two nodes, and each brings a part of the
gradient. The parts are added on the device, as the engine would have done, until each node of the graphs that are alive has
brought its own; if some do not (another graph is alive, a branch has no gradient), until the backward is over.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from memkit.device.base import Device, Event
from memkit.errors import LayerOffloadError
from memkit.hooks import HookSet, after_backward, backward_task, gradient_node, num_users
from memkit.transfer.arena import ALIGNMENT_BYTES, Arena, Span
from memkit.transfer.lanes import lanes_of
from memkit.weights.extents import LayerExtent, StreamedParameter

_TOKEN = "memkit"


class _Token:
    """Stands for one node that brings gradients: it lives as long as the node."""

    __slots__ = ("__weakref__", "task")

    def __init__(self) -> None:
        self.task = -1
        """The last backward in which the node has brought some."""


class _Buffer:
    """Pinned host memory for one gradient: `span`, or a part of one."""

    __slots__ = ("span", "storage")

    def __init__(self, span: Span) -> None:
        self.span = span
        assert span.whole is not None
        self.storage = torch.frombuffer(span.whole.numpy(), dtype=torch.uint8).untyped_storage()

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds a gradient that lies here."""
        return num_users(self.storage) == 1


class _Gradient:
    """The gradient of one parameter."""

    __slots__ = ("buffers", "kept", "num_bytes", "parts", "tokens", "total")

    def __init__(self, span: Span) -> None:
        self.num_bytes = span.num_bytes
        self.buffers = [_Buffer(span)]
        self.tokens = weakref.WeakSet[_Token]()
        self.parts: dict[int, Tensor] = {}
        """On the device: what each backward has made so far."""
        self.kept: Tensor | None = None
        """What was in `grad` before."""
        self.total: Tensor | None = None
        """In host memory: all that was brought there, or is on its way."""

    def is_complete(self, task: int) -> bool:
        """See [Note: when a gradient is complete]."""
        return all(token.task == task for token in self.tokens)


class HostGradients:
    """Takes the gradients of streamed parameters to the host.

    Args:
        device: where they are made.
        arena: where they go.
        extents: the layers that stream.
        hooks: where the hooks are noted.
    """

    def __init__(self, device: Device, arena: Arena, extents: Sequence[LayerExtent], hooks: HookSet) -> None:
        self._device = device
        self._arena = arena
        self._lanes = lanes_of(device)
        self._hooks = hooks
        self._gradients: dict[StreamedParameter, _Gradient] = {}
        self._watched: dict[StreamedParameter, Tensor] = {}
        self._tasks: list[int] = []
        """The backwards that run, each within the one before."""
        self._in_flight: deque[tuple[torch.UntypedStorage, Event]] = deque()
        """Gradients that a copy still reads, oldest first: they go back to the stream when it has waited for that."""
        self._in_flight_bytes = 0
        self._window_bytes = 2 * max((extent.num_bytes for extent in extents), default=0)
        self._last: Event | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="memkit-grad")
        self._additions: list[Future[None]] = []
        self.d2h_bytes = 0
        self._spans: list[Span] = []
        """What was taken of the arena, and is given back in the end."""
        trained = [[item for item in extent.parameters if item.parameter.requires_grad] for extent in extents]
        self._take_memory([parameters for parameters in trained if parameters])
        for extent in extents:
            self.watch(extent)

    def _take_memory(self, groups: Sequence[Sequence[StreamedParameter]]) -> None:
        """Take memory for the gradients of groups of parameters, each group's pinned as one."""
        ends = [list(accumulate((_room_bytes(item) for item in group), initial=0)) for group in groups]
        spans = self._arena.take_pinned_as_one([found[-1] for found in ends])
        self._spans += spans
        for group, starts, span in zip(groups, ends, spans, strict=True):
            for item, start in zip(group, starts, strict=False):
                self._gradients[item] = _Gradient(span.part(start, start + _gradient_bytes(item)))

    def watch(self, extent: LayerExtent) -> None:
        """See the gradients of a layer, of those of its parameters that require one now."""
        for streamed in extent.parameters:
            parameter = streamed.parameter
            if parameter.requires_grad and self._watched.get(streamed) is not parameter:
                self._watched[streamed] = parameter
                if streamed not in self._gradients:
                    self._take_memory([[streamed]])
                self._hooks.around_accumulation(
                    parameter,
                    before=self._bound(self._before, streamed),
                    after=self._bound(self._after, streamed),
                )

    def _bound(self, method: Callable[[StreamedParameter], None], streamed: StreamedParameter) -> Callable[[], None]:
        return lambda: method(streamed)

    def note_forward(self, extent: LayerExtent) -> None:
        """A layer's forward is over, and its parameters are bound to a slot still: note the nodes that it may have made."""
        for streamed in extent.parameters:
            gradient = self._gradients.get(streamed)
            if gradient is None or not streamed.parameter.requires_grad:
                continue
            node = gradient_node(streamed.parameter)
            if _TOKEN not in node.metadata:
                token = node.metadata[_TOKEN] = _Token()
                gradient.tokens.add(token)
                node.register_prehook(_Firing(token))

    def close(self) -> None:
        """Let go of the hooks' state and the host memory; gradients stay where they are, in memory of their own."""
        self._threads.shutdown()
        for streamed in self._gradients:
            grad = streamed.parameter.grad
            if grad is not None:
                streamed.parameter.grad = None
                streamed.parameter.grad = grad.clone() if grad.layout is torch.strided else grad
        self._gradients.clear()
        for span in self._spans:
            self._arena.give(span)

    # In a backward

    def _before(self, streamed: StreamedParameter) -> None:
        """The engine has a gradient of a parameter, and is about to add it to `grad`."""
        task, gradient = backward_task(), self._gradients[streamed]
        if task not in self._tasks:
            self._tasks.append(task)
            after_backward(_Ending(self, task))
        if streamed.parameter.grad is not None:
            gradient.kept, streamed.parameter.grad = streamed.parameter.grad, None

    def _after(self, streamed: StreamedParameter) -> None:
        """The engine has put a gradient, or a part of one, to `grad`."""
        gradient, made = self._gradients[streamed], streamed.parameter.grad
        streamed.parameter.grad = None
        if made is None:
            return
        if made.requires_grad:
            raise LayerOffloadError(
                f'"{streamed.name}" streams, and its gradient was asked for with create_graph=True, which a copy in host '
                "memory cannot have. Use torch.autograd.grad, or leave this layer on the device"
            )
        task = backward_task()
        part = gradient.parts.get(task)
        gradient.parts[task] = made if part is None else part + made
        if gradient.is_complete(task):
            self._send(streamed, gradient, task)

    def end_backward(self, task: int, *, has_failed: bool = False) -> None:
        """A backward has ended: what is left goes now; once no other runs, all is put to where it is looked for.

        Where it has failed, gradients are as the engine leaves them: of some parameters with what it has made.
        """
        for streamed, gradient in self._gradients.items():
            if has_failed:
                gradient.parts.pop(task, None)
            elif task in gradient.parts:
                self._send(streamed, gradient, task)
        self._tasks.remove(task)
        if not self._tasks:
            self._await()
            for streamed, gradient in self._gradients.items():
                self._put(streamed, gradient)

    def _put(self, streamed: StreamedParameter, gradient: _Gradient) -> None:
        """Let `grad` be the sum, in host memory."""
        found = gradient.total if gradient.total is not None else gradient.kept
        gradient.total = gradient.kept = None
        if found is not None:
            streamed.parameter.grad = found

    def _send(self, streamed: StreamedParameter, gradient: _Gradient, task: int) -> None:
        """Take what a backward has made to the host, behind what was brought there before."""
        part = gradient.parts.pop(task)
        if gradient.total is None:
            gradient.total, gradient.kept = gradient.kept, None
        if part.layout is not torch.strided:
            self._await()
            brought = part.to("cpu")
            gradient.total = brought if gradient.total is None else gradient.total + brought
            return
        if gradient.total is None:
            buffer = next((buffer for buffer in gradient.buffers if buffer.is_idle), None)
            if buffer is None:  # somebody keeps the gradient of an earlier step
                self._spans += self._arena.take_pinned_as_one([gradient.num_bytes])
                buffer = _Buffer(self._spans[-1])
                gradient.buffers.append(buffer)
            self._copy_out(streamed, part, buffer.span)
            gradient.total = streamed.over_gradient(buffer.storage)
            return
        span = self._arena.take(gradient.num_bytes)
        landed = self._copy_out(streamed, part, span)
        self._additions.append(self._threads.submit(self._add, streamed, gradient.total, span, landed))

    def _add(self, streamed: StreamedParameter, total: Tensor, span: Span, landed: Event) -> None:
        """Add a gradient that has come to host memory; runs on a thread of its own, one after the other."""
        self._device.synchronize(landed)
        assert span.whole is not None
        brought = streamed.over_gradient(torch.frombuffer(span.whole.numpy(), dtype=torch.uint8).untyped_storage())
        with torch.no_grad():
            total.add_(brought)
        del brought
        self._arena.give(span)

    def _copy_out(self, streamed: StreamedParameter, made: Tensor, span: Span) -> Event:
        device, stream = self._device, self._device.current_stream()
        storage = made.untyped_storage()
        if storage.nbytes() != span.num_bytes or made.stride() != streamed.gradient_stride:
            packed = streamed.over_gradient(device.allocate(span.num_bytes))
            packed.copy_(made)
            storage = packed.untyped_storage()
        device.note_written(storage, made._version)
        passage = self._lanes.copy_out(storage, span, after=device.record_event(stream, timed=False))
        self._in_flight.append((storage, passage.done))
        self._in_flight_bytes += span.num_bytes
        while self._in_flight and self._in_flight_bytes > self._window_bytes:
            self._settle_oldest()
        self._last = passage.done
        self.d2h_bytes += span.num_bytes
        return passage.done

    def _settle_oldest(self) -> None:
        storage, done = self._in_flight.popleft()
        self._device.wait_event(self._device.current_stream(), done)
        self._in_flight_bytes -= storage.nbytes()

    def _await(self) -> None:
        """Make the host wait until all that was sent has come."""
        if self._last is not None:
            self._device.synchronize(self._last)
            self._last = None
        while self._in_flight:
            self._settle_oldest()
        additions, self._additions = self._additions, []
        for addition in additions:
            addition.result()


def _gradient_bytes(streamed: StreamedParameter) -> int:
    return streamed.parameter.numel() * streamed.dtype.itemsize


def _room_bytes(streamed: StreamedParameter) -> int:
    return -(-_gradient_bytes(streamed) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Ending:
    """Called when a backward has ended well. If it fails, the engine drops it, which tells as much."""

    __slots__ = ("_gradients", "_task")

    def __init__(self, gradients: HostGradients, task: int) -> None:
        self._gradients: HostGradients | None = gradients
        self._task = task

    def __call__(self) -> None:
        gradients, self._gradients = self._gradients, None
        if gradients is not None:
            gradients.end_backward(self._task)

    def __del__(self) -> None:
        if self._gradients is not None:
            self._gradients.end_backward(self._task, has_failed=True)


class _Firing:
    """Called when a node is about to bring its gradient."""

    __slots__ = ("_token",)

    def __init__(self, token: _Token) -> None:
        self._token = token

    def __call__(self, _: Any) -> None:
        self._token.task = backward_task()
