"""The pinned memory or the disk of layers' host copies, and tensors that do not stream."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.owners import with_offloaded_states
from memkit.core.sizes import DISK_PAGE_BYTES, rounded
from memkit.core.tensors import (
    byte_view,
    has_plain_parts,
    overlapping,
    parts_of,
    set_reported_device,
    tensor_over,
    unique_storages,
    wrappers_in,
)
from memkit.device.base import Device, Event
from memkit.errors import DiskError, warn_user
from memkit.plan import disk_bytes
from memkit.transfer.disk import Disk, DiskCopy, DiskStore
from memkit.transfer.host_memory import Arena, Span

if TYPE_CHECKING:
    from memkit.weights.chunks import LayerChunk, StreamedParameter
    from memkit.weights.gradients import Accumulation

_streaming_by: weakref.WeakValueDictionary[int, HostCopies] = weakref.WeakValueDictionary()  # by parameter's id
NUM_BUFFERS = 4


def move(tensors: Sequence[Tensor], torch_device: torch.device) -> None:
    with torch.inference_mode(False), torch.no_grad(), torch_private.without_dispatch_modes():
        movable = [tensor for tensor in tensors if has_plain_parts(tensor)]
        for tensor in tensors:
            if not has_plain_parts(tensor):
                tensor.data = tensor.data.to(torch_device)
        for group in overlapping([part for tensor in movable for part in parts_of(tensor)]):
            first, last = min(low for _, low, _ in group), max(high for _, _, high in group)
            source = byte_view(group[0][0].untyped_storage())[first:last]
            storage = torch.empty(last - first, dtype=torch.uint8, device=torch_device).untyped_storage()
            byte_view(storage).copy_(source)
            for tensor, low, _ in group:
                offset = (low - first) // tensor.dtype.itemsize
                tensor.data = tensor_over(storage, tensor.dtype, offset=offset, size=tensor.size(), stride=tensor.stride())
        for wrapper in (wrapper for tensor in movable for wrapper in wrappers_in(tensor)):
            set_reported_device(wrapper, torch_device)
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                tensor.grad = tensor.grad.to(torch_device)


class DevicePlacement:
    def __init__(self) -> None:
        self._found: dict[torch.device, list[Tensor]] = {}

    def place(self, tensors: Iterable[Tensor], torch_device: torch.device) -> None:
        found: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.device != torch_device:
                found.setdefault(tensor.device, []).append(tensor)
        for device, moved in found.items():
            self._found.setdefault(device, []).extend(moved)
            move(moved, torch_device)

    def restore(self) -> None:
        for torch_device, moved in self._found.items():
            move(moved, torch_device)
        self._found.clear()


def shared_between(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[int, list[str]]:
    """Return storages shared between layers, a layer and the rest, or a parameter and a buffer, by key, with names."""
    layers_of: dict[int, set[int]] = {}
    for number, layer in enumerate(layers.values()):
        for module in layer.modules():
            layers_of.setdefault(id(module), set()).add(number)
    homes: dict[int, set[int]] = {}
    names: dict[int, list[str]] = {}
    of_buffers = unique_storages(model.buffers())
    for prefix, module in model.named_modules():
        for key, tensor in (*torch_private.parameters_of(module).items(), *torch_private.buffers_of(module).items()):
            for storage in () if tensor is None else unique_storages([tensor]):
                if isinstance(tensor, nn.Parameter):
                    homes.setdefault(storage, set()).update(layers_of.get(id(module), {-1}))
                names.setdefault(storage, []).append(f"{prefix}.{key}" if prefix else key)
    return {storage: names[storage] for storage, found in homes.items() if len(found) > 1 or storage in of_buffers}


def claim(streamed: StreamedParameter, host: HostCopies) -> None:
    _streaming_by[id(streamed.parameter)] = host


def release(chunk: LayerChunk) -> None:
    for streamed in chunk.parameters:
        _streaming_by.pop(id(streamed.parameter), None)


def is_streamed(parameter: Tensor) -> bool:
    return id(parameter) in _streaming_by


def refuse_streamed(model: nn.Module) -> None:
    stepped = {id(own) for optimizer in with_offloaded_states for group in optimizer.param_groups for own in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in stepped:
            raise ValueError(
                f'LayerOffload: "{name}" is stepped by an optimizer with a StateOffload. Make the LayerOffload first, and then '
                "an optimizer with a StateOffload for the parameters that don't stream"
            )
        other = _streaming_by.get(id(parameter))
        if other is not None and any(item.parameter is parameter for chunk in other.chunks for item in chunk.parameters):
            raise ValueError(
                f'LayerOffload: "{name}" is streamed by another LayerOffload already, over a {type(other.model).__name__}. '
                "Close that one first: call its close(), or memkit.detach(model) with the model that it was given"
            )


@dataclass(eq=False)
class _ReadBuffer:
    room: Span
    chunk: LayerChunk | None = None
    state: tuple[int, ...] | None = None
    sent: Event | None = None
    has_unknown: bool = False  # whether a copy to a slot may be under way whose event is unknown: an interrupt came in between

    def holds(self, chunk: LayerChunk) -> bool:
        return self.chunk is chunk and self.state is not None and self.state == chunk.state()


class DiskCopies:
    """The frozen layers in a scratch file: mapped between passes, and for a pass read past the mapping into a few buffers."""

    def __init__(self, disk: Disk, device: Device) -> None:
        self._disk, self._device = disk, device
        self._opened: DiskStore | None = None
        self._copies: dict[LayerChunk, DiskCopy] = {}
        self._buffers: list[_ReadBuffer] = []

    def take(self, chunks: list[LayerChunk], arena: Arena) -> None:
        sizes = [chunk.num_bytes for chunk in chunks]
        if not sizes:
            return
        self._opened = self._disk.open(disk_bytes(sizes, num_written_at_once=1), self._device)
        largest = rounded(max(sizes), DISK_PAGE_BYTES)
        with torch.inference_mode(False):
            rooms = arena.take_pinned_as_one([largest] * min(NUM_BUFFERS, len(sizes)))
        self._buffers = [_ReadBuffer(room) for room in rooms]
        for chunk in chunks:
            self._copies[chunk] = copy = self._store.add(chunk.name, chunk.num_bytes)
            chunk.mapped = self._store.map(copy)

    @property
    def _store(self) -> DiskStore:
        assert self._opened is not None
        return self._opened

    def settle(self, chunk: LayerChunk) -> None:
        if chunk.mapped is not None:
            self._store.settle_map(self._copies[chunk], chunk.mapped)

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies.values())

    @property
    def read_bytes(self) -> int:
        return 0 if self._opened is None else self._opened.read_bytes

    def invalidate(self) -> None:
        for buffer in self._buffers:
            buffer.state = None

    def read_ahead(self, chunks: Iterable[LayerChunk]) -> None:
        wanted = [chunk for chunk, _ in zip(chunks, self._buffers, strict=False)]
        for chunk in wanted:
            if self._find(chunk) is None:
                free = next((buffer for buffer in self._buffers if not any(map(buffer.holds, wanted))), None)
                if free is None:
                    return
                self._read(chunk, free)

    def is_here(self, chunk: LayerChunk) -> bool:
        transfer = self._copies[chunk].transfer
        return self._find(chunk) is not None and (transfer is None or transfer.is_over)

    def bring(self, chunk: LayerChunk) -> Span:
        """Wait for the disk, and return a layer's place in host memory. `note_sent` is due then."""
        buffer = self._find(chunk)
        if buffer is None:
            buffer = self._buffers[0]
            self._read(chunk, buffer)
        try:
            self._store.wait(self._copies[chunk])
        except DiskError:
            buffer.state = None
            raise
        self._buffers.remove(buffer)
        self._buffers.append(buffer)  # so that the first is the one that was used longest ago
        buffer.has_unknown = True
        return buffer.room.part(0, chunk.num_bytes)

    def note_sent(self, sent: Event) -> None:
        buffer = self._buffers[-1]
        buffer.sent, buffer.has_unknown = sent, False

    def _find(self, chunk: LayerChunk) -> _ReadBuffer | None:
        return next((buffer for buffer in self._buffers if buffer.holds(chunk)), None)

    def _read(self, chunk: LayerChunk, buffer: _ReadBuffer) -> None:
        buffer.state = None
        if buffer.chunk is not None:
            with contextlib.suppress(DiskError):
                self._store.wait(self._copies[buffer.chunk])
        if buffer.has_unknown:
            self._device.synchronize()
            buffer.has_unknown = False
        buffer.chunk = chunk
        state = chunk.state()
        after = () if buffer.sent is None else (buffer.sent,)
        self._store.read(self._copies[chunk], buffer.room.part(0, chunk.num_bytes), after=after)
        buffer.state = state

    def drain(self) -> None:
        for buffer in self._buffers:
            if buffer.room.staging is not None:
                buffer.room.staging.drain()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


class HostCopies:
    """The host memory of weights and gradients, or the disk where host copies of weights are instead."""

    def __init__(
        self, device: Device, model: nn.Module, chunks: Iterable[LayerChunk], *, limit_bytes: int | None, disk: Disk | None
    ) -> None:
        self.model = model
        self.chunks = tuple(chunks)
        self.arena = Arena(device, limit_bytes=limit_bytes, must_pin=False)
        self.disk = None if disk is None else DiskCopies(disk, device)
        self._has_warned = False
        self._held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] | None = None

    def take(self, chunks: Sequence[LayerChunk]) -> None:
        if self.disk is not None:
            self.disk.take(list(chunks), self.arena)
            return
        with torch.inference_mode(False):  # else host memory could not be written to outside of that
            spans = self.arena.take_pinned_as_one([chunk.num_bytes for chunk in chunks])
        for chunk, span in zip(chunks, spans, strict=True):
            chunk.span = span

    def move_in(self, chunk: LayerChunk, read: Callable[[Tensor, Tensor], None]) -> None:
        chunk.move_to_host(read)
        if self.disk is not None:
            self.disk.settle(chunk)
        for item in chunk.parameters:
            claim(item, self)

    def spans(self) -> list[Span]:
        return [chunk.span for chunk in self.chunks if chunk.span is not None]

    def warn_of_refusal(self) -> None:
        if self.arena.refusal is not None and not self._has_warned:
            self._has_warned = True
            warn_user(f"LayerOffload: {self.arena.refusal}")

    def give(self, leaving: Iterable[LayerChunk]) -> None:
        for chunk in leaving:
            release(chunk)
            if chunk.span is not None and not chunk.held:
                span, chunk.span = chunk.span, None
                self.arena.give(span)
        self.arena.trim_gaps()

    def restore(self, gradients: Accumulation | None) -> None:
        if self._held is not None:
            return
        held = [] if gradients is None else gradients.close()
        for chunk in self.chunks:
            if chunk.is_on_host:
                chunk.restore()
            held += [(storage, byte_view(storage).clone().untyped_storage()) for storage, _ in chunk.held]
            release(chunk)
        self._held = held

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
            self._held = []  # holders of mapped tensors have their bytes there
            for chunk in self.chunks:
                chunk.let_go_of_disk()
        self.arena.give_all()
        self.arena.close()
        # The arena has given the memory back; the addresses still belong to the tensors there.
        for storage, copied in self._held or ():
            byte_view(storage).copy_(byte_view(copied))
