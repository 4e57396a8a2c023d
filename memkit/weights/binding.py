"""Points parameters at the bytes of a chunk, in a slot or in the host copy: which plain tensors they are, and their layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.storages import Geometry, is_dense, storage_key, tensor_over
from memkit.wrappers import has_plain_parts, parts_of, set_reported_device, wrappers_in

HOST = torch.device("cpu")


class BoundTensor:
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

    @property
    def place(self) -> Geometry:
        """How it lies in the chunk."""
        return Geometry(self.size, self.stride, self.offset // self.dtype.itemsize, self.dtype, False, False)

    def adopt_layout(self, source: Tensor) -> None:
        """Let the elements of the host copy lie in the order of those of another tensor, if they can."""
        is_alone = self.host_copy.untyped_storage().nbytes() == source.nbytes
        if is_alone and is_dense(self.size, self.stride) and is_dense(source.size(), source.stride()):
            self.stride = source.stride()
            self.host_copy = tensor_over(
                self.host_copy.untyped_storage(), self.dtype, offset=0, size=self.size, stride=self.stride
            )

    def shares_host_copy(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in the host copy's storage."""
        return storage_key(tensor.untyped_storage()) == storage_key(self.host_copy.untyped_storage())

    def is_host_copy(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is a view of the host copy's storage with the same offset, size, stride and dtype."""
        host_copy = self.host_copy
        return (
            tensor.dtype == self.dtype
            and bool(tensor.storage_offset() == host_copy.storage_offset())
            and tensor.size() == self.size
            and tensor.stride() == self.stride
            and self.shares_host_copy(tensor)
        )


class StreamedParameter:
    """One parameter that streams: its plain tensors, and the wrappers around them, which say where those are."""

    __slots__ = ("device", "dtype", "gradient_stride", "name", "parameter", "parts", "places", "size", "stride", "wrappers")

    def __init__(self, name: str, parameter: nn.Parameter, places: Sequence[tuple[nn.Module, str]]) -> None:
        self.name = name
        self.parameter = parameter
        self.places = tuple(places)
        """The modules that hold it, and under which name."""
        self.parts = [BoundTensor(part) for part in parts_of(parameter)]
        self.wrappers = wrappers_in(parameter)
        self.size, self.dtype = parameter.size(), parameter.dtype
        self.note_stride()
        self.device = torch.device("cpu") if parameter.is_meta else parameter.device
        """Where it was found; the host if it had no data."""

    def note_stride(self) -> None:
        """Take note of how the elements of the parameter lie now."""
        self.stride = self.parameter.stride()
        self.gradient_stride = self.stride if is_dense(self.size, self.stride) else _contiguous(self.size)
        """How those of a gradient lie: as the parameter's, which `AccumulateGrad` sees to."""

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
            set_reported_device(wrapper, HOST)

    def set_gradient_at_rest(self, gradient: Tensor) -> None:
        """Let `grad` be a tensor of the host, which torch refuses while the parameter lies in a slot: in a forward that an
        interrupt has left there, and whose end is yet to come."""
        lying, device = [part.tensor.data for part in self.parts], self.parameter.device
        with without_modes():
            self.unbind()
            self.parameter.grad = gradient
            for part, data in zip(self.parts, lying, strict=True):
                part.tensor.data = data
            for wrapper in self.wrappers:
                set_reported_device(wrapper, device)

    def replace(self, parameter: nn.Parameter) -> None:
        """Let another parameter of the same kind be the one that streams."""
        self.parameter, self.wrappers = parameter, wrappers_in(parameter)
        for part, tensor in zip(self.parts, parts_of(parameter), strict=True):
            part.tensor = tensor

    def over_gradient(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a gradient of the parameter that fills a storage."""
        return tensor_over(storage, self.dtype, offset=0, size=self.size, stride=self.gradient_stride)

    def is_unchanged(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter, which a module has now, is the one that streams, and each of its parts is its host copy."""
        if parameter is not self.parameter:
            return False
        if not self.wrappers:  # asked of all parameters ahead of each pass
            return self.parts[0].is_host_copy(parameter)
        tensors = parts_of(parameter)
        if len(tensors) != len(self.parts):
            return False
        pairs = zip(self.parts, tensors, strict=True)
        return all(part.tensor is tensor and part.is_host_copy(tensor) for part, tensor in pairs)

    def is_of_kind(self, parameter: nn.Parameter) -> bool:
        """Tell whether another parameter could stream in place of this one: its class, dtypes and sizes, on the CPU."""
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


class Binding:
    """All parameters of a chunk, as arrays that are made once: a step goes through them without a call for each.

    Args:
        parameters: those of the chunk. Where one is replaced, or its host copy comes to lie another way, `renew` is due.
    """

    __slots__ = (
        "_addresses",
        "_expected",
        "_guards",
        "_holders",
        "_keys",
        "_layout",
        "_sample",
        "counted",
        "host_copies",
        "is_frozen",
        "known",
        "parameters",
        "places",
        "requires_grad",
        "set_data",
        "tensors",
        "versions",
        "wrappers",
    )

    def __init__(self, parameters: Sequence[StreamedParameter]) -> None:
        self.parameters = tuple(parameters)
        self.places: tuple[Geometry, ...] = ()
        """How each tensor lies in the chunk. As long as that stays so, this is the same object."""
        self.renew()

    def renew(self) -> None:
        """Take note of what the parameters are now, and of their host copies."""
        parts = [part for streamed in self.parameters for part in streamed.parts]
        self.tensors = tuple(part.tensor for part in parts)
        self.known = frozenset(map(id, self.tensors))
        """Which tensors these are, by their ids."""
        self.host_copies = tuple(part.host_copy for part in parts)
        self.wrappers = tuple(wrapper for streamed in self.parameters for wrapper in streamed.wrappers)
        self.counted = (*self.wrappers, *self.tensors)
        """What counts the writes to the bytes."""
        self.versions: Callable[[], Iterator[int]] = partial(map, torch_private.version_of, self.counted)
        """What they come to now."""
        self.requires_grad: Callable[[], Iterator[bool]] = partial(map, _requires_grad, self.tensors)
        """Whether each tensor requires grad."""
        self.set_data: Callable[[Sequence[Tensor]], Iterator[None]] = partial(map, setattr, self.tensors, repeat("data"))
        """Sets what each tensor is, as it is gone through: what `point_at` does where nothing else is to be seen to."""
        places = tuple(part.place for part in parts)
        if places != self.places:
            self.places = places
        self._holders = tuple(streamed.places[0][0] for streamed in self.parameters)
        self._keys = tuple(streamed.places[0][1] for streamed in self.parameters)
        self._expected = tuple(streamed.parameter for streamed in self.parameters)
        self._addresses = tuple(part.address for part in parts)
        self._layout = tuple((part.dtype, part.size, part.stride) for part in parts)
        self._guards: deque[tuple[Callable[..., bool], bool]] = deque(maxlen=2)
        """What tells in one call that the tensors lie, and require grad, as they did when `is_unchanged` has looked at each.
        Autocast and inference mode are part of what it compares: so there are two."""
        self.is_frozen = False
        """Whether no tensor required grad when `is_unchanged` has last said yes."""
        floating = (at for at, streamed in enumerate(self.parameters) if streamed.dtype.is_floating_point)
        self._sample = next(floating, 0)

    def is_unchanged(self, *, in_modules: bool = True) -> bool:
        """Tell whether the modules have the parameters, and each is its host copy, where that was made. It may be so also where
        this says no: what wraps other tensors is not looked into.

        Args:
            in_modules: whether it matters what the modules have. It does not to a backward, which is of the parameters that
                its forward had.
        """
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
        """Tell by one parameter, which costs far less than `is_unchanged`, whether all may have been cast or replaced."""
        at = self._sample
        now = torch_private.parameters_of(self._holders[at]).get(self._keys[at])
        return bool(self.wrappers) or now is not self._expected[at] or self.tensors[at].data_ptr() != self._addresses[at]

    def point_at(self, views: Sequence[Tensor], device: torch.device) -> None:
        """Let the parameters be the views, which are on a device; those that are made of others say so."""
        is_seen = torch_private.num_dispatch_modes() or torch.is_inference_mode_enabled()
        with without_modes() if is_seen else _NO_CONTEXT:
            deque(self.set_data(views), maxlen=0)
            for wrapper in self.wrappers:
                set_reported_device(wrapper, device)

    def unbind(self) -> None:
        """Let the parameters be the host copies again."""
        self.point_at(self.host_copies, HOST)


_NO_CONTEXT = nullcontext()
_requires_grad = attrgetter("requires_grad")


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def copy_into(tensor: Tensor, host_copy: Tensor) -> None:
    """Copy what a tensor is to a host copy of it."""
    distinct(host_copy).copy_(distinct(tensor.data))


def distinct(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that was expanded, each once."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@contextmanager
def without_modes() -> Iterator[None]:
    """Return a context in which `data` is set as it is meant: no mode sees it, and inference mode does not mark it."""
    with torch_private.without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        yield
