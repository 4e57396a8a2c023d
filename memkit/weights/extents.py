"""What streams of one layer: which tensors, where they lie in its extent, and the master copy in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memkit.device.base import Event
from memkit.errors import LayerOffloadError
from memkit.hooks import num_users
from memkit.sizes import byte_view, storage_key, tensor_over
from memkit.transfer.arena import Span
from memkit.weights.placement import is_plain, overlapping

HEADER_BYTES = 512
"""Where the first tensor of an extent begins: compilers treat offset 0 as a case of its own."""
_ALIGNMENT_BYTES = 512
"""As the caching allocator aligns: the kernel that is chosen may depend on it."""


class StreamedParameter:
    """One parameter that streams.

    While its layer runs, `parameter.data` lies in a slot; at all other times it is `master`, in host memory.
    """

    __slots__ = ("device", "dtype", "master", "name", "offset", "parameter", "places", "size", "stride")

    def __init__(self, name: str, parameter: nn.Parameter, places: Sequence[tuple[nn.Module, str]], offset: int) -> None:
        self.name = name
        self.parameter = parameter
        self.places = tuple(places)
        """The modules that hold it, and under which name."""
        self.offset = offset
        """Where its first element lies in the extent, in bytes."""
        self.size, self.stride, self.dtype = parameter.size(), parameter.stride(), parameter.dtype
        self.device = parameter.device
        """Where it was found."""
        self.master: Tensor = parameter.data

    def bind(self, storage: torch.UntypedStorage) -> None:
        """Let the parameter lie in a slot."""
        with _plainly():
            self.parameter.data = self.over(storage)

    def unbind(self) -> None:
        """Let the parameter be the master."""
        with _plainly():
            self.parameter.data = self.master

    def lie_as(self, source: Tensor) -> None:
        """Let the elements of the master lie in the order of those of another tensor, if they can."""
        is_alone = self.master.untyped_storage().nbytes() == source.nbytes
        if is_alone and _is_dense(self.size, self.stride) and _is_dense(source.size(), source.stride()):
            self.stride = source.stride()
            self.master = tensor_over(self.master.untyped_storage(), self.dtype, offset=0, size=self.size, stride=self.stride)

    @property
    def gradient_stride(self) -> tuple[int, ...]:
        """How the elements of a gradient lie: as the parameter's, which `AccumulateGrad` sees to."""
        return self.stride if _is_dense(self.size, self.stride) else _contiguous(self.size)

    def over_gradient(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a gradient of the parameter that fills a storage."""
        return tensor_over(storage, self.dtype, offset=0, size=self.size, stride=self.gradient_stride)

    def is_at_master(self, parameter: Tensor) -> bool:
        """Tell whether a parameter lies in the master's storage."""
        return storage_key(parameter.untyped_storage()) == storage_key(self.master.untyped_storage())

    def is_as_master(self, parameter: Tensor) -> bool:
        """Tell whether a parameter is just what the master is."""
        place, master = (parameter.storage_offset(), parameter.size(), parameter.stride()), self.master
        is_same = place == (master.storage_offset(), master.size(), master.stride()) and parameter.dtype == master.dtype
        return is_same and self.is_at_master(parameter)

    def current_parameters(self) -> list[nn.Parameter]:
        """Return the parameter, and what somebody has put in its place since."""
        found = (module._parameters.get(key) for module, key in self.places)
        now = (parameter for parameter in found if isinstance(parameter, nn.Parameter) and is_plain(parameter))
        return list({id(parameter): parameter for parameter in (self.parameter, *now)}.values())

    def over(self, storage: torch.UntypedStorage, *, start: int = 0) -> Tensor:
        """Return the tensor as it lies in a storage whose first byte is that of the extent at `start`."""
        offset = (self.offset - start) // self.dtype.itemsize
        return tensor_over(storage, self.dtype, offset=offset, size=self.size, stride=self.stride)


class LayerExtent:
    """The streamed parameters of one layer, packed side by side.

    Args:
        name: the layer's, in the model.
        module: the layer.
        parameters: what streams of it: not empty, of plain tensors.
        position: its number among the layers that stream.
    """

    def __init__(self, name: str, module: nn.Module, parameters: Iterable[nn.Parameter], position: int) -> None:
        self.name = name
        self.module = module
        self.position = position
        self.span: Span | None = None
        """The host memory for the master, pinned as one."""
        self.is_on_host = False
        """Whether the masters are in the span."""
        self.num_changes = 0
        """How often bytes were put into the master that no version counter knows of."""
        self.written: Event | None = None
        """Behind the last copy to the master."""
        self.num_bound = 0
        """How many of the layer's forwards are going on."""
        wanted = {id(parameter) for parameter in parameters}
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, inner in module.named_modules(remove_duplicate=True):
            for key, parameter in inner._parameters.items():
                if parameter is not None and id(parameter) in wanted:
                    places.setdefault(id(parameter), []).append((inner, key))
                    full = ".".join(part for part in (name, prefix, key) if part)
                    named.setdefault(id(parameter), (full, parameter))
        self._regions: list[tuple[int, int, list[StreamedParameter]]] = []
        """Where each range of bytes that belongs together begins and ends in the extent, and what lies in it."""
        self.parameters: list[StreamedParameter] = []
        end = HEADER_BYTES
        for group in overlapping([named[key][1] for key in named]):
            start, first = end, min(low for _, low, _ in group)
            region = [
                StreamedParameter(*named[id(parameter)], places[id(parameter)], start + low - first)
                for parameter, low, _ in group
            ]
            stop = start + max(high for _, _, high in group) - first
            self._regions.append((start, stop, region))
            self.parameters += region
            end = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_bytes = end

    def move_to_host(self) -> None:
        """Copy the parameters to the master, in `span`, and let them be that."""
        assert self.span is not None
        assert self.span.whole is not None
        memory = self.span.whole.numpy()
        with _plainly():
            for start, stop, region in self._regions:
                # A storage of its own, so that saving a parameter writes no more than its bytes.
                storage = torch.frombuffer(memory, dtype=torch.uint8, count=stop - start, offset=start).untyped_storage()
                for streamed in region:
                    streamed.master = streamed.over(storage, start=start)
                    _distinct(streamed.master).copy_(_distinct(streamed.parameter.data))
                    streamed.parameter.data = streamed.master
        self.is_on_host = True

    def restore(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """Let the parameters be tensors of their own again, where they were found.

        Those that somebody has put in the place of others since are his, and stay as they are.

        Returns:
            Storages of the master that somebody else holds (a `state_dict`), each with one of the same bytes.
        """
        self.is_on_host = False
        held = []
        with _plainly():
            for _, _, region in self._regions:
                copied: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
                for streamed in region:
                    key = storage_key(streamed.master.untyped_storage()), streamed.device
                    if key not in copied:
                        source = byte_view(streamed.master.untyped_storage())
                        copied[key] = source.to(streamed.device, copy=True).untyped_storage()
                    for parameter in streamed.current_parameters():
                        now = parameter.data
                        if streamed.is_at_master(parameter):
                            offset, size, stride = now.storage_offset(), now.size(), now.stride()
                            parameter.data = tensor_over(copied[key], now.dtype, offset=offset, size=size, stride=stride)
                        elif now.device != streamed.device:
                            parameter.data = now.to(streamed.device)
                    grad = streamed.parameter.grad
                    if grad is not None and grad.device != streamed.device:
                        streamed.parameter.grad = grad.to(streamed.device)
                storage = region[0].master.untyped_storage()
                if num_users(storage) > len(region) + 1:
                    held.append((storage, next(iter(copied.values()))))
        return held

    def bind(self, storage: torch.UntypedStorage) -> None:
        """Let the parameters lie in a slot."""
        with _plainly():
            for streamed in self.parameters:
                streamed.parameter.data = streamed.over(storage)

    def write_back(self) -> None:
        """Copy what the parameters are to the master."""
        with _plainly():
            for streamed in self.parameters:
                if streamed.parameter.size() == streamed.size:
                    _distinct(streamed.master).copy_(_distinct(streamed.parameter.data))

    def unbind(self) -> None:
        """Let the parameters be the master again."""
        with _plainly():
            for streamed in self.parameters:
                streamed.parameter.data = streamed.master

    def state(self) -> tuple[int, ...]:
        """Return what changes with every write to the master that can be seen."""
        return (self.num_changes, *[streamed.parameter._version for streamed in self.parameters])

    def adopt(self) -> list[StreamedParameter]:
        """Take over parameters that were put in the place of others (`load_state_dict(assign=True)`), and return them.

        Raises:
            LayerOffloadError: a parameter was moved, or is of another kind now.
        """
        adopted = [streamed for streamed in self.parameters if self._is_replaced(streamed)]
        for streamed in adopted:
            module, key = streamed.places[0]
            old, found = streamed.parameter, module._parameters[key]
            assert found is not None
            for inner, inner_key in streamed.places[1:]:
                if inner._parameters.get(inner_key) is old:
                    inner._parameters[inner_key] = found
            streamed.parameter = found
            if old is not found and streamed.is_at_master(old):
                is_kept = weakref.ref(old)
                del old
                if (kept := is_kept()) is not None:  # who has it reads and writes there what it is, not what has replaced it
                    with _plainly():
                        kept.data = kept.data.clone()
        for streamed in adopted:
            self._take_over(streamed)
            self.num_changes += 1
        return adopted

    def _is_replaced(self, streamed: StreamedParameter) -> bool:
        """Tell whether somebody has put another tensor in the place of a parameter; raise where it is of another kind."""
        module, key = streamed.places[0]
        found = module._parameters.get(key)
        if found is streamed.parameter and streamed.is_as_master(found):
            return False
        if found is None:
            raise LayerOffloadError(f'"{streamed.name}" is gone from its module while LayerOffload streams it. {_ADVICE}')
        if not isinstance(found, nn.Parameter):
            raise LayerOffloadError(
                f'"{streamed.name}" streams, and is a {type(found).__name__} that is no parameter now: was the model called by '
                "torch.func.functional_call? That cannot run with weights that stream"
            )
        now = found.data
        if type(now) is not Tensor or now.dtype != streamed.dtype or now.size() != streamed.size or now.device.type != "cpu":
            raise LayerOffloadError(
                f'"{streamed.name}" streams as {streamed.dtype}, {list(streamed.size)}, and is {now.dtype}, '
                f"{list(now.size())} on {now.device} now: was the model moved or cast (.to(), .cuda(), .half())? {_ADVICE}"
            )
        return True

    def _take_over(self, streamed: StreamedParameter) -> None:
        """Write to the master what a parameter is now, and let it be that."""
        found = streamed.parameter
        if not streamed.is_as_master(found):
            source = found.data
            if streamed.is_at_master(found):
                source = source.clone()
                found.data = source
            if num_users(streamed.master.untyped_storage()) > 2:
                raise LayerOffloadError(
                    f'"{streamed.name}" was given another tensor (`parameter.data = other`) while somebody still holds the one '
                    "that it was, which is where LayerOffload has its weights. Write to it instead: parameter.data.copy_(other)"
                )
            with _plainly():
                streamed.lie_as(source)
                _distinct(streamed.master).copy_(_distinct(source))
                found.data = streamed.master


_ADVICE = "Call offload.close() first, change the model, and make a new LayerOffload."


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


def _distinct(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that was expanded, each once."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@contextmanager
def _plainly() -> Iterator[None]:
    """Return a context in which `data` is set as it is meant: no mode sees it, and inference mode does not mark it."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield
