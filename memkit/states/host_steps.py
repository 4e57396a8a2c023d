"""Stepping pieces on the host: gradients go there, the optimizer's own step runs over host copies, new parameters come back."""

from __future__ import annotations

import itertools
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.device.base import Device
from memkit.errors import StateOffloadError
from memkit.interrupts import do_at_once
from memkit.labels import label
from memkit.plan import aligned
from memkit.states.host_memory import HostStates
from memkit.states.masters import follow_on_host
from memkit.states.one_step import OneStep
from memkit.states.packing import copy_state, may_leave, moved_state, pack, storage_of_part
from memkit.states.pieces import MASTER, Layout, Piece, Residency, StateRecord, stand_in_of
from memkit.states.shards import are_one, local_gradient, local_of, shard_like, write_local
from memkit.states.slots import StateSlot, StateSlots
from memkit.storages import tensor_over
from memkit.transfer.lanes import Lanes, Transfer
from memkit.transfer.spans import Span

_HOST = torch.device("cpu")

_Traits = tuple[int, torch.dtype, torch.Size, tuple[int, ...], tuple[int, ...], bool]
"""What a route depends on of a parameter that is due: which it is, how it lies, and whether a copy is stepped in its place."""


def _traits_of(record: StateRecord) -> _Traits:
    parameter, grad = local_of(record.parameter), local_gradient(record.parameter)
    assert grad is not None
    return id(record), parameter.dtype, parameter.size(), parameter.stride(), grad.stride(), record.has_master


@dataclass(slots=True)
class _Route:
    """Where parameters and gradients of a piece lie on their way, in the slot and in host memory alike."""

    storage: torch.UntypedStorage
    room: Span
    """What was set aside in host memory, of which they take the first bytes."""
    due: list[_Traits]
    """What goes this way."""
    grads: list[Tensor]
    parameters: list[Tensor]
    host_grads: list[Tensor]
    host_parameters: list[Tensor]
    stand_ins: list[nn.Parameter]
    grad_copies: list[Tensor]
    """In float32, where a float32 copy is stepped; else the gradients in host memory themselves."""
    rounded: list[Tensor]
    """Where float32 copies are rounded to, to be compared with the parameters."""
    num_bytes: int
    back_bytes: int


class HostSteps:
    """Steps pieces on the host.

    The step itself runs in a thread of its own: Ctrl-C comes before it or after, and the caller can go on giving the device
    work.

    Args:
        optimizer: whose step it is.
        device: where the parameters are.
        lanes: what copies are put on.
        slots: where parameters and gradients are packed on the device.
        host: where the states are.
        runs_ahead: whether gradients of all pieces may be in host memory at once, so that nobody waits for the steps of those
            before: each piece then has room of its own.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: Device,
        lanes: Lanes,
        slots: StateSlots,
        host: HostStates,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._lanes = lanes
        self._slots = slots
        self._host = host
        self._runs_ahead = runs_ahead
        self._rooms: dict[int, Span] = {}
        """Host memory by the slot that it belongs to, or by the id of the plan of a piece with room of its own."""
        self._routes: dict[Piece, _Route] = {}
        self._out: dict[Piece, Transfer] = {}
        self._lost = dict[Piece, str]()
        self._thread: ThreadPoolExecutor | None = None
        self._running = dict[Piece, Future[None]]()
        """Steps that the thread is to make."""
        with torch.inference_mode(False):
            self._casts = torch.empty(0, dtype=torch.uint8).untyped_storage()

    def reserve(self, pieces: list[Piece]) -> None:
        """Take the host memory that parameters and gradients of pieces come to: what is there for their slots already stays.

        Raises:
            HostMemoryError: there is not as much.
        """
        if self._runs_ahead:
            parts = [part for piece in pieces for part in piece.plan.parts]
            own = self._host.take_side_by_side([2 * aligned(part.parameter_bytes) for part in parts])
            self._rooms.update(zip(map(id, parts), own, strict=True))
            return
        numbers = sorted({part.slot for piece in pieces for part in piece.plan.parts} - self._rooms.keys())
        spans = self._host.take([self._slots.slots[number].num_bytes for number in numbers])
        self._rooms.update(zip(numbers, spans, strict=True))

    def is_free_for(self, piece: Piece) -> bool:
        """Tell whether parameters and gradients of a piece may be brought to the host now."""
        return self._slots.is_free_for(piece)

    def begin(self, piece: Piece) -> None:
        """Have the gradients of a piece, and the parameters, come to host memory."""
        slot = self._slots.claim(piece)
        route = self._route(piece, slot)
        with torch.no_grad():
            for record, grad, parameter in zip(piece.due, route.grads, route.parameters, strict=True):
                own = local_gradient(record.parameter)
                assert own is not None
                grad.copy_(own)
                parameter.copy_(local_of(record.parameter))
        self._slots.note_written(slot)
        slot.freed = self._device.record_event(timed=False)
        span = route.room.part(0, route.num_bytes)
        slot.left = self._out[piece] = self._lanes.copy_out(slot.storage, span, after=slot.freed)
        self._slots.d2h_bytes += route.num_bytes
        if self._runs_ahead:
            slot.piece = None  # others come there behind the copy

    def start(self, piece: Piece, run: OneStep) -> None:
        """Have the thread step what is due of a piece, once its gradients have come."""
        lost = self._lost.get(piece)
        if lost is not None:
            raise StateOffloadError(lost)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="memkit-step")
        out = self._out[piece]
        self._running[piece] = self._thread.submit(partial(self._step, piece, run, out, torch.is_grad_enabled()))

    def join(self, piece: Piece) -> None:
        """Wait for the step of a piece, and have the parameters come back."""
        with label(f"step on the host ({piece.names})"):
            running = self._running[piece]
            self._await([running])
            running.result()
            del self._running[piece]
        self.finish(piece)

    def settle(self) -> None:
        """Wait until nothing runs in the thread any more."""
        self._await(list(self._running.values()))

    def is_over(self, piece: Piece) -> bool:
        """Tell whether the thread has made the step of a piece, or failed."""
        return self._running[piece].done()

    def failure_of(self, piece: Piece) -> BaseException | None:
        """Return why the step of a piece has failed; None if it hasn't, or was not begun."""
        running = self._running.get(piece)
        return running.exception() if running is not None and running.done() else None

    @staticmethod
    def _await(steps: list[Future[None]]) -> None:
        """Wait until the thread is through with some steps, also where an interrupt comes meanwhile."""
        interrupt: BaseException | None = None
        while not all(running.done() for running in steps):
            try:
                wait(steps)
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _step(self, piece: Piece, run: OneStep, out: Transfer, has_grad: bool) -> None:
        """Run the optimizer's step over host copies, in the thread. From its end on the piece is stepped."""
        piece.await_turn()
        self._device.synchronize(out.done)
        route = self._routes[piece]
        layout = piece.layout
        numbers: list[tuple[Tensor, Tensor]] = []
        state: dict[Any, Any] = defaultdict(dict)
        keys: list[nn.Parameter] = []
        known = piece.states_in(self._optimizer)
        with torch.no_grad():
            for number, record in enumerate(piece.due):
                entries = dict(known.get(record.parameter) or {})
                key = route.stand_ins[number]
                grad = route.host_grads[number]
                if record.has_master:
                    copied = route.host_parameters[number]
                    master = entries.pop(MASTER, None)
                    if master is not None:
                        key.data = local_of(master)
                        if not may_leave(master):
                            numbers.append((master, master.clone()))
                        follow_on_host(key.data, copied, route.rounded[number])
                    else:
                        key.data = copied.to(torch.float32)
                    route.grad_copies[number].copy_(grad)
                key.grad = route.grad_copies[number]
                if entries:
                    state[key] = entries
                keys.append(key)
            numbers += [
                (value, value.clone())
                for entries in state.values()
                for value in entries.values()
                if isinstance(value, Tensor) and not may_leave(value)
            ]
        try:
            with torch.set_grad_enabled(has_grad):
                found = run.step(piece.due, keys, state)
            made = [dict(state[key]) if key in state else {} for key in keys]
            with torch.no_grad():
                for number, (record, key) in enumerate(zip(piece.due, keys, strict=True)):
                    view = route.host_parameters[number]
                    if record.has_master:
                        made[number][MASTER] = shard_like(record.parameter, key.data)
                        view.copy_(key)
                    elif key.data_ptr() != view.data_ptr():  # the class has put another tensor there
                        view.copy_(key)
                        key.data = view
            laid_out = self._lay_out(piece, made)
            piece.entered = piece.new_entries(known, laid_out, zip(piece.due, made, strict=True))
            marks = piece.marks(self._optimizer, laid_out)
        except BaseException as error:
            if layout is not None:
                self._lost[piece] = (
                    f"the step of {piece.names} on the host has failed within the optimizer ({type(error).__name__}: {error}), "
                    "and may have written a part of its states: they are lost. Load a checkpoint "
                    "(optimizer.load_state_dict) and go on"
                )
            with torch.no_grad():
                for value, before in numbers:
                    value.copy_(before)
            raise
        finally:
            for key in keys:
                key.grad = None
        do_at_once(*marks, partial(setattr, piece, "residency", Residency.DIRTY), *run.leave(found))

    def _lay_out(self, piece: Piece, made: list[dict[Any, Any]]) -> Layout | None:
        """Have all states of a piece lie in its host memory. Return how; None if there are none."""
        index_of = {id(record): index for index, record in enumerate(piece.records)}
        layout = piece.layout
        rows: list[dict[str, Tensor]] = (
            [dict(host) for host in layout.host] if layout is not None else [{} for _ in piece.records]
        )
        is_as_before = layout is not None and piece.may_lie_as_before()
        for record, entries in zip(piece.due, made, strict=True):
            index = index_of[id(record)]
            leaving = {name: value for name, value in entries.items() if may_leave(value)}
            is_as_before = is_as_before and leaving.keys() == rows[index].keys()
            is_as_before = is_as_before and all(
                value is rows[index][name] or (name == MASTER and are_one(value, rows[index][name]))
                for name, value in leaving.items()
            )
            rows[index] = leaving
        if is_as_before:
            return layout
        tensors, num_bytes = pack(rows)
        with torch.inference_mode(False), torch.no_grad():
            values = [{name: moved_state(value, _HOST) for name, value in row.items()} for row in rows]
            laid_out = piece.lay_out(self._host, tensors, num_bytes)
            for row, found in zip(laid_out.host if laid_out is not None else (), values, strict=laid_out is not None):
                for name, tensor in row.items():
                    copy_state(tensor, found[name])
        return laid_out

    def finish(self, piece: Piece) -> None:
        """Have parameters be what was stepped. Calling it again does what was broken off."""
        piece.enter(self._optimizer)
        route, slot = self._routes[piece], self._slots.of(piece)
        slot.piece = piece
        span = route.room.part(0, route.back_bytes)
        after = [slot.freed, *([slot.left.done] if slot.left is not None else [])]
        slot.arrived = self._lanes.copy_back(span, route.storage, after=after)
        self._slots.h2d_bytes += route.back_bytes
        self._device.wait_event(self._device.current_stream(), slot.arrived.done)
        self._device.note_read(route.storage)
        with torch.no_grad():
            for record, parameter in zip(piece.due, route.parameters, strict=True):
                write_local(record.parameter, parameter)
                if self._device.takes_notes:
                    own = local_of(record.parameter)
                    self._device.note_written(own.untyped_storage(), torch_private.version_of(own))
        self._slots.release(piece)
        self._out.pop(piece, None)
        piece.residency = Residency.HOST

    def drop(self, piece: Piece) -> None:
        """A step was broken off before the piece was stepped."""
        self._running.pop(piece, None)
        self._slots.release(piece)
        self._out.pop(piece, None)
        piece.residency = Residency.HOST

    def forget_losses(self) -> None:
        """All states were loaded."""
        self._lost.clear()

    def _route(self, piece: Piece, slot: StateSlot) -> _Route:
        """Return where what is due of a piece lies on its way."""
        known = self._routes.get(piece)
        due = [_traits_of(record) for record in piece.due]
        place = id(piece.plan) if self._runs_ahead else piece.plan.slot
        room = self._rooms.get(place)
        if known is not None and known.storage is slot.storage and known.room is room and known.due == due:
            return known
        offset, places = 0, []
        for kind in ("parameter", "grad"):
            for record in piece.due:
                tensor = local_of(record.parameter)
                places.append((kind, record, offset))
                offset += aligned(tensor.nbytes)
            if kind == "parameter":
                back_bytes = offset
        if slot.num_bytes < offset:
            self._slots.grow(slot, offset)
        if room is None or room.num_bytes < offset:
            (room,) = self._host.take([offset])
            self._rooms[place] = room
        assert room.whole is not None
        found: dict[str, list[Tensor]] = {"parameter": [], "grad": [], "host parameter": [], "host grad": []}
        with torch.inference_mode(False):
            own = storage_of_part(room.whole)
            for kind, record, start in places:
                tensor, grad = local_of(record.parameter), local_gradient(record.parameter)
                lies = grad if kind == "grad" and grad is not None else tensor
                dense = may_leave(lies)
                stride = lies.stride() if dense else torch.empty(tensor.size(), device="meta").stride()
                for where, storage in (("", slot.storage), ("host ", own)):
                    found[where + kind].append(
                        tensor_over(
                            storage, tensor.dtype, offset=start // tensor.dtype.itemsize, size=tensor.size(), stride=stride
                        )
                    )
            stand_ins = [
                stand_in_of(record, torch.empty(0) if record.has_master else view)
                for record, view in zip(piece.due, found["host parameter"], strict=True)
            ]
            grad_copies, rounded = self._scratch(piece.due, found["host grad"])
        known = self._routes[piece] = _Route(
            storage=slot.storage,
            room=room,
            due=due,
            grads=found["grad"],
            parameters=found["parameter"],
            host_grads=found["host grad"],
            host_parameters=found["host parameter"],
            stand_ins=stand_ins,
            grad_copies=grad_copies,
            rounded=rounded,
            num_bytes=max(1, offset),
            back_bytes=max(1, back_bytes),
        )
        return known

    def _scratch(self, due: list[StateRecord], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return where gradients are cast to, and float32 copies are rounded to, where such are stepped: memory that all pieces
        share, since one is stepped at a time."""
        copied = [record.has_master for record in due]
        sizes = [aligned(4 * grad.numel()) if is_copied else 0 for grad, is_copied in zip(grads, copied, strict=True)]
        starts = [0, *itertools.accumulate(sizes)]
        rounded_bytes = max((grad.nbytes for grad, is_copied in zip(grads, copied, strict=True) if is_copied), default=0)
        if starts[-1] + rounded_bytes > self._casts.nbytes():
            self._casts = torch.empty(starts[-1] + rounded_bytes, dtype=torch.uint8).untyped_storage()

        def over(grad: Tensor, dtype: torch.dtype, start: int) -> Tensor:
            return tensor_over(self._casts, dtype, offset=start // dtype.itemsize, size=grad.size(), stride=grad.stride())

        rows = list(zip(grads, copied, starts, strict=False))
        cast = [over(grad, torch.float32, start) if is_copied else grad for grad, is_copied, start in rows]
        return cast, [over(grad, grad.dtype, starts[-1]) if is_copied else grad for grad, is_copied, _ in rows]

    def close(self) -> None:
        """End the thread, and let the memory go."""
        self._casts = torch.empty(0, dtype=torch.uint8).untyped_storage()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._routes.clear()
        self._rooms.clear()
        self._out.clear()
