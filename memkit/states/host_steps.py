"""Stepping pieces on the host: gradients go there, the optimizer's own step runs over host copies, new parameters come back."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from operator import is_
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
from memkit.states.host_routes import WORD_BYTES, Route, Sections, WayBack, traits_of
from memkit.states.memory import HostStates, StateSlot, StateSlots
from memkit.states.one_step import OneStep, Prepared
from memkit.states.packing import MASTER, copy_state, follow, may_leave, moved_state, pack
from memkit.states.pieces import Layout, Piece, StateRecord, follow_attributes
from memkit.states.shards import are_one, local_gradient, shard_like, write_local
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes, Transfer

Entries = dict[Any, Any]


class Given:
    """The input of the optimizer's step on the host: stand-ins for the parameters, with their states in host memory.

    [Note: a steady step on the host] While the stepping thread runs Python, the cores are idle. So whatever a step shares with
    the one before is looked up once: which states are numbers, where float32 copies are, and that nothing has to be laid out
    anew. That holds while `optimizer.state` has the identical tensors, and they lie where the last step has left them.
    """

    def __init__(self, due: Iterable[StateRecord], route: Route) -> None:
        self._due = list(due)
        self.route = route
        self.keys = route.stand_ins
        """Stand-ins: float32 copies, or copies of parameters that have none."""
        self.state: dict[Any, Entries] = defaultdict(dict)
        self.rows: list[Entries] = [{} for _ in self._due]
        """Each parameter's entries in `optimizer.state`, as last looked up."""
        self._given: list[Entries] = []
        """The same without float32 copies."""
        self._layout: Layout | None = None
        self._masters: list[Tensor | None] = []
        """The float32 copy of each parameter; of a shard, this rank's part."""
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self._is_at_home = False
        self.has_copies = False

    def take(self, layout: Layout | None, known: Mapping[Any, Any]) -> None:
        """Point the stand-ins at float32 copies, gradients and states. Parameters are still being copied: see `follow`."""
        rows = [dict(known.get(record.parameter) or ()) for record in self._due]
        if layout is not None and layout is self._layout and all(map(_are_same, rows, self.rows)):
            for value, before in self._numbers:
                before.copy_(value)
        else:
            self._look_up(layout, rows)
        self.state = defaultdict(dict)
        grads = self.route.on_host.grads
        rows_of_due = zip(self._due, self.keys, grads, self._masters, self._given, strict=True)
        for record, key, grad, master, given in rows_of_due:
            if master is not None:
                key.data = master
            if master is not None or not record.has_master:
                key.grad = grad
            if vars(record.parameter):  # of most there are none
                follow_attributes(key, record.parameter)
            if given:
                self.state[key] = dict(given)

    def _look_up(self, layout: Layout | None, rows: list[Entries]) -> None:
        self._layout = None
        masters = [row.get(MASTER) if record.has_master else None for record, row in zip(self._due, rows, strict=True)]
        self._masters = [None if master is None else local_of(master) for master in masters]
        copies = zip(self._due, self._masters, strict=True)
        self.has_copies = all(master is not None or not record.has_master for record, master in copies)
        values = [value for row in rows for value in row.values() if isinstance(value, Tensor) and not may_leave(value)]
        self._numbers = [(value, value.clone()) for value in values]
        hosts = self.route.rows_of(layout)
        self._is_at_home = hosts is not None and all(map(_is_at_home, rows, hosts))
        self._given = [
            {name: value for name, value in row.items() if not record.has_master or name != MASTER}
            for record, row in zip(self._due, rows, strict=True)
        ]
        self.rows, self._layout = rows, layout

    def follow(self, *, is_unwritten: bool) -> None:
        """Copy foreign writes to the parameters into the float32 copies. The parameters must be here if they are needed."""
        on_host = self.route.on_host
        for number, (record, key, master) in enumerate(zip(self._due, self.keys, self._masters, strict=True)):
            if record.has_master and master is None:
                key.data = on_host.parameters[number].to(torch.float32)
                key.grad = on_host.grads[number]
            elif master is not None and not is_unwritten:
                follow(key.data, on_host.parameters[number])  # which counts as no write: only the user's change the version

    def is_written_in_place(self) -> bool:
        """Tell whether a step wrote its results in place, where the layout says. Then `rows` are the results."""
        return self._is_at_home and all(map(self._is_in_place, range(len(self.keys))))

    def _is_in_place(self, number: int) -> bool:
        key, master = self.keys[number], self._masters[number]
        place = self.route.on_host.parameters[number] if master is None else master
        return key.data_ptr() == place.data_ptr() and _are_same(self.state.get(key, {}), self._given[number])

    def made(self) -> list[Entries]:
        found = []
        for number, (record, key) in enumerate(zip(self._due, self.keys, strict=True)):
            entries = dict(self.state[key]) if key in self.state else {}
            view = self.route.on_host.parameters[number]
            if record.has_master:
                entries[MASTER] = shard_like(record.parameter, key.data)
            elif key.data_ptr() != view.data_ptr():  # the class has put another tensor there
                view.copy_(key)
                key.data = view
            found.append(entries)
        return found

    def put_numbers_back(self) -> None:
        for value, before in self._numbers:
            value.copy_(before)

    def let_go(self, *, is_steady: bool) -> None:
        for key in self.keys:
            key.grad = None
        self.state = defaultdict(dict)
        if not is_steady:
            self.rows, self._layout, self._masters, self._numbers, self._given = [], None, [], [], []


def _are_same(one: Entries, other: Entries) -> bool:
    """Tell whether two dicts have the same keys in the same order, and identical (`is`) values."""
    return len(one) == len(other) and all(map(is_, one.values(), other.values())) and [*one] == [*other]


def _is_at_home(row: Entries, host: Mapping[str, Any]) -> bool:
    leaving = {name: value for name, value in row.items() if may_leave(value)}
    return lie_as(leaving, host)


def lie_as(leaving: Mapping[Any, Any], host: Mapping[str, Any]) -> bool:
    return leaving.keys() == host.keys() and all(
        value is host[name] or (name == MASTER and are_one(value, host[name])) for name, value in leaving.items()
    )


_HOST = torch.device("cpu")


class HostSteps:
    """Steps pieces on the host, in a thread: Ctrl-C comes before a step or after it, and the caller goes on feeding the device.

    [Note: casts on the device] The host's memory bounds a step there, so the thread touches nothing but what the optimizer
    reads and writes. Where float32 copies are stepped, the device casts gradients to float32 before their copy to the host, and
    rounds the float32 copies once they are back. Fingerprints, which the device takes after each step and before the next, tell
    whether the user has written to a parameter. Only where they differ, or where there is none yet, is the parameter itself
    copied to the host, and the thread compares. Where pieces run ahead it always is, since others come to its slot.

    Args:
        runs_ahead: whether gradients of all pieces may be in host memory at once, so that none waits for earlier steps: each
        piece then has room of its own.
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
        self._given: dict[Piece, Given] = {}
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
            self._given.pop(other, None)
        with torch.no_grad():
            for record, parameter in zip(piece.due, route.on_device.parameters, strict=True):
                parameter.copy_(local_of(record.parameter))
            route.compare(piece.layout)
            for record, grad in zip(piece.due, route.on_device.grads, strict=True):
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
        given, prepared = self._given[piece], None
        with torch.inference_mode(False), torch.no_grad():
            given.take(piece.layout, piece.states_in(self._optimizer))
        if not any(record.is_shard for record in piece.due):  # else that may fail, as a step does
            prepared = run.prepare(piece.due, given.keys, given.state)
        begun = self._begun[piece] = Event()
        step = partial(self._step, piece, run, prepared, self._out[piece], begun, torch.is_grad_enabled())
        self._running[piece] = self._thread.submit(step)

    def join(self, piece: Piece) -> None:
        """Wait for the step of a piece, and begin the copy of its parameters back."""
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
        """Wait for all that the thread was given, noted or not (an interrupt)."""
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
        given, layout = self._given[piece], piece.layout
        route = given.route
        is_steady, is_unwritten = False, route.is_unwritten()
        if not is_unwritten and not route.has_parameters:
            self._bring_parameters(route)
        route.forget()
        torch.set_grad_enabled(has_grad)  # of this thread
        if not is_unwritten or not given.has_copies:
            with torch.no_grad():
                given.follow(is_unwritten=is_unwritten)
        try:
            found = run.step(run.prepare(piece.due, given.keys, given.state) if prepared is None else prepared)
            is_steady = given.is_written_in_place() and piece.may_lie_as_before()
            if is_steady:
                made, laid_out = given.rows, layout
                piece.entered = [(record.parameter, row) for record, row in zip(piece.due, made, strict=True) if row]
            else:
                with torch.no_grad():
                    made = given.made()
                    laid_out = self._lay_out(piece, made)
                    known = piece.states_in(self._optimizer)
                    piece.entered = piece.new_entries(known, laid_out, zip(piece.due, made, strict=True))
            if staying := route.way_back(laid_out).staying:
                self._put(staying, made, route)
            marks = piece.marks(self._optimizer, laid_out)
        except BaseException as error:
            if layout is not None:
                piece.whole.lost = (
                    f"the step of {piece.names} on the host has failed within the optimizer ({type(error).__name__}: {error}), "
                    "and may have written a part of its states: they are lost. Load a checkpoint "
                    "(optimizer.load_state_dict) and go on"
                )
            with torch.no_grad():
                given.put_numbers_back()
            raise
        finally:
            given.let_go(is_steady=is_steady)
            self._slots.host_step_s += time.perf_counter() - begin_s
        for mark in (*marks, *run.leave(found)):
            mark()
        piece.residency = Residency.DIRTY

    @staticmethod
    def _put(staying: list[tuple[int, Tensor | None]], made: list[dict[Any, Any]], route: Route) -> None:
        """Round float32 copies that aren't copied to the device to their parameters, on the host."""
        with torch.no_grad():
            for number, master in staying:
                route.on_host.parameters[number].copy_(local_of(made[number][MASTER] if master is None else master))

    def _bring_parameters(self, route: Route) -> None:
        """Copy parameters written to by others to the host. They are in the slot until the piece is stepped."""
        sections, lanes = route.sections, self._lanes
        span = route.room.part(sections.rounded_at, sections.num_bytes)
        brought = lanes.copy(lanes.out, route.storage, span, is_out=True, after=span.free_events, start=sections.rounded_at)
        self._device.synchronize(brought.done)
        route.brought_bytes = sections.rounded_bytes

    def _lay_out(self, piece: Piece, made: list[dict[Any, Any]]) -> Layout | None:
        """Lay all states of a piece out in its host memory. Return the layout; None if there are none."""
        index_of = {id(record): index for index, record in enumerate(piece.records)}
        layout = piece.layout
        rows: list[dict[str, Tensor]] = (
            [dict(host) for host in layout.host] if layout is not None else [{} for _ in piece.records]
        )
        is_as_before = layout is not None and piece.may_lie_as_before()
        for record, entries in zip(piece.due, made, strict=True):
            index = index_of[id(record)]
            leaving = {name: value for name, value in entries.items() if may_leave(value)}
            is_as_before = is_as_before and lie_as(leaving, rows[index])
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
        piece.enter(self._optimizer)
        route, slot = self._given[piece].route, self._slots.of(piece)
        route.forget()
        slot.piece = piece
        way_back = route.way_back(piece.layout)
        self._bring(piece, way_back, slot)
        self._slots.await_copies(slot)
        self._device.note_read(route.storage)
        with torch.no_grad():
            for record, master, parameter in zip(piece.due, way_back.masters, route.on_device.parameters, strict=True):
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

    def _bring(self, piece: Piece, way_back: WayBack, slot: StateSlot) -> None:
        lanes, after = self._lanes, slot.users()
        for copied in way_back.ranges:
            slot.arrived = piece.left = lanes.copy(
                lanes.back, slot.storage, copied.span, is_out=False, after=after, parts=copied.parts, start=copied.start
            ).done
            self._slots.h2d_bytes += copied.span.num_bytes

    def drop(self, piece: Piece) -> None:
        self._running.pop(piece, None)
        self._slots.release(piece)
        self._out.pop(piece, None)
        piece.residency = piece.rest

    def _route(self, piece: Piece, slot: StateSlot) -> Route:
        known = self._given[piece].route if piece in self._given else None
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
        route = Route(piece, due, sections, slot.storage, room, self._stepped.get(id(piece.plan)))
        self._given[piece] = Given(piece.due, route)
        return route

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._given.clear()
        self._begun.clear()
        self._rooms.clear()
        self._stepped.clear()
        self._out.clear()
