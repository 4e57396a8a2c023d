"""`shard`: FSDP2 with memkit's host copies of shards; its refusals come before any change."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memkit.core import torch_private
from memkit.core.agreement import together
from memkit.core.backwards import BackwardEnd, on_end
from memkit.core.sizes import ALIGNMENT_BYTES, rounded
from memkit.core.tensors import byte_view, tensor_over, unique_storages
from memkit.core.torch_state import NO_LABEL, is_dtensor, is_sharded_by_fsdp, label, leave_untraced
from memkit.device import open_device
from memkit.device.base import Device, Event, Stream
from memkit.errors import MissingTorchNameError, StateOffloadError, warn_user
from memkit.optimizers.steppers import reduced_layers
from memkit.transfer.host_memory import Arena, Span
from memkit.transfer.lanes import TURN_BYTES, lanes_of
from memkit.weights import LayerOffload
from memkit.weights.host_copies import is_streamed, shared_between
from memkit.weights.selection import LayerChoice, find_layers, quoted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

    from memkit.optimizers.steppers import ReducedSteps

data_of = attrgetter(torch_private.FSDP_SHARD)  # what FSDP2 gathers: padded to the same length on all ranks, [numel]
_own_of = attrgetter(f"sharded_param.{torch_private.LOCAL_TENSOR}")  # what the optimizer steps; it may be empty
_gather_of = attrgetter(torch_private.FSDP_GATHER)
_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class _ShardRegion:
    start: int
    numel: int
    dtype: torch.dtype

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        offset = self.start // self.dtype.itemsize
        return tensor_over(storage, self.dtype, offset=offset, size=(self.numel,), stride=(1,))


Layout = tuple[_ShardRegion, ...]  # of a layer's shards in its chunk; the identical object where shards lie alike


class ShardBuffer:
    """Device memory for chunks of one layout, one after the other, with views made once. It goes back to the stream `home`."""

    def __init__(self, storage: torch.UntypedStorage, layout: Layout, home: Stream) -> None:
        self.storage, self.layout, self.home = storage, layout, home
        self.parts = byte_view(storage).split(TURN_BYTES)
        self.shards = [region.over(storage) for region in layout]
        self.done: Event


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
    on the lane when it began to gather the one before, and leave when FSDP2's stream for packing has come so far. A chunk's
    memory belongs to that stream, and once it is packed, the layer but one behind it has that memory, if its shards lie alike:
    a forward makes two buffers. They are freed when nothing more is to be brought, before the loss and its gradients take most
    memory.

    [Note: writes to the host's shards] Nothing is brought ahead outside of a forward of the model and of a backward, nor from
    one into the next: the next gather sees an `optimizer.step()`, a `load_state_dict` or a write to `data` in between. At the
    end of a backward, and of a forward without grad, the host waits for the last copy. After a forward with grad the copy is
    ahead for the backward: the host waits when states are loaded or asked for, and a write to `data` has to wait for the
    backward. Steppers of shards within the backward are asked ahead of each copy (`memkit.optimizers.steppers.ReducedSteps`).
    """

    def __init__(self, device: Device, num_shards: int) -> None:
        self._device = device
        self._num_shards = num_shards
        self._lanes = lanes_of(device)
        self._arena = Arena(device)
        self._layouts: dict[Layout, Layout] = {}
        self._spare: list[ShardBuffer] = []  # for layers that are yet to be brought in this forward or backward
        self._packing: tuple[object, Stream] | None = None  # FSDP2's stream, the device's (slow to look up)
        self._is_in_forward = False
        self._last: Event | None = None  # behind the last copy on the lane, until the host has waited for it
        self._end: BackwardEnd | None = None
        self._task = -1
        self.layers: list[HostLayer] = []  # the groups that FSDP2 gathers: layers in running order, then the rest
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


@dataclass(frozen=True, slots=True)
class _Options:
    mesh: DeviceMesh
    frozen_dtype: torch.dtype | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    reshard_after_forward: bool
    prefetch: int

    def check(self) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

        fsdp, none = "torch.distributed.fsdp.", type(None)
        for name, kinds, what in (
            ("mesh", (DeviceMesh,), "a torch.distributed.device_mesh.DeviceMesh"),
            ("mp_policy", (MixedPrecisionPolicy, none), f"a {fsdp}MixedPrecisionPolicy"),
            ("offload_policy", (OffloadPolicy, none), f"a {fsdp}CPUOffloadPolicy or OffloadPolicy"),
            ("frozen_dtype", (torch.dtype, none), "a torch.dtype"),
        ):
            given = getattr(self, name)
            found = repr(given) if name == "frozen_dtype" else type(given).__name__
            if not isinstance(given, kinds):
                raise TypeError(f"shard: {name} is {what}; found {found}")
        if self.frozen_dtype is not None and not self.frozen_dtype.is_floating_point:
            raise ValueError(f"shard: frozen_dtype is a floating-point type; found {self.frozen_dtype}")
        if not isinstance(self.reshard_after_forward, bool):
            raise TypeError(
                f"shard: reshard_after_forward is True or False; found {self.reshard_after_forward!r}. "
                "torch.distributed.fsdp.fully_shard takes a number of ranks as well"
            )
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int):
            raise TypeError(f"shard: prefetch is a number of layers; found {self.prefetch!r}")
        if self.prefetch < 0:
            raise ValueError(f"shard: prefetch is a number of layers, 0 or more; found {self.prefetch}")


def check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where, kind = quoted(name), type(module).__name__
        if is_sharded_by_fsdp(module):
            raise ValueError(f"shard needs a model that is not sharded; found {where} sharded already ({kind}). Shard it once")
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(f"shard: {where} is wrapped by {kind}. Use one of the two: give shard the plain model")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"shard: {where} is compiled by torch.jit, which takes no hooks. torch.compile works")
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter.data):
            raise ValueError(f'shard: "{name}" is a DTensor, which is on several devices already. Give shard the plain model')
        if is_streamed(parameter):
            raise ValueError(
                f'shard: "{name}" is streamed by {LayerOffload.__name__}. Close that first (memkit.detach(model)); '
                "offload_policy=torch.distributed.fsdp.CPUOffloadPolicy() has shards on the host"
            )
        if is_lazy(parameter):
            raise ValueError(f'shard: "{name}" has no data: its module is lazy. Run the model once first')
        if not parameter.is_contiguous() or not parameter.numel():
            kind = "has no elements" if not parameter.numel() else "is not contiguous"
            raise ValueError(f'shard: "{name}" {kind}, which FSDP2 can\'t shard. Leave it out, or make it contiguous')
        if parameter.dim() == 0:
            raise ValueError(f'shard: "{name}" is a scalar, which can\'t be sharded. Make it a tensor of shape [1]')
    _refuse_views_of_one(model)


def check_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        if layer is model:
            raise ValueError("layers: the model itself is no layer of it. Leave layers out, or name modules in it")
        if isinstance(layer, nn.ModuleList | nn.ModuleDict) and type(layer).forward is nn.Module.forward:
            raise ValueError(f'layers: "{name}" is a {type(layer).__name__}, which is never called. Name what is in it')
    tied = shared_between(model, layers)
    if tied:
        names = ", ".join(f'"{name}"' for name in next(iter(tied.values())))
        raise ValueError(
            f"shard: {names} are one tensor, in several layers or in one and outside. Each layer is gathered by itself: leave "
            "out of layers= what shares (what is in no layer is gathered as one), or untie them"
        )
    inside = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    named = dict(model.named_parameters())
    groups = {quoted(name): dict(layer.named_parameters(prefix=name)) for name, layer in layers.items()}
    groups["what is in no layer"] = {name: item for name, item in named.items() if id(item) not in inside}
    for where, parameters in groups.items():
        first_of = dict[torch.dtype, str]()
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                first_of.setdefault(parameter.dtype, name)
        if len(first_of) > 1:
            found = ", ".join(f'"{name}" is {str(dtype).removeprefix("torch.")}' for dtype, name in first_of.items())
            raise ValueError(
                f"shard needs one dtype for what is trained in {where}, whose gradients are reduced as one; {found}. "
                "Convert one, or make it a layer of its own"
            )


def check_mesh(mesh: DeviceMesh, model: nn.Module) -> None:
    world_size = dist.get_world_size()
    if mesh.size() != world_size:
        raise ValueError(
            f"shard needs a mesh of all {world_size} ranks of the process group; found one of {mesh.size()}. "
            "torch.distributed.fsdp.fully_shard takes a part of a mesh"
        )
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        raise ValueError(
            f"shard takes a mesh of one dimension (shards), or of two with names (replicas of shards); found {mesh.ndim}"
            + (" without names" if mesh.ndim == 2 else "")
        )
    expected = device_of(mesh)
    for name, parameter in model.named_parameters():
        device = parameter.device
        if device.type not in ("meta", "cpu") and device != expected:
            raise ValueError(
                f'shard: the mesh is of {expected}, and "{name}" is on {device}. Leave the model on the CPU, from where each '
                "layer is sharded, or choose the device first (torch.accelerator.set_device_index(LOCAL_RANK))"
            )


def device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _refuse_views_of_one(model: nn.Module) -> None:
    owners = defaultdict[int, dict[int, str]](dict)
    for name, parameter in model.named_parameters():  # each parameter once
        for storage in unique_storages([parameter]):
            owners[storage][id(parameter)] = name
    for names in owners.values():
        if len(names) > 1:
            found = " and ".join(f'"{name}"' for name in names.values())
            raise ValueError(f"shard: {found} are parameters over the same bytes, which shards would not share. Untie them")


def shard(
    model: _Model,
    *,
    mesh: DeviceMesh | None = None,
    layers: LayerChoice = None,
    frozen_dtype: torch.dtype | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
) -> _Model:
    """Split a model between the processes of the default group, layer by layer, with FSDP2.

    Each process, a rank, keeps its part of every parameter, and so of gradients and optimizer states. A layer is gathered just
    before its forward and its backward, and let go of after them. Parameters in no layer are gathered as one, and stay from
    their forward until their backward. Every rank calls it with the same model; a rank that cannot raises on all of them.

    The model stays what `torch.distributed.fsdp.fully_shard` makes of it: make the optimizer afterwards, clip by
    `torch.nn.utils.clip_grad_norm_`, save by `torch.distributed.checkpoint`. Freeze before: a parameter that doesn't require
    grad has no gradient, is left out of reductions, and may be of another dtype than those trained beside it.

    Args:
        model: on the CPU, from where it is sharded layer by layer; on this rank's device; or on "meta".
        mesh: of all ranks, with one dimension, or two with names: replicas of shards. By default of one dimension, on the
            accelerator if there is one and the group has a backend for it other than gloo, else on the CPU.
        layers: names, modules, or a predicate of name and module. By default the elements of lists (`ModuleList`, `Sequential`)
            whose elements are of one class; if they are stages, the blocks inside them: as `LayerOffload` finds them.
        frozen_dtype: the dtype that frozen floating-point parameters are converted to first. By default they stay as they are.
        mp_policy: FSDP2's, for every layer: in which dtypes parameters are gathered and gradients reduced.
        offload_policy: `torch.distributed.fsdp.CPUOffloadPolicy()` has parameters, gradients and the optimizer's step be on the
            host. memkit brings each layer's part to the device one layer ahead of where it is gathered, in one copy. With
            `pin_memory=False` that is left to FSDP2.
        reshard_after_forward: whether layers are let go of after their forward.
        prefetch: how many layers ahead are gathered, in the order in which they are registered in forward, and the other way
            round in backward. 0 leaves it to FSDP2, which goes by the order in which they ran.

    Returns:
        The model, whose parameters are shards (`DTensor`) from now on.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: there is no process group; the mesh is of another size or device; the model is sharded, replicated or
            streamed already, or has parameters that can't be sharded; layers overlap, or are tied.
        HostMemoryError: the host has no room for shards that are to be there.
        ShardError: one of these errors was raised on another rank, or ranks were given different models, or one has ended.

    Example:
        >>> import torch, memkit
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> model = memkit.shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> torch.distributed.destroy_process_group()

    Source: `torch.distributed.fsdp.fully_shard`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "shard needs a process group; found none. Start the script by torchrun --nproc-per-node N, and call "
            "torch.distributed.init_process_group() first; one process is a group as well"
        )
    over = _default_mesh() if mesh is None else mesh  # before ranks may raise: it chooses the device by LOCAL_RANK
    options = _Options(over, frozen_dtype, mp_policy, offload_policy, reshard_after_forward, prefetch)

    def look() -> dict[str, nn.Module]:
        if not isinstance(model, nn.Module):
            raise TypeError(f"shard needs a torch.nn.Module; found {type(model).__name__}")
        options.check()
        check_mesh(over, model)
        check_model(model)
        found = find_layers(model, layers, feature="shard")
        check_layers(model, found)
        return found

    def describe(found: Mapping[str, nn.Module]) -> Iterator[object]:
        yield frozen_dtype, mp_policy, offload_policy, reshard_after_forward, prefetch, over.device_type, over.shape
        yield list(found)
        for name, item in model.named_parameters():
            yield name, tuple(item.shape), item.dtype, item.requires_grad

    found = together(look, describe, doing="looking at the model")
    together(lambda: _shard(model, found, options), lambda _: (), doing="sharding it, which is done in part now")
    return model


def _default_mesh() -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cpu"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and f"{accelerator.type}:gloo" not in dist.get_backend_config().split(","):
        kind = accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def _shard(model: nn.Module, layers: Mapping[str, nn.Module], options: _Options) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if options.frozen_dtype is not None:
        frozen = [item for item in model.parameters() if not item.requires_grad and item.is_floating_point()]
        if not frozen:
            warn_user(f"memkit.shard: frozen_dtype={options.frozen_dtype} changes nothing: no parameter is frozen")
        for parameter in frozen:
            parameter.data = parameter.data.to(options.frozen_dtype)
    mesh, offload_policy, host = options.mesh, options.offload_policy or OffloadPolicy(), None
    if isinstance(offload_policy, CPUOffloadPolicy):
        if offload_policy.pin_memory:  # then memkit brings shards from there
            host = HostShards(open_device(device_of(mesh)), mesh.size(mesh.ndim - 1))
        if mesh.device_type == "cpu":
            offload_policy = CPUOffloadPolicy(pin_memory=False)  # there is no device to pin for
    policies: dict[str, Any] = {"mp_policy": options.mp_policy or MixedPrecisionPolicy(), "offload_policy": offload_policy}
    parts: list[FSDPModule] = []
    for module in (*layers.values(), model):
        # parameters in no layer may be needed again at once, last in the forward; None leaves that to FSDP2
        reshards = None if module is model and options.reshard_after_forward else options.reshard_after_forward
        parts.append(fully_shard(module, mesh=mesh, reshard_after_forward=reshards, **policies))
        if host is not None:
            try:
                (host.add_whole if module is model else host.add)(parts[-1])  # at once: until then a shard is there twice
            except MissingTorchNameError as error:
                warn_user(f"memkit.shard: parameters come from the host by FSDP2's own policy, in one copy each: {error}")
                host = None
    *parts, whole = parts
    _set_prefetch(whole, parts, options.prefetch, comes_from_host=host is not None)


def _set_prefetch(model: FSDPModule, layers: list[FSDPModule], prefetch: int, *, comes_from_host: bool) -> None:
    if prefetch == 0:
        return
    model.set_modules_to_forward_prefetch(layers[:prefetch])
    # The last layer's part comes from the host while the loss has its gradients, when most memory is in use: to gather it as
    # well takes all parts. The model itself is there: nothing is gathered ahead, as without a list FSDP2 would.
    model.set_modules_to_backward_prefetch([model] if comes_from_host else layers[::-1][:prefetch])
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + prefetch])
        layer.set_modules_to_backward_prefetch(layers[:number][::-1][:prefetch])
