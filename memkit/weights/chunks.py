"""What streams of one layer: which tensors, where they lie in its chunk, and the copy in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.device.base import Event
from memkit.plan.chunks import Region, Residency, lay_out
from memkit.storages import Geometry, byte_view, overlapping, storage_key
from memkit.torch_state import num_users
from memkit.transfer.spans import Span
from memkit.weights.binding import Binding, BoundTensor, StreamedParameter, copy_into, distinct, without_modes
from memkit.wrappers import set_reported_device, wrappers_in

if TYPE_CHECKING:
    from memkit.weights.slots import Slot

_HOST = torch.device("cpu")


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
        """The host memory for the host copy. None if that is on a disk."""
        self.mapped: memoryview | None = None
        """What is there, as memory."""
        self.is_on_host = False
        """Whether the host copies are in the span, and parameters may be those."""
        self.num_changes = 0
        """How often bytes were put into the host copy that no version counter knows of."""
        self.written: Event | None = None
        """Behind the last write to the host copy."""
        self.use_order = 0
        """When in the forward it has run last: see [Note: one queue for all] in `memkit.transfer.lanes`."""
        self.residency = Residency.HOST
        self.slot: Slot | None = None
        """Where the bytes are, or will be, if they are in flight, on the device or dirty."""
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
        self.binding = Binding([StreamedParameter(*named[key], places[key]) for key in named])
        parts: dict[int, list[BoundTensor]] = {id(part.tensor): [] for part in self._parts()}
        for part in self._parts():
            parts[id(part.tensor)].append(part)
        groups = list(overlapping([same[0].tensor for same in parts.values()]))
        layout = lay_out([[(low, high) for _, low, high in group] for group in groups])
        self._regions: list[tuple[Region, list[BoundTensor]]] = []
        """The ranges of bytes that belong together, and what lies in each."""
        for group, region in zip(groups, layout.regions, strict=True):
            lying = []
            for (tensor, _, _), offset in zip(group, region.offsets, strict=True):
                for part in parts[id(tensor)]:
                    part.offset = offset
                    lying.append(part)
            self._regions.append((region, lying))
        self.num_bytes = layout.num_bytes

    @property
    def parameters(self) -> tuple[StreamedParameter, ...]:
        """What streams of the layer."""
        return self.binding.parameters

    def _parts(self) -> Iterator[BoundTensor]:
        return (part for streamed in self.parameters for part in streamed.parts)

    def become(self, residency: Residency) -> None:
        """Note where its bytes are from now on; an assertion fails where that would lose some."""
        assert self.residency.may_become(residency), f"{self.name}: from {self.residency} to {residency}"
        self.residency = residency

    def evict(self) -> None:
        """Note that its bytes are in host memory from now on, and in no slot."""
        self.become(Residency.HOST)
        self.slot = None

    def move_to_host(self, read: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Copy the parameters to the host copy, in `span` or on a disk, and point them at it.

        Args:
            read: reads a parameter (its first argument) into its host copy (its second), in place of a copy.
        """
        memory = self._memory()
        self._restored, self.held = {}, []
        with without_modes():
            for region, lying in self._regions:
                # A storage of its own, so that saving a parameter writes no more than its bytes.
                if region.num_bytes > 0:
                    storage = torch.frombuffer(
                        memory, dtype=torch.uint8, count=region.num_bytes, offset=region.start
                    ).untyped_storage()
                else:
                    storage = torch.UntypedStorage(0)
                for part in lying:
                    part.host_copy = part.over(storage, start=region.start)
                    part.address = part.host_copy.data_ptr()
                    (read or copy_into)(part.tensor, part.host_copy)
            self.binding.renew()
            self.is_on_host = True  # ahead of the first that is: an interrupt leaves some that are not, and `restore` knows
            self.binding.unbind()
            for streamed in self.parameters:
                grad = streamed.parameter.grad
                if grad is not None and grad.device != _HOST:
                    streamed.parameter.grad = grad.to(_HOST)

    def _memory(self) -> Any:
        """Return the bytes of the host copy."""
        if self.mapped is not None:
            return self.mapped
        assert self.span is not None
        assert self.span.whole is not None
        return self.span.whole.numpy()

    def let_go_of_disk(self) -> None:
        """Hold nothing of a disk any more, once the parameters are restored."""
        if self.mapped is not None and not self.is_on_host:
            self.mapped, self.held = None, []
            for part in self._parts():
                part.host_copy = torch.empty(0, dtype=part.host_copy.dtype)
            self.binding.renew()

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
        host_copies = [(lying[0].host_copy.untyped_storage(), len(lying)) for _, lying in self._regions]
        self.held = [(storage, copied[storage_key(storage)]) for storage, num in host_copies if num_users(storage) > num + 1]
        self.is_on_host = False
        self._restored = {}

    def write_back(self) -> None:
        """Copy the parameters, as they are now, to the host copy."""
        with without_modes():
            for part in self._parts():
                if part.tensor.size() == part.size:
                    distinct(part.host_copy).copy_(distinct(part.tensor.data))

    def state(self) -> tuple[int, ...]:
        """Return numbers that change with every write to the host copy that can be seen: versions, and `num_changes`."""
        return (self.num_changes, *self.binding.versions())
