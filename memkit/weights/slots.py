"""Device memory that layers use in turn. For the order of notes and copies see [Note: interrupts of streaming]."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, count

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.owners import Owner, disown, own
from memkit.core.tensors import Geometry, storage_key
from memkit.device.base import Device, Event, Stream
from memkit.plan import slot_size_of
from memkit.plan.chunks import Residency
from memkit.transfer.device_memory import device_memory_of
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes, Transfer
from memkit.weights.chunks import LayerChunk, without_modes

_num_filled = count()
_num_writes = count(1)
_FETCHED = (Residency.HOST, Residency.IN_FLIGHT, Residency.DEVICE)  # DEVICE, since the caller may have written since


class Slot:
    """A storage with the bytes of one layer at a time, in use while the layer runs, or somebody holds the storage."""

    def __init__(self, device: Device, storage: torch.UntypedStorage, *, is_overflow: bool = False) -> None:
        self.storage = storage
        self.key = storage_key(storage)
        self.num_bytes = storage.nbytes()
        self.tensors: dict[Geometry, Tensor] = {}  # never handed out: the storage's use count tells who else holds it
        self._views: dict[LayerChunk, tuple[tuple[Geometry, ...], tuple[Tensor, ...]]] = {}
        self._parts: dict[LayerChunk, tuple[Span, tuple[Tensor, ...]]] = {}
        self.filled = next(_num_filled)
        self.is_overflow = is_overflow  # all others were in use: it goes as soon as it is idle
        self.chunk: LayerChunk | None = None
        self.state: object = None
        self.ready: Event | None = None
        self.is_ready = False
        self.stepped: Event | None = None  # the last step beside the backward; who isn't that backward waits
        self.left: Event | None = None
        self._has_unknown = False  # whether a copy may be under way whose event an interrupt has lost
        self._device = device
        stream = device.current_stream()
        self.users: dict[Stream, Event | None] = {stream: device.record_event(stream, timed=False)}  # None: in use

    @property
    def is_idle(self) -> bool:
        is_held = torch_private.num_storage_users(self.key) > 1 + len(self.tensors)
        return not self.is_dirty and (self.chunk is None or not self.chunk.uses) and not is_held

    @property
    def is_dirty(self) -> bool:
        """Whether it has, or is about to have, newer weights than the host copy, not copied back yet."""
        chunk = self.chunk
        return chunk is not None and chunk.slot is self and chunk.residency is Residency.DIRTY

    def holds(self, chunk: LayerChunk) -> bool:
        state = chunk.num_changes, *chunk.binding.versions()
        return self.chunk is chunk and chunk.slot is self and (self.state == state or chunk.residency is Residency.DIRTY)

    def view(self, place: Geometry) -> Tensor:
        """Return a view of the storage. It must not be handed out; hand out an alias of it."""
        found = self.tensors.get(place)
        if found is None:
            with without_modes():
                found = self.tensors[place] = place.over(self.storage)
        return found

    def lend(self, chunk: LayerChunk, *, use: object) -> None:
        """Point the parameters of the layer in this slot at it, if they are not yet, until all its users have left."""
        is_first = not chunk.uses
        if self.stepped is not None:
            self.await_steps(self._device.current_stream())
        chunk.uses.add(use)
        if is_first:
            places, known = chunk.binding.places, self._views.get(chunk)
            if known is None or known[0] is not places:
                known = self._views[chunk] = places, tuple(self.view(place) for place in places)
            if torch_private.num_dispatch_modes() or torch.is_inference_mode_enabled() or chunk.binding.wrappers:
                chunk.binding.point_at(known[1], self._device.torch_device)
            else:
                deque(chunk.binding.set_data(known[1]), maxlen=0)

    def fill(self, chunk: LayerChunk, span: Span, lanes: Lanes, log: list[Transfer] | None = None) -> Event:
        """Copy a layer's bytes here, behind all uses of the slot, log that, and evict the former layer. Return an event."""
        there = self.chunk
        if there is not None and there.slot is self:  # it is evicted: said here, since this is done for each copy
            assert there.residency is not Residency.DIRTY, there.name
            there.slot, there.residency = None, Residency.HOST
        after = list[Event]()
        for stream, freed in self.users.items():
            after.append(freed or self._device.record_event(stream, timed=False))
        if self.left is not None:
            after.append(self.left)
        if chunk.written is not None:
            after.append(chunk.written)
        known = self._parts.get(chunk)
        if known is None or known[0] is not span:
            cut = zip(accumulate(map(len, span.pieces), initial=0), span.pieces, strict=False)
            parts = (self.view(Geometry(piece.size(), (1,), start, torch.uint8, False, False)) for start, piece in cut)
            known = self._parts[chunk] = span, tuple(parts)
        assert chunk.residency in _FETCHED, chunk.residency
        chunk.residency = Residency.IN_FLIGHT
        self.chunk, self._has_unknown, self.is_ready = None, True, False
        # Until the copy is noted it has neither the one layer nor the other.
        if log is None and span.staging is None and not torch_private.profiler_is_on():
            self.ready = lanes.copy_parts(span, known[1], after=after)
        else:
            transfer = lanes.copy(lanes.back, self.storage, span, is_out=False, after=after, parts=known[1])
            self.ready = transfer.done
            if log is not None:
                log.append(transfer)
        self.users, self.stepped = {}, None
        self.state = (chunk.num_changes, *chunk.binding.versions())
        self.filled = next(_num_filled)
        self.chunk, self._has_unknown, chunk.slot = chunk, False, self
        return self.ready

    def fail(self) -> None:
        if self.chunk is not None and self.chunk.slot is self:
            self.chunk.become(Residency.HOST)
            self.chunk.slot = None
        self.chunk = self.state = self.ready = None

    def leave(self) -> None:
        for chunk in self._parts:
            if chunk.slot is self:
                chunk.slot, chunk.residency = None, Residency.HOST

    def claim(self, stream: Stream) -> None:
        """Let a stream write to the slot, once the last copy from it is done. From now on its bytes count (DIRTY)."""
        if self.left is not None:
            self._device.wait_event(stream, self.left)
        assert self.chunk is not None
        self.chunk.become(Residency.DIRTY)

    def note_written(self, chunk: LayerChunk, stepped: Event | None = None) -> None:
        self.state = chunk.state()
        if stepped is None:
            self._device.note_written(self.storage, -next(_num_writes))
        else:
            self.stepped = stepped

    def await_steps(self, stream: Stream) -> None:
        if self.stepped is not None:
            self._device.wait_event(stream, self.stepped)

    def write_back(self, copy: Callable[[torch.UntypedStorage, Event], Event]) -> Event:
        assert self.chunk is not None
        if self.stepped is not None:  # not sooner: the backward has read other weights here meanwhile
            self._device.note_written(self.storage, -next(_num_writes))
        after, self._has_unknown = self._device.record_event(timed=False), True
        self.stepped = None if self.stepped is None else after
        self.left = copy(self.storage, after)
        self.chunk.become(Residency.DEVICE)
        self._has_unknown = False
        return self.left

    def await_users(self, stream: Stream) -> None:
        if self._has_unknown:
            self._device.synchronize()
        if self.ready is not None:
            self._device.wait_event(stream, self.ready)
        if self.left is not None:
            self._device.wait_event(stream, self.left)
        for other, freed in self.users.items():
            if other != stream:
                self._device.wait_event(stream, freed or self._device.record_event(other, timed=False))


class SlotRing:
    """A device's slots, whose storages have an owner (`memkit.core.owners`): some of each size, and overflow slots."""

    holder = "LayerOffload's slots"

    def __init__(self, device: Device, slot_bytes: Sequence[int], owner: Owner) -> None:
        self._device = device
        self._owner = owner
        self._slot_bytes = tuple(slot_bytes)
        self._memory = device_memory_of(device)
        self.slots: dict[int, Slot] = {}
        self.bounds: list[int] = []
        self._sizes: dict[int, int] = {}
        self.num_planned = len(self._slot_bytes)
        self.num_overflows = 0
        try:
            for num_bytes in slot_bytes:
                self._add(Slot(device, self._memory.allocate(self, num_bytes)))
        except BaseException:
            self.close()
            raise
        self._memory.join(self)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots.values())

    @property
    def num_bytes(self) -> int:
        return sum(slot.num_bytes for slot in tuple(self.slots.values()))  # a backward's thread may add one meanwhile

    def holding(self, chunk: LayerChunk) -> Slot | None:
        slot = chunk.slot
        return slot if slot is not None and slot.holds(chunk) else None

    def at(self, storage: torch.UntypedStorage) -> Slot | None:
        return self.slots.get(storage_key(storage))

    def find_idle(self, chunk: LayerChunk, ahead: Mapping[int, int], place: int, current: LayerChunk | None) -> Slot | None:
        """Return an idle slot for a layer, None without one: of a layer not expected, else of the one that is used last."""
        size = self._sizes.get(chunk.num_bytes)
        if size is None:
            size = self._sizes[chunk.num_bytes] = slot_size_of(chunk.num_bytes, self._slot_bytes)
        idle, last = list[Slot](), len(ahead)
        for slot in self.slots.values():
            there = slot.chunk
            if slot.num_bytes != size or slot.is_overflow:
                continue
            if there is not None:
                is_evicted = there.slot is not slot
                if there.uses or not (is_evicted or there.residency is not Residency.DIRTY):
                    continue
                is_wanted = there is current or ahead.get(there.position, last) < place
                if is_wanted and not is_evicted and slot.state is not None:
                    continue
            if torch_private.num_storage_users(slot.key) <= 1 + len(slot.tensors):
                idle.append(slot)
        if len(idle) < 2:
            return idle[0] if idle else None
        best, best_rank = None, (-1, 0)
        for slot in idle:
            there, rank = slot.chunk, last + 1
            if there is not None and there.slot is slot and slot.state == (there.num_changes, *there.binding.versions()):
                rank = ahead.get(there.position, last)
            if (rank, -slot.filled) > best_rank:
                best, best_rank = slot, (rank, -slot.filled)
        return best

    def overflow(self, chunk: LayerChunk) -> Slot:
        slot = Slot(self._device, self._memory.allocate(self, chunk.num_bytes), is_overflow=True)
        self._add(slot)
        self.num_overflows += 1
        return slot

    def sweep(self, current: LayerChunk | None) -> None:
        for slot in [slot for slot in self if slot.is_overflow and slot.chunk is not current and slot.is_idle]:
            self._release(slot)

    def invalidate(self) -> None:
        for slot in self.slots.values():
            slot.state = None

    def await_copies(self) -> None:
        for event in (event for slot in self.slots.values() for event in (slot.ready, slot.left) if event is not None):
            with suppress(Exception):  # the use of the bytes raises it
                event.recorded()

    def close(self) -> None:
        """Release all memory. The host must have waited for the device, since a copy that failed has no event to wait for."""
        for slot in self.slots.values():
            slot.leave()
            disown(slot.storage)
        self.slots.clear()
        self._note_bounds()

    def _add(self, slot: Slot) -> None:
        self.slots[slot.key] = slot  # first: whose storage is owned is known here until it is not owned any more
        self._note_bounds()
        own(slot.storage, self._owner)

    def _release(self, slot: Slot) -> None:
        slot.leave()
        slot.chunk = None
        slot.await_users(self._device.current_stream())
        disown(slot.storage)
        del self.slots[slot.key]
        self._note_bounds()

    def _note_bounds(self) -> None:
        starts = sorted((slot.storage.data_ptr(), slot.num_bytes) for slot in self.slots.values())
        self.bounds = [bound for start, num_bytes in starts for bound in (start, start + num_bytes)]
