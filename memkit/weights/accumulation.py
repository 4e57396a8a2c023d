"""Gradients of streamed parameters while a backward runs: hooks that see them, and when one is complete.

[Note: when a gradient is complete] A parameter that is bound to a slot and back changes its device, which makes torch give it a
new `AccumulateGrad` node each time. A layer that is used twice in one graph then has two nodes, and each brings a part of the
gradient. The engine would have added the parts before it adds their sum to what `grad` had, and floating-point sums depend on
that. So a part is held, on the device, until all others have come; if some do not (another graph is alive, a branch has no
gradient), until the backward is over.

For how a backward ends see [Note: interrupts of streaming] in `memkit.weights.streaming`.

[Note: gradients from the host] Code outside of a layer that computes with its parameters has their host copies, and so the
engine adds their gradients in its thread for the host, to the `grad` that its thread for the device adds to. Such a backward is
refused in the former, with the latter under way (see [Note: backwards that have failed and are not over] in
`memkit.core.backwards`): first all hooks refuse to have anything more added; then a backward within this one, of a tensor on
the device, has the device's thread come to the end of its node; then the backward is ended as a failed one.

[Note: gradients by the layer] One layer at a time is *open* in a backward: from when the backward reaches it until it reaches
the next one, or ends. When a layer is opened, the `grad` of each of its parameters is set aside; the engine accumulates on the
device as usual; and when the layer is closed, all its gradients are taken at once. They are complete by then, since the engine
runs the nodes of a later forward first, and nodes that accumulate a gradient as soon as they can run. There are exceptions:
branches, a checkpoint inside of a layer that runs a backward of its own, an output that does not lead to the loss. Then a
gradient comes while another layer is open, or none. A hook on each parameter sees this before the gradient is added, and opens
the layer. What was taken of the layer before is then added to.

Whether a gradient is complete is a question only where several graphs over the layer are alive: it is complete once it has come
from each of them. A call of the layer whose outputs have a graph counts for as long as that graph is alive; any other call (of
a module inside of the layer, or with outputs that are not tensors) for as long as each of its nodes. A graph may outlive the
nodes of all outputs, if the outputs are dropped, or are views and written to, while something that was computed inside leads to
the loss. So once a layer has been called again before a backward has reached its last call, the nodes of all its later calls
count.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from memkit.core import backwards, torch_private
from memkit.core.backwards import BackwardEnd
from memkit.core.hooks import HookSet
from memkit.device.base import Device, Stream
from memkit.errors import LayerOffloadError
from memkit.weights.chunks import LayerChunk, StreamedParameter


class Made(NamedTuple):
    """A gradient of a parameter, or a part of one, that a backward has computed."""

    streamed: StreamedParameter
    gradient: Tensor


class Accumulation(ABC):
    """Sees the gradients of streamed parameters as a backward computes them, and hands over each when it is complete."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.d2h_bytes = 0
        self._tasks: dict[int, BackwardEnd] = {}
        """The backwards under way, each inside of the one before; also those whose end was interrupted."""
        self._is_on_host: Callable[[Tensor], bool] = attrgetter("is_cpu") if device.torch_device.type != "cpu" else _never
        """Whether a gradient comes from the host, where a parameter lies while its layer does not run."""
        self._refused_task, self._refusal = _NONE, ""
        """The last backward in which nothing is added any more, and why."""

    @abstractmethod
    def watch(self, chunk: LayerChunk) -> None:
        """Set hooks on those parameters of a layer that require grad now."""

    @abstractmethod
    def unwatch(self, chunk: LayerChunk) -> None:
        """Remove the hooks of a layer. No backward may be running."""

    @abstractmethod
    def _take_left(self, task: int) -> None:
        """Hand over what an ended backward has not handed over yet."""

    @abstractmethod
    def _forget_parts(self, task: int) -> None:
        """Drop the parts of a backward that is over."""

    @abstractmethod
    def _finish(self, has_failed: bool) -> None:
        """No backward is running any more; called again, with `has_failed`, if an interrupt broke it off."""

    @abstractmethod
    def _reset(self) -> None:
        """Drop the gradients of a backward that failed earlier, and for which `_finish` was interrupted."""

    def _ask_each(self, task: int) -> None:  # noqa: B027  # some are asked for each gradient anyway
        """From now on call `_refuse_more` ahead of each gradient of a refused backward."""

    def begin(self, chunks: Sequence[LayerChunk]) -> None:
        for chunk in chunks:
            self.watch(chunk)

    @abstractmethod
    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """Remove all hooks. No backward may be running. Calling it again finishes a call that was interrupted.

        Returns:
            Pairs of a storage of host memory that the caller still holds, and a copy of it that outlives the host memory.
        """

    def watch_recomputes(self, model: nn.Module) -> None:  # noqa: B027  # not all want to know
        """Call `note_recompute` for modules that do not stream, too. Calling it again does nothing."""

    def note_recompute(self) -> None:  # noqa: B027
        """A forward begins within a backward: a checkpoint may run another backward inside of this one."""

    def note_call(self, chunk: LayerChunk) -> object:
        """A layer's forward has an output. Return an object that the graph behind the output is to keep alive."""
        return None

    @abstractmethod
    def note_forward(self, chunk: LayerChunk, *, is_followed: bool) -> None:
        """A layer's forward is over, and its parameters are still in a slot: note the nodes that it made.

        Args:
            is_followed: whether the output has a graph, which keeps what `note_call` returned and calls `begin_backward`.
        """

    def begin_backward(self, chunk: LayerChunk) -> None:  # noqa: B027
        """A backward reaches an output of a layer."""

    # In a backward

    def _enter_backward(self) -> None:
        """Register for the end of the backward that is running."""
        task = torch_private.backward_task()
        if task not in self._tasks:
            if task == self._refused_task:
                self._refuse_more()
            self._tasks[task] = backwards.on_end(partial(self._end_backward, task))

    def _refuse_host(self, streamed: StreamedParameter) -> NoReturn:
        """End the backward that runs, which has brought a gradient from the host: see [Note: gradients from the host]."""
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
        """End backwards whose end was interrupted. No forward may run, nor a backward in this thread."""
        if backwards.join(self._tasks.values()) and self._tasks:
            for task in self._tasks:
                self._forget_parts(task)
            self._reset()
            self._tasks.clear()


def accumulating_node(parameter: Tensor, *, has_modes: bool) -> Any:
    """Return the `AccumulateGrad` node of a parameter: a new one if no live graph has used the parameter as it is now."""
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


_NONE = -2
_never = ().__contains__
"""Says no without a frame of its own."""


_TOKEN = "memkit"
_NOT_WAITING = -2


class _Alive:
    """Stands for a source of gradients: one node, or, by its weak references, all graphs behind a layer's outputs."""

    __slots__ = ("__weakref__",)


class _LayerGradients:
    def __init__(self, chunk: LayerChunk) -> None:
        self.chunk = chunk
        self.streamed: tuple[StreamedParameter, ...] = ()
        """Those that are watched."""
        self.parameters: tuple[Tensor, ...] = ()
        self.tensors: Sequence[Tensor] | None = None
        """The binding's tensors when the hooks were set; None until all are."""
        self.requires_grad: tuple[bool, ...] = ()
        self.hooks = HookSet()
        self.task = -1
        """The backward that `grad` belongs to, or is about to; -1 while the layer is not open."""
        self.stream_number = 0
        """The stream on which these are made."""
        self.stream: Stream
        self.elsewhere: dict[StreamedParameter, Stream] = {}
        """Those of which a part was made on another stream."""
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
        if weakref.getweakrefcount(self.calls) > 1:
            return True
        return bool(self.nodes) and any(self.num_alive(streamed) > 1 for streamed in self.nodes)

    def num_alive(self, streamed: StreamedParameter) -> int:
        return weakref.getweakrefcount(self.calls) + len(self.nodes.get(streamed, ()))

    def add_part(self, task: int, streamed: StreamedParameter, made: Tensor) -> None:
        parts = self.parts.setdefault(task, {})
        part = parts.get(streamed)
        parts[streamed] = made if part is None else sum_of(part, made)


class LayerAccumulation(Accumulation):
    """Hands over the gradients of a layer together: see [Note: gradients by the layer]."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._has_new_nodes = device.torch_device.type != "cpu"
        """Whether a parameter has another node once it has left a slot: see [Note: when a gradient is complete]."""
        self._watched: dict[LayerChunk, _LayerGradients] = {}
        self._layer: _LayerGradients | None = None
        self._lock = threading.RLock()
        """The engine has a thread for each device."""

    @abstractmethod
    def _admit(self, parameters: Sequence[StreamedParameter]) -> None:
        """Parameters of a layer are watched from now on."""

    @abstractmethod
    def _set_aside(self, streamed: StreamedParameter, grad: Tensor) -> None:
        """A backward is about to bring a gradient of a parameter that has this `grad`, which is None now."""

    @abstractmethod
    def _prepare(self, chunk: LayerChunk) -> None:
        """A backward is about to bring the gradients of a layer."""

    @abstractmethod
    def _take(self, made: Sequence[Made]) -> None:
        """Gradients of a layer are complete that a backward has made, on the current stream."""

    @abstractmethod
    def _take_whole(self, parameters: tuple[StreamedParameter, ...], gradients: Sequence[Tensor | None]) -> bool:
        """Take the complete gradients (None where none has come) of all watched parameters of a layer. Return whether they were
        taken: where they are not as they were the last time, they are left to `_take`."""

    def watch(self, chunk: LayerChunk) -> None:
        binding, layer = chunk.binding, self._watched.get(chunk)
        if layer is None:
            layer = self._watched[chunk] = _LayerGradients(chunk)
        requires_grad = tuple(binding.requires_grad())
        if layer.tensors is binding.tensors and layer.requires_grad == requires_grad and not binding.wrappers:
            return
        streamed = tuple(item for item in binding.parameters if item.parameter.requires_grad)
        if layer.tensors is not binding.tensors or streamed != layer.streamed:
            layer.tensors = None
            if layer.task != -1:
                self._collect(layer)
            layer.hooks.remove()
            self._admit(streamed)
            layer.streamed, layer.parameters = streamed, tuple(item.parameter for item in streamed)
            for item in streamed:
                layer.hooks.before_accumulation(item.parameter, self._arrives(layer, item))
        layer.tensors, layer.requires_grad = binding.tensors, requires_grad

    def _arrives(self, layer: _LayerGradients, streamed: StreamedParameter) -> Callable[[Tensor], None]:
        """Return the hook that the engine calls before it adds to a parameter's gradient."""
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
        for chunk in [*self._watched]:
            LayerAccumulation.unwatch(self, chunk)
        self._layer = None
        return []

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

    def _note_arrival(self, layer: _LayerGradients, streamed: StreamedParameter) -> None:
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

    def _open(self, layer: _LayerGradients, task: int) -> None:
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

    def _collect(self, layer: _LayerGradients) -> None:
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

    def _hand_over(self, layer: _LayerGradients, task: int, made: Sequence[Made]) -> None:
        if any(map(_requires_grad, map(_gradient_of, made))):
            refuse_graph(made)
        if layer.is_shared or task in layer.parts:
            made = [*self._complete(layer, task, made)]
        if made:
            self._take(made)

    def _complete(self, layer: _LayerGradients, task: int, made: Iterable[Made]) -> Iterable[Made]:
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


class _Token:
    """Lives as long as one node that brings gradients, and is called when that is about to bring some."""

    task = -1

    def __call__(self, _: Any) -> None:
        self.task = torch_private.backward_task()


class _Sum:
    """The parts of one parameter's gradient that have come."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.hooks = HookSet()
        self.is_watched = False
        """Whether all hooks are set."""
        self.due = -1
        """The backward that is about to put a gradient to `grad`, or has done so; -1 once it is taken."""
        self.tokens = weakref.WeakSet[_Token]()
        self.parts: dict[int, Tensor] = {}

    def is_complete(self, task: int) -> bool:
        """See [Note: when a gradient is complete]."""
        for token in self.tokens:  # noqa: SIM110  # a generator would be one more frame, for each gradient
            if token.task != task:
                return False
        return True


class ParameterAccumulation(Accumulation):
    """Hands over each gradient when it is complete."""

    _steps = False
    """Whether parameters are written to when their gradients are handed over."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._sums: dict[StreamedParameter, _Sum] = {}

    @abstractmethod
    def _set_aside(self, streamed: StreamedParameter, grad: Tensor) -> None:
        """A backward is about to bring a gradient of a parameter that has this `grad`."""

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
        self._forget(chunk.parameters)

    def _forget(self, parameters: Iterable[StreamedParameter]) -> None:
        for streamed in parameters:
            known = self._sums.get(streamed)
            if known is not None:
                known.hooks.remove()
                del self._sums[streamed]

    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        self._forget([*self._sums])
        return []

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
