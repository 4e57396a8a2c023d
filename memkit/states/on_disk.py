"""States that lie on a disk between steps, and their buffers in host memory."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memkit.core.sizes import HOST_PAGE_BYTES, rounded
from memkit.core.torch_state import label
from memkit.device.base import Device
from memkit.errors import DiskError
from memkit.plan import StatePiece, disk_bytes
from memkit.plan.states import NUM_BUFFERS
from memkit.states.packing import PackedRows, copy_state
from memkit.states.pieces import Layout, Piece, Rows, stand_ins_for
from memkit.transfer.disk import Disk, DiskCopy, DiskStore
from memkit.transfer.host_memory import Span

if TYPE_CHECKING:
    from memkit.states.memory import HostStates


class Holds(enum.Enum):
    """The meaning of a buffer's bytes.

    NOTHING: none. READ: they are on the disk as well, or on their way from there. DIRTY: they are nowhere else, but for a slot.
    WRITTEN: they are on their way to the disk, or there.
    """

    NOTHING = enum.auto()
    READ = enum.auto()
    DIRTY = enum.auto()
    WRITTEN = enum.auto()


class Buffer:
    def __init__(self, room: Span) -> None:
        self.room = room
        self.part: Piece | None = None
        self.holds = Holds.NOTHING
        self.copy: DiskCopy | None = None
        self.number = 0

    @property
    def chunk(self) -> DiskCopy:
        assert self.copy is not None
        return self.copy

    @property
    def span(self) -> Span:
        return self.room.part(0, self.chunk.num_bytes)


class DiskStates:
    """Parts of pieces on a disk, and a few buffers in host memory, each for one part at a time.

    [Note: a part's turn] A part has a buffer from before it is read until its bytes are known to be on the disk again: it comes
    back from its slot to the same buffer. Buffers are given out in the order of the step, and there are no more slots than
    buffers, so the part whose turn it is has one, or waits for the write of an earlier part.

    A write goes on in the background. If it fails, the bytes stay in the buffer, and are written again at the next step, or
    when somebody needs the buffer. If that fails as well, the step is broken off, and nothing is lost.
    """

    def __init__(self, disk: Disk | None, device: Device, host: HostStates) -> None:
        self._disk, self._device, self._host = disk, device, host
        self.opened: DiskStore | None = None
        self.buffers: list[Buffer] = []
        self._writes = itertools.count()
        self._planned: list[int] = []

    @property
    def store(self) -> DiskStore:
        assert self.opened is not None, "nothing was planned to be on the disk"
        return self.opened

    def reserve(self, plans: Sequence[StatePiece]) -> None:
        sizes = [part.state_bytes for plan in plans if plan.is_on_disk for part in plan.parts]
        if not sizes:
            return
        planned = [*self._planned, *sizes]
        num_bytes = disk_bytes(planned, num_written_at_once=NUM_BUFFERS)
        if self.opened is None:
            assert self._disk is not None
            self.opened = self._disk.open(num_bytes, self._device)
        self._make_room(num_bytes)
        self.add_buffers(min(NUM_BUFFERS, len(planned)) - len(self.buffers), max(planned))
        self._planned = planned

    def _make_room(self, num_bytes: int) -> None:
        if self.store.file.num_bytes < num_bytes:
            assert self._disk is not None
            self._disk.extend(self.store, num_bytes)

    # Buffers

    def add_buffers(self, number: int, num_bytes: int) -> None:
        self.buffers += map(Buffer, self._host.take([rounded(num_bytes, HOST_PAGE_BYTES)] * number))

    def _find(self, part: Piece) -> Buffer | None:
        return next((buffer for buffer in self.buffers if buffer.part is part), None)

    def _give_free(self, part: Piece) -> Buffer | None:
        buffer = next((buffer for buffer in self.buffers if buffer.part is None), None)
        if buffer is not None:
            buffer.holds, buffer.copy = Holds.NOTHING, None
            buffer.part = part
        return buffer

    def _claim(self, part: Piece) -> Buffer:
        while (buffer := self._find(part) or self._give_free(part)) is None:
            self._free_one()
        return buffer

    def _free_one(self) -> None:
        """Wait for a write, or make it again; else give up a part that was read ahead."""
        resting = [buffer for buffer in self.buffers if buffer.part is not None and buffer.part.residency is buffer.part.rest]
        written = [buffer for buffer in resting if buffer.holds is Holds.WRITTEN]
        for buffer in sorted(written, key=lambda buffer: buffer.number):
            self._end_write(buffer)
            if buffer.part is None:
                return
        clean = [buffer for buffer in resting if buffer.holds in (Holds.NOTHING, Holds.READ)]
        if clean:
            assert clean[-1].part is not None
            self.release(clean[-1].part)
            return
        dirty = next(buffer for buffer in resting if buffer.holds is Holds.DIRTY)
        self._write(dirty)
        try:
            self.store.wait(dirty.chunk)
        except DiskError:
            dirty.holds = Holds.DIRTY
            raise
        dirty.part = None

    def _free_written(self) -> None:
        for buffer in self._holding(Holds.WRITTEN):
            transfer = buffer.chunk.transfer
            if transfer is None or transfer.is_over:
                self._end_write(buffer)

    def _holding(self, holds: Holds) -> list[Buffer]:
        return [buffer for buffer in self.buffers if buffer.part is not None and buffer.holds is holds]

    def _end_write(self, buffer: Buffer, *, keeps: bool = False) -> None:
        try:
            self.store.wait(buffer.chunk)
        except DiskError:  # it is written again, and then its error is raised
            buffer.holds = Holds.DIRTY
            return
        if keeps:
            buffer.holds = Holds.READ
        else:
            buffer.part = None

    def end_writes(self) -> None:
        for buffer in self._holding(Holds.WRITTEN):
            self._end_write(buffer)

    def begin_read(self, buffer: Buffer, part: Piece) -> None:
        chunk = buffer.copy = part.chunk
        if buffer.room.num_bytes < chunk.num_bytes:
            self.grow(buffer, chunk.num_bytes)
        self.store.read(chunk, buffer.span)
        buffer.holds = Holds.READ

    def _write(self, buffer: Buffer) -> None:
        assert buffer.part is not None
        left = buffer.part.left
        self.store.write(buffer.chunk, buffer.span, after=() if left is None else (left,))
        buffer.number, buffer.holds = next(self._writes), Holds.WRITTEN

    def _end_transfer(self, buffer: Buffer) -> None:
        if buffer.copy is not None:
            with contextlib.suppress(DiskError):
                self.store.wait(buffer.copy)

    def grow(self, buffer: Buffer, num_bytes: int) -> None:
        """Give a buffer more room. It waits for the device, whose copies may use the buffer."""
        self._end_transfer(buffer)
        self._device.synchronize()
        (larger,) = self._host.take([rounded(num_bytes, HOST_PAGE_BYTES)])
        larger.whole[: buffer.room.num_bytes].copy_(buffer.room.whole)
        smaller, buffer.room = buffer.room, larger
        self._host.give(smaller)

    def release(self, part: Piece) -> None:
        buffer = self._find(part)
        if buffer is not None and buffer.holds not in (Holds.DIRTY, Holds.WRITTEN):
            self._end_transfer(buffer)
            buffer.part = None

    # A step

    def tidy(self, pieces: Sequence[Piece]) -> None:
        """Begin a step, with no part on its way: write failed writes again, and forget chunks that no piece has any more."""
        if self.opened is None:
            return
        self._free_written()
        for buffer in self.buffers:  # those that were read ahead in vain
            if buffer.part is not None:
                self.release(buffer.part)
        kept = {copy for piece in pieces for copy in piece.copies}
        self.store.keep_only(kept)  # which waits for the transfers under way
        for buffer in self.buffers:
            if buffer.copy is not None and buffer.copy not in kept:
                buffer.holds, buffer.part = Holds.NOTHING, None
        for buffer in self._holding(Holds.DIRTY):
            self._write(buffer)

    def read_ahead(self, parts: Sequence[Piece]) -> None:
        """Begin to read parts, as many as have buffers. Errors are raised at the part's turn."""
        if self.opened is None:
            return
        self._free_written()
        for part in parts:
            if not part.plan.is_on_disk or self._find(part) is not None:
                continue
            buffer = self._give_free(part)
            if buffer is None:
                return
            if part.layout is not None:
                self.begin_read(buffer, part)

    def is_here(self, part: Piece) -> bool:
        buffer = self._find(part)
        if buffer is None:
            return False
        if part.layout is None or buffer.holds is Holds.DIRTY:
            return True
        return buffer.holds is not Holds.NOTHING and buffer.copy is not None and buffer.copy.is_at_rest

    def bring(self, part: Piece) -> None:
        buffer = self._claim(part)
        if buffer.holds is Holds.WRITTEN:
            self._end_write(buffer, keeps=True)
        if part.layout is None:
            buffer.holds = Holds.NOTHING
            return
        if buffer.holds is Holds.NOTHING:
            self.begin_read(buffer, part)
        if buffer.holds is Holds.READ:
            try:
                self.store.wait(buffer.chunk)
            except DiskError:
                buffer.holds = Holds.NOTHING
                raise
        if part.left is not None:
            self._device.synchronize(part.left)

    def span_of(self, part: Piece) -> Span:
        buffer = self._find(part)
        assert buffer is not None
        return buffer.room.part(0, part.chunk.num_bytes)

    def layout_of(self, piece: Piece, tensors: PackedRows, num_bytes: int, *, is_apart: bool = False) -> Layout:
        buffer = self._claim(piece)
        if buffer.room.num_bytes < num_bytes:
            self.grow(buffer, num_bytes)
        self._make_room(disk_bytes([*self.store.sizes, num_bytes], num_written_at_once=NUM_BUFFERS))
        return Layout(None, tensors, stand_ins_for(piece, tensors), self.store.add(piece.names, num_bytes))

    def note_coming(self, part: Piece) -> None:
        buffer = self._claim(part)
        buffer.copy, buffer.holds = part.chunk, Holds.DIRTY

    def write(self, part: Piece) -> None:
        buffer = self._find(part)
        assert buffer is not None
        with label("write states to the disk", part):
            self._write(buffer)

    def forget(self, copies: Sequence[DiskCopy], piece: Piece) -> None:
        for copy in copies:
            if copy in piece.copies or not self.store.has(copy):
                continue
            self.store.remove(copy)  # which waits for the transfers under way
            for buffer in self.buffers:
                if buffer.copy is copy:
                    buffer.holds, buffer.copy = Holds.NOTHING, None

    # At rest

    def put(self, piece: Piece, tensors: PackedRows, num_bytes: int, rows: Rows, entries: Mapping[Any, Any]) -> None:
        before = piece.copies
        parts = piece.cut(tensors, num_bytes, rows, entries)
        for part, own_tensors, own_bytes, own_rows in parts:
            self._put(part, own_tensors, own_bytes, own_rows)
        if parts[0][0] is not piece:
            piece.note_put(tensors)
        self.forget(before, piece)

    def _put(self, part: Piece, tensors: PackedRows, num_bytes: int, rows: Rows) -> None:
        before, layout = part.copies, part.layout
        buffer = self._claim(part)
        self._end_transfer(buffer)
        buffer.holds = Holds.NOTHING
        if layout is None or layout.copy is None or layout.tensors != tensors:
            layout = self.layout_of(part, tensors, num_bytes)
        assert layout.copy is not None
        span = buffer.room.part(0, layout.copy.num_bytes)
        for row, values in zip(tensors, rows, strict=True):
            for tensor in row:
                copy_state(tensor.on_host(span), values[tensor.name])
        buffer.copy, buffer.holds, part.layout = layout.copy, Holds.DIRTY, layout
        self.forget(before, part)
        self._write(buffer)

    def read(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Rows]]:
        """Yield pieces with their states, as new tensors in host memory, with the next ones on their way."""
        self.end_writes()
        parts = [part for piece in pieces for part in piece.stored]
        num_read = 0
        try:
            for piece in pieces:
                with torch.inference_mode(False), torch.no_grad():
                    rows = piece.empty_rows()
                    for part in piece.stored:
                        self.read_ahead(parts[num_read:])
                        span = self._brought(part)
                        assert part.layout is not None
                        values = [{tensor.name: tensor.on_host(span) for tensor in row} for row in part.layout.tensors]
                        piece.fill(rows, part, values)
                        del values
                        self.release(part)
                        num_read += 1
                yield piece, rows
        finally:
            for part in parts[num_read:]:
                self.release(part)

    def _brought(self, part: Piece) -> Span:
        """Return the bytes of a part, in memory of their own if no buffer can be had, since others can't be written."""
        try:
            self.bring(part)
        except DiskError:
            if self._find(part) is not None:  # it can't be read itself
                raise
        else:
            return self.span_of(part)
        copy = part.chunk
        aside = torch.empty(copy.num_bytes, dtype=torch.uint8)
        span = Span(offset=0, num_bytes=copy.num_bytes, pieces=(aside,), free_events=(), ranges=(), whole=aside, staging=None)
        self.store.read(copy, span)
        self.store.wait(copy)
        return span

    def close(self) -> None:
        self.buffers.clear()
        if self.opened is not None:
            self.opened.close()
