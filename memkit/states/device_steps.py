"""Stepping pieces on the device: the optimizer's own step over a slot, whole or not at all."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from operator import is_not, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memkit.core import torch_private
from memkit.core.interrupts import do_at_once
from memkit.core.tensors import parts_of, tensor_over
from memkit.core.torch_state import label, local_of
from memkit.device.base import Device
from memkit.plan.chunks import WRITTEN, Residency
from memkit.plan.states import Update, aligned
from memkit.states.memory import StateSlots
from memkit.states.one_step import OneStep
from memkit.states.packing import (
    MASTER,
    PackedTensor,
    are_one,
    copy_each,
    copy_state,
    follow,
    may_leave,
    moved_state,
    pack,
    write_local,
)
from memkit.states.pieces import Layout, Piece, StateRecord, follow_attributes, stand_in_of
from memkit.transfer.device_memory import device_memory_of

if TYPE_CHECKING:
    from memkit.states.memory import DiskStates, HostStates

Stepped = tuple[StateRecord, Tensor, dict[Any, Any]]

_FIRST = itemgetter(0)


class Undo:
    """Room on the device for the parameters of one piece as they were before its step."""

    holder = "what StateOffload could undo"

    def __init__(self, device: Device, num_bytes: int) -> None:
        memory = device_memory_of(device)
        self._storage = memory.allocate(self, max(1, num_bytes))
        self._address = self._storage.data_ptr()
        memory.join(self)

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes()

    def close(self) -> None:
        self._storage = torch.UntypedStorage(0)

    def keep(self, piece: Piece) -> None:
        offset = 0
        kept, parameters = [], []
        for record in piece.due:
            parameter = local_of(record.parameter) if record.is_shard else record.parameter
            if record.undo is None or not self._is_room(record.undo, parameter, offset):
                with torch.inference_mode(False):
                    record.undo = self._over(parameter, offset)
            offset += aligned(parameter.nbytes)
            kept.append(record.undo)
            parameters.append(parameter)
        copy_each(kept, parameters)

    def _is_room(self, undo: Tensor, parameter: Tensor, offset: int) -> bool:
        """Tell whether the last place of a parameter's copy will do: its own place now, or outside of this room."""
        if undo.dtype != parameter.dtype or undo.size() != parameter.size():
            return False
        is_outside = undo.untyped_storage().data_ptr() != self._address
        return is_outside or undo.data_ptr() == self._address + offset

    def _over(self, parameter: Tensor, offset: int) -> Tensor:
        if not may_leave(parameter) or offset + parameter.nbytes > self._storage.nbytes():
            return parameter.detach().clone()
        start = offset // parameter.dtype.itemsize
        return tensor_over(self._storage, parameter.dtype, offset=start, size=parameter.size(), stride=parameter.stride())


class DeviceSteps:
    def __init__(
        self, optimizer: Optimizer, device: Device, slots: StateSlots, host: HostStates, disk: DiskStates, *, undo_bytes: int
    ) -> None:
        self._optimizer, self.slots, self._host, self.disk = optimizer, slots, host, disk
        self._undo = Undo(device, undo_bytes)

    def begin(self, piece: Piece) -> None:
        if piece.plan.is_resident:
            return
        if piece.plan.is_on_disk:
            self.disk.bring(piece)
        layout = piece.layout
        if layout is None:
            self.slots.claim(piece)
        else:
            with label("fetch states", piece):
                self.slots.fetch(piece, layout.span or self.disk.span_of(piece))

    def follow(self, pieces: Iterable[Piece]) -> None:
        parts = [part for piece in pieces for part in piece.parts]
        self.slots.deal(part for part in parts if part.plan.update is Update.DEVICE and not part.plan.is_resident)

    def is_free_for(self, piece: Piece) -> bool:
        if piece.plan.is_resident:
            return True
        return self.slots.is_free_for(piece) and (not piece.plan.is_on_disk or self.disk.is_here(piece))

    def step(self, piece: Piece, run: OneStep) -> None:
        moves = not piece.plan.is_resident
        if moves and piece.layout is not None:
            self.slots.await_arrived(piece)
        with label("step", piece):
            with torch.no_grad():
                known = piece.states_in(self._optimizer)
                self._keep(piece, known)
                assert piece.residency not in WRITTEN, piece.names
                piece.residency = Residency.STEPPING
                keys, state = self._given(piece, known)
            written = run.step(run.prepare(piece.due, keys, state))
            stepped: list[Stepped] = []
            for record, key in zip(piece.due, keys, strict=True):
                entries = dict(state.get(key, ()))
                if record.has_master:
                    entries[MASTER] = key.data
                stepped.append((record, key, entries))
            with torch.no_grad():
                for record, key, _ in stepped:
                    if record.has_master:
                        record.parameter.copy_(key)
                        key.grad = None
                piece.put_parameters()
        before = piece.copies if piece.plan.is_on_disk else ()
        layout = self._lay_out(piece, stepped) if moves else None
        made = ((record, entries) for record, _, entries in stepped)
        piece.entered = piece.new_entries(known, layout, made)
        marks = piece.marks(self._optimizer, layout)
        do_at_once(*marks, partial(setattr, piece, "residency", Residency.DIRTY), *run.leave(written))
        self.finish(piece)
        if before:
            self.disk.forget(before, piece)

    def finish(self, piece: Piece) -> None:
        piece.enter(self._optimizer)
        for record in piece.due if piece.plan.is_resident else ():
            record.numbers = []  # all its states, as they were: they would take as much again until the next step
        if piece.plan.is_resident or piece.layout is None:
            if piece.plan.is_on_disk:  # nothing comes back to its buffer, behind which that would be free
                self.slots.await_copied(piece)
            self._release(piece)
            piece.residency = piece.rest
            return
        span = piece.layout.span
        with label("write states back", piece):
            if span is None:
                self.disk.note_coming(piece)
            self.slots.write_back(piece, span or self.disk.span_of(piece))
        if span is None:
            self.disk.write(piece)

    def close(self, pieces: Iterable[Piece]) -> None:
        for record in [record for piece in pieces for record in piece.records]:
            record.undo, record.numbers = None, []
        self._undo.close()

    def _release(self, piece: Piece) -> None:
        if not piece.plan.is_resident:
            self.slots.release(piece)
        if piece.plan.is_on_disk:
            self.disk.release(piece)

    def _keep(self, piece: Piece, state: Mapping[Any, Any]) -> None:
        self._undo.keep(piece)
        kept, values = [], []
        for record in piece.due:
            entries = state.get(record.parameter)
            staying = piece.staying(record, entries) if entries else []
            known = record.numbers
            if piece.plan.is_resident or len(known) != len(staying) or any(map(is_not, map(_FIRST, known), staying)):
                record.numbers = [(value, value.clone()) for value in staying]
            else:
                for value, before in known:
                    kept.append(before)
                    values.append(value)
        copy_each(kept, values)

    def undo(self, piece: Piece) -> None:
        with torch.no_grad():
            for record in piece.due:
                if record.undo is not None:
                    write_local(record.parameter, record.undo)
                for value, before in record.numbers:
                    value.copy_(before)
            piece.put_parameters()
        for record in piece.whole.spoiled_by(self._optimizer):
            grad = record.parameter.grad
            record.spoiled = None if grad is None else (weakref.ref(grad), torch_private.version_of(grad))
        piece.entered.clear()
        piece.let_go()  # the class may have put other tensors into the stand-ins
        self._release(piece)
        piece.residency = piece.rest

    def drop(self, piece: Piece) -> None:
        if piece.slot >= 0:
            self._release(piece)
        piece.residency = piece.rest

    def _given(self, piece: Piece, known: Mapping[Any, Any]) -> tuple[list[Tensor], dict[Any, Any]]:
        state: dict[Any, Any] = defaultdict(dict)
        is_in_slot = not piece.plan.is_resident and piece.layout is not None
        keys = []
        for record in piece.due:
            bound = dict(known.get(record.parameter) or ())
            if is_in_slot:
                bound.update(piece.views[record.index])
            key: Tensor = record.parameter
            if record.has_master:
                key = self._stand_in(record, piece.stand_ins[record.index] if is_in_slot else None, bound)
                bound.pop(MASTER, None)
            if bound:
                state[key] = bound
            keys.append(key)
        return keys, state

    @staticmethod
    def _stand_in(record: StateRecord, found: nn.Parameter | None, entries: Mapping[Any, Any]) -> nn.Parameter:
        parameter = record.parameter
        if found is None:
            known = entries.get(MASTER)
            found = stand_in_of(record, parameter.detach().to(torch.float32) if known is None else known)
        if vars(parameter):  # of most there are none
            follow_attributes(found, parameter)
        follow(*((local_of(found.data), local_of(parameter)) if record.is_shard else (found.data, parameter)))
        assert parameter.grad is not None
        found.grad = parameter.grad.to(torch.float32)
        return found

    def _lay_out(self, piece: Piece, stepped: list[Stepped]) -> Layout | None:
        layout = piece.layout
        if layout is not None and piece.may_lie_as_before() and self._is_as_laid_out(piece, layout, stepped):
            return layout
        states = piece.leaving(piece.views, ((record, entries) for record, _, entries in stepped))
        tensors, num_bytes = pack(states)
        slot = self.slots.of(piece)
        copies = states
        if layout is not None:  # they may lie where the others are to
            copies = [{name: moved_state(value, slot.storage.device) for name, value in row.items()} for row in states]
        if slot.num_bytes < num_bytes:
            self.slots.grow(slot, num_bytes)
        with torch.inference_mode(False), torch.no_grad():
            laid_out = piece.lay_out(self.disk if piece.plan.is_on_disk else self._host, tensors, num_bytes)
            for row, values in zip(tensors, copies, strict=True):
                for tensor in row:
                    copy_state(tensor.over(slot.storage), values[tensor.name])
        return laid_out

    def _is_as_laid_out(self, piece: Piece, layout: Layout, stepped: Iterable[Stepped]) -> bool:
        """Tell whether the states lie in the slot as before. Replaced states are copied there."""
        new: list[tuple[Tensor, Tensor]] = []
        replaced: list[tuple[nn.Parameter, Tensor]] = []
        slot = self.slots.of(piece)
        address = slot.storage.data_ptr()
        for record, _, entries in stepped:
            views = piece.views[record.index]
            for tensor in layout.tensors[record.index]:
                value = entries.get(tensor.name)
                view = views[tensor.name]
                if value is view:
                    is_there = (
                        view.data_ptr() == address + tensor.offset
                        if type(tensor) is PackedTensor
                        else tensor.is_at(view, address)
                    )
                    if not is_there:
                        return False  # the class has set other data
                    continue
                if not isinstance(value, Tensor) or not tensor.is_like(value):
                    return False
                if tensor.name == MASTER and (are_one(value, view) if record.is_shard else value.data_ptr() == view.data_ptr()):
                    continue
                if any(part.untyped_storage().data_ptr() == address for part in parts_of(value)):
                    return False  # they have changed places: one would be written over before it is read
                new.append((view, value))
                stand_in = piece.stand_ins[record.index]
                if tensor.name == MASTER and stand_in is not None:
                    replaced.append((stand_in, view))
            others = [value for name, value in entries.items() if name not in views] if len(views) != len(entries) else []
            if any(map(may_leave, others)):
                return False
        if new:
            with torch.no_grad():
                for view, value in new:
                    copy_state(view, value)
        for stand_in, view in replaced:
            stand_in.data = view
        return True
