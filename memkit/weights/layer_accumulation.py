"""Gradients of streamed parameters, those of a layer handed over together.

[Note: gradients by the layer] One layer at a time is *open* in a backward: from when the backward reaches it until it reaches
the next one, or ends. When a layer is opened, the `grad` of each of its parameters is set aside; the engine accumulates on the
device as usual; and when the layer is closed, all its gradients are taken at once. They are complete by then, since the engine
runs the nodes of a later forward first, and nodes that accumulate a gradient as soon as they can run. There are exceptions:
branches, a checkpoint inside of a layer that runs a backward of its own, an output that does not lead to the loss. Then a
gradient comes while another layer is open, or none. A hook on each parameter sees this before the gradient is added, and opens
the layer. What was taken of the layer before is then added to.

Whether a gradient is complete (see the note in `memkit.weights.accumulation`) is a question only where several graphs over the
layer are alive: it is complete once it has come from each of them. A call of the layer whose outputs have a graph counts for as
long as that graph is alive; any other call (of a module inside of the layer, or with outputs that are not tensors) for as long
as each of its nodes. A graph may outlive the nodes of all outputs, if the outputs are dropped, or are views and written to,
while something that was computed inside leads to the loss. So once a layer has been called again before a backward has reached
its last call, the nodes of all its later calls are counted.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device.base import Device, Stream
from memkit.hooks import HookSet
from memkit.weights.accumulation import Accumulation, Made, accumulating_node, are_modes_on, refuse_graph, sum_of
from memkit.weights.binding import StreamedParameter
from memkit.weights.chunks import LayerChunk

_TOKEN = "memkit"
_NOT_WAITING = -2


class _Alive:
    """Stands for a source of gradients: one node, or, by its weak references, all graphs behind a layer's outputs."""

    __slots__ = ("__weakref__",)


class _Layer:
    """What is known of the gradients of a layer."""

    def __init__(self, chunk: LayerChunk) -> None:
        self.chunk = chunk
        self.streamed: tuple[StreamedParameter, ...] = ()
        """Those that are watched."""
        self.parameters: tuple[Tensor, ...] = ()
        """What these are."""
        self.tensors: Sequence[Tensor] | None = None
        """What the layer's parameters were when that was found out; None until all hooks are set."""
        self.requires_grad: tuple[bool, ...] = ()
        """And which of them required grad."""
        self.hooks = HookSet()
        self.task = -1
        """The backward whose gradients `grad` is, or is about to be; -1 while the layer is not under way."""
        self.stream_number = 0
        """The stream on which these are made."""
        self.stream: Stream
        self.elsewhere: dict[StreamedParameter, Stream] = {}
        """Those of which something was made on another one."""
        self.calls = _Alive()
        """What the graph behind each of the layer's calls has a weak reference of its own to, for as long as it is alive."""
        self.nodes: dict[StreamedParameter, weakref.WeakSet[_Alive]] = {}
        """Of other calls, the nodes."""
        self.waits_in = _NOT_WAITING
        """The backward, -1 outside of one, in which the layer's last call was that none has come to yet."""
        self.has_nodes_counted = False
        """Whether the nodes of all its calls are counted, since several come before a backward does."""
        self.is_shared = False
        """Whether several graphs may bring gradients in the backward that is under way."""
        self.num_come: Counter[tuple[int, StreamedParameter]] = Counter()
        """How many nodes have brought some in each backward, where several may."""
        self.parts: dict[int, dict[StreamedParameter, Tensor]] = {}
        """On the device: what each backward has made so far, if more may come."""

    def has_several_graphs(self) -> bool:
        """Tell whether several graphs may bring gradients of a parameter."""
        if weakref.getweakrefcount(self.calls) > 1:
            return True
        return bool(self.nodes) and any(self.num_alive(streamed) > 1 for streamed in self.nodes)

    def num_alive(self, streamed: StreamedParameter) -> int:
        """Return how many nodes may bring a parameter's gradient."""
        return weakref.getweakrefcount(self.calls) + len(self.nodes.get(streamed, ()))

    def add_part(self, task: int, streamed: StreamedParameter, made: Tensor) -> None:
        """Hold what a backward has made, added to what is held of it."""
        parts = self.parts.setdefault(task, {})
        part = parts.get(streamed)
        parts[streamed] = made if part is None else sum_of(part, made)


class LayerAccumulation(Accumulation):
    """Hands over the gradients of a layer together: see [Note: gradients by the layer].

    Args:
        device: where they are made.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._has_new_nodes = device.torch_device.type != "cpu"
        """Whether a parameter has another node once it has left a slot: see [Note: when a gradient is complete]."""
        self._watched: dict[LayerChunk, _Layer] = {}
        self._layer: _Layer | None = None
        """The layer that is under way."""
        self._lock = threading.RLock()
        """The engine has a thread for each device."""

    @abstractmethod
    def _admit(self, parameters: Sequence[StreamedParameter]) -> None:
        """Parameters of a layer are watched from now on."""

    @abstractmethod
    def _set_aside(self, streamed: StreamedParameter, grad: Tensor) -> None:
        """A backward is about to bring a gradient of a parameter whose `grad` was this; it is None now."""

    @abstractmethod
    def _prepare(self, chunk: LayerChunk) -> None:
        """A backward is about to bring the gradients of a layer."""

    @abstractmethod
    def _take(self, made: Sequence[Made]) -> None:
        """Gradients of a layer are complete that a backward has made, on the current stream."""

    def _take_whole(self, parameters: tuple[StreamedParameter, ...], gradients: Sequence[Tensor | None]) -> bool:
        """The same, of all parameters of a layer that are watched, and they are complete. This may leave them to `_take`, and
        does where they are not as they were the last time: then nothing was done.

        Args:
            parameters: the same tuple each time.
            gradients: of each; None where nothing has come.

        Returns:
            Whether they were taken.
        """
        return False

    def watch(self, chunk: LayerChunk) -> None:
        binding, layer = chunk.binding, self._watched.get(chunk)
        if layer is None:
            layer = self._watched[chunk] = _Layer(chunk)
        requires_grad = tuple(binding.requires_grad())
        if layer.tensors is binding.tensors and layer.requires_grad == requires_grad and not binding.wrappers:
            return
        streamed = tuple(item for item in binding.parameters if item.parameter.requires_grad)
        if (
            layer.tensors is not binding.tensors
            or len(streamed) != len(layer.streamed)
            or not all(map(is_, streamed, layer.streamed))
        ):
            layer.tensors = None
            if layer.task != -1:
                self._collect(layer)
            layer.hooks.remove()
            self._admit(streamed)
            layer.streamed, layer.parameters = streamed, tuple(item.parameter for item in streamed)
            for item in streamed:
                layer.hooks.before_accumulation(item.parameter, self._arrives(layer, item))
        layer.tensors, layer.requires_grad = binding.tensors, requires_grad

    def _arrives(self, layer: _Layer, streamed: StreamedParameter) -> Callable[[Tensor], None]:
        """Return what is called when the engine is about to add to a parameter's gradient."""
        stream_number, is_on_host = self._device.stream_number, self._is_on_host

        def arrives(grad: Tensor) -> None:
            if is_on_host(grad):
                self._refuse_host(streamed)
            if layer.task != torch_private.backward_task() or layer.is_shared or layer.stream_number != stream_number():
                self._note_arrival(layer, streamed)

        return arrives

    def unwatch(self, chunk: LayerChunk) -> None:
        layer = self._watched.get(chunk)
        if layer is not None:
            layer.hooks.remove()
            del self._watched[chunk]

    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        for layer in self._watched.values():
            layer.hooks.remove()
        self._watched.clear()
        self._layer = None
        return super().close()

    def note_call(self, chunk: LayerChunk) -> object:
        layer = self._watched.get(chunk)
        if layer is None or not self._has_new_nodes or layer.has_nodes_counted:
            return None
        return weakref.ref(layer.calls, _nothing)  # torn down with the graph, without a call of a Python function

    def note_forward(self, chunk: LayerChunk, *, is_followed: bool) -> None:
        layer = self._watched.get(chunk)
        if layer is None or not self._has_new_nodes:
            return
        if is_followed and not layer.has_nodes_counted:
            task = torch_private.backward_task()
            layer.has_nodes_counted = layer.waits_in == task
            layer.waits_in = task
            return
        has_modes = are_modes_on()
        for streamed in layer.streamed:
            if streamed.parameter.requires_grad:
                node = accumulating_node(streamed.parameter, has_modes=has_modes)
                if _TOKEN not in node.metadata:
                    token = node.metadata[_TOKEN] = _Alive()
                    layer.nodes.setdefault(streamed, weakref.WeakSet()).add(token)

    # In a backward

    def begin_backward(self, chunk: LayerChunk) -> None:
        layer = self._watched.get(chunk)
        if layer is not None:
            task = torch_private.backward_task()
            layer.waits_in = _NOT_WAITING
            if layer.task != task:
                with self._lock:
                    if task == self._refused_task:
                        self._refuse_more()
                    self._open(layer, task)

    def _note_arrival(self, layer: _Layer, streamed: StreamedParameter) -> None:
        """Handle a gradient that comes while its layer is not open, or that is one of several parts."""
        with self._lock:
            task = torch_private.backward_task()
            if task == self._refused_task:
                self._refuse_more()
            if layer.task != task:
                self._open(layer, task)
            if layer.is_shared:
                layer.num_come[task, streamed] += 1
                made = streamed.parameter.grad
                if made is not None:  # a part that is to be added to those before it first
                    streamed.parameter.grad = None
                    layer.add_part(task, streamed, made)
            if layer.stream_number != self._device.stream_number():
                layer.elsewhere[streamed] = self._device.current_stream()

    def _open(self, layer: _Layer, task: int) -> None:
        """Open a layer, and close the one that is open."""
        if task not in self._tasks:
            self._enter_backward()
        if self._layer is not None:
            self._collect(self._layer)
        self._prepare(layer.chunk)
        if any(map(is_not, map(_grad_of, layer.parameters), repeat(None))):
            for streamed, grad in zip(layer.streamed, map(_grad_of, layer.parameters), strict=True):
                if grad is not None:
                    self._set_aside(streamed, grad)
                    streamed.parameter.grad = None
        layer.is_shared = layer.has_several_graphs()
        layer.stream_number, layer.stream = self._device.stream_number(), self._device.current_stream()
        self._layer = layer
        layer.task = task

    def _collect(self, layer: _Layer) -> None:
        """Close a layer: take the gradients that have come."""
        task, self._layer = layer.task, None
        if task == -1:
            return
        gradients = [*map(_grad_of, layer.parameters)]
        deque(map(setattr, layer.parameters, repeat("grad"), repeat(None)), maxlen=0)
        layer.task = -1
        elsewhere, is_here = layer.elsewhere, layer.stream_number == self._device.stream_number()
        if is_here and not (elsewhere or layer.is_shared or layer.parts) and self._take_whole(layer.streamed, gradients):
            return
        made = [Made(one, grad) for one, grad in zip(layer.streamed, gradients, strict=True) if grad is not None]
        if is_here and not elsewhere:
            self._hand_over(layer, task, made)
            return
        layer.elsewhere = {}
        for stream in {layer.stream: None, **dict.fromkeys(elsewhere.values())}:
            with self._device.on_stream(stream):
                self._hand_over(layer, task, [one for one in made if elsewhere.get(one.streamed, layer.stream) == stream])

    def _hand_over(self, layer: _Layer, task: int, made: Sequence[Made]) -> None:
        """Hand over the gradients that are complete, and hold the other parts."""
        if any(map(_requires_grad, map(_gradient_of, made))):
            refuse_graph(made)
        if layer.is_shared or task in layer.parts:
            made = [*self._complete(layer, task, made)]
        if made:
            self._take(made)

    def _complete(self, layer: _Layer, task: int, made: Iterable[Made]) -> Iterable[Made]:
        """Add parts to those that are held, and yield the gradients that are complete by that."""
        for streamed, gradient in made:
            layer.add_part(task, streamed, gradient)
            if layer.num_come[task, streamed] == layer.num_alive(streamed):
                yield Made(streamed, layer.parts[task].pop(streamed))

    def _ask_each(self, task: int) -> None:
        for layer in self._watched.values():
            layer.is_shared = layer.is_shared or layer.task == task  # whose arrivals are all noted

    def _take_left(self, task: int) -> None:
        with self._lock:
            if self._layer is not None and self._layer.task == task:
                self._collect(self._layer)
            for layer in self._watched.values():
                parts = layer.parts.pop(task, None)
                if parts:
                    self._take([Made(*part) for part in parts.items()])

    def _forget_parts(self, task: int) -> None:
        for layer in self._watched.values():
            layer.parts.pop(task, None)
            if layer.num_come:
                layer.num_come = Counter({key: count for key, count in layer.num_come.items() if key[0] != task})
            if layer.task == task:
                for parameter in layer.parameters:
                    parameter.grad = None
                layer.elsewhere = {}
                layer.task = -1


_nothing = callable
"""Is called for nothing, without a frame of its own."""
_grad_of, _gradient_of, _requires_grad = attrgetter("grad"), attrgetter("gradient"), attrgetter("requires_grad")
