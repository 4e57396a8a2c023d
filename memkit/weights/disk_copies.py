"""Host copies of layers on a disk, and the buffers in host memory that they are read into ahead of their use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from memkit.device.base import Device, Event
from memkit.errors import DiskError
from memkit.plan import disk_bytes
from memkit.transfer.arena import Arena
from memkit.transfer.disk import Disk
from memkit.transfer.disk_store import DiskCopy, DiskStore
from memkit.transfer.spans import Span, rounded

if TYPE_CHECKING:
    from memkit.weights.chunks import LayerChunk

NUM_BUFFERS = 4
_PAGE_BYTES = 4096


class _Buffer:
    """Host memory for the bytes of one layer at a time, between the disk and a slot."""

    def __init__(self, room: Span) -> None:
        self.room = room
        self.chunk: LayerChunk | None = None
        """Whose bytes were asked for last."""
        self.state: tuple[int, ...] | None = None
        """What the chunk's `state()` was when it was read; None if what is here counts for nothing."""
        self.sent: Event | None = None
        """Behind the last copy from here to a slot."""
        self.has_unknown = False
        """Whether such a copy may be under way of which no event is known: an interrupt came in between."""

    def holds(self, chunk: LayerChunk) -> bool:
        """Tell whether the bytes of a layer as they are now are here, or on their way."""
        return self.chunk is chunk and self.state is not None and self.state == chunk.state()


class DiskCopies:
    """The layers that lie in a scratch file.

    Between passes each parameter is a tensor over the file's bytes, mapped into memory: whoever reads it has the system read
    those, and whoever writes to it has them written. For a pass they are read past that into a few buffers, as far ahead as
    these reach, and from there they are copied to slots. They are frozen: memkit writes them once.

    Args:
        disk: where.
        device: where the layers run.
    """

    def __init__(self, disk: Disk, device: Device) -> None:
        self._disk, self._device = disk, device
        self._opened: DiskStore | None = None
        """Made when layers are to lie there."""
        self._copies: dict[LayerChunk, DiskCopy] = {}
        self._buffers: list[_Buffer] = []

    def take(self, chunks: list[LayerChunk], arena: Arena) -> None:
        """Take room on the disk for layers, and buffers in host memory.

        Raises:
            DiskError: there is not enough of the one.
            HostMemoryError: there is not enough of the other.
        """
        sizes = [chunk.num_bytes for chunk in chunks]
        if not sizes:
            return
        self._opened = self._disk.open(disk_bytes(sizes, num_written_at_once=1), self._device)
        largest = rounded(max(sizes), _PAGE_BYTES)
        with torch.inference_mode(False):
            rooms = arena.take_pinned_as_one([largest] * min(NUM_BUFFERS, len(sizes)))
        self._buffers = [_Buffer(room) for room in rooms]
        for chunk in chunks:
            self._copies[chunk] = copy = self._store.add(chunk.name, chunk.num_bytes)
            chunk.mapped = self._store.map(copy)

    @property
    def _store(self) -> DiskStore:
        assert self._opened is not None
        return self._opened

    def settle(self, chunk: LayerChunk) -> None:
        """The host copy of a layer is written: have it be on the disk, and take no memory."""
        if chunk.mapped is not None:
            self._store.settle_map(self._copies[chunk], chunk.mapped)

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk."""
        return sum(copy.num_bytes for copy in self._copies.values())

    @property
    def read_bytes(self) -> int:
        """Bytes that were read from there so far."""
        return 0 if self._opened is None else self._opened.read_bytes

    # A pass

    def invalidate(self) -> None:
        """The caller may have written to the host copies unseen."""
        for buffer in self._buffers:
            buffer.state = None

    def read_ahead(self, chunks: Iterable[LayerChunk]) -> None:
        """Have layers be read that are needed next, in this order.

        Raises:
            DiskError: another read has failed.
        """
        wanted = [chunk for chunk, _ in zip(chunks, self._buffers, strict=False)]
        for chunk in wanted:
            if self._find(chunk) is None:
                free = next((buffer for buffer in self._buffers if not any(map(buffer.holds, wanted))), None)
                if free is None:
                    return
                self._read(chunk, free)

    def is_here(self, chunk: LayerChunk) -> bool:
        """Tell whether a layer can be copied to a slot without anybody waiting for the disk."""
        transfer = self._copies[chunk].transfer
        return self._find(chunk) is not None and (transfer is None or transfer.is_over)

    def bring(self, chunk: LayerChunk) -> Span:
        """Return where the bytes of a layer are in host memory: waits for the disk. `note_sent` is due then.

        Raises:
            DiskError: it can't be read.
        """
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
        self._buffers.append(buffer)  # the first is the one that was used longest ago
        buffer.has_unknown = True
        return buffer.room.part(0, chunk.num_bytes)

    def note_sent(self, sent: Event) -> None:
        """What was brought last is copied to a slot once an event is reached."""
        buffer = self._buffers[-1]
        buffer.sent, buffer.has_unknown = sent, False

    def _find(self, chunk: LayerChunk) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.holds(chunk)), None)

    def _read(self, chunk: LayerChunk, buffer: _Buffer) -> None:
        """Have a layer be read to a buffer, behind all that uses that."""
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
        """Make the host wait until each copy from memory that is not pinned is on its lane, or has failed."""
        for buffer in self._buffers:
            if buffer.room.staging is not None:
                buffer.room.staging.drain()

    def close(self) -> None:
        """Give the room on the disk back, but for what is mapped. The host has waited for all copies."""
        if self._opened is not None:
            with contextlib.suppress(DiskError):  # of what was read ahead
                self._opened.close()
