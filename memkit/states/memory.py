"""Memory for the states of pieces: pinned on the host, and slots on the device that pieces use in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from memkit.core.sizes import HOST_PAGE_BYTES, format_bytes, rounded
from memkit.core.tensors import byte_view, parts_of
from memkit.core.torch_state import num_users
from memkit.device.base import Device, Event
from memkit.errors import HostMemoryError, warn_user
from memkit.plan import StatePlan
from memkit.plan.chunks import WRITTEN, Residency
from memkit.plan.states import Update, in_slots, side_by_side
from memkit.states.packing import PackedRows
from memkit.states.pieces import Layout, Piece
from memkit.transfer.arena import Arena
from memkit.transfer.device_memory import device_memory_of
from memkit.transfer.host_memory import Span
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
        self.freed: Event | None = device.record_event(timed=False)
        """Behind the last work on the computing stream that uses the slot; None where `left` comes behind that."""
        self.arrived: Event | None = None
        """Behind the last copy to the slot; None where `left` comes behind that."""
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
