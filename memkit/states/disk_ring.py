"""The buffers in host memory that states on a disk pass through: which part has which, and what its bytes are worth."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from memkit.device.base import Device
from memkit.errors import DiskError
from memkit.sizes import HOST_PAGE_BYTES, rounded
from memkit.states.pieces import Layout, Piece
from memkit.transfer.disk import DiskCopy, DiskStore
from memkit.transfer.host_memory import Span

if TYPE_CHECKING:
    from memkit.states.host_memory import HostStates


class Holds(enum.Enum):
    """What the bytes in a buffer are.

    NOTHING: they don't count. READ: they are on the disk as well, or on their way from there. DIRTY: they are nowhere else, but
    for a slot. WRITTEN: they are on their way to the disk, or there.
    """

    NOTHING = enum.auto()
    READ = enum.auto()
    DIRTY = enum.auto()
    WRITTEN = enum.auto()


class Buffer:
    """Host memory for one part at a time: from before it is read until it is written."""

    def __init__(self, room: Span) -> None:
        self.room = room
        self.part: Piece | None = None
        """Whose bytes come to it. None if it is free."""
        self.holds = Holds.NOTHING
        self.copy: DiskCopy | None = None
        """What its bytes are on the disk, or become there."""
        self.number = 0
        """Which write they came in: the first ones are over first."""

    @property
    def span(self) -> Span:
        """The bytes that go to the disk, and come from there."""
        assert self.copy is not None
        return self.room.part(0, self.copy.num_bytes)


class DiskRing:
    """A few buffers, each for one part at a time.

    [Note: a part's turn] A part has a buffer from before it is read until its bytes are known to be on the disk again. In
    between it goes to its slot, is stepped, and comes back to the same buffer: so nothing that was stepped lacks a place to go
    to. Buffers are given out in the order of the step, so the part whose turn it is has one, or waits for a write of one that
    came before.

    A write goes on in the background. If it fails, the bytes stay in the buffer, and are written again at the next step, or
    when somebody needs the buffer. Where that fails as well, the step is broken off, and nothing is lost.

    A part on its way to its slot keeps its buffer. There are no more slots than buffers, and that of the part whose turn it is
    has none of the others any more: so one buffer is left for it.

    Args:
        store: what is on the disk.
        device: whose copies use the buffers.
        host: gives the memory for these.
    """

    def __init__(self, store: DiskStore, device: Device, host: HostStates) -> None:
        self.store = store
        self.buffers: list[Buffer] = []
        self._device, self._host = device, host
        self._writes = itertools.count()

    def add(self, num_buffers: int, num_bytes: int) -> None:
        """Have so many buffers more, each of so many bytes, rounded up to what is taken for them anyway.

        Raises:
            HostMemoryError: there is not as much.
        """
        rooms = self._host.take([rounded(num_bytes, HOST_PAGE_BYTES)] * num_buffers)
        self.buffers += map(Buffer, rooms)

    def find(self, part: Piece) -> Buffer | None:
        """Return the buffer that a part has."""
        return next((buffer for buffer in self.buffers if buffer.part is part), None)

    def give_free(self, part: Piece) -> Buffer | None:
        """Have a part have a free buffer. Return it; None if there is none."""
        buffer = next((buffer for buffer in self.buffers if buffer.part is None), None)
        if buffer is not None:
            buffer.holds, buffer.copy = Holds.NOTHING, None
            buffer.part = part
        return buffer

    def claim(self, part: Piece) -> Buffer:
        """Return the buffer of a part: see [Note: a part's turn]."""
        while (buffer := self.find(part) or self.give_free(part)) is None:
            self._free_one()
        return buffer

    def _free_one(self) -> None:
        """Wait for a write, or make it again; or else give up what was read ahead."""
        resting = [buffer for buffer in self.buffers if buffer.part is not None and buffer.part.residency is buffer.part.rest]
        written = [buffer for buffer in resting if buffer.holds is Holds.WRITTEN]
        for buffer in sorted(written, key=lambda buffer: buffer.number):
            self.end_write(buffer, None)
            if buffer.part is None:
                return
        clean = [buffer for buffer in resting if buffer.holds in (Holds.NOTHING, Holds.READ)]
        if clean:
            assert clean[-1].part is not None
            self.release(clean[-1].part)
            return
        dirty = next(buffer for buffer in resting if buffer.holds is Holds.DIRTY)
        self.write(dirty)
        assert dirty.copy is not None
        try:
            self.store.wait(dirty.copy)
        except DiskError:
            dirty.holds = Holds.DIRTY
            raise
        dirty.part = None

    def note_written(self) -> None:
        """Have buffers be free whose bytes are on the disk."""
        for buffer in self.buffers:
            if buffer.part is not None and buffer.holds is Holds.WRITTEN:
                assert buffer.copy is not None
                transfer = buffer.copy.transfer
                if transfer is None or transfer.is_over:
                    self.end_write(buffer, None)

    def end_write(self, buffer: Buffer, holds: Holds | None) -> None:
        """Wait for a write. Then the buffer is free, or its bytes are as if they were read."""
        assert buffer.copy is not None
        try:
            self.store.wait(buffer.copy)
        except DiskError:  # it is written again: what fails then is raised
            buffer.holds = Holds.DIRTY
            return
        if holds is None:
            buffer.part = None
        else:
            buffer.holds = holds

    def read(self, buffer: Buffer, layout: Layout) -> None:
        """Have the bytes of its part be read to a buffer. Who waits for them is told of errors.

        Raises:
            HostMemoryError: there is no room for a larger buffer.
        """
        assert layout.copy is not None
        buffer.copy = layout.copy
        if buffer.room.num_bytes < layout.copy.num_bytes:
            self.grow(buffer, layout.copy.num_bytes)
        self.store.read(layout.copy, buffer.span)
        buffer.holds = Holds.READ

    def write(self, buffer: Buffer) -> None:
        """Have the bytes in a buffer be written, once they are there. Who waits for that is told of errors.

        Raises:
            DiskError: the scratch file has no room.
        """
        assert buffer.part is not None
        assert buffer.copy is not None
        left = buffer.part.left
        self.store.write(buffer.copy, buffer.span, after=() if left is None else (left,))
        buffer.number, buffer.holds = next(self._writes), Holds.WRITTEN

    def grow(self, buffer: Buffer, num_bytes: int) -> None:
        """Give a buffer more room. It waits for the device, whose copies may use it.

        Raises:
            HostMemoryError: there is no more.
        """
        if buffer.copy is not None:
            with contextlib.suppress(DiskError):
                self.store.wait(buffer.copy)
        self._device.synchronize()
        (larger,) = self._host.take([rounded(num_bytes, HOST_PAGE_BYTES)])
        assert larger.whole is not None
        assert buffer.room.whole is not None
        larger.whole[: buffer.room.num_bytes].copy_(buffer.room.whole)
        smaller, buffer.room = buffer.room, larger
        self._host.give(smaller)

    def forget(self, copies: Sequence[DiskCopy]) -> None:
        """Let go of what was on the disk."""
        for copy in copies:
            if not self.store.has(copy):
                continue
            self.store.remove(copy)  # which waits for what is under way
            for buffer in self.buffers:
                if buffer.copy is copy:
                    buffer.holds, buffer.copy = Holds.NOTHING, None

    def release(self, part: Piece) -> None:
        """Have the buffer of a part be free, unless it has bytes that are not on the disk."""
        buffer = self.find(part)
        if buffer is None or buffer.holds in (Holds.DIRTY, Holds.WRITTEN):
            return
        for copy in {buffer.copy, *part.copies}:  # an interrupt may have kept us from noting that one is read
            if copy is not None:
                with contextlib.suppress(DiskError):
                    self.store.wait(copy)
        buffer.part = None

    def end_transfer(self, buffer: Buffer) -> None:
        """Wait until nothing is read to a buffer any more, nor written from it. Its bytes count for nothing then."""
        if buffer.copy is not None:
            with contextlib.suppress(DiskError):
                self.store.wait(buffer.copy)
        buffer.holds = Holds.NOTHING

    def give_up_reads(self) -> None:
        """Have buffers be free that were read ahead, and whose parts nobody came to. None of these is on its way any more."""
        for buffer in self.buffers:
            if buffer.part is not None:
                self.release(buffer.part)

    def keep_only(self, copies: Collection[DiskCopy]) -> None:
        """Let go of all else that was on the disk. No part is under way."""
        self.store.keep_only(copies)  # which waits for what is under way
        for buffer in self.buffers:
            if buffer.copy is not None and buffer.copy not in copies:
                buffer.holds, buffer.part = Holds.NOTHING, None

    def write_again(self) -> None:
        """Write what could not be written."""
        for buffer in self.buffers:
            if buffer.part is not None and buffer.holds is Holds.DIRTY:
                self.write(buffer)

    def end_writes(self) -> None:
        """Wait for all writes. The bytes of one that fails stay in their buffer."""
        for buffer in self.buffers:
            if buffer.part is not None and buffer.holds is Holds.WRITTEN:
                self.end_write(buffer, None)
