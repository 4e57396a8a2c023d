"""Hooks on the gradients of streamed parameters while a backward runs, and when a gradient is complete.

[Note: when a gradient is complete] A parameter that is bound to a slot and back gets a new `AccumulateGrad` node each time. A
layer that is used twice in one graph then has two nodes, and each brings a part of the gradient. The engine would have added
the parts before it adds their sum to `grad`, and floating-point sums depend on that order. So a part is held, on the device,
until all others have come; if some do not, until the backward is over.

[Note: gradients from the host] Code outside of a layer that computes with its parameters has their host copies, so the engine
adds their gradients in its thread for the host, to the `grad` that its thread for the device adds to. Such a backward is
refused: all hooks refuse further gradients; a backward within this one has the device's thread come to the end of its node (see
[Note: backwards that have failed and are not over]); then the backward is ended as a failed one.

While a backward runs, an earlier `grad` is set aside, each new one is taken away from the device, and only behind the backward
`grad` becomes their sum, on the host.

[Note: gradients by the layer] One layer at a time is *open* in a backward: from when the backward reaches it until it reaches
the next one, or ends. When it is closed, all its gradients are taken at once: they are complete, since the engine runs the
nodes of a later forward first. In exceptions (branches, a checkpoint with a backward of its own, an output that does not lead
to the loss) a gradient comes while another layer is open, or none: a hook on each parameter sees this before it is added, and
opens the layer.

Where several graphs over the layer are alive, a gradient is complete once it has come from each of them. A call of the layer
whose outputs have a graph counts for as long as that graph is alive; any other call for as long as each of its nodes. A graph
may outlive the nodes of all outputs, so once a layer has been called again before a backward has reached its last call, the
nodes of all its later calls count.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat
from operator import attrgetter, is_not
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from memkit.core import backwards, torch_private
from memkit.core.backwards import BackwardEnd
from memkit.core.forks import OwnThreads, forked
from memkit.core.hooks import HookSet
from memkit.core.sizes import ALIGNMENT_BYTES, rounded
from memkit.core.tensors import byte_view
from memkit.core.torch_state import num_users
from memkit.device.base import CopyBatch, Device, Event, Stream
from memkit.errors import LayerOffloadError
from memkit.transfer.host_memory import Arena, Span
from memkit.transfer.lanes import lanes_of
from memkit.weights.chunks import LayerChunk, StreamedParameter, without_modes

_NONE = -2
_never = ().__contains__  # returns False without a frame of its own
TOKEN = "memkit"
_NO_CONTEXT = nullcontext()
Made = Mapping[StreamedParameter, Tensor]
_IDLE = {2}
_data_of = attrgetter("data")
_stride_of = attrgetter("gradient_stride")
_nothing = callable  # does nothing, without a frame of its own
_grad_of = attrgetter("grad")
_MOST_TARGETS = 8  # for each layer, so many sets of parameters with gradients that come together are remembered


class Accumulation(ABC):
    """Sees the gradients of streamed parameters as a backward computes them, and hands over each when it is complete."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.d2h_bytes = 0
        self._tasks: dict[int, BackwardEnd] = {}  # those under way, innermost last, even if their end was interrupted
        self._is_on_host: Callable[[Tensor], bool] = attrgetter("is_cpu") if device.torch_device.type != "cpu" else _never
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


class GradientBuffer:
    """Pinned host memory for one gradient: `span`, which is `taken` of the arena, or a part of that."""

    def __init__(self, span: Span, taken: Span) -> None:
        self.span, self.taken = span, taken
        self.storage = self._over_span()
        self.view: Any = None  # the gradient here; `lend` gives an alias of it, nobody gets this one

    def _over_span(self) -> torch.UntypedStorage:
        return torch.frombuffer(self.span.whole.numpy(), dtype=torch.uint8).untyped_storage()

    @property
    def is_idle(self) -> bool:
        return num_users(self.storage) == 1 + (self.view is not None)

    def lend(self, streamed: StreamedParameter) -> Tensor | None:
        """Return the gradient of a parameter as it lies here; None if the caller holds one that lies here."""
        if self.storage.data_ptr() != self.span.whole.data_ptr():  # it was moved to other memory in place
            self.storage, self.view = self._over_span(), None  # (`Tensor.share_memory_`): its holders have that
        view = self.view
        if torch_private.num_storage_users(torch_private.storage_address(self.storage)) != 1 + (view is not None):
            return None
        is_seen = torch_private.num_dispatch_modes() or torch.is_inference_mode_enabled()
        with without_modes() if is_seen else _NO_CONTEXT:
            if view is None or view.stride() != streamed.gradient_stride:
                view = self.view = streamed.over_gradient(self.storage)
            return view.data  # type: ignore[no-any-return]


class LayerBuffers:
    """Buffers to which gradients of a layer are sent together, lent before: `lend` is `GradientBuffer.lend` of all at once."""

    def __init__(
        self, parameters: Sequence[StreamedParameter], buffers: Sequence[GradientBuffer], copies: CopyBatch | None
    ) -> None:
        self._parameters, self.buffers, self.copies = parameters, buffers, copies
        self._storages = [buffer.storage for buffer in buffers]
        self._addresses = [buffer.storage.data_ptr() for buffer in buffers]
        self._keys = [torch_private.storage_address(storage) for storage in self._storages]
        self._views = [buffer.view for buffer in buffers]
        self._strides = [view.stride() for view in self._views]
        self._sizes_bytes = [buffer.span.num_bytes for buffer in buffers]
        self.num_bytes = sum(self._sizes_bytes)
        self._is_as_before: Callable[..., bool] | None = None

    def lend(self) -> list[Tensor] | None:
        if torch_private.num_dispatch_modes() or torch.is_inference_mode_enabled():
            return None
        if [*map(_stride_of, self._parameters)] != self._strides:
            return None
        if [*map(torch.UntypedStorage.data_ptr, self._storages)] != self._addresses:  # one was moved in place
            return None
        if {*map(torch_private.num_storage_users, self._keys)} != _IDLE:
            return None
        return [*map(_data_of, self._views)]

    def packed(self, gradients: Sequence[Tensor]) -> list[torch.UntypedStorage] | None:
        """Return the storages of gradients, if each fills its own with the layout that it is to have here."""
        if any(map(Tensor.is_neg, gradients)) or any(map(Tensor.is_conj, gradients)):
            return None
        if [*map(Tensor.stride, gradients)] != self._strides:
            return None
        storages = [*map(Tensor.untyped_storage, gradients)]
        if [*map(torch.UntypedStorage.nbytes, storages)] != self._sizes_bytes:
            return None
        for make in torch_private.known("TensorGuards"):
            self._is_as_before = make(*gradients, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return storages

    def packed_as_before(self, gradients: Sequence[Tensor | None]) -> list[torch.UntypedStorage] | None:
        """The same for gradients with the last ones' dtypes and strides, and no graph."""
        if self._is_as_before is None or not self._is_as_before(*gradients):
            return None
        storages = [*map(Tensor.untyped_storage, gradients)]  # type: ignore[arg-type]  # each is a tensor, as those before
        return storages if [*map(torch.UntypedStorage.nbytes, storages)] == self._sizes_bytes else None


@dataclass(slots=True, eq=False)
class Flight:
    stream: Stream
    storages: Sequence[torch.UntypedStorage]
    num_bytes: int
    done: Event | None = None  # None until known: an interrupt may come in between


class _Alive:
    """Stands for a source of gradients: one node, or, by its weak references, all graphs behind a layer's outputs."""

    __slots__ = ("__weakref__",)


class _LayerGradients:
    def __init__(self, chunk: LayerChunk) -> None:
        self.chunk = chunk
        self.streamed: tuple[StreamedParameter, ...] = ()
        self.parameters: tuple[Tensor, ...] = ()
        self.tensors: Sequence[Tensor] | None = None  # the binding's tensors when the hooks were set; None until all are
        self.requires_grad: tuple[bool, ...] = ()
        self.hooks = HookSet()
        self.task = -1  # the backward that `grad` belongs to, or is about to; -1 while the layer is not open
        self.stream_number = 0
        self.stream: Stream
        self.elsewhere: dict[StreamedParameter, Stream] = {}
        self.calls = _Alive()  # graphs of calls have weak references to this, as long as they live
        self.nodes: dict[StreamedParameter, weakref.WeakSet[_Alive]] = {}
        self.waits_in = _NONE  # the backward of the last call, -1: none, if no backward has come to that call
        self.has_nodes_counted = False  # whether nodes of all calls are counted: several come before a backward
        self.is_shared = False  # whether several graphs may bring gradients in the running backward
        self.num_come: Counter[tuple[int, StreamedParameter]] = Counter()
        self.parts: dict[int, dict[StreamedParameter, Tensor]] = {}

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


class HostGradients(Accumulation):
    """Takes the gradients of streamed parameters to the host; `rest` puts parameters to rest, `others` are others' spans."""

    def __init__(
        self, device: Device, arena: Arena, chunks: list[LayerChunk], rest: Callable[[], None], others: Callable[[], list[Span]]
    ) -> None:
        super().__init__(device)
        self._has_new_nodes = device.torch_device.type != "cpu"  # see [Note: when a gradient is complete]
        self._watched: dict[LayerChunk, _LayerGradients] = {}
        self._layer: _LayerGradients | None = None
        self._lock = threading.RLock()
        self._rest, self._others, self._arena = rest, others, arena
        self._lanes = lanes_of(device)
        self._buffers: dict[StreamedParameter, list[GradientBuffer]] = {}
        self._before: dict[StreamedParameter, Tensor] = {}
        self._totals: dict[StreamedParameter, Tensor] = {}  # that, plus all gradients that were sent to the host
        self._in_flight: deque[Flight] = deque()  # oldest first; the memory goes back once its stream has waited
        self._in_flight_bytes = 0
        self._targets: dict[tuple[StreamedParameter, ...], LayerBuffers] = {}
        self._window_bytes = 2 * max((chunk.num_bytes for chunk in chunks), default=0)
        self._last: Event | None = None
        self._threads = OwnThreads(1, "memkit-grad", device.enter_thread)
        self._additions: list[Future[None]] = []
        self._kept: list[GradientBuffer] = []  # with gradients that the caller holds, of layers that no longer stream
        trained = [[item for item in chunk.parameters if item.parameter.requires_grad] for chunk in chunks]
        self._take_memory([parameters for parameters in trained if parameters])

    def _take_memory(self, groups: Sequence[Sequence[StreamedParameter]]) -> None:
        sizes = [[rounded(_gradient_bytes(item), ALIGNMENT_BYTES) for item in group] for group in groups]
        for group, found, span in zip(groups, sizes, self._arena.take_pinned_as_one([*map(sum, sizes)]), strict=True):
            for item, start in zip(group, accumulate(found, initial=0), strict=False):
                self._buffers[item] = [GradientBuffer(span.part(start, start + _gradient_bytes(item)), span)]

    @property
    def _spans(self) -> dict[Span, None]:
        return {buffer.taken: None for buffers in (*self._buffers.values(), self._kept) for buffer in buffers}

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
            unknown = [item for item in streamed if item not in self._buffers]
            if unknown:
                self._take_memory([unknown])
            layer.streamed, layer.parameters = streamed, tuple(item.parameter for item in streamed)
            for item in streamed:
                layer.hooks.before_accumulation(item.parameter, self._arrives(layer, item))
        layer.tensors, layer.requires_grad = binding.tensors, requires_grad

    def _arrives(self, layer: _LayerGradients, streamed: StreamedParameter) -> Callable[[Tensor | None], None]:
        stream_number, is_on_host = self._device.stream_number, self._is_on_host

        def arrives(grad: Tensor | None) -> None:
            if grad is not None and is_on_host(grad):  # None of a `Function` that returns it
                self._refuse_host(streamed)
            if layer.task != torch_private.backward_task() or layer.is_shared or layer.stream_number != stream_number():
                self._note_arrival(layer, streamed)

        return arrives

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
                if TOKEN not in node.metadata:
                    token = node.metadata[TOKEN] = _Alive()
                    layer.nodes.setdefault(streamed, weakref.WeakSet()).add(token)

    def unwatch(self, chunk: LayerChunk) -> None:
        layer = self._watched.get(chunk)
        if layer is not None:
            layer.hooks.remove()
            del self._watched[chunk]
        taken = self._spans
        self._leave(chunk.parameters)
        for span in taken.keys() - self._spans.keys():
            self._arena.give(span)

    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        for layer in self._watched.values():
            layer.hooks.remove()
        self._watched.clear()
        self._layer = None
        self._threads.shutdown()
        self._leave(list(self._buffers))
        self._rest, self._others = lambda: None, list  # those before belong to an object that holds this one
        return [(buffer.storage, byte_view(buffer.storage).clone().untyped_storage()) for buffer in self._kept]

    def _leave(self, parameters: Sequence[StreamedParameter]) -> None:
        self._targets.clear()  # first: no copy may go to memory given back
        for streamed in parameters:
            buffers = self._buffers.get(streamed)
            if buffers is not None:
                grad = streamed.parameter.grad
                if grad is not None and grad.layout is torch.strided:
                    with without_modes():
                        streamed.parameter.grad = grad.clone()
                self._kept += [buffer for buffer in buffers if not buffer.is_idle]
                del self._buffers[streamed]

    def begin_backward(self, chunk: LayerChunk) -> None:
        layer = self._watched.get(chunk)
        if layer is not None:
            task = torch_private.backward_task()
            layer.waits_in = _NONE
            if layer.task != task:
                with self._lock:
                    if task == self._refused_task:
                        self._refuse_more()
                    self._open(layer, task)

    def _note_arrival(self, layer: _LayerGradients, streamed: StreamedParameter) -> None:
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
        self._make_room(min(layer.chunk.num_bytes, self._window_bytes))
        if any(map(is_not, map(_grad_of, layer.parameters), repeat(None))):
            for streamed, grad in zip(layer.streamed, map(_grad_of, layer.parameters), strict=True):
                if grad is not None:
                    self._before[streamed] = grad
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
        made = {one: grad for one, grad in zip(layer.streamed, gradients, strict=True) if grad is not None}
        if is_here and not elsewhere:
            self._hand_over(layer, task, made)
            return
        layer.elsewhere = {}
        for stream in {layer.stream: None, **dict.fromkeys(elsewhere.values())}:
            with self._device.on_stream(stream):
                here = {one: grad for one, grad in made.items() if elsewhere.get(one, layer.stream) == stream}
                self._hand_over(layer, task, here)

    def _hand_over(self, layer: _LayerGradients, task: int, made: Made) -> None:
        for streamed, gradient in made.items():
            if gradient.requires_grad:
                refuse_graph(streamed)
        if layer.is_shared or task in layer.parts:
            for streamed, gradient in made.items():
                layer.add_part(task, streamed, gradient)
            complete = [one for one in made if layer.num_come[task, one] == layer.num_alive(one)]
            made = {streamed: layer.parts[task].pop(streamed) for streamed in complete}
        if made:
            self._take(made)

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
                    self._take(parts)

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

    def _finish(self, has_failed: bool) -> None:
        try:
            self._await()
        except Exception:
            self._lose()
            if not has_failed:
                raise
        if has_failed:
            self._give_lost()
        self._put_back()

    def _give_lost(self) -> None:
        self._threads.submit(int).result()  # an addition that was not noted has come to its end then
        self._arena.give_all(but_for=[*self._spans, *self._others()])

    def _lose(self) -> None:
        self._arena.drain()
        self._device.synchronize()
        self._last = None
        self._in_flight.clear()
        self._in_flight_bytes = 0
        for addition in self._additions:
            with suppress(Exception):
                addition.result()
        self._additions.clear()
        self._totals.clear()

    def _put_back(self) -> None:
        self._rest()
        for streamed, found in {**self._before, **self._totals}.items():
            if streamed.parameter.is_cpu:
                streamed.parameter.grad = found
            else:
                streamed.set_gradient_at_rest(found)
        self._before.clear()  # last: an interrupt has all be put back again
        self._totals.clear()

    def _reset(self) -> None:
        self._lose()
        self._give_lost()
        self._before.clear()  # the user may have cleared `grad` since

    def _take(self, made: Made) -> None:
        first = dict[StreamedParameter, Tensor]()
        before, totals = self._before, self._totals
        for streamed, grad in made.items():
            is_dense = grad.layout is torch.strided
            if is_dense and grad.dtype != streamed.dtype:
                raise LayerOffloadError(
                    f'"{streamed.name}" streams as {streamed.dtype}, and its gradient is {grad.dtype}: was its grad_dtype set? '
                    "Leave that as it was, or have this layer stay on the device: name the others by layers="
                )
            if streamed in before and streamed not in totals:
                totals[streamed] = before[streamed]
            if is_dense and streamed not in totals:
                first[streamed] = grad
            else:
                self._take_more(streamed, grad)
        if first:
            self._send(tuple(first), [*first.values()])

    def _take_whole(self, parameters: tuple[StreamedParameter, ...], gradients: Sequence[Tensor | None]) -> bool:
        target = self._targets.get(parameters)
        storages = None if target is None else target.packed_as_before(gradients)
        is_first = self._before.keys().isdisjoint(parameters) and self._totals.keys().isdisjoint(parameters)
        totals = target.lend() if target is not None and storages is not None and is_first else None
        if target is None or storages is None or totals is None:
            return False
        self._start(target, parameters, gradients, storages, totals)  # type: ignore[arg-type]  # each is there, as before
        return True

    def _take_more(self, streamed: StreamedParameter, made: Tensor) -> None:
        total = self._totals.get(streamed)
        if total is None or made.layout is not torch.strided or total.layout is not torch.strided:
            self._await()
            # Added on its own device, as in the plain run: the host's kernels add entries in another order.
            self._totals[streamed] = (made if total is None else sum_of(total.to(made.device), made)).to("cpu")
            return
        span = self._arena.take(_gradient_bytes(streamed))
        try:
            storage = self._packed(streamed, made)
            if self._device.takes_notes:
                self._note_made([made], [storage])
            landed = self._fly([storage], storage.nbytes(), partial(self._copy_to, storage, span))
        except BaseException:
            self._arena.give(span)
            raise
        self._additions.append(self._threads.submit(self._add, streamed, total, span, landed))

    def _add(self, streamed: StreamedParameter, total: Tensor, span: Span, landed: Event) -> None:
        try:
            self._device.synchronize(landed)
            brought = streamed.over_gradient(torch.frombuffer(span.whole.numpy(), dtype=torch.uint8).untyped_storage())
            with torch.no_grad():
                total.add_(brought)
            del brought
        finally:
            self._arena.give(span)

    def _packed(self, streamed: StreamedParameter, made: Tensor) -> torch.UntypedStorage:
        if made.is_conj() or made.is_neg():
            made = made.resolve_conj().resolve_neg()  # else the bytes are not the elements' yet
        storage = made.untyped_storage()
        num_bytes = self._buffers[streamed][0].span.num_bytes
        if storage.nbytes() != num_bytes or made.stride() != streamed.gradient_stride:
            packed = streamed.over_gradient(self._device.allocate(num_bytes))
            packed.copy_(made)
            storage = packed.untyped_storage()
        return storage

    def _note_made(self, gradients: Sequence[Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        for gradient, storage in zip(gradients, storages, strict=True):
            self._device.note_written(storage, torch_private.version_of(gradient))

    def _send(self, parameters: tuple[StreamedParameter, ...], gradients: Sequence[Tensor]) -> None:
        target = self._targets.get(parameters)
        totals = None if target is None else target.lend()
        if target is None or totals is None:
            target, totals = self._claim(parameters)
        storages = target.packed(gradients)
        if storages is None:
            storages = [self._packed(*one) for one in zip(parameters, gradients, strict=True)]
        self._start(target, parameters, gradients, storages, totals)

    def _start(
        self,
        target: LayerBuffers,
        parameters: tuple[StreamedParameter, ...],
        gradients: Sequence[Tensor],
        storages: Sequence[torch.UntypedStorage],
        totals: Sequence[Tensor],
    ) -> None:
        if self._device.takes_notes:
            self._note_made(gradients, storages)
        if target.copies is not None:
            self._fly(storages, target.num_bytes, partial(self._lanes.start_out, target.copies, storages))
        else:
            for storage, buffer in zip(storages, target.buffers, strict=True):
                self._fly([storage], storage.nbytes(), partial(self._copy_to, storage, buffer.span))
        self._totals.update(zip(parameters, totals, strict=True))

    def _claim(self, parameters: tuple[StreamedParameter, ...]) -> tuple[LayerBuffers, list[Tensor]]:
        totals, buffers = list[Tensor](), list[GradientBuffer]()
        for streamed in parameters:
            known = self._buffers[streamed]
            found = next(((buffer, total) for buffer in known if (total := buffer.lend(streamed)) is not None), None)
            if found is None:  # the caller keeps the gradients of earlier steps
                (span,) = self._arena.take_pinned_as_one([known[0].span.num_bytes])
                known.append(GradientBuffer(span, span))
                total = known[-1].lend(streamed)
                assert total is not None
                found = known[-1], total
            buffers.append(found[0])
            totals.append(found[1])
        spans = [buffer.span for buffer in buffers]
        is_pinned = all(span.staging is None for span in spans)  # else each is sent by itself: a thread of its own sees to it
        copies = self._lanes.batch_out(spans) if is_pinned else None
        if len(self._targets) >= _MOST_TARGETS * len(self._watched):  # other parameters each time: experts that are routed to
            del self._targets[next(iter(self._targets))]
        target = self._targets[parameters] = LayerBuffers(parameters, buffers, copies)
        return target, totals

    def _fly(self, storages: Sequence[torch.UntypedStorage], num_bytes: int, copy: Callable[[], Event]) -> Event:
        flight = Flight(self._device.current_stream(), storages, num_bytes)
        self._make_room(num_bytes)
        self._in_flight.append(flight)
        self._in_flight_bytes += num_bytes
        flight.done = self._last = copy()
        self.d2h_bytes += num_bytes
        return flight.done

    def _copy_to(self, storage: torch.UntypedStorage, span: Span) -> Event:
        return self._lanes.copy_out(storage, span, after=self._device.record_event(timed=False)).done

    def _make_room(self, num_bytes: int) -> None:
        while self._in_flight and self._in_flight_bytes + num_bytes > self._window_bytes:
            self._await_oldest()  # may raise, and then nothing writes to the span

    def _await_oldest(self) -> None:
        oldest = self._in_flight[0]
        if oldest.done is None:
            self._arena.drain()
            self._device.synchronize()
        else:
            self._device.wait_event(oldest.stream, oldest.done)  # where this raises, `_finish` meets it again
        self._in_flight.popleft()
        self._in_flight_bytes -= oldest.num_bytes

    def _await(self) -> None:
        if self._last is not None:
            self._device.synchronize(self._last)
        while self._in_flight:
            self._await_oldest()
        self._last, self._in_flight_bytes = None, 0
        for addition in self._additions:
            if not (self._threads.are_here or addition.done()):
                raise forked("LayerOffload")
            addition.result()
        self._additions.clear()


def _gradient_bytes(streamed: StreamedParameter) -> int:
    return streamed.parameter.numel() * streamed.dtype.itemsize
