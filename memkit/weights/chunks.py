"""The streamed parameters of a layer: their layout in its chunk, their host copies, and where they point."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, repeat
from operator import attrgetter, is_, mul
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.tensors import (
    Geometry,
    byte_view,
    has_plain_parts,
    is_dense,
    overlapping,
    parts_of,
    set_reported_device,
    storage_key,
    tensor_over,
    wrappers_in,
)
from memkit.core.torch_state import num_users
from memkit.device.base import Event
from memkit.errors import LayerOffloadError
from memkit.plan.chunks import Region, Residency, lay_out
from memkit.transfer.host_memory import Span

if TYPE_CHECKING:
    from memkit.weights.slots import Slot

HOST = torch.device("cpu")
_NO_CONTEXT = nullcontext()
_ADVICE = "Call offload.close() first, change the model, and make a new LayerOffload."


class BoundTensor:
    """A plain tensor, of a streamed parameter: `tensor.data` lies in a slot while its layer runs; else it is `host_copy`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.offset = 0
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype
        self.host_copy: Tensor = tensor.data
        self.address = 0

    def over(self, storage: torch.UntypedStorage, *, start: int = 0) -> Tensor:
        offset = (self.offset - start) // self.dtype.itemsize
        return tensor_over(storage, self.dtype, offset=offset, size=self.size, stride=self.stride)

    @property
    def place(self) -> Geometry:
        return Geometry(self.size, self.stride, self.offset // self.dtype.itemsize, self.dtype, False, False)

    def adopt_layout(self, source: Tensor) -> None:
        storage = self.host_copy.untyped_storage()
        is_alone = storage.nbytes() == source.nbytes
        if is_alone and is_dense(self.size, self.stride) and is_dense(source.size(), source.stride()):
            self.stride = source.stride()
            self.host_copy = tensor_over(storage, self.dtype, offset=0, size=self.size, stride=self.stride)

    def shares_host_copy(self, tensor: Tensor) -> bool:
        return storage_key(tensor.untyped_storage()) == storage_key(self.host_copy.untyped_storage())

    def is_host_copy(self, tensor: Tensor) -> bool:
        return (
            tensor.dtype == self.dtype
            and bool(tensor.storage_offset() == self.host_copy.storage_offset())
            and tensor.size() == self.size
            and tensor.stride() == self.stride
            and self.shares_host_copy(tensor)
        )


class StreamedParameter:
    """One parameter that streams: its plain tensors, and the wrappers around them, which report a device."""

    def __init__(self, name: str, parameter: nn.Parameter, places: Sequence[tuple[nn.Module, str]]) -> None:
        self.name = name
        self.parameter = parameter
        self.places = tuple(places)
        self.parts = [BoundTensor(part) for part in parts_of(parameter)]
        self.wrappers = wrappers_in(parameter)
        self.size, self.dtype = parameter.size(), parameter.dtype
        self.note_stride()
        self.device = torch.device("cpu") if parameter.is_meta else parameter.device

    def note_stride(self) -> None:
        self.stride = self.parameter.stride()
        # `AccumulateGrad` gives gradients the parameter's strides where those are dense.
        contiguous = tuple(accumulate((max(length, 1) for length in self.size[:0:-1]), mul, initial=1))[::-1]
        self.gradient_stride = self.stride if is_dense(self.size, self.stride) else contiguous

    def bind(self, storage: torch.UntypedStorage) -> None:
        """Only to be called in `without_modes()`, as is `unbind`."""
        for part in self.parts:
            part.tensor.data = part.over(storage)
        for wrapper in self.wrappers:
            set_reported_device(wrapper, storage.device)

    def unbind(self) -> None:
        for part in self.parts:
            part.tensor.data = part.host_copy
        for wrapper in self.wrappers:
            set_reported_device(wrapper, HOST)

    def set_gradient_at_rest(self, gradient: Tensor) -> None:
        """Set `grad` to a tensor of the host while the parameter lies in a slot, which torch refuses."""
        lying, device = [part.tensor.data for part in self.parts], self.parameter.device
        with without_modes():
            self.unbind()
            self.parameter.grad = gradient
            for part, data in zip(self.parts, lying, strict=True):
                part.tensor.data = data
            for wrapper in self.wrappers:
                set_reported_device(wrapper, device)

    def replace(self, parameter: nn.Parameter) -> None:
        self.parameter, self.wrappers = parameter, wrappers_in(parameter)
        for part, tensor in zip(self.parts, parts_of(parameter), strict=True):
            part.tensor = tensor

    def over_gradient(self, storage: torch.UntypedStorage) -> Tensor:
        return tensor_over(storage, self.dtype, offset=0, size=self.size, stride=self.gradient_stride)

    def is_unchanged(self, parameter: nn.Parameter) -> bool:
        """Tell whether a module's present parameter is the one that streams, with each part in its host copy."""
        tensors = parts_of(parameter)
        if parameter is not self.parameter or len(tensors) != len(self.parts):
            return False
        pairs = zip(self.parts, tensors, strict=True)
        return all(part.tensor is tensor and part.is_host_copy(tensor) for part, tensor in pairs)

    def is_of_kind(self, parameter: nn.Parameter) -> bool:
        tensors = parts_of(parameter)
        return (
            has_plain_parts(parameter)
            and (not self.wrappers or type(parameter) is type(self.parameter))
            and (parameter.dtype, parameter.size(), len(tensors)) == (self.dtype, self.size, len(self.parts))
            and all(
                (tensor.dtype, tensor.size(), tensor.device.type) == (part.dtype, part.size, "cpu")
                for part, tensor in zip(self.parts, tensors, strict=True)
            )
        )

    def in_module(self) -> Any:
        module, key = self.places[0]
        return torch_private.parameters_of(module).get(key)

    def current_parameters(self) -> list[nn.Parameter]:
        found = (torch_private.parameters_of(module).get(key) for module, key in self.places)
        now = (parameter for parameter in found if isinstance(parameter, nn.Parameter) and has_plain_parts(parameter))
        return list({id(parameter): parameter for parameter in (self.parameter, *now)}.values())

    def current_tensors(self) -> list[Tensor]:
        now = (tensor for parameter in self.current_parameters() for tensor in parts_of(parameter))
        return list({id(tensor): tensor for tensor in (*(part.tensor for part in self.parts), *now)}.values())


class Binding:
    """All parameters of a chunk, as arrays made once: `renew` is due when one is replaced, or its layout changes."""

    def __init__(self, parameters: Sequence[StreamedParameter]) -> None:
        self.parameters = tuple(parameters)
        self.places: tuple[Geometry, ...] = ()
        self.renew()

    def renew(self) -> None:
        parts = [part for streamed in self.parameters for part in streamed.parts]
        self.tensors = tuple(part.tensor for part in parts)
        self.known = frozenset(map(id, self.tensors))
        self.host_copies = tuple(part.host_copy for part in parts)
        self.wrappers = tuple(wrapper for streamed in self.parameters for wrapper in streamed.wrappers)
        counted = (*self.wrappers, *self.tensors)  # which count the writes to the bytes
        self.versions: Callable[[], Iterator[int]] = partial(map, torch_private.version_of, counted)
        self.requires_grad: Callable[[], Iterator[bool]] = partial(map, attrgetter("requires_grad"), self.tensors)
        self.set_data: Callable[[Sequence[Tensor]], Iterator[None]] = partial(map, setattr, self.tensors, repeat("data"))
        places = tuple(part.place for part in parts)
        if places != self.places:
            self.places = places
        self._holders = tuple(streamed.places[0][0] for streamed in self.parameters)
        self._keys = tuple(streamed.places[0][1] for streamed in self.parameters)
        self._expected = tuple(streamed.parameter for streamed in self.parameters)
        self._addresses = tuple(part.address for part in parts)
        self._layout = tuple((part.dtype, part.size, part.stride) for part in parts)
        self._guards: deque[tuple[Callable[..., bool], bool]] = deque(maxlen=2)  # they compare autocast and inference mode too
        self.is_frozen = False  # whether no tensor required grad when `check_unchanged` last returned True
        floating = (at for at, streamed in enumerate(self.parameters) if streamed.dtype.is_floating_point)
        self._sample = next(floating, 0)

    def check_unchanged(self, *, in_modules: bool = True) -> bool:
        """Tell whether each parameter is its host copy, where that was made, and with `in_modules` its module's."""
        tensors = self.tensors
        if self.wrappers or tuple(map(Tensor.data_ptr, tensors)) != self._addresses:
            return False
        if in_modules:
            held = map(dict.get, map(torch_private.parameters_of, self._holders), self._keys)
            if not all(map(is_, held, self._expected)):
                return False
        for guard, is_frozen in self._guards:
            if guard(*tensors):
                self.is_frozen = is_frozen
                return True
        if tuple((tensor.dtype, tensor.size(), tensor.stride()) for tensor in tensors) != self._layout:
            return False
        self.is_frozen = not any(self.requires_grad())
        for make in torch_private.known("TensorGuards"):
            guard = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._guards.appendleft((guard.check, self.is_frozen))
        return True

    def may_be_cast(self) -> bool:
        """Tell by one parameter, which costs far less than `check_unchanged`, whether all may have been cast or replaced."""
        at = self._sample
        now = torch_private.parameters_of(self._holders[at]).get(self._keys[at])
        return bool(self.wrappers) or now is not self._expected[at] or self.tensors[at].data_ptr() != self._addresses[at]

    def point_at(self, views: Sequence[Tensor], device: torch.device) -> None:
        is_seen = torch_private.num_dispatch_modes() or torch.is_inference_mode_enabled()
        with without_modes() if is_seen else _NO_CONTEXT:
            deque(self.set_data(views), maxlen=0)
            for wrapper in self.wrappers:
                set_reported_device(wrapper, device)

    def unbind(self) -> None:
        self.point_at(self.host_copies, HOST)


def copy_into(tensor: Tensor, host_copy: Tensor) -> None:
    distinct(host_copy).copy_(distinct(tensor.data))


def distinct(tensor: Tensor) -> Tensor:
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@contextmanager
def without_modes() -> Iterator[None]:
    """Return a context for setting `data`: no mode sees it, and inference mode does not mark it."""
    with torch_private.without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        yield


class LayerChunk:
    """The streamed parameters of one layer, packed side by side: at least one, each plain or with plain parts."""

    def __init__(self, name: str, module: nn.Module, parameters: Iterable[nn.Parameter], position: int) -> None:
        self.name = name
        self.module = module
        self.position = position
        self.span: Span | None = None
        self.mapped: memoryview | None = None
        self.is_on_host = False  # whether the host copies are in the span, and parameters may be those
        self.num_changes = 0  # how often the host copy was written to without a version counter
        self.written: Event | None = None
        self.use_order = 0  # when in the forward it has run last: see [Note: one queue for all] in `memkit.transfer.lanes`
        self.residency = Residency.HOST
        self.slot: Slot | None = None  # the slot of the bytes, now or soon, if they are in flight, on the device or dirty
        self.uses = set[object]()  # the layer's calls and backward for which its parameters lie in a slot, or are about to
        self._restored: dict[int, torch.UntypedStorage] = {}  # in `restore`: by key, each with a copy elsewhere
        self.held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        wanted = {id(parameter) for parameter in parameters}
        named: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for prefix, inner in module.named_modules(remove_duplicate=True):
            for key, parameter in torch_private.parameters_of(inner).items():
                if parameter is not None and id(parameter) in wanted:
                    full = ".".join(part for part in (name, prefix, key) if part)
                    named.setdefault(id(parameter), (full, parameter, []))[2].append((inner, key))
        self.binding = Binding([StreamedParameter(*found) for found in named.values()])
        parts = defaultdict[int, list[BoundTensor]](list)
        for part in self._parts():
            parts[id(part.tensor)].append(part)
        groups = list(overlapping([same[0].tensor for same in parts.values()]))
        layout = lay_out([[(low, high) for _, low, high in group] for group in groups])
        self._regions: list[tuple[Region, list[BoundTensor]]] = []
        for group, region in zip(groups, layout.regions, strict=True):
            self._regions.append((region, [part for tensor, _, _ in group for part in parts[id(tensor)]]))
            for (tensor, _, _), offset in zip(group, region.offsets, strict=True):
                for part in parts[id(tensor)]:
                    part.offset = offset
        self.num_bytes = layout.num_bytes

    @property
    def parameters(self) -> tuple[StreamedParameter, ...]:
        return self.binding.parameters

    def _parts(self) -> Iterator[BoundTensor]:
        return (part for streamed in self.parameters for part in streamed.parts)

    def become(self, residency: Residency) -> None:
        assert self.residency.may_become(residency), f"{self.name}: from {self.residency} to {residency}"
        self.residency = residency

    def move_to_host(self, read: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Copy the parameters to the host copy, in `span` or on a disk, by `read` in place of a copy, and point them at it."""
        memory: Any = self.mapped
        if memory is None:
            assert self.span is not None
            memory = self.span.whole.numpy()
        self._restored, self.held = {}, []
        with without_modes():
            for region, lying in self._regions:
                # A storage of its own, so that saving a parameter writes no more than its bytes.
                storage, count = torch.UntypedStorage(0), region.num_bytes
                if count:
                    storage = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=region.start).untyped_storage()
                for part in lying:
                    part.host_copy = part.over(storage, start=region.start)
                    part.address = part.host_copy.data_ptr()
                    (read or copy_into)(part.tensor, part.host_copy)
            self.binding.renew()
            self.is_on_host = True  # ahead of the first that is: an interrupt leaves some that are not, and `restore` knows
            self.binding.unbind()
            for streamed in self.parameters:
                grad = streamed.parameter.grad
                if grad is not None and grad.device != HOST:
                    streamed.parameter.grad = grad.to(HOST)

    def let_go_of_disk(self) -> None:
        if self.mapped is not None and not self.is_on_host:
            self.mapped, self.held = None, []
            for part in self._parts():
                part.host_copy = torch.empty(0, dtype=part.host_copy.dtype)
            self.binding.renew()

    @property
    def is_at_rest(self) -> bool:
        """Whether the parameters are the host copies, in the span, and restoring them has not begun."""
        return self.is_on_host and not self._restored

    def restore(self) -> None:
        """Make the parameters tensors of their own again, where they were found; `held`: what the caller has of host copies."""
        copied = self._restored
        with without_modes():
            for streamed in self.parameters:
                for part in streamed.parts:
                    storage = part.host_copy.untyped_storage()
                    if storage_key(storage) not in copied:
                        copied[storage_key(storage)] = byte_view(storage).to(streamed.device, copy=True).untyped_storage()
                for now in streamed.current_tensors():
                    to = copied.get(storage_key(now.untyped_storage()))
                    if to is not None:
                        now.data = Geometry.of(now).over(to)
                    elif now.device != streamed.device:
                        now.data = now.data.to(streamed.device)
                for wrapper in (wrapper for parameter in streamed.current_parameters() for wrapper in wrappers_in(parameter)):
                    set_reported_device(wrapper, streamed.device)
                grad = streamed.parameter.grad
                if grad is not None and grad.device != streamed.device:
                    streamed.parameter.grad = grad.to(streamed.device)
        host_copies = [(lying[0].host_copy.untyped_storage(), len(lying)) for _, lying in self._regions]
        self.held = [(storage, copied[storage_key(storage)]) for storage, num in host_copies if num_users(storage) > num + 1]
        self.is_on_host = False
        self._restored = {}

    def write_back(self) -> None:
        with without_modes():
            for part in self._parts():
                if part.tensor.size() == part.size:
                    distinct(part.host_copy).copy_(distinct(part.tensor.data))

    def state(self) -> tuple[int, ...]:
        """Return numbers that change with every visible write to the host copy: versions, and `num_changes`."""
        return (self.num_changes, *self.binding.versions())


def adopt(chunk: LayerChunk, *, may_replace: bool = True) -> list[StreamedParameter]:
    """Take over and return data that parameters were given and, unless a graph is alive, parameters put in their place."""
    if chunk.binding.check_unchanged(in_modules=may_replace):
        return []
    adopted = [streamed for streamed in chunk.parameters if _is_replaced(streamed)]
    if not may_replace:
        adopted = [item for item in adopted if item.in_module() is item.parameter]
    for streamed in adopted if may_replace else ():
        old, found = streamed.parameter, streamed.in_module()
        for inner, inner_key in streamed.places[1:]:
            if torch_private.parameters_of(inner).get(inner_key) is old:
                torch_private.parameters_of(inner)[inner_key] = found
        left = [weakref.ref(part.tensor) for part in streamed.parts if part.shares_host_copy(part.tensor)]
        streamed.replace(found)
        chunk.binding.renew()
        del old
        now = {id(part.tensor) for part in streamed.parts}
        for is_kept in left:
            kept = is_kept()
            if kept is not None and id(kept) not in now:  # its holder reads and writes its bytes, not those of its successor
                with without_modes():
                    kept.data = kept.data.clone()
    for streamed in adopted:
        chunk.num_changes += 1
        _take_over(streamed)
    chunk.binding.renew()  # also where there was nothing: an interrupt may have kept an earlier call from it
    return adopted


def refuse_tied(adopted: StreamedParameter, chunks: Iterable[LayerChunk]) -> None:
    for other in (item for chunk in chunks for item in chunk.parameters):
        if other is not adopted and other.parameter is adopted.parameter:
            raise LayerOffloadError(
                f'"{adopted.name}" and "{other.name}" have become one parameter while they stream. Call '
                "offload.close() first, tie them, and make a new LayerOffload: what is tied then stays on the device"
            )


def _is_replaced(streamed: StreamedParameter) -> bool:
    """Tell whether the caller has put another tensor in the place of a parameter; raise if it is of another kind."""
    found = streamed.in_module()
    if found is None:
        raise LayerOffloadError(f'"{streamed.name}" is gone from its module while LayerOffload streams it. {_ADVICE}')
    if not isinstance(found, nn.Parameter):
        raise LayerOffloadError(
            f'"{streamed.name}" streams, and is now a {type(found).__name__}, not a parameter: was the model called by '
            "torch.func.functional_call? That cannot run with weights that stream"
        )
    if streamed.wrappers and found.requires_grad:
        raise LayerOffloadError(
            f'"{streamed.name}" now requires grad, and it streams. A {type(found).__name__} wraps tensors, and '
            "streams as a frozen one. Set this before LayerOffload is made: it then stays on the device"
        )
    if any(part.host_copy.data_ptr() != part.address for part in streamed.parts):
        raise LayerOffloadError(
            f'"{streamed.name}" streams, and its bytes were moved to other memory in place: by model.share_memory(), or by '
            f"sending its tensors to another process (torch.multiprocessing)? Send copies. {_ADVICE}"
        )
    if streamed.is_unchanged(found):
        return False
    if not streamed.is_of_kind(found):
        was, now = (f"{type(own[0]).__name__}, " if own else "" for own in (streamed.wrappers, wrappers_in(found)))
        raise LayerOffloadError(
            f'"{streamed.name}" streams as {was}{streamed.dtype}, {list(streamed.size)}, and is {now}{found.dtype}, '
            f"{list(found.size())} on {found.device} now: was the model moved or cast (.to(), .cuda(), .half())? {_ADVICE}"
        )
    return True


def _take_over(streamed: StreamedParameter) -> None:
    for part in streamed.parts:
        if part.is_host_copy(part.tensor):
            continue
        source = part.tensor.data
        if part.shares_host_copy(part.tensor):
            source = source.clone()
            part.tensor.data = source
        if num_users(part.host_copy.untyped_storage()) > 2:
            raise LayerOffloadError(
                f'"{streamed.name}" was given another tensor (`parameter.data = other`) while the one that it was '
                "is still held, which is where LayerOffload has its weights. Write to it instead: parameter.data.copy_(other)"
            )
        with without_modes():
            part.adopt_layout(source)
            distinct(part.host_copy).copy_(distinct(source))
            part.tensor.data = part.host_copy
    streamed.note_stride()
