"""Memory for the states of pieces: pinned on the host, slots on the device that pieces use in turn, and buffers for a disk."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from memkit.core.sizes import HOST_PAGE_BYTES, format_bytes, rounded
from memkit.core.tensors import byte_view, parts_of
from memkit.core.torch_state import label, num_users
from memkit.device.base import Device, Event
from memkit.errors import DiskError, HostMemoryError, warn_user
from memkit.plan import StatePiece, StatePlan, disk_bytes
from memkit.plan.chunks import WRITTEN, Residency
from memkit.plan.states import NUM_BUFFERS, Update, in_slots, side_by_side
from memkit.states.packing import PackedRows, copy_state
from memkit.states.pieces import Layout, Piece, Rows, stand_ins_for
from memkit.transfer.device_memory import device_memory_of
from memkit.transfer.disk import Disk, DiskCopy, DiskStore
from memkit.transfer.host_memory import Arena, Span
from memkit.transfer.lanes import Lanes


class HostStates:
    def __init__(self, device: Device, *, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self.arena = Arena(device, limit_bytes=limit_bytes, must_pin=False)
        self._has_warned = False

    def reserve(self, pieces: Sequence[Piece]) -> None:
        for piece, span in zip(pieces, self.take_side_by_side([piece.plan.state_bytes for piece in pieces]), strict=True):
            piece.room = span

    def take_side_by_side(self, sizes_bytes: Sequence[int]) -> list[Span]:
        blocks = side_by_side(sizes_bytes)
        spans = []
        for block, whole in zip(blocks, self.take(list(map(sum, blocks))), strict=True):
            ends = list(itertools.accumulate(block, initial=0))
            spans += [whole.part(*ends_of) for ends_of in itertools.pairwise(ends)]
        return spans

    def take(self, sizes_bytes: Sequence[int]) -> list[Span]:
        if not sizes_bytes:
            return []
        needed_bytes = self.arena.held_bytes + sum(rounded(num_bytes, HOST_PAGE_BYTES) for num_bytes in sizes_bytes)
        if self._limit_bytes is not None and needed_bytes > self._limit_bytes:
            raise HostMemoryError(
                f"StateOffload needs a host_budget of at least {format_bytes(needed_bytes)}, in whole pages of "
                f"{format_bytes(HOST_PAGE_BYTES)}; found {format_bytes(self._limit_bytes)}. Raise it, or have more states stay "
                "on the device (device_budget)"
            )
        with torch.inference_mode(False):
            spans = self.arena.take_pinned_as_one(sizes_bytes)
        if self.arena.refusal is not None and not self._has_warned:
            self._has_warned = True
            warn_user(f"StateOffload: {self.arena.refusal}")
        return spans

    def layout_of(self, piece: Piece, tensors: PackedRows, num_bytes: int, *, is_apart: bool = False) -> Layout:
        """Return where states of a piece are from now on; with `is_apart`, not where they have been, which is still needed."""
        if is_apart:
            (span,) = self.take([num_bytes])
        else:
            if piece.room is None or piece.room.num_bytes < num_bytes:
                (piece.room,) = self.take([num_bytes])
            span = piece.room.part(0, num_bytes)
        return Layout(span, tensors, tuple({tensor.name: tensor.on_host(span) for tensor in row} for row in tensors))

    def give(self, span: Span) -> None:
        self.arena.give(span)
        self.arena.trim_gaps()

    def close(self, pieces: Sequence[Piece]) -> None:
        """Give all memory back. States that somebody still holds (a `state_dict`) keep their bytes."""
        layouts = [piece.layout for piece in pieces if piece.layout is not None and not piece.plan.is_on_disk]
        tensors = [tensor for layout in layouts for host in layout.host for tensor in host.values()]
        storages = [part.untyped_storage() for tensor in tensors for part in parts_of(tensor)]
        tensors.clear()
        for piece in pieces:
            piece.room = piece.layout = None
            piece.let_go()
        layouts.clear()
        held = [(storage, byte_view(storage).clone()) for storage in storages if num_users(storage) > 1]
        self.arena.give_all()
        self.arena.close()
        for storage, copied in held:  # the arena has given the memory back; the addresses still belong to the tensors there
            byte_view(storage).copy_(copied)


class StateSlot:
    """Device memory for one piece at a time: `piece` is set from before its copy comes until its copy back is on the lane."""

    def __init__(self, device: Device, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.num_bytes = storage.nbytes()
        self.piece: Piece | None = None
        self.freed: Event | None = device.record_event(timed=False)  # behind the last work on it; None if `left` is
        self.arrived: Event | None = None  # behind the last copy to the slot; None where `left` comes behind that
        self.left: Event | None = None

    def users(self) -> list[Event]:
        """Return the events ahead of a copy to the slot, also behind the last copy there: if unpinned it is issued late."""
        return [event for event in (self.freed, self.left, self.arrived) if event is not None]


class StateSlots:
    holder = "StateOffload's slots"

    def __init__(self, device: Device, lanes: Lanes, plan: StatePlan) -> None:
        self._device, self._lanes, self._plan = device, lanes, plan
        self._memory = device_memory_of(device)
        self.slots = [self._new(num_bytes) for num_bytes in plan.slot_bytes]
        self._memory.join(self)
        self.h2d_bytes = self.d2h_bytes = 0
        self.host_step_s = 0.0
        self._num_writes = 0

    def add(self, plan: StatePlan) -> StatePlan:
        """Assign pieces of another plan to these slots, or to new ones if their side has none. Return the plan with them."""
        known = self._plan.pieces
        sides = {
            update: [part.slot for piece in known if piece.update is update for part in piece.parts if part.slot >= 0]
            for update in Update
        }
        own: dict[int, int] = {}
        pieces = []
        for piece in plan.pieces:
            slots = sides[piece.update]
            wanted = [part.slot for part in piece.parts if part.slot >= 0]
            found = [slots[slot % len(slots)] if slots else self._own_slot(slot, own, plan) for slot in wanted]
            pieces.append(in_slots(piece, found))
        added = replace(plan, pieces=tuple(pieces))
        self._plan = replace(self._plan, pieces=(*self._plan.pieces, *pieces), slot_bytes=self.sizes)
        return added

    def _own_slot(self, slot: int, own: dict[int, int], plan: StatePlan) -> int:
        if slot not in own:
            own[slot] = len(self.slots)
            self.slots.append(self._new(plan.slot_bytes[slot]))
        return own[slot]

    def _new(self, num_bytes: int) -> StateSlot:
        return StateSlot(self._device, self._memory.allocate(self, max(1, num_bytes)))

    @property
    def num_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self.slots)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(slot.num_bytes for slot in self.slots)

    def of(self, piece: Piece) -> StateSlot:
        return self.slots[piece.slot]

    def deal(self, pieces: Iterable[Piece]) -> None:
        """Assign pieces, in no slot now, round robin to slots of their size, so that none waits for the one before."""
        moving = [piece for piece in pieces if piece.plan.slot >= 0]
        numbers: dict[int, list[int]] = {}
        for number in sorted({piece.plan.slot for piece in moving}):
            numbers.setdefault(self._plan.slot_bytes[number], []).append(number)
        turns = {num_bytes: itertools.cycle(those) for num_bytes, those in numbers.items()}
        for piece in moving:
            piece.slot = next(turns[self._plan.slot_bytes[piece.plan.slot]])

    def is_free_for(self, piece: Piece) -> bool:
        return self.slots[piece.slot].piece is None

    def claim(self, piece: Piece) -> StateSlot:
        slot = self.slots[piece.slot]
        slot.piece = piece
        self.await_copies(slot)
        return slot

    def fetch(self, piece: Piece, span: Span) -> None:
        slot = self.slots[piece.slot]
        if slot.num_bytes < span.num_bytes:
            self.grow(slot, span.num_bytes)
        slot.piece = piece
        assert piece.residency not in WRITTEN, piece.names
        piece.residency = Residency.IN_FLIGHT
        after = slot.users()
        if piece.left is not None:
            after.append(piece.left)
        slot.arrived = self._copy(piece, slot, span, is_out=False, after=after)
        self.h2d_bytes += span.num_bytes

    def await_arrived(self, piece: Piece) -> StateSlot:
        slot = self.slots[piece.slot]
        assert slot.arrived is not None
        self._device.wait_event(self._device.current_stream(), slot.arrived)
        self._device.note_read(slot.storage)
        piece.bind(slot.storage)
        return slot

    def write_back(self, piece: Piece, span: Span) -> None:
        slot = self.slots[piece.slot]
        self.note_written(slot.storage)
        slot.freed = freed = self._device.record_event(timed=False)
        slot.left = piece.left = self._copy(piece, slot, span, is_out=True, after=(freed, *span.free_events))
        slot.freed = slot.arrived = None  # the copy waits for both
        piece.residency = piece.rest
        slot.piece = None
        self.d2h_bytes += span.num_bytes

    def _copy(self, piece: Piece, slot: StateSlot, span: Span, *, is_out: bool, after: Sequence[Event]) -> Event:
        lanes, storage = self._lanes, slot.storage
        if span.staging is None:
            return lanes.copy_parts(span, piece.bytes_in(storage, span), after=after, is_out=is_out)
        return lanes.copy(lanes.out if is_out else lanes.back, storage, span, is_out=is_out, after=after).done

    def note_written(self, storage: torch.UntypedStorage) -> None:
        self._num_writes += 1
        self._device.note_written(storage, -self._num_writes)

    def release(self, piece: Piece) -> None:
        slot = self.slots[piece.slot]
        if slot.piece is piece:
            slot.freed = self._device.record_event(timed=False)
            slot.piece = None

    def grow(self, slot: StateSlot, num_bytes: int) -> None:
        """Give a slot more room, with no copy from or to it under way. It waits for the device, which may use the slot."""
        self._device.synchronize()
        slot.storage, slot.num_bytes = self._memory.allocate(self, num_bytes), num_bytes
        slot.freed = self._device.record_event(timed=False)

    def await_copies(self, slot: StateSlot) -> None:
        """Let the current stream wait for the last copies from and to a slot, and so be free to write there or let it go."""
        for copied in (slot.arrived, slot.left):
            if copied is not None:
                self._device.wait_event(self._device.current_stream(), copied)

    def await_copied(self, piece: Piece) -> None:
        """Have the host wait for the copy of a piece to its slot, and so be free to write to the copy's source."""
        arrived = self.slots[piece.slot].arrived
        if arrived is not None:
            self._device.synchronize(arrived)

    def wait(self) -> None:
        for slot in self.slots:
            for copied in (slot.left, slot.arrived):
                if copied is not None:
                    self._device.synchronize(copied)

    def close(self) -> None:
        self.slots.clear()


class Holds(enum.Enum):
    NOTHING = enum.auto()
    READ = enum.auto()  # bytes that are also on the disk, or coming from there
    DIRTY = enum.auto()  # nowhere else but perhaps in a slot
    WRITTEN = enum.auto()  # on their way to the disk, or there


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

    [Note: a part's turn] A part has a buffer from before it is read until its bytes are known to be on the disk again. Buffers
    are given out in the order of the step, and there are no more slots than buffers, so the part whose turn it is has one, or
    waits for the write of an earlier part. If a write fails, the bytes stay in the buffer, and are written again at the next
    step, or when somebody needs the buffer. If that fails as well, the step is broken off, and nothing is lost.
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
