"""Shards that live in host memory: one chunk for each layer, brought to the device on memkit's lanes ahead of its gather.

Who owns what stays FSDP2's (`CPUOffloadPolicy`): shards, their gradients and the optimizer's step are the CPU's, and a layer is
gathered where FSDP2 gathers it. Only how its shard comes to the device is done here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.backwards import BackwardEnd, on_end
from memkit.device import Device
from memkit.device.base import Event, Stream
from memkit.errors import MissingTorchNameError
from memkit.storages import tensor_over
from memkit.torch_state import leave_untraced
from memkit.transfer.arena import Arena
from memkit.transfer.lanes import lanes_of
from memkit.transfer.spans import ALIGNMENT_BYTES, Span, rounded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True, slots=True)
class _Region:
    """Where the shard of one parameter is in its layer's chunk."""

    start: int
    numel: int
    dtype: torch.dtype

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the shard, [numel], in a storage that has the bytes of the chunk."""
        offset = self.start // self.dtype.itemsize
        return tensor_over(storage, self.dtype, offset=offset, size=(self.numel,), stride=(1,))


@dataclass(frozen=True, slots=True)
class _Brought:
    """A layer's chunk on the device, or on its way there."""

    storage: torch.UntypedStorage
    """Goes back to `home`."""
    home: Stream
    done: Event
    """The bytes are there."""


class HostLayer:
    """What FSDP2 gathers as one, whose shards on this rank lie side by side in pinned host memory.

    Args:
        group: FSDP2's parameters that are gathered together.
        arena: has the memory.
    """

    def __init__(self, group: Any, arena: Arena) -> None:
        self.group = group
        self.brought: _Brought | None = None
        self._arena = arena
        self._regions: list[_Region] = []
        self._span: Span | None = None
        self._memories: list[tuple[Span, weakref.ref[Any]]] = []
        """Chunks that it has had, each with its memory, which is there as long as a tensor is in it."""
        self.last_read: Event | None = None
        """Behind the last copy of its chunk."""
        self._addresses: list[tuple[int, int]] = []
        """Where each shard was put: what is gathered, and what is this rank's own of it, which may be nothing."""

    @property
    def is_gathered(self) -> bool:
        """Whether FSDP2 has gathered it, or has begun to."""
        return self.group.is_unsharded or getattr(self.group, torch_private.FSDP_GATHER) is not None

    def chunk(self) -> Span:
        """Return its host memory, in which all shards are.

        A shard may have come to lie elsewhere: what had no data when it was sharded, and what was loaded with `assign=True`,
        moved or cast since.
        """
        if self._addresses != [(flat.data_ptr(), own.data_ptr()) for flat, own in self._shards()]:
            self._move_in()
        assert self._span is not None
        return self._span

    def _shards(self) -> list[tuple[Tensor, Tensor]]:
        """Return of each parameter what FSDP2 gathers, filled up to the length of all ranks, as [numel], and what is the rank's
        own of that, in the shape that it has: what the optimizer steps."""
        parts = []
        for parameter in self.group.fsdp_params:
            own = getattr(parameter.sharded_param, torch_private.LOCAL_TENSOR)
            parts.append((getattr(parameter, torch_private.FSDP_SHARD), own))
        return parts

    @torch.no_grad()
    def _move_in(self) -> None:
        """Have the shards lie in the chunk. What the caller has kept of those that lay elsewhere stays what it was."""
        shards, regions, end = self._shards(), [], 0
        for flat, _ in shards:
            regions.append(_Region(end, flat.numel(), flat.dtype))
            end += rounded(flat.nbytes, ALIGNMENT_BYTES)
        with torch.inference_mode(False):
            if self._span is None or regions != self._regions:
                self._span = None
                self._give_left()
                (self._span,) = self._arena.take_pinned_as_one([end])
                self._regions, self._addresses = regions, [(0, 0)] * len(regions)
            assert self._span.whole is not None
            memory = self._span.whole.numpy()
            self._memories.append((self._span, weakref.ref(memory)))
            for number, (region, (flat, own)) in enumerate(zip(regions, shards, strict=True)):
                if (flat.data_ptr(), own.data_ptr()) == self._addresses[number]:
                    continue
                # A storage of its own, so that saving a shard writes no more than its bytes.
                num_bytes = region.numel * region.dtype.itemsize
                moved = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=region.start).view(region.dtype)
                moved.copy_(flat)
                moved_own = moved[: own.numel()].view(own.shape)
                moved_own.copy_(own)  # which torch may have put elsewhere by itself, to pin it
                parameter = self.group.fsdp_params[number]
                setattr(parameter, torch_private.FSDP_SHARD, moved)
                setattr(parameter.sharded_param, torch_private.LOCAL_TENSOR, moved_own)
                self._addresses[number] = moved.data_ptr(), moved_own.data_ptr()

    def _give_left(self) -> None:
        """Give back the chunks that it has had and in which no tensor is any more, also none that the caller has kept."""
        self._memories, before = [each for each in self._memories if each[1]() is not None], self._memories
        for span in dict.fromkeys(span for span, _ in before):
            if all(span is not held for held, _ in self._memories):
                self._arena.give(span, self.last_read)
        self._arena.trim_gaps()

    def views(self, brought: _Brought) -> list[Tensor]:
        """Return the shards on the device, each as [numel]."""
        return [region.over(brought.storage) for region in self._regions]


def _group_of(module: Any) -> Any:
    """Return what FSDP2 gathers as one for a module, None for one without parameters of its own.

    Raises:
        MissingTorchNameError: a name of FSDP2's is not there.
    """
    to_state, to_group = torch_private.FSDP_GROUP
    group = _named(_named(module, to_state)(), to_group)
    if group is not None:
        for name in (*torch_private.FSDP_PARTS, torch_private.FSDP_GATHER, torch_private.FSDP_PHASE):
            _named(group, name)
        _named(group.comm_ctx, "get_all_gather_streams")
        for parameter in group.fsdp_params:
            _named(parameter, torch_private.FSDP_SHARD)
            _named(parameter.sharded_param, torch_private.LOCAL_TENSOR)
    return group


def _named(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        symbol = f"{type(owner).__qualname__}.{name}"
        raise MissingTorchNameError(f"found torch {torch.__version__} without {symbol}", symbol=symbol) from None


class HostShards:
    """The layers of one model whose shards are on the host, and what of them is on its way to the device.

    [Note: ahead of the gather] Where FSDP2 begins to gather a layer, that layer's bytes are on their way already: they were put
    on the lane where it began to gather the one before, so that two chunks at most are on the device beside what is gathered.
    The lane starts when the work that FSDP2's stream for packing has then is done, which keeps it one layer ahead of compute.
    A chunk belongs to the stream that packs. It is let go of as soon as it is packed.

    [Note: writes to the host's shards] Nothing is brought ahead outside of a forward of the model and of a backward, nor from
    one into the next: `optimizer.step()`, `load_state_dict` or a write to `data` in between is seen by the next gather. At the
    end of a backward, and of a forward without grad, the host waits for the last copy, so that it reads what was there before.
    After a forward with grad it is ahead for the sake of the backward; it waits where states are loaded, or asked for, which
    `torch.distributed.checkpoint` writes to. A write to `data` has to wait for the backward, or for the device.

    Args:
        device: where layers are gathered.
        num_shards: how many parts each parameter has.
    """

    def __init__(self, device: Device, num_shards: int) -> None:
        self._device = device
        self._num_shards = num_shards
        self._lanes = lanes_of(device)
        self._arena = Arena(device)
        self._is_in_forward = False
        self._last: Event | None = None
        """Behind the copy that was put on the lane last, until the host has waited for it."""
        self._end: BackwardEnd | None = None
        self._task = -1
        self.layers: list[HostLayer] = []
        """What FSDP2 gathers as one: layers in the order in which they run, and behind these what is in none."""
        self._numbers: dict[int, int] = {}
        """Of layers, by the ids of what FSDP2 gathers."""
        for function in (self._unshard, self._wait_for_unshard, self._begin, self._leave):
            leave_untraced(function)

    def add(self, module: FSDPModule) -> None:
        """Bring what FSDP2 gathers as one for a layer from now on. If it has data, that moves to a chunk at once.

        Raises:
            MissingTorchNameError: FSDP2 does not gather as it did. The layer is left to its own policy.
        """
        group = _group_of(module)
        if group is None:  # without parameters
            return
        layer = HostLayer(group, self._arena)
        if not any(item.sharded_param.is_meta for item in group.fsdp_params):
            layer.chunk()
        group.unshard = functools.partial(self._unshard, layer, group.unshard)
        group.wait_for_unshard = functools.partial(self._wait_for_unshard, layer, group.wait_for_unshard)
        self._numbers[id(layer)] = len(self.layers)
        self.layers.append(layer)

    def add_whole(self, model: FSDPModule) -> None:
        """The same for what is in no layer, last. Bring ahead from now on.

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
        context, state = layer.group.comm_ctx, getattr(layer.group, torch_private.FSDP_PHASE)
        stream, _ = context.get_all_gather_streams(async_op, state)
        self._read(layer, lambda: unshard(async_op), functools.partial(layer.group.device_handle.stream, stream))

    def _wait_for_unshard(self, layer: HostLayer, wait: Callable[[], None]) -> None:
        """Wait for that, as `FSDPParamGroup.wait_for_unshard`, which reads the shards where there is but one rank."""
        if self._num_shards > 1 or getattr(layer.group, torch_private.FSDP_GATHER) is None:
            wait()
            return
        self._bring(layer)
        self._read(layer, wait, nullcontext)

    def _read(self, layer: HostLayer, read: Callable[[], None], on_stream: Callable[[], AbstractContextManager[Any]]) -> None:
        """Have FSDP2 read the shards of a layer on the device, on a stream that has waited for them."""
        brought, layer.brought = layer.brought, None
        assert brought is not None
        parameters, device = layer.group.fsdp_params, self._device
        shards = [getattr(item, torch_private.FSDP_SHARD) for item in parameters]
        with on_stream():
            stream = device.current_stream()
            device.wait_event(stream, brought.done)
            device.note_read(brought.storage)
        try:
            for parameter, view in zip(parameters, layer.views(brought), strict=True):
                setattr(parameter, torch_private.FSDP_SHARD, view)
            read()
        finally:
            for parameter, shard in zip(parameters, shards, strict=True):
                setattr(parameter, torch_private.FSDP_SHARD, shard)
            if stream != brought.home:
                device.wait_event(brought.home, device.record_event(stream))

    # What comes to the device

    def _bring(self, layer: HostLayer) -> None:
        """Put a layer's bytes on the lane, if they are not there or on the device."""
        if layer.brought is not None:
            return
        chunk, group = layer.chunk(), layer.group
        packing = getattr(group.comm_ctx, "all_gather_copy_in_stream", None)  # none before the first forward
        with group.device_handle.stream(packing) if packing is not None else nullcontext():
            home = self._device.current_stream()
            storage = self._device.allocate(chunk.num_bytes)
            ready = self._device.record_event()
        done = self._lanes.copy_back(chunk, storage, after=(ready,)).done
        layer.brought = _Brought(storage, home, done)
        layer.last_read = self._last = done

    def _bring_next(self, layer: HostLayer) -> None:
        """Bring what FSDP2 will gather after a layer: see [Note: ahead of the gather]."""
        task = torch_private.backward_task()
        if task == -1 and not self._is_in_forward:
            return
        if task not in (-1, self._task):
            self._task, self._end = task, on_end(self._end_backward)
        number = self._numbers.get(id(layer), -1 if task == -1 else len(self._numbers))
        number += 1 if task == -1 else -1
        if 0 <= number < len(self._numbers):
            following = self.layers[number]
            if not following.is_gathered and (task == -1 or following.group.unshard_in_backward):
                self._bring(following)

    def _drop_all(self) -> None:
        """Let go of what was brought and not gathered."""
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
