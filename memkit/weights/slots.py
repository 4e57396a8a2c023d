"""Device memory that layers take turns in: who has which slot, and from when on the next may.

For the order of notes and copies see [Note: interrupts of streaming] in `memkit.weights.streaming`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import torch

from memkit.device.base import Device, Event, Stream
from memkit.owners import Owner, disown, own
from memkit.plan import slot_size_of
from memkit.storages import storage_key
from memkit.torch_state import num_users
from memkit.weights.chunks import LayerChunk


class Slot:
    """A storage of its own, with the bytes of one layer at a time.

    It is in use while the layer runs, or while another holds its storage: a node of the graph a tensor that it was given, the
    caller a view. What reads it does so on the streams noted here.
    """

    __slots__ = (
        "_device",
        "_freed",
        "_has_unknown",
        "_left",
        "chunk",
        "is_dirty",
        "is_overflow",
        "num_bytes",
        "ready",
        "state",
        "storage",
    )

    def __init__(self, device: Device, num_bytes: int, *, is_overflow: bool = False) -> None:
        self.storage = device.allocate(num_bytes)
        self.num_bytes = num_bytes
        self.is_overflow = is_overflow
        """Whether it was taken because all others were in use: it goes as soon as it is idle."""
        self.chunk: LayerChunk | None = None
        """Whose bytes it has, or will have once `ready` is reached."""
        self.state: object = None
        """What the chunk's `state()` was when its bytes were copied."""
        self.ready: Event | None = None
        self.is_dirty = False
        """Whether it has weights that the host copy has not yet, or is about to: until they are copied, it is the truth."""
        self._left: Event | None = None
        """Behind the last write to the host copy."""
        self._has_unknown = False
        """Whether a copy from or to it may be under way that no event is known of: an interrupt came in between."""
        self._device = device
        stream = device.current_stream()
        self._freed: dict[Stream, Event | None] = {stream: device.record_event(stream, timed=False)}
        """The streams that have used it since it was filled: behind which event they no longer do, None if they may still."""

    @property
    def is_idle(self) -> bool:
        """Whether it is not in use."""
        return not self.is_dirty and (self.chunk is None or not self.chunk.uses) and num_users(self.storage) == 1

    def holds(self, chunk: LayerChunk) -> bool:
        """Tell whether it has the bytes of a layer as they are now."""
        return self.chunk is chunk and (self.is_dirty or self.state == chunk.state())

    def forget(self) -> None:
        """What it holds is not to be found any more."""
        self.state = None

    def fill(self, chunk: LayerChunk, copy: Callable[[torch.UntypedStorage, Iterable[Event]], Event]) -> None:
        """Have the bytes of a layer copied here, once all work that uses the slot is done.

        Args:
            copy: puts the copy into a storage on a lane, behind some events, and returns what is reached when it is done.
        """
        after = [freed or self._device.record_event(stream, timed=False) for stream, freed in self._freed.items()]
        if self._left is not None:
            after.append(self._left)
        self.chunk, self._has_unknown = None, True  # until the copy is noted it has neither the one layer nor the other
        self.ready = copy(self.storage, after)
        self._freed = {}
        self.state = chunk.state()
        self.chunk, self._has_unknown = chunk, False

    def use(self, stream: Stream) -> None:
        """Let work that is put on a stream from now on read the slot."""
        assert self.ready is not None
        if stream not in self._freed:
            try:
                self.ready.recorded()
            except Exception:  # the copy has failed, and is not under way any more
                self.chunk = self.state = self.ready = None
                raise
            self._device.wait_event(stream, self.ready)
        self._freed[stream] = None
        self._device.note_read(self.storage)

    def await_filled(self) -> None:
        """Make the host wait until the copy that fills it has read the host copy: whoever is given that may write to it."""
        if self.ready is not None and not self.ready.is_reached():
            self._device.synchronize(self.ready)

    def release(self, stream: Stream) -> None:
        """A forward of the layer is over, or its backward: all work that uses the slot has been put on a stream, and the
        layer's tensors do not lie here any more.

        Unless the graph or the caller holds a tensor that does: they may put work on it until they let go, which nothing
        tells.
        """
        self._device.note_read(self.storage)
        is_held = num_users(self.storage) > 1
        self._freed[stream] = None if is_held else self._device.record_event(stream, timed=False)

    def claim(self, stream: Stream) -> None:
        """Let work that is put on a stream from now on write to the slot."""
        if self._left is not None:
            self._device.wait_event(stream, self._left)
        self.is_dirty = True

    def note_written(self, chunk: LayerChunk) -> None:
        """Work on the current stream has written to the weights here: the slot has them as they are now."""
        self.state = chunk.state()
        self._device.note_written(self.storage, -sum(chunk.state()))

    def write_back(self, copy: Callable[[torch.UntypedStorage, Event], Event]) -> Event:
        """Write its bytes to the host copy, behind what the current stream has done with them; return what is reached then.

        Args:
            copy: puts the copy on a lane, behind an event.
        """
        after, self._has_unknown = self._device.record_event(timed=False), True
        self._left = copy(self.storage, after)
        self.is_dirty = self._has_unknown = False
        return self._left

    def await_copies(self) -> None:
        """Make the host wait for a thread that brings bytes here or from here."""
        for event in (self.ready, self._left):
            if event is not None:
                with suppress(Exception):  # who needs the bytes is told
                    event.recorded()

    def settle(self, stream: Stream) -> None:
        """Let a stream wait for all that uses the slot, so that its memory can go back to it."""
        if self._has_unknown:
            self._device.synchronize()
        if self.ready is not None:
            self._device.wait_event(stream, self.ready)
        if self._left is not None:
            self._device.wait_event(stream, self._left)
        for other, freed in self._freed.items():
            if other != stream:
                self._device.wait_event(stream, freed or self._device.record_event(other, timed=False))


class SlotRing:
    """All slots of a device: some of each size, and more for a while where all of a size are in use.

    Args:
        device: where they are.
        slot_bytes: the size of each.
        owner: who lends them out.
    """

    def __init__(self, device: Device, slot_bytes: Sequence[int], owner: Owner) -> None:
        self._device = device
        self._owner = owner
        self._slot_bytes = tuple(slot_bytes)
        self._slots: list[Slot] = []
        """The one that was filled longest ago comes first."""
        self.num_overflows = 0
        """How often there was no slot."""
        try:
            for num_bytes in slot_bytes:
                self._add(Slot(device, num_bytes))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that they take now."""
        return sum(slot.num_bytes for slot in self._slots)

    def holding(self, chunk: LayerChunk) -> Slot | None:
        """Return the slot that has the bytes of a layer as they are now, or will have them."""
        return next((slot for slot in self._slots if slot.holds(chunk)), None)

    def at(self, storage: torch.UntypedStorage) -> Slot | None:
        """Return the slot that a storage is, None if it is none."""
        key = storage_key(storage)
        return next((slot for slot in self._slots if storage_key(slot.storage) == key), None)

    def find_idle(self, chunk: LayerChunk, rank: Callable[[LayerChunk], float | None]) -> Slot | None:
        """Return a slot that a layer may take, None if there is none. Among equals that is the one filled longest ago, whose
        work is done soonest.

        Args:
            rank: how far away the next use of a layer is that would have to go, None if it must stay.
        """
        size = slot_size_of(chunk.num_bytes, self._slot_bytes)
        best, best_rank = None, -1.0
        for slot in self._slots:
            if slot.num_bytes != size or slot.is_overflow or not slot.is_idle:
                continue
            is_empty = slot.chunk is None or not slot.holds(slot.chunk)
            found = float("inf") if is_empty or slot.chunk is None else rank(slot.chunk)
            if found is not None and found > best_rank:
                best, best_rank = slot, found
        return best

    def fill(self, slot: Slot, chunk: LayerChunk, copy: Callable[[torch.UntypedStorage, Iterable[Event]], Event]) -> None:
        """Fill a slot of this ring: see `Slot.fill`."""
        slot.fill(chunk, copy)
        self._slots = [*(other for other in self._slots if other is not slot), slot]

    def overflow(self, chunk: LayerChunk) -> Slot:
        """Return one more slot, for a while.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        slot = Slot(self._device, chunk.num_bytes, is_overflow=True)
        self._add(slot)
        self.num_overflows += 1
        return slot

    def sweep(self, current: LayerChunk | None) -> None:
        """Give those up that were taken for a while, and that are idle."""
        for slot in [slot for slot in self._slots if slot.is_overflow and slot.chunk is not current and slot.is_idle]:
            self._drop(slot)

    def forget(self) -> None:
        """What the slots hold is not to be found any more: the caller may have written to the host copies unseen."""
        for slot in self._slots:
            slot.forget()

    def await_copies(self) -> None:
        """Make the host wait for threads that bring bytes to slots or from there: they hold a slot meanwhile."""
        for slot in self._slots:
            slot.await_copies()

    def close(self) -> None:
        """Give all memory back. The host has waited for all work, since a copy that has failed cannot be waited for."""
        for slot in self._slots:
            disown(slot.storage)
        self._slots.clear()

    def _add(self, slot: Slot) -> None:
        self._slots.append(slot)  # first: whose storage is owned is known here until it is not owned any more
        own(slot.storage, self._owner)

    def _drop(self, slot: Slot) -> None:
        slot.chunk = None
        slot.settle(self._device.current_stream())
        disown(slot.storage)
        self._slots.remove(slot)
