"""Host copies of FSDP2 shards: their memory, and which of them are on the device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.backwards import BackwardEnd, on_end
from memkit.core.sizes import ALIGNMENT_BYTES, rounded
from memkit.core.tensors import byte_view, tensor_over
from memkit.core.torch_state import NO_LABEL, label, leave_untraced
from memkit.device.base import Device, Event, Stream
from memkit.errors import MissingTorchNameError, StateOffloadError
from memkit.optimizers.steppers import reduced_layers
from memkit.transfer.host_memory import Arena, Span
from memkit.transfer.lanes import TURN_BYTES, lanes_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from memkit.optimizers.steppers import ReducedSteps


@dataclass(frozen=True, slots=True)
class _ShardRegion:
    start: int
    numel: int
    dtype: torch.dtype

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        offset = self.start // self.dtype.itemsize
        return tensor_over(storage, self.dtype, offset=offset, size=(self.numel,), stride=(1,))


Layout = tuple[_ShardRegion, ...]
"""The places of a layer's shards in its chunk. Layers whose shards lie alike have the identical object."""


class ShardBuffer:
    """Device memory for chunks of one layout, one after the other, with views made once. It goes back to the stream `home`."""

    def __init__(self, storage: torch.UntypedStorage, layout: Layout, home: Stream) -> None:
        self.storage, self.layout, self.home = storage, layout, home
        self.parts = byte_view(storage).split(TURN_BYTES)
        self.shards = [region.over(storage) for region in layout]
        self.done: Event


data_of = attrgetter(torch_private.FSDP_SHARD)
"""The shard that FSDP2 gathers of a parameter: padded to the same length on all ranks, as [numel]."""
_own_of = attrgetter(f"sharded_param.{torch_private.LOCAL_TENSOR}")
"""The rank's own part of that, in its shape, which the optimizer steps. It may be empty."""
_gather_of = attrgetter(torch_private.FSDP_GATHER)


class HostLayer:
    def __init__(self, group: Any, device: Device, arena: Arena, layouts: dict[Layout, Layout]) -> None:
        self.group = group
        self.device = device
        self.brought: ShardBuffer | None = None
        self.layout: Layout = ()
        self._arena, self._layouts = arena, layouts
        self._span: Span | None = None
        self.pieces: tuple[Tensor, ...] = ()
        self._memories: list[tuple[Span, weakref.ref[Any]]] = []
        self.last_read: Event | None = None
        self._addresses: tuple[list[int], list[int]] = [], []
        self.steppers: Collection[ReducedSteps] = ()

    @property
    def is_stepped(self) -> bool:
        return any(steps.is_stepping(self) for steps in self.steppers)

    # For a `StateOffload` that steps its shards: see `memkit.optimizers.steppers.ReducedLayer`

    def begin_steps(self, steps: ReducedSteps) -> None:
        self.steppers = weakref.WeakSet([*self.steppers, steps])

    def end_steps(self, steps: ReducedSteps) -> None:
        others = [other for other in self.steppers if other is not steps]
        self.steppers = weakref.WeakSet(others) if others else ()

    def shards(self) -> list[Tensor]:
        return [parameter.sharded_param for parameter in self.group.fsdp_params]

    def landing(self) -> list[Any]:
        events = [getattr(parameter, torch_private.FSDP_LANDED) for parameter in self.group.fsdp_params]
        return [event for event in events if event is not None]  # none where FSDP2 has waited itself

    # Its memory

    def chunk(self) -> Span:
        """Return its host memory with all shards in it, also those that got data, were assigned, moved or cast since."""
        parameters = self.group.fsdp_params
        flat, own = map(Tensor.data_ptr, map(data_of, parameters)), map(Tensor.data_ptr, map(_own_of, parameters))
        if self._addresses != ([*flat], [*own]):
            self._move_in()
        assert self._span is not None
        return self._span

    @torch.no_grad()
    def _move_in(self) -> None:
        parameters, regions, end = self.group.fsdp_params, [], 0
        for flat in map(data_of, parameters):
            regions.append(_ShardRegion(end, flat.numel(), flat.dtype))
            end += rounded(flat.nbytes, ALIGNMENT_BYTES)
        layout = self._layouts.setdefault(tuple(regions), tuple(regions))
        with torch.inference_mode(False):
            if self._span is None or layout is not self.layout:
                self._span = None
                self._give_left()
                (self._span,) = self._arena.take_pinned_as_one([end])
                self.pieces = self._span.whole.split(TURN_BYTES)
                self.layout, self._addresses = layout, ([0] * len(layout), [0] * len(layout))
            memory, (flats, owns) = self._span.whole.numpy(), self._addresses
            self._memories.append((self._span, weakref.ref(memory)))
            for number, (region, parameter) in enumerate(zip(layout, parameters, strict=True)):
                flat, own = data_of(parameter), _own_of(parameter)
                if (flat.data_ptr(), own.data_ptr()) == (flats[number], owns[number]):
                    continue
                # A storage of its own, so that saving a shard writes no more than its bytes.
                moved = torch.frombuffer(memory, dtype=region.dtype, count=region.numel, offset=region.start)
                moved.copy_(flat)
                moved_own = moved[: own.numel()].view(own.shape)
                moved_own.copy_(own)  # which torch may have put elsewhere by itself, to pin it
                setattr(parameter, torch_private.FSDP_SHARD, moved)
                setattr(parameter.sharded_param, torch_private.LOCAL_TENSOR, moved_own)
                flats[number], owns[number] = moved.data_ptr(), moved_own.data_ptr()

    def _give_left(self) -> None:
        self._memories, before = [each for each in self._memories if each[1]() is not None], self._memories
        for span in dict.fromkeys(span for span, _ in before):
            if all(span is not held for held, _ in self._memories):
                self._arena.give(span, self.last_read)
        self._arena.trim_gaps()


def group_of(module: Any) -> Any:
    """Return FSDP2's group of the parameters that it gathers as one for a module, None for one without its own."""
    to_state, to_group = torch_private.FSDP_GROUP
    group = _named(_named(module, to_state)(), to_group)
    if group is not None:
        names = torch_private.FSDP_GATHER, torch_private.FSDP_PHASE, torch_private.FSDP_REDUCE
        expected = [(group, (*torch_private.FSDP_PARTS, *names)), (group.comm_ctx, ("get_all_gather_streams",))]
        for parameter in group.fsdp_params:
            expected.append((parameter, (torch_private.FSDP_SHARD, torch_private.FSDP_LANDED)))
            expected.append((parameter.sharded_param, (torch_private.LOCAL_TENSOR,)))
        for owner, attributes in expected:
            for name in attributes:
                _named(owner, name)
    return group


def _named(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        symbol = f"{type(owner).__qualname__}.{name}"
        raise MissingTorchNameError(f"found torch {torch.__version__} without {symbol}", symbol=symbol) from None


class HostShards:
    """The layers of one model whose shards are on the host, and their copies to the device.

    [Note: ahead of the gather] When FSDP2 begins to gather a layer, that layer's bytes are on their way already: they were put
    on the lane when it began to gather the one before, so that two chunks at most are on the device beside the gathered layers.
    The lane starts when the work so far on FSDP2's stream for packing is done, which keeps it one layer ahead of compute. A
    chunk's memory belongs to the stream that packs. As soon as it is packed, the layer but one behind it has that memory, if
    its shards lie alike: so a forward makes two buffers, with a view of each shard. They are freed when nothing more is to be
    brought, before the loss and its gradients take most memory.

    [Note: writes to the host's shards] Nothing is brought ahead outside of a forward of the model and of a backward, nor from
    one into the next: the next gather sees an `optimizer.step()`, a `load_state_dict` or a write to `data` in between. At the
    end of a backward, and of a forward without grad, the host waits for the last copy, so that it reads the former bytes. After
    a forward with grad the copy is ahead for the sake of the backward; the host waits when states are loaded, or asked for,
    since `torch.distributed.checkpoint` writes to those. A write to `data` has to wait for the backward, or for the device.
    Steppers of shards within the backward are asked ahead of each copy, and told of each reduction: see
    `memkit.optimizers.steppers.ReducedSteps`.
    """

    def __init__(self, device: Device, num_shards: int) -> None:
        self._device = device
        self._num_shards = num_shards
        self._lanes = lanes_of(device)
        self._arena = Arena(device)
        self._layouts: dict[Layout, Layout] = {}
        self._spare: list[ShardBuffer] = []
        """For layers that are yet to be brought in this forward or backward."""
        self._packing: tuple[object, Stream] | None = None
        """FSDP2's stream for packing, and the device's object for it, whose look-up takes as long as a copy."""
        self._is_in_forward = False
        self._last: Event | None = None
        """Behind the last copy on the lane, until the host has waited for it."""
        self._end: BackwardEnd | None = None
        self._task = -1
        self.layers: list[HostLayer] = []
        """The groups that FSDP2 gathers: layers in running order, then the rest."""
        self._numbers: dict[int, int] = {}
        for function in (self._unshard, self._wait_for_unshard, self._reduce, self._begin, self._leave):
            leave_untraced(function)

    def add(self, module: FSDPModule) -> None:
        """Copy a layer's shards ahead of its gathers from now on. If they have data, it moves to a chunk at once."""
        group = group_of(module)
        if group is None:  # without parameters
            return
        layer = HostLayer(group, self._device, self._arena, self._layouts)
        if not any(item.sharded_param.is_meta for item in group.fsdp_params):
            layer.chunk()
        group.unshard = functools.partial(self._unshard, layer, group.unshard)
        group.wait_for_unshard = functools.partial(self._wait_for_unshard, layer, group.wait_for_unshard)
        reduce = torch_private.FSDP_REDUCE
        setattr(group, reduce, functools.partial(self._reduce, layer, getattr(group, reduce)))
        reduced_layers.add(layer)
        self._numbers[id(layer)] = len(self.layers)
        self.layers.append(layer)

    def add_whole(self, model: FSDPModule) -> None:
        """The same for parameters that are in no layer. To be called last: from now on shards are copied ahead."""
        num_layers = len(self.layers)
        self.add(model)
        for layer in self.layers[num_layers:]:
            del self._numbers[id(layer)]
        assert isinstance(model, nn.Module)
        model.register_forward_pre_hook(self._begin, prepend=True)  # ahead of FSDP2's, which gathers
        model.register_forward_hook(self._leave, always_call=True)
        model.register_load_state_dict_pre_hook(self._wait)  # type: ignore[no-untyped-call]
        model.register_state_dict_pre_hook(self._wait)  # type: ignore[no-untyped-call]

    # What FSDP2 calls

    def _unshard(self, layer: HostLayer, unshard: Callable[[bool], None], async_op: bool = False) -> None:
        """Begin to gather a layer, as `FSDPParamGroup.unshard`: it reads the shards, unless there is but one rank."""
        is_read = not (layer.group.is_unsharded or _gather_of(layer.group) is not None)
        if is_read:
            self._bring(layer)
        self._bring_next(layer)
        if not is_read or self._num_shards == 1:
            unshard(async_op)
            return
        stream, _ = layer.group.comm_ctx.get_all_gather_streams(async_op, getattr(layer.group, torch_private.FSDP_PHASE))
        self._read(layer, functools.partial(unshard, async_op), stream)

    def _wait_for_unshard(self, layer: HostLayer, wait: Callable[[], None]) -> None:
        """Wait for that, as `FSDPParamGroup.wait_for_unshard`, which reads the shards if there is but one rank."""
        is_gathering = _gather_of(layer.group) is not None
        if is_gathering and layer.steppers and layer.is_stepped:
            raise StateOffloadError(
                "shard: the backward gathers a layer once more whose gradients it has reduced, and with which a "
                'StateOffload(when="backward") has stepped it: what is computed would mix weights of two steps. Leave the '
                "StateOffload out"
            )
        if self._num_shards > 1 or not is_gathering:
            wait()
            return
        self._bring(layer)
        self._read(layer, wait)

    def _reduce(self, layer: HostLayer, reduce: Callable[..., None], *args: Any) -> None:
        """Reduce a layer's gradients to host memory, as `FSDPParamGroup.post_backward`, and tell its steppers."""
        steppers = [*layer.steppers]  # held until both are called
        for steps in steppers:
            steps.before_reduce(layer)
        reduce(*args)
        for steps in steppers:
            steps.after_reduce(layer)

    def _read(self, layer: HostLayer, read: Callable[[], None], packing: object = None) -> None:
        """Have FSDP2 read the shards of a layer on the device, on a stream that waits for them: by default the current one."""
        brought, layer.brought = layer.brought, None
        assert brought is not None
        parameters, device, name = layer.group.fsdp_params, self._device, torch_private.FSDP_SHARD
        shards = [*map(data_of, parameters)]
        stream = self._stream_of(layer, packing)
        device.wait_event(stream, brought.done)
        if device.takes_notes:
            with device.on_stream(stream):
                device.note_read(brought.storage)
        try:
            for parameter, shard in zip(parameters, brought.shards, strict=True):
                setattr(parameter, name, shard)
            read()
        finally:
            for parameter, shard in zip(parameters, shards, strict=True):
                setattr(parameter, name, shard)
            if stream != brought.home:
                device.wait_event(brought.home, device.record_event(stream, timed=False))
        if self._is_reused(layer, brought):
            self._spare.append(brought)

    # What comes to the device

    def _bring(self, layer: HostLayer) -> None:
        if layer.brought is not None:
            return
        for steps in layer.steppers:
            steps.before_read(layer)
        chunk, device = layer.chunk(), self._device
        buffer = self._buffer_for(layer, chunk.num_bytes)
        with label("fetch") if torch_private.profiler_is_on() else NO_LABEL:
            ready = device.record_event(buffer.home, timed=False)
            # One part is put on the lane on which the last one was; the first of several may come on the other.
            after = (ready,) if self._last is None or len(layer.pieces) == 1 else (ready, self._last)
            try:
                buffer.done = self._lanes.copy_back_by_turns(layer.pieces, buffer.parts, after=after)
                layer.brought, layer.last_read, self._last = buffer, buffer.done, buffer.done
            except BaseException:
                device.synchronize()  # some parts may be on their way to a buffer that goes back now
                raise

    def _buffer_for(self, layer: HostLayer, num_bytes: int) -> ShardBuffer:
        """Return memory for a layer's chunk that FSDP2's packing stream is done with."""
        for number, buffer in enumerate(self._spare):
            if buffer.layout is layer.layout:
                return self._spare.pop(number)
        packing = getattr(layer.group.comm_ctx, "all_gather_copy_in_stream", None)  # none before the first forward
        with layer.group.device_handle.stream(packing) if packing is not None else nullcontext():
            return ShardBuffer(self._device.allocate(num_bytes), layer.layout, self._device.current_stream())

    def _stream_of(self, layer: HostLayer, stream: object) -> Stream:
        if stream is None:
            return self._device.current_stream()
        known = self._packing
        if known is None or known[0] is not stream:
            with layer.group.device_handle.stream(stream):
                known = self._packing = stream, self._device.current_stream()
        return known[1]

    def _is_reused(self, layer: HostLayer, buffer: ShardBuffer) -> bool:
        """Tell whether the next layer but one can have the buffer: see [Note: ahead of the gather]."""
        is_forward = torch_private.backward_task() == -1
        if is_forward and not self._is_in_forward:
            return False
        number = self._numbers.get(id(layer))
        if number is None:
            return False
        number += 2 if is_forward else -2
        return 0 <= number < len(self._numbers) and self.layers[number].layout is buffer.layout

    def _bring_next(self, layer: HostLayer) -> None:
        """Start the copy for the layer that FSDP2 will gather after this one: see [Note: ahead of the gather]."""
        task = torch_private.backward_task()
        if task == -1 and not self._is_in_forward:
            return
        if task not in (-1, self._task):
            self._task, self._end = task, on_end(self._end_backward)
        number = self._numbers.get(id(layer), -1 if task == -1 else len(self._numbers))
        number += 1 if task == -1 else -1
        if 0 <= number < len(self._numbers):
            following = self.layers[number]
            if following.brought is not None or following.group.is_unsharded or _gather_of(following.group) is not None:
                return
            # a stepped one runs in another order than it is registered in
            if not (following.steppers and following.is_stepped) and (task == -1 or following.group.unshard_in_backward):
                self._bring(following)

    def _drop_all(self) -> None:
        self._spare.clear()
        for layer in self.layers:
            brought, layer.brought = layer.brought, None
            if brought is not None:
                self._device.wait_event(brought.home, brought.done)

    # Where a forward or a backward begins and ends: see [Note: writes to the host's shards]

    def _begin(self, *_: object) -> None:
        self._drop_all()
        self._is_in_forward = True

    def _leave(self, *_: object) -> None:
        self._is_in_forward = False
        if torch_private.backward_task() == -1:  # else it is run again by a backward, which goes on
            self._drop_all()
            if not torch.is_grad_enabled():
                self._wait()

    def _end_backward(self, _: bool) -> None:
        self._task = -1
        self._drop_all()
        self._wait()

    def _wait(self, *_: object) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._device.synchronize(last)
