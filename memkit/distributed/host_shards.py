"""Shards that live in host memory: one chunk for each layer, brought to the device on memkit's lanes ahead of its gather.

Who owns what stays FSDP2's (`CPUOffloadPolicy`): shards, their gradients and the optimizer's step are the CPU's, and a layer is
gathered where FSDP2 gathers it. Only how its shard comes to the device is done here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memkit import torch_private
from memkit.backwards import BackwardEnd, on_end
from memkit.device import Device
from memkit.device.base import Event, Stream
from memkit.distributed.host_layers import Buffer, HostLayer, Layout, data_of, group_of
from memkit.errors import StateOffloadError
from memkit.labels import NO_LABEL, label
from memkit.steppers import reduced_layers
from memkit.torch_state import leave_untraced
from memkit.transfer.arena import Arena
from memkit.transfer.lanes import lanes_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class HostShards:
    """The layers of one model whose shards are on the host, and their copies to the device.

    [Note: ahead of the gather] Where FSDP2 begins to gather a layer, that layer's bytes are on their way already: they were put
    on the lane where it began to gather the one before, so that two chunks at most are on the device beside what is gathered.
    The lane starts when the work that FSDP2's stream for packing has then is done, which keeps it one layer ahead of compute.
    A chunk's memory belongs to the stream that packs. As soon as it is packed, the layer but one behind it has that memory, if
    its shards lie alike: so a forward makes two buffers, with a view of each shard. They are gone when nothing more is to be
    brought, before the loss and its gradients take most memory.

    [Note: writes to the host's shards] Nothing is brought ahead outside of a forward of the model and of a backward, nor from
    one into the next: `optimizer.step()`, `load_state_dict` or a write to `data` in between is seen by the next gather. At the
    end of a backward, and of a forward without grad, the host waits for the last copy, so that it reads what was there before.
    After a forward with grad it is ahead for the sake of the backward; it waits where states are loaded, or asked for, which
    `torch.distributed.checkpoint` writes to. A write to `data` has to wait for the backward, or for the device. Whoever steps
    shards within the backward is asked ahead of each copy, and told of each reduction: see `memkit.steppers.ReducedSteps`.

    Args:
        device: where layers are gathered.
        num_shards: how many parts each parameter has.
    """

    def __init__(self, device: Device, num_shards: int) -> None:
        self._device = device
        self._num_shards = num_shards
        self._lanes = lanes_of(device)
        self._arena = Arena(device)
        self._layouts: dict[Layout, Layout] = {}
        self._spare: list[Buffer] = []
        """What layers that are yet to be brought in this forward or backward will need."""
        self._packing: tuple[object, Stream] | None = None
        """FSDP2's stream for packing, and the same one as the device has it: to ask for that takes as long as a copy."""
        self._is_in_forward = False
        self._last: Event | None = None
        """Behind the copy that was put on the lane last, until the host has waited for it."""
        self._end: BackwardEnd | None = None
        self._task = -1
        self.layers: list[HostLayer] = []
        """What FSDP2 gathers as one: layers in the order in which they run, and behind these what is in none."""
        self._numbers: dict[int, int] = {}
        """Of layers, by the ids of what FSDP2 gathers."""
        for function in (self._unshard, self._wait_for_unshard, self._reduce, self._begin, self._leave):
            leave_untraced(function)

    def add(self, module: FSDPModule) -> None:
        """Copy a layer's shards ahead of its gathers from now on. If they have data, it moves to a chunk at once.

        Raises:
            MissingTorchNameError: FSDP2 does not gather as it did. The layer is left to its own policy.
        """
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
        """The same for parameters that are in no layer. To be called last: from now on shards are copied ahead.

        Raises:
            MissingTorchNameError: as for a layer.
        """
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
        is_read = not layer.is_gathered
        if is_read:
            self._bring(layer)
        self._bring_next(layer)
        if not is_read or self._num_shards == 1:
            unshard(async_op)
            return
        stream, _ = layer.group.comm_ctx.get_all_gather_streams(async_op, getattr(layer.group, torch_private.FSDP_PHASE))
        self._read(layer, functools.partial(unshard, async_op), stream)

    def _wait_for_unshard(self, layer: HostLayer, wait: Callable[[], None]) -> None:
        """Wait for that, as `FSDPParamGroup.wait_for_unshard`, which reads the shards where there is but one rank.

        Raises:
            StateOffloadError: a `StateOffload` has stepped the layer within this backward, which needs it once more.
        """
        if layer.steppers and getattr(layer.group, torch_private.FSDP_GATHER) is not None and _is_stepped(layer):
            raise StateOffloadError(
                "shard: the backward gathers a layer once more whose gradients it has reduced, and with which a "
                'StateOffload(when="backward") has stepped it: what is computed would mix weights of two steps. Leave the '
                "StateOffload out"
            )
        if self._num_shards > 1 or getattr(layer.group, torch_private.FSDP_GATHER) is None:
            wait()
            return
        self._bring(layer)
        self._read(layer, wait)

    def _reduce(self, layer: HostLayer, reduce: Callable[..., None], *args: Any) -> None:
        """Reduce a layer's gradients to host memory, as `FSDPParamGroup.post_backward`; whoever steps with them is told."""
        steppers = [*layer.steppers]  # held until both are called
        for steps in steppers:
            steps.before_reduce(layer)
        reduce(*args)
        for steps in steppers:
            steps.after_reduce(layer)

    def _read(self, layer: HostLayer, read: Callable[[], None], packing: object = None) -> None:
        """Have FSDP2 read the shards of a layer on the device, on a stream that has waited for them: by default the current
        one."""
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
        """Put the copy of a layer's chunk on the lane, unless it is there or done already."""
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

    def _buffer_for(self, layer: HostLayer, num_bytes: int) -> Buffer:
        """Return memory for a layer's chunk that the stream for packing is done with when it comes to what it is given next."""
        for number, buffer in enumerate(self._spare):
            if buffer.layout is layer.layout:
                return self._spare.pop(number)
        packing = getattr(layer.group.comm_ctx, "all_gather_copy_in_stream", None)  # none before the first forward
        with layer.group.device_handle.stream(packing) if packing is not None else nullcontext():
            return Buffer(self._device.allocate(num_bytes), layer.layout, self._device.current_stream())

    def _stream_of(self, layer: HostLayer, stream: object) -> Stream:
        """Return one of FSDP2's streams as the device has it; for None the current one."""
        if stream is None:
            return self._device.current_stream()
        known = self._packing
        if known is None or known[0] is not stream:
            with layer.group.device_handle.stream(stream):
                known = self._packing = stream, self._device.current_stream()
        return known[1]

    def _is_reused(self, layer: HostLayer, buffer: Buffer) -> bool:
        """Tell whether the buffer of a layer that was read is reused for the next layer but one: see [Note: ahead of the
        gather]."""
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
            if following.brought is not None or following.is_gathered:
                return
            if following.steppers and _is_stepped(following):
                return  # it runs in another order than it is registered in
            if task == -1 or following.group.unshard_in_backward:
                self._bring(following)

    def _drop_all(self) -> None:
        """Drop chunks that were copied and not gathered, and free buffers."""
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


def _is_stepped(layer: HostLayer) -> bool:
    """Tell whether the running backward has had shards of a layer stepped, or has begun to."""
    return any(steps.is_stepping(layer) for steps in layer.steppers)
