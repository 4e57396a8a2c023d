"""Stepping pieces on the host: gradients go there, the optimizer's own step runs over host copies, new parameters come back."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future, wait
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.forks import OwnThreads, forked
from memkit.core.tensors import tensor_over
from memkit.core.torch_state import label, local_of
from memkit.device.base import Device
from memkit.plan.chunks import Residency
from memkit.states.host_routes import WORD_BYTES, Route, Sections, lie_as, traits_of
from memkit.states.memory import HostStates, StateSlot, StateSlots
from memkit.states.one_step import OneStep, Prepared
from memkit.states.packing import MASTER, copy_state, moved_state, pack
from memkit.states.pieces import Layout, Piece
from memkit.states.shards import local_gradient, write_local
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes, Transfer

_HOST = torch.device("cpu")


class HostSteps:
    """Steps pieces on the host, in a thread: Ctrl-C comes before a step or after it, and the caller goes on feeding the device.

    [Note: casts on the device] The host's memory bounds a step there, so the thread touches nothing but what the optimizer
    reads and writes. Where float32 copies are stepped, the device casts gradients to float32 before their copy to the host, and
    rounds the float32 copies once they are back. Fingerprints, which the device takes after each step and before the next, tell
    whether the user has written to a parameter. Only where they differ, or where there is none yet, is the parameter itself
    copied to the host, and the thread compares. Where pieces run ahead it always is, since others come to its slot.
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
        """By slot, or by the id of a piece's plan if the piece has room of its own."""
        self._routes: dict[Piece, Route] = {}
        self._out: dict[Piece, Transfer] = {}
        self._thread: OwnThreads | None = None
        self._running = dict[Piece, Future[None]]()
        """Steps that the thread is to make, in this order."""
        self._begun = dict[Piece, Event]()
        """Set once the thread has turned to a piece, and is about to step it or to wait for its gradients."""
        self._stepped: dict[int, Tensor] = {}
        """On the device, by the id of a piece's plan: the fingerprint of the parameters as last stepped."""

    def reserve(self, pieces: list[Piece]) -> None:
        """Take host memory for gradients and parameters, if their slots have none, and 8 device bytes for each fingerprint."""
        parts = [part for piece in pieces for part in piece.plan.parts]
        plans = {id(plan): plan for piece in pieces for plan in (piece.plan, *piece.plan.parts)}
        if any(record.has_master for piece in pieces for record in piece.records):
            with torch.inference_mode(False):
                words = self._device.allocate(WORD_BYTES * len(plans))
                stepped = [tensor_over(words, torch.int64, offset=n, size=(1,), stride=(1,)) for n in range(len(plans))]
            self._stepped.update(zip(plans, stepped, strict=True))
        if self._runs_ahead:
            own = self._host.take_side_by_side([part.way_bytes for part in parts])
            self._rooms.update(zip(map(id, parts), own, strict=True))
            return
        numbers = sorted({part.slot for part in parts} - self._rooms.keys())
        spans = self._host.take([self._slots.slots[number].num_bytes for number in numbers])
        self._rooms.update(zip(numbers, spans, strict=True))

    def is_free_for(self, piece: Piece) -> bool:
        return self._slots.is_free_for(piece)

    def begin(self, piece: Piece) -> None:
        slot = self._slots.claim(piece)
        route = self._route(piece, slot)
        for other in piece.alternatives:
            self._routes.pop(other, None)
        with torch.no_grad():
            for record, parameter in zip(piece.due, route.parameters, strict=True):
                parameter.copy_(local_of(record.parameter))
            route.compare(piece.layout)
            for record, grad in zip(piece.due, route.grads, strict=True):
                own = local_gradient(record.parameter)
                assert own is not None
                grad.copy_(own)
        self._slots.note_written(slot.storage)
        slot.freed = self._device.record_event(timed=False)
        route.has_parameters, route.brought_bytes = self._runs_ahead or not route.is_known, 0
        copied, lanes = route.to_host(), self._lanes
        span, after = copied.span, (slot.freed, *copied.span.free_events)
        self._out[piece] = lanes.copy(lanes.out, slot.storage, span, is_out=True, after=after, parts=copied.parts)
        slot.left = self._out[piece].done
        self._slots.d2h_bytes += copied.span.num_bytes
        if self._runs_ahead:
            slot.piece = None  # others come there behind the copy

    def start(self, piece: Piece, run: OneStep) -> None:
        if self._thread is None:
            self._thread = OwnThreads(1, "memkit-step", self._device.enter_thread)
        route, prepared = self._routes[piece], None
        with torch.inference_mode(False), torch.no_grad():
            route.take(piece.layout, piece.states_in(self._optimizer))
        if not any(record.is_shard for record in piece.due):  # else that may fail, as a step does
            prepared = run.prepare(piece.due, route.stand_ins, route.state)
        begun = self._begun[piece] = Event()
        step = partial(self._step, piece, run, prepared, self._out[piece], begun, torch.is_grad_enabled())
        self._running[piece] = self._thread.submit(step)

    def join(self, piece: Piece) -> None:
        with label("step on the host", piece):
            running = self._running[piece]
            begun = self._begun_behind(piece)
            while not running.done():
                if self._thread is not None and not self._thread.are_here:
                    raise forked("StateOffload")
                _ = wait([running]) if begun is None else begun.wait()
            running.result()
            del self._running[piece]
        self.finish(piece)

    def settle(self) -> None:
        if self._thread is not None:
            self._thread.submit(int).result()

    def is_over(self, piece: Piece) -> bool:
        return self._running[piece].done()

    def failure_of(self, piece: Piece) -> BaseException | None:
        running = self._running.get(piece)
        return running.exception() if running is not None and running.done() else None

    def _begun_behind(self, piece: Piece) -> Event | None:
        """Return the event of the thread's next step: a caller woken sooner would want the interpreter when the thread does."""
        first, second = itertools.islice(itertools.chain(self._running, (None, None)), 2)
        return self._begun[second] if first is piece and second is not None else None

    def _step(self, piece: Piece, run: OneStep, prepared: Prepared | None, out: Transfer, begun: Event, has_grad: bool) -> None:
        """Run the optimizer's step: see [Note: a steady step on the host]. From its end on the piece is stepped."""
        try:
            piece.await_turn()
            if out.done.is_reached():
                out.done.recorded()  # raises where the copy has failed
            else:
                begun.set()
                self._device.synchronize(out.done)
        finally:
            begun.set()
        begin_s = time.perf_counter()
        route, layout = self._routes[piece], piece.layout
        is_steady, is_unwritten = False, route.is_unwritten()
        if not is_unwritten and not route.has_parameters:
            self._bring_parameters(route)
        route.forget()
        torch.set_grad_enabled(has_grad)  # of this thread
        if not is_unwritten or not route.has_all_copies:
            with torch.no_grad():
                route.follow(is_unwritten=is_unwritten)
        try:
            found = run.step(run.prepare(piece.due, route.stand_ins, route.state) if prepared is None else prepared)
            is_steady = route.is_written_in_place() and piece.may_lie_as_before()
            if is_steady:
                made, laid_out = route.rows, layout
                piece.entered = [(record.parameter, row) for record, row in zip(piece.due, made, strict=True) if row]
            else:
                with torch.no_grad():
                    made = route.made()
                    laid_out = self._lay_out(piece, made)
                    known = piece.states_in(self._optimizer)
                    piece.entered = piece.new_entries(known, laid_out, zip(piece.due, made, strict=True))
            for number, master in route.way_back(laid_out).staying:  # float32 copies that aren't copied are rounded here
                with torch.no_grad():
                    route.host_parameters[number].copy_(local_of(made[number][MASTER] if master is None else master))
            marks = piece.marks(self._optimizer, laid_out)
        except BaseException as error:
            if layout is not None:
                piece.whole.lost = (
                    f"the step of {piece.names} on the host has failed within the optimizer ({type(error).__name__}: {error}), "
                    "and may have written a part of its states: they are lost. Load a checkpoint "
                    "(optimizer.load_state_dict) and go on"
                )
            with torch.no_grad():
                route.put_numbers_back()
            raise
        finally:
            route.let_go(is_steady=is_steady)
            self._slots.host_step_s += time.perf_counter() - begin_s
        for mark in (*marks, *run.leave(found)):
            mark()
        piece.residency = Residency.DIRTY

    def _bring_parameters(self, route: Route) -> None:
        sections, lanes = route.sections, self._lanes
        span = route.room.part(sections.rounded_at, sections.num_bytes)
        brought = lanes.copy(lanes.out, route.storage, span, is_out=True, after=span.free_events, start=sections.rounded_at)
        self._device.synchronize(brought.done)
        route.brought_bytes = sections.rounded_bytes

    def _lay_out(self, piece: Piece, made: list[dict[Any, Any]]) -> Layout | None:
        layout = piece.layout
        rows = piece.leaving(() if layout is None else layout.host, zip(piece.due, made, strict=True))
        if layout is not None and piece.may_lie_as_before() and all(map(lie_as, rows, layout.host)):
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
        piece.enter(self._optimizer)
        route, slot = self._routes[piece], self._slots.of(piece)
        route.forget()
        slot.piece = piece
        way_back, lanes, after = route.way_back(piece.layout), self._lanes, slot.users()
        for copied in way_back.ranges:
            slot.arrived = piece.left = lanes.copy(
                lanes.back, slot.storage, copied.span, is_out=False, after=after, parts=copied.parts, start=copied.start
            ).done
            self._slots.h2d_bytes += copied.span.num_bytes
        self._slots.await_copies(slot)
        self._device.note_read(route.storage)
        with torch.no_grad():
            for record, master, parameter in zip(piece.due, way_back.masters, route.parameters, strict=True):
                if master is not None:
                    parameter.copy_(master)
                write_local(record.parameter, parameter)
                if self._device.takes_notes:
                    own = local_of(record.parameter)
                    self._device.note_written(own.untyped_storage(), torch_private.version_of(own))
            self._slots.note_written(route.storage)
            route.note_stepped(piece.layout)
        self._slots.d2h_bytes += route.brought_bytes
        self._slots.release(piece)
        self._out.pop(piece, None)
        piece.residency = piece.rest

    def drop(self, piece: Piece) -> None:
        self._running.pop(piece, None)
        self._slots.release(piece)
        self._out.pop(piece, None)
        piece.residency = piece.rest

    def _route(self, piece: Piece, slot: StateSlot) -> Route:
        known = self._routes.get(piece)
        due = [traits_of(record) for record in piece.due]
        place = id(piece.plan) if self._runs_ahead else piece.slot
        room = self._rooms.get(place)
        if known is not None and known.storage is slot.storage and known.room is room and known.due == due:
            return known
        sections = Sections.of(piece)
        if slot.num_bytes < sections.num_bytes:
            self._slots.grow(slot, sections.num_bytes)
        if room is None or room.num_bytes < sections.num_bytes:
            (room,) = self._host.take([sections.num_bytes])
            self._rooms[place] = room
        route = self._routes[piece] = Route(piece, due, sections, slot.storage, room, self._stepped.get(id(piece.plan)))
        return route

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._routes.clear()
        self._begun.clear()
        self._rooms.clear()
        self._stepped.clear()
        self._out.clear()
