"""Stepping pieces on the host: gradients go there, the optimizer's own step runs over host copies, new parameters come back."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memkit.core import torch_private
from memkit.core.forks import OwnThreads, forked
from memkit.core.sizes import rounded
from memkit.core.tensors import byte_view, tensor_over
from memkit.core.torch_state import label, local_of
from memkit.device.base import Device
from memkit.plan.chunks import Residency
from memkit.plan.states import aligned
from memkit.states.memory import HostStates, StateSlot, StateSlots
from memkit.states.one_step import OneStep, Prepared
from memkit.states.packing import (
    MASTER,
    PackedTensor,
    are_one,
    are_same,
    copy_state,
    follow,
    local_gradient,
    local_packed,
    may_leave,
    moved_state,
    pack,
    shard_like,
    storage_of_part,
    write_local,
)
from memkit.states.pieces import Layout, Piece, StateRecord, follow_attributes, stand_in_of, version_of
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes, Transfer

Entries = dict[Any, Any]
WORD_BYTES = 8
Traits = tuple[object, ...]  # what the route of a due parameter depends on
_BETWEEN_BYTES = 16  # parameters with float32 copies begin at multiples of this: a kernel reads as many bytes at once
_HOST = torch.device("cpu")


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def take_fingerprint(words: Tensor, scratch: tuple[Tensor, Tensor], found: Tensor) -> None:
    """Write what a change of any bit changes, but for one case in 2**64. Source: SplitMix64 by Stafford's variant 13."""
    mixed, shifted = scratch
    torch.arange(words.numel(), out=mixed, device=mixed.device)
    mixed.mul_(_GOLDEN).add_(words)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(mixed, shift, out=shifted)
        mixed.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))  # the shift has drawn the sign along
        if factor != 1:
            mixed.mul_(factor)
    torch.sum(mixed, dim=0, keepdim=True, out=found)


def traits_of(record: StateRecord) -> Traits:
    parameter, grad = local_of(record.parameter), local_gradient(record.parameter)
    assert grad is not None
    return id(record), parameter.dtype, parameter.size(), parameter.stride(), grad.stride(), record.has_master


@dataclass(frozen=True, slots=True)
class Sections:
    """Sections of a slot, in this order, and of its host memory; a name with `_at` is a section's first byte."""

    float32_bytes: int  # gradients, cast to float32, to the host; float32 copies of parameters to the device
    fingerprint_bytes: int  # two, of the parameters in `rounded_bytes`
    plain_bytes: int  # of parameters that are stepped themselves; as many bytes for their gradients follow
    rounded_bytes: int  # parameters with float32 copies, copied to the host only where somebody may have written to them

    @classmethod
    def of(cls, piece: Piece) -> Sections:
        copied = [local_of(record.parameter) for record in piece.due if record.has_master]
        rounded_bytes = sum(rounded(parameter.nbytes, _BETWEEN_BYTES) for parameter in copied)
        # the copies of all its parameters come back, due or not; and fingerprints need some scratch
        float32_bytes = sum(aligned(4 * local_of(record.parameter).numel()) for record in piece.records if record.has_master)
        return cls(
            float32_bytes=aligned(max(float32_bytes, 2 * rounded_bytes)) if copied else 0,
            fingerprint_bytes=aligned(2 * WORD_BYTES) if copied else 0,
            plain_bytes=sum(aligned(local_of(record.parameter).nbytes) for record in piece.due if not record.has_master),
            rounded_bytes=rounded_bytes,
        )

    @property
    def plain_at(self) -> int:
        return self.float32_bytes + self.fingerprint_bytes

    @property
    def rounded_at(self) -> int:
        return self.plain_at + 2 * self.plain_bytes

    @property
    def num_bytes(self) -> int:
        return max(1, self.rounded_at + self.rounded_bytes)


def _views(storage: torch.UntypedStorage, due: list[StateRecord], sections: Sections) -> tuple[list[Tensor], list[Tensor]]:
    parameters, grads = list[Tensor](), list[Tensor]()
    float32_at, rounded_at, plain_at = 0, sections.rounded_at, sections.plain_at
    for record in due:
        parameter, grad = local_of(record.parameter), local_gradient(record.parameter)
        assert grad is not None
        if record.has_master:
            parameters.append(_like(parameter, storage, rounded_at, parameter.dtype))
            grads.append(_like(grad, storage, float32_at, torch.float32))
            rounded_at += rounded(parameter.nbytes, _BETWEEN_BYTES)
            float32_at += aligned(4 * parameter.numel())
        else:
            parameters.append(_like(parameter, storage, plain_at, parameter.dtype))
            grads.append(_like(grad, storage, plain_at + sections.plain_bytes, parameter.dtype))
            plain_at += aligned(parameter.nbytes)
    return parameters, grads


def _like(tensor: Tensor, storage: torch.UntypedStorage, start: int, dtype: torch.dtype) -> Tensor:
    stride = tensor.stride() if may_leave(tensor) else torch.empty(tensor.size(), device="meta").stride()
    return tensor_over(storage, dtype, offset=start // dtype.itemsize, size=tensor.size(), stride=stride)


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes to copy between a host span and a slot, from byte `start`; `parts` are the slot's bytes, cut as the span is."""

    span: Span
    start: int
    parts: Sequence[Tensor]

    @classmethod
    def of(cls, storage: torch.UntypedStorage, span: Span, start: int = 0) -> CopyRange:
        with torch.inference_mode(False):
            whole = byte_view(storage).narrow(0, start, span.num_bytes)
            return cls(span, start, whole.split(list(map(len, span.pieces))))


@dataclass(frozen=True, slots=True)
class WayBack:
    """The copies back: of float32 copies (`masters`, in the slot), or of parameters the host rounds (`staying`)."""

    layout: Layout | None
    masters: list[Tensor | None]
    staying: list[tuple[int, Tensor | None]]
    ranges: list[CopyRange]


class Route:
    """The way of a piece's gradients and parameters to the host, the input of the optimizer's step there, and the way back.

    [Note: a steady step on the host] While the stepping thread runs Python, the cores are idle. So what a step shares with the
    one before is looked up once, as long as `optimizer.state` has the identical tensors, where the last step has left them.
    """

    def __init__(
        self, piece: Piece, due: list[Traits], sections: Sections, slot: StateSlot, room: Span, stepped: Tensor | None
    ) -> None:
        self.storage, self.room, self.due, self.sections = slot.storage, room, due, sections
        storage = slot.storage
        self._stepped = stepped
        self._known: tuple[Layout, list[int]] | None = None  # of the last fingerprint: versions of float32 copies
        self.is_known = False
        self.has_parameters = True
        self.brought_bytes = 0  # bytes of those that the thread has copied later, since they were written to
        self._records = list(piece.due)
        self._numbers = [record.index for record in piece.due]
        self.state: dict[Any, Entries] = defaultdict(dict)
        self.rows: list[Entries] = [{} for _ in self._records]
        self._entries: list[Entries] = []
        self._layout: Layout | None = None
        self._masters: list[Tensor | None] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # states that are not copied, each with a copy from before the step
        self._is_at_home = self.has_all_copies = False
        self._to_host: dict[bool, CopyRange] = {}
        self._way_back: WayBack | None = None
        with torch.inference_mode(False):
            self.parameters, self.grads = _views(storage, piece.due, sections)
            self.host_parameters, self._host_grads = _views(storage_of_part(room.whole), piece.due, sections)
            # float32 copies, or copies of parameters that have none
            self.stand_ins: list[nn.Parameter] = [
                stand_in_of(record, torch.empty(0) if record.has_master else view)
                for record, view in zip(piece.due, self.host_parameters, strict=True)
            ]
            self.has_copies = sections.float32_bytes > 0
            num_words = sections.rounded_bytes // WORD_BYTES
            self._words = _words(storage, sections.rounded_at, num_words)
            self._scratch = _words(storage, 0, num_words), _words(storage, sections.rounded_bytes, num_words)
            self._fingerprints = _words(storage, sections.float32_bytes, 2 if self.has_copies else 0)
            self._host_fingerprints = _words(storage_of_part(room.whole), sections.float32_bytes, 2 if self.has_copies else 0)
            self._gaps = list(self._gaps_between(storage))

    def _gaps_between(self, storage: torch.UntypedStorage) -> Iterator[Tensor]:
        end = self.sections.rounded_at
        for record, parameter in zip(self._records, self.parameters, strict=True):
            if record.has_master:
                start, end = end + parameter.nbytes, end + rounded(parameter.nbytes, _BETWEEN_BYTES)
                if start < end:
                    yield tensor_over(storage, torch.uint8, offset=start, size=(end - start,), stride=(1,))

    def to_host(self) -> CopyRange:
        copied = self._to_host.get(self.has_parameters)
        if copied is None:
            num_bytes = self.sections.num_bytes if self.has_parameters else self.sections.rounded_at
            copied = self._to_host[self.has_parameters] = CopyRange.of(self.storage, self.room.part(0, num_bytes))
        return copied

    def way_back(self, layout: Layout | None) -> WayBack:
        """Return the copies back: float32 copies from their states' place, parameters from where they were sent."""
        found = self._way_back
        if found is None or found.layout is not layout:
            found = self._way_back = self._find_way_back(layout)
        return found

    def _find_way_back(self, layout: Layout | None) -> WayBack:
        sections, copies = self.sections, None if layout is None else layout.masters()
        fits = copies is not None and copies.num_bytes <= sections.float32_bytes
        masters = [self._master(layout, number) if layout is not None and fits else None for number in self._numbers]
        hosts, staying = self.rows_of(layout), list[tuple[int, Tensor | None]]()
        for number, (record, master) in enumerate(zip(self._records, masters, strict=True)):
            if record.has_master and master is None:
                staying.append((number, None if hosts is None else hosts[number].get(MASTER)))
        ranges = [(sections.plain_at, sections.plain_bytes)]
        if staying:
            ranges.append((sections.rounded_at, sections.rounded_bytes))
        spans = [(self.room.part(start, start + num_bytes), start) for start, num_bytes in ranges if num_bytes]
        if copies is not None and any(master is not None for master in masters):
            spans.append((copies, 0))
        return WayBack(layout, masters, staying, [CopyRange.of(self.storage, span, start) for span, start in spans])

    def _master(self, layout: Layout, number: int) -> Tensor | None:
        packed = [one for one in map(local_packed, layout.tensors[number]) if one.name == MASTER]
        with torch.inference_mode(False):
            return packed[0].over(self.storage) if packed and isinstance(packed[0], PackedTensor) else None

    def rows_of(self, layout: Layout | None) -> list[dict[str, Any]] | None:
        return None if layout is None else [layout.host[number] for number in self._numbers]

    def compare(self, layout: Layout | None) -> None:
        """Take the fingerprint of the parameters in the slot, before gradients are there, to find foreign writes."""
        self.is_known = self._known is not None and layout is self._known[0] and self._versions(layout) == self._known[1]
        if self.is_known and self._stepped is not None:
            self._take(self._fingerprints[:1])
            self._fingerprints[1:].copy_(self._stepped)

    def note_stepped(self, layout: Layout | None) -> None:
        """Take the fingerprint of the parameters in the slot, which are the user's after this step."""
        if self._stepped is not None and self.has_copies and layout is not None:
            self._take(self._stepped)
            self._known = layout, self._versions(layout)

    def _take(self, found: Tensor) -> None:
        for gap in self._gaps:
            gap.zero_()
        take_fingerprint(self._words, self._scratch, found)

    def _versions(self, layout: Layout) -> list[int]:
        """Return the versions of float32 copies. The optimizer writes to other aliases, whose writes count apart."""
        masters = [layout.host[number].get(MASTER) for number in self._numbers]
        return [-1 if master is None else version_of(master) for master in masters]

    def is_unwritten(self) -> bool:
        if not self.is_known:
            return not self.has_copies
        now, before = self._host_fingerprints.tolist()
        return bool(now == before)

    def forget(self) -> None:
        self._known = None

    def take(self, layout: Layout | None, known: Mapping[Any, Any]) -> None:
        """Point the stand-ins at float32 copies, gradients and states. Parameters are still being copied: see `follow`."""
        rows = [dict(known.get(record.parameter) or ()) for record in self._records]
        if layout is not None and layout is self._layout and all(map(are_same, rows, self.rows)):
            for value, before in self.before:
                before.copy_(value)
        else:
            self._look_up(layout, rows)
        self.state = defaultdict(dict)
        due = zip(self._records, self.stand_ins, self._host_grads, self._masters, self._entries, strict=True)
        for record, key, grad, master, given in due:
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
        masters = [row.get(MASTER) if record.has_master else None for record, row in zip(self._records, rows, strict=True)]
        self._masters = [None if master is None else local_of(master) for master in masters]
        copies = zip(self._records, self._masters, strict=True)
        self.has_all_copies = all(master is not None or not record.has_master for record, master in copies)
        values = [value for row in rows for value in row.values() if isinstance(value, Tensor) and not may_leave(value)]
        self.before = [(value, value.clone()) for value in values]
        hosts = self.rows_of(layout)
        leaving = [{name: value for name, value in row.items() if may_leave(value)} for row in rows]
        self._is_at_home = hosts is not None and all(map(lie_as, leaving, hosts))
        self._entries = [
            {name: value for name, value in row.items() if not record.has_master or name != MASTER}
            for record, row in zip(self._records, rows, strict=True)
        ]
        self.rows, self._layout = rows, layout

    def follow(self, *, is_unwritten: bool) -> None:
        """Copy foreign writes to the parameters into the float32 copies. The parameters must be here if they are needed."""
        for number, (record, key, master) in enumerate(zip(self._records, self.stand_ins, self._masters, strict=True)):
            if record.has_master and master is None:
                key.data = self.host_parameters[number].to(torch.float32)
                key.grad = self._host_grads[number]
            elif master is not None and not is_unwritten:
                follow(key.data, self.host_parameters[number])  # which counts as no write: only the user's change the version

    def is_written_in_place(self) -> bool:
        """Tell whether a step wrote its results in place, where the layout says. Then `rows` are the results."""
        if not self._is_at_home:
            return False
        rows = zip(self.stand_ins, self._masters, self.host_parameters, self._entries, strict=True)
        for key, master, parameter, entries in rows:
            place = parameter if master is None else master
            if key.data_ptr() != place.data_ptr() or not are_same(self.state.get(key, {}), entries):
                return False
        return True

    def made(self) -> list[Entries]:
        found = []
        for number, (record, key) in enumerate(zip(self._records, self.stand_ins, strict=True)):
            entries = dict(self.state[key]) if key in self.state else {}
            view = self.host_parameters[number]
            if record.has_master:
                entries[MASTER] = shard_like(record.parameter, key.data)
            elif key.data_ptr() != view.data_ptr():  # the class has put another tensor there
                view.copy_(key)
                key.data = view
            found.append(entries)
        return found

    def let_go(self, *, is_steady: bool) -> None:
        for key in self.stand_ins:
            key.grad = None
        self.state = defaultdict(dict)
        if not is_steady:
            self.rows, self._layout, self._masters, self.before, self._entries = [], None, [], [], []


def _words(storage: torch.UntypedStorage, start: int, num_words: int) -> Tensor:
    return tensor_over(storage, torch.int64, offset=start // WORD_BYTES, size=(num_words,), stride=(1,))


def lie_as(leaving: Mapping[Any, Any], host: Mapping[str, Any]) -> bool:
    return leaving.keys() == host.keys() and all(
        value is host[name] or (name == MASTER and are_one(value, host[name])) for name, value in leaving.items()
    )


class HostSteps:
    """Steps pieces on the host, in a thread: Ctrl-C comes before a step or after it, and the caller goes on feeding the device.

    [Note: casts on the device] The host's memory bounds a step there, so the thread touches nothing but what the optimizer
    reads and writes. Where float32 copies are stepped, the device casts gradients before their copy to the host, and rounds the
    float32 copies once they are back. Fingerprints, taken on the device after each step and before the next, tell whether the
    user has written to a parameter. Only where they differ, or where pieces run ahead, is the parameter copied to the host and
    compared.
    """

    def __init__(
        self, optimizer: Optimizer, device: Device, lanes: Lanes, slots: StateSlots, host: HostStates, *, runs_ahead: bool
    ) -> None:
        self._optimizer, self._device, self._lanes = optimizer, device, lanes
        self._slots, self._host, self._runs_ahead = slots, host, runs_ahead
        self._rooms: dict[int, Span] = {}
        self._routes: dict[Piece, Route] = {}
        self._out: dict[Piece, Transfer] = {}
        self._thread: OwnThreads | None = None
        self._running = dict[Piece, Future[None]]()
        self._begun = dict[Piece, Event]()  # set once the thread has turned to a piece: it may wait for its gradients
        self._stepped: dict[int, Tensor] = {}  # on the device, by plan's id: fingerprints of parameters as last stepped

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
                for value, before in route.before:
                    value.copy_(before)
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
        route = self._routes[piece] = Route(piece, due, sections, slot, room, self._stepped.get(id(piece.plan)))
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
