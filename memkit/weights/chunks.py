"""What streams of one layer: which tensors, where they lie in its chunk, and the copy in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.device.base import Event
from memkit.storages import Geometry, byte_view, overlapping, storage_key, tensor_over
from memkit.torch_state import num_users
from memkit.transfer.spans import Span
from memkit.wrappers import has_plain_parts, parts_of, set_reported_device, wrappers_in

HEADER_BYTES = 512
"""Where the first tensor of a chunk begins: compilers treat offset 0 as a case of its own."""
_ALIGNMENT_BYTES = 512
"""As the caching allocator aligns: the kernel that is chosen may depend on it."""
_HOST = torch.device("cpu")


class StreamedTensor:
    """A plain tensor that streams: a parameter, or one of those that a parameter wraps.

    While its layer runs, `tensor.data` lies in a slot; at all other times it is `host_copy`, in host memory.
    """

    __slots__ = ("address", "dtype", "host_copy", "offset", "size", "stride", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.offset = 0
        """Where its first element lies in the chunk, in bytes."""
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype
        self.host_copy: Tensor = tensor.data
        self.address = 0
        """Where the host copy was made: elsewhere are the bytes of a storage that was moved in place."""

    def over(self, storage: torch.UntypedStorage, *, start: int = 0) -> Tensor:
        """Return the tensor as it lies in a storage whose first byte is that of the chunk at `start`."""
        offset = (self.offset - start) // self.dtype.itemsize
        return tensor_over(storage, self.dtype, offset=offset, size=self.size, stride=self.stride)

    def adopt_layout(self, source: Tensor) -> None:
        """Let the elements of the host copy lie in the order of those of another tensor, if they can."""
        is_alone = self.host_copy.untyped_storage().nbytes() == source.nbytes
        if is_alone and _is_dense(self.size, self.stride) and _is_dense(source.size(), source.stride()):
            self.stride = source.stride()
            self.host_copy = tensor_over(
                self.host_copy.untyped_storage(), self.dtype, offset=0, size=self.size, stride=self.stride
            )

    def is_at_host_copy(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in the host copy's storage."""
        return storage_key(tensor.untyped_storage()) == storage_key(self.host_copy.untyped_storage())

    def is_as_host_copy(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is just what the host copy is."""
        host_copy = self.host_copy
        return (
            tensor.dtype == self.dtype
            and bool(tensor.storage_offset() == host_copy.storage_offset())
            and tensor.size() == self.size
            and tensor.stride() == self.stride
            and self.is_at_host_copy(tensor)
        )


class StreamedParameter:
    """One parameter that streams: its plain tensors, and the wrappers around them, which say where those are."""

    __slots__ = ("device", "dtype", "name", "parameter", "parts", "places", "size", "stride", "wrappers")

    def __init__(self, name: str, parameter: nn.Parameter, places: Sequence[tuple[nn.Module, str]]) -> None:
        self.name = name
        self.parameter = parameter
        self.places = tuple(places)
        """The modules that hold it, and under which name."""
        self.parts = [StreamedTensor(part) for part in parts_of(parameter)]
        self.wrappers = wrappers_in(parameter)
        self.size, self.stride, self.dtype = parameter.size(), parameter.stride(), parameter.dtype
        self.device = _HOST if parameter.is_meta else parameter.device
        """Where it was found; the host if it had no data."""

    def bind(self, storage: torch.UntypedStorage) -> None:
        """Let the parameter lie in a slot. Only to be called in `without_modes()`."""
        for part in self.parts:
            part.tensor.data = part.over(storage)
        for wrapper in self.wrappers:
            set_reported_device(wrapper, storage.device)

    def unbind(self) -> None:
        """Let the parameter be the host copy. Only to be called in `without_modes()`."""
        for part in self.parts:
            part.tensor.data = part.host_copy
        for wrapper in self.wrappers:
            set_reported_device(wrapper, _HOST)

    def replace(self, parameter: nn.Parameter) -> None:
        """Let another parameter of the same kind be the one that streams."""
        self.parameter, self.wrappers = parameter, wrappers_in(parameter)
        for part, tensor in zip(self.parts, parts_of(parameter), strict=True):
            part.tensor = tensor

    @property
    def gradient_stride(self) -> tuple[int, ...]:
        """How the elements of a gradient lie: as the parameter's, which `AccumulateGrad` sees to."""
        return self.stride if _is_dense(self.size, self.stride) else _contiguous(self.size)

    def over_gradient(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a gradient of the parameter that fills a storage."""
        return tensor_over(storage, self.dtype, offset=0, size=self.size, stride=self.gradient_stride)

    def is_at_host_copy(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter is the one that streams, and made of the host copies."""
        if parameter is not self.parameter:
            return False
        if not self.wrappers:  # asked of all parameters ahead of each pass
            return self.parts[0].is_as_host_copy(parameter)
        tensors = parts_of(parameter)
        if len(tensors) != len(self.parts):
            return False
        pairs = zip(self.parts, tensors, strict=True)
        return all(part.tensor is tensor and part.is_as_host_copy(tensor) for part, tensor in pairs)

    def is_of_kind(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter could be the host copy."""
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

    def current_parameters(self) -> list[nn.Parameter]:
        """Return the parameter, and what the caller has put in its place since."""
        found = (torch_private.parameters_of(module).get(key) for module, key in self.places)
        now = (parameter for parameter in found if isinstance(parameter, nn.Parameter) and has_plain_parts(parameter))
        return list({id(parameter): parameter for parameter in (self.parameter, *now)}.values())

    def current_tensors(self) -> list[Tensor]:
        """Return the plain tensors that these are made of, and those that it was made of."""
        now = (tensor for parameter in self.current_parameters() for tensor in parts_of(parameter))
        return list({id(tensor): tensor for tensor in (*(part.tensor for part in self.parts), *now)}.values())


class LayerChunk:
    """The streamed parameters of one layer, packed side by side.

    Args:
        name: the layer's, in the model.
        module: the layer.
        parameters: what streams of it: not empty, each plain or with plain parts.
        position: its number among the layers that stream.
    """

    def __init__(self, name: str, module: nn.Module, parameters: Iterable[nn.Parameter], position: int) -> None:
        self.name = name
        self.module = module
        self.position = position
        self.span: Span | None = None
        """The host memory for the host copy."""
        self.is_on_host = False
        """Whether the host copies are in the span, and parameters may be those."""
        self.num_changes = 0
        """How often bytes were put into the host copy that no version counter knows of."""
        self.written: Event | None = None
        """Behind the last write to the host copy."""
        self.tick = 0
        """When in the forward it has run last: see [Note: one queue for all] in `memkit.transfer.lanes`."""
        self.uses = set[object]()
        """Who has the parameters lie in a slot, or is about to: the calls of the layer that are going on, and its backward."""
        self._restored: dict[int, torch.UntypedStorage] = {}
        """While the parameters are restored: storages of the host copy, by key, each with one of the same bytes elsewhere."""
        self.held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        """Since then: storages of the host copy that the caller holds (a `state_dict`), each with one of the same bytes."""
        wanted = {id(parameter) for parameter in parameters}
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, inner in module.named_modules(remove_duplicate=True):
            for key, parameter in torch_private.parameters_of(inner).items():
                if parameter is not None and id(parameter) in wanted:
                    places.setdefault(id(parameter), []).append((inner, key))
                    full = ".".join(part for part in (name, prefix, key) if part)
                    named.setdefault(id(parameter), (full, parameter))
        self.parameters = [StreamedParameter(*named[key], places[key]) for key in named]
        self._regions: list[tuple[int, int, list[StreamedTensor]]] = []
        """Where each range of bytes that belongs together begins and ends in the chunk, and what lies in it."""
        parts: dict[int, list[StreamedTensor]] = {id(part.tensor): [] for part in self._parts()}
        for part in self._parts():
            parts[id(part.tensor)].append(part)
        end = HEADER_BYTES
        for group in overlapping([same[0].tensor for same in parts.values()]):
            start, first = end, min(low for _, low, _ in group)
            region = []
            for tensor, low, _ in group:
                for part in parts[id(tensor)]:
                    part.offset = start + low - first
                    region.append(part)
            stop = start + max(high for _, _, high in group) - first
            self._regions.append((start, stop, region))
            end = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_bytes = end

    def tensors(self) -> Iterator[Tensor]:
        """Yield the plain tensors that stream."""
        return (part.tensor for part in self._parts())

    def _parts(self) -> Iterator[StreamedTensor]:
        return (part for streamed in self.parameters for part in streamed.parts)

    def move_to_host(self, read: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Copy the parameters to the host copy, in `span`, or read them into that, and let them be that."""
        assert self.span is not None
        assert self.span.whole is not None
        memory = self.span.whole.numpy()
        self._restored, self.held = {}, []
        with without_modes():
            for start, stop, region in self._regions:
                # A storage of its own, so that saving a parameter writes no more than its bytes.
                if stop > start:
                    storage = torch.frombuffer(memory, dtype=torch.uint8, count=stop - start, offset=start).untyped_storage()
                else:
                    storage = torch.UntypedStorage(0)
                for part in region:
                    part.host_copy = part.over(storage, start=start)
                    part.address = part.host_copy.data_ptr()
                    (read or copy_into)(part.tensor, part.host_copy)
            self.is_on_host = True  # ahead of the first that is: an interrupt leaves some that are not, and `restore` knows
            for streamed in self.parameters:
                streamed.unbind()
                grad = streamed.parameter.grad
                if grad is not None and grad.device != _HOST:
                    streamed.parameter.grad = grad.to(_HOST)

    @property
    def is_at_rest(self) -> bool:
        """Whether the parameters are the host copies, in the span, and it was not begun to restore them."""
        return self.is_on_host and not self._restored

    def restore(self) -> None:
        """Let the parameters be tensors of their own again, where they were found; see also `held`.

        Those that the caller has put in the place of others since stay as they are. Calling it again after an
        interrupt does the rest.
        """
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
        host_copies = [(region[0].host_copy.untyped_storage(), len(region)) for _, _, region in self._regions]
        self.held = [(storage, copied[storage_key(storage)]) for storage, num in host_copies if num_users(storage) > num + 1]
        self.is_on_host = False
        self._restored = {}

    def lie_in(self, storage: torch.UntypedStorage, *, use: object) -> None:
        """Let the parameters lie in a slot, if they do not yet, until all who use them there have left."""
        is_first = not self.uses
        self.uses.add(use)
        if is_first:
            with without_modes():
                for streamed in self.parameters:
                    streamed.bind(storage)

    def write_back(self) -> None:
        """Copy what the parameters are to the host copy."""
        with without_modes():
            for part in self._parts():
                if part.tensor.size() == part.size:
                    distinct(part.host_copy).copy_(distinct(part.tensor.data))

    def unbind(self) -> None:
        """Let the parameters be the host copy again."""
        with without_modes():
            for streamed in self.parameters:
                streamed.unbind()

    def state(self) -> tuple[int, ...]:
        """Return what changes with every write to the host copy that can be seen."""
        wrappers = [torch_private.version_of(wrapper) for streamed in self.parameters for wrapper in streamed.wrappers]
        return (self.num_changes, *wrappers, *[torch_private.version_of(part.tensor) for part in self._parts()])


def _is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether elements lie side by side, each in a place of its own."""
    expected = 1
    for step, length in sorted((step, length) for length, step in zip(size, stride, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def distinct(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that was expanded, each once."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def copy_into(tensor: Tensor, host_copy: Tensor) -> None:
    """Copy what a tensor is to a host copy of it."""
    distinct(host_copy).copy_(distinct(tensor.data))


@contextmanager
def without_modes() -> Iterator[None]:
    """Return a context in which `data` is set as it is meant: no mode sees it, and inference mode does not mark it."""
    with torch_private.without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        yield
