"""`Piece`: parameters whose states are copied and stepped together; `CutPiece`: a large one, whose states move in `Window`s."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.owners import GradientStandIn, owner_of
from memkit.core.tensors import byte_view
from memkit.core.torch_state import is_dtensor, local_of
from memkit.device.base import Event
from memkit.errors import StateOffloadError
from memkit.plan import StatePiece
from memkit.plan.chunks import Residency
from memkit.plan.states import Update, aligned
from memkit.states.packing import (
    MASTER,
    OnDisk,
    Packed,
    PackedRows,
    PackedTensor,
    are_same_number,
    is_number,
    is_number_on_host,
    local_packed,
    may_leave,
    moved_state,
    note_written,
    pack,
    shard_like,
)
from memkit.transfer.disk import DiskCopy
from memkit.transfer.host_memory import Span

if TYPE_CHECKING:
    from memkit.states.memory import DiskStates, HostStates

Rows = Sequence[Mapping[str, Tensor]]
_NOWHERE = -1


class StateRecord:
    def __init__(self, name: str, parameter: Tensor, *, has_master: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.has_master = has_master
        self.is_shard = is_dtensor(parameter)  # whether it is a `DTensor`, whose local tensor is stepped: see `LocalStep`
        self.index = 0
        self.group = self.position = -1  # the number of its group, and its position there; -1 once it is in none
        self.undo: Tensor | None = None
        self.numbers: list[tuple[Tensor, Tensor]] = []
        self.done: tuple[weakref.ref[Tensor], int] | None = None
        self.spoiled: tuple[weakref.ref[Tensor], int] | None = None  # a gradient that an undone step wrote to

    def is_due(self) -> bool:
        grad = self.parameter.grad
        return grad is not None and self.group >= 0 and type(grad) is not ConsumedGradient

    def is_done(self) -> bool:
        grad = self.parameter.grad
        if self.done is None or grad is None:
            return False
        ref, version = self.done
        return ref() is grad and version == (version_of(grad) if self.is_shard else torch_private.version_of(grad))


def mark_of(record: StateRecord) -> tuple[weakref.ref[Tensor], int] | None:
    grad = record.parameter.grad
    if grad is None:
        return None
    return weakref.ref(grad), version_of(grad) if record.is_shard else torch_private.version_of(grad)


def version_of(tensor: Tensor) -> int:
    version = torch_private.version_of(tensor)
    return version + torch_private.version_of(local_of(tensor)) if is_dtensor(tensor) else version


class Accumulating:
    """Steps within the backward, but not while `num_accumulating` is above 0."""

    num_accumulating = 0

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.num_accumulating += 1
        try:
            yield
        finally:
            self.num_accumulating -= 1


class ConsumedGradient(GradientStandIn):
    error = StateOffloadError
    advice = 'With when="backward" gradients cannot be clipped, scaled or read. Use when="step"'


def some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def let_go_of_consumed(records: Iterable[StateRecord]) -> None:
    for record in records:
        if type(record.parameter.grad) is ConsumedGradient:
            record.parameter.grad = None


def refuse_another(record: StateRecord) -> NoReturn:
    """Raise: a parameter stepped within the backward gets another gradient of the same step."""
    raise StateOffloadError(
        f"{record.name} was stepped within an earlier backward of this step, and another brings it a gradient. To "
        "accumulate, put `with states.accumulate():` around all backwards but the last one; after one whose gradients you have "
        "zeroed to leave a step out, call optimizer.step() first. A backward inside of another one can't be stepped"
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a piece's states are: packed `tensors` in a host `span`, or the chunk `copy` on a disk; `host`: their entries."""

    span: Span | None
    tensors: PackedRows
    host: tuple[dict[str, Any], ...]
    copy: DiskCopy | None = None

    def is_in_place(self, index: int) -> bool:
        if self.span is None or self.span.whole is None:
            return True
        host, address = self.host[index], self.span.whole.data_ptr()
        for tensor in self.tensors[index]:
            value = host[tensor.name]
            is_there = (
                value.data_ptr() == address + tensor.offset if type(tensor) is PackedTensor else tensor.is_at(value, address)
            )
            if not is_there:
                return False
        return True

    def masters(self) -> Span | None:
        found = [one for row in self.tensors for one in map(local_packed, row) if one.name == MASTER]
        ends = [one.offset + aligned(one.num_bytes) for one in found if isinstance(one, PackedTensor)]
        if not ends or self.span is None:
            return None
        if self.span.whole is not None:
            return self.span.part(0, max(ends))
        first = self.span.pieces[0]  # of a window, each of whose states is a range of others
        return replace(self.span, num_bytes=len(first), pieces=(first,))


class Piece:
    is_stepped = False  # whether a step has stepped it, and not all of `whole` yet

    def __init__(self, plan: StatePiece, records: list[StateRecord]) -> None:
        self.plan = plan
        self.records = records
        for index, record in enumerate(records):
            record.index = index
        self._is_cut = False  # whether the step under way, or the last one, steps it window by window
        self.slot = plan.slot
        self.residency = self.rest
        self.room: Span | None = None
        self.layout: Layout | None = None
        self.left: Event | None = None
        self.views: list[dict[str, Tensor]] = []
        self.stand_ins: list[nn.Parameter | None] = []  # float32 copies in the slot, stepped in place of parameters
        self._bound: tuple[torch.UntypedStorage, Layout] | None = None
        self._cut_bytes: tuple[torch.UntypedStorage, Span, Sequence[Tensor]] | None = None  # a slot's, with its views
        self.due: list[StateRecord] = []
        self._versions: list[int] = []
        self.lost: str | None = None  # why it can't be stepped or saved, until a load: a step left it half written
        self.entered: list[tuple[Tensor, dict[Any, Any]]] = []

    @property
    def rest(self) -> Residency:
        if self.plan.is_on_disk:
            return Residency.DISK
        return Residency.DEVICE if self.plan.is_resident else Residency.HOST

    @property
    def names(self) -> str:
        first, last = self.records[0].name, self.records[-1].name
        return first if first == last else f"{first} to {last}"

    def bind(self, storage: torch.UntypedStorage) -> None:
        layout = self.layout
        assert layout is not None
        if self._bound is not None and self._bound[0] is storage and self._bound[1] is layout:
            return
        with torch.inference_mode(False):
            self.views = [{tensor.name: tensor.over(storage) for tensor in tensors} for tensors in layout.tensors]
            self.stand_ins = [
                stand_in_of(record, views[MASTER]) if record.has_master and MASTER in views else None
                for record, views in zip(self.records, self.views, strict=True)
            ]
        self._bound = storage, layout

    def bytes_in(self, storage: torch.UntypedStorage, span: Span) -> Sequence[Tensor]:
        known = self._cut_bytes
        if known is not None and known[0] is storage and known[1] is span:
            return known[2]
        with torch.inference_mode(False):
            whole = byte_view(storage).narrow(0, 0, span.num_bytes)
            found: Sequence[Tensor] = torch.split(whole, [part.numel() for part in span.pieces])
        if self.layout is not None and span is self.layout.span:
            self._cut_bytes = storage, span, found
        return found

    def staying(self, record: StateRecord, entries: Mapping[Any, Any]) -> list[Tensor]:
        if self.plan.is_resident:
            return [value for value in entries.values() if isinstance(value, Tensor)]
        # the piece's own are known: `may_leave` of a tensor that wraps others takes the host long
        host = self.layout.host[record.index] if self.layout is not None else {}
        others = [value for name, value in entries.items() if value is not host.get(name)]
        return [value for value in others if isinstance(value, Tensor) and not may_leave(value)]

    @property
    def parts(self) -> Sequence[Piece]:
        return (self,)

    @property
    def stored(self) -> Sequence[Piece]:
        return (self,)

    @property
    def chunk(self) -> DiskCopy:
        assert self.layout is not None
        assert self.layout.copy is not None
        return self.layout.copy

    @property
    def copies(self) -> Sequence[DiskCopy]:
        return () if self.layout is None or self.layout.copy is None else (self.layout.copy,)

    @property
    def whole(self) -> Piece:
        """The piece that it is a window of; itself if it is not a window."""
        return self

    @property
    def alternatives(self) -> Sequence[Piece]:
        """The other units that may step its elements, whose data from earlier steps is out of date: its windows, or `whole`."""
        return () if self.whole is self else (self.whole,)

    @property
    def is_last(self) -> bool:
        return True

    @property
    def may_come_early(self) -> bool:
        """Whether its states may be copied to the slot before `prepare` was called."""
        return self.layout is not None

    @property
    def is_half_way(self) -> bool:
        return any(part.is_stepped for part in self.parts)

    def spoiled_by(self, optimizer: torch.optim.Optimizer) -> list[StateRecord]:
        unscales = getattr(optimizer, "grad_scale", None) is not None and self.plan.update is Update.DEVICE
        found = []
        for record, version in zip(self.due, self._versions, strict=True):
            mark = mark_of(record)
            if mark is None or mark[1] != version or (unscales and not record.has_master):
                found.append(record)
        return found

    def forget_loss(self) -> None:
        self.lost = None

    def forget_step(self) -> None:
        """Forget which windows a broken-off step has stepped."""

    def await_turn(self) -> None:
        """Raise if an earlier window of the same parameter was not stepped."""

    def prepare(self, state: Mapping[Any, Any]) -> None:
        if self.lost is not None:
            raise StateOffloadError(self.lost)
        versions = []
        for record in self.due:
            grad = record.parameter.grad
            assert grad is not None
            spoiled = record.spoiled
            if spoiled is not None and spoiled[0]() is grad and spoiled[1] == torch_private.version_of(grad):
                raise StateOffloadError(
                    f"a step that was broken off has written to the gradient of {record.name}, as to unscale it, and a step "
                    "would do so again. Call optimizer.zero_grad() and run the backward again; with a GradScaler, delete "
                    "optimizer.grad_scale first, which torch leaves there and multiplies the next scale by"
                )
            versions.append(version_of(grad) if record.is_shard else torch_private.version_of(grad))
        self._versions = versions
        if self.plan.update is Update.DEVICE and not self._is_cut:
            return  # the parameters are stepped themselves
        for record in self.due:
            grad = record.parameter.grad
            if grad is not None and grad.dtype != record.parameter.dtype and not record.has_master:
                raise StateOffloadError(
                    f'"{record.name}" is {record.parameter.dtype}, and its gradient {grad.dtype}: was its grad_dtype set? '
                    "What is stepped on the host, or in windows, takes those of the parameter's dtype. Leave it as it was, use "
                    'master=torch.float32, or have parameters that are not large stepped by update="device"'
                )

    def read_by_step(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the tensors that a step on another stream reads, gradients first: the caller holds them until that is done."""
        gradients = [record.parameter.grad for record in self.records if record.parameter.grad is not None]
        found = [record.parameter.detach() for record in self.records if owner_of(record.parameter.untyped_storage()) is None]
        state = self.states_in(optimizer)
        for record in self.records:
            entries = state.get(record.parameter)
            if entries:
                found += self.staying(record, entries)
        return gradients + found

    def let_gradients_go(self) -> None:
        """Drop references to gradients that were read."""

    def leave_parameters(self) -> None:
        """Drop views of the parameters' present storages, which will be used for others."""

    def put_parameters(self) -> None:
        """Copy stand-ins that the optimizer has put elsewhere to the user's parameters."""

    def states_in(self, optimizer: torch.optim.Optimizer) -> MutableMapping[Any, Any]:
        return optimizer.state

    def may_lie_as_before(self) -> bool:
        """Tell whether states whose layout has not changed may stay where they are."""
        return True

    def lay_out(self, place: HostStates | DiskStates, tensors: PackedRows, num_bytes: int) -> Layout | None:
        return place.layout_of(self, tensors, num_bytes) if num_bytes else None

    def lies_as_it_goes(self, entries: Mapping[Any, Any]) -> bool:
        return True

    def cut(
        self, tensors: PackedRows, num_bytes: int, rows: Rows, entries: Mapping[Any, Any]
    ) -> Sequence[tuple[Piece, PackedRows, int, Rows]]:
        """Cut states into units for the disk. Return for each: the unit, its packed tensors, their bytes, and the states."""
        return [(self, tensors, num_bytes, rows)]

    def note_put(self, tensors: PackedRows) -> None:
        """Note that all units of these states are on the disk."""

    def empty_rows(self) -> list[dict[str, Tensor]]:
        return [{} for _ in self.records]

    def fill(self, rows: list[dict[str, Tensor]], part: Piece, found: Rows) -> None:
        for row, values in zip(rows, found, strict=True):
            row.update({name: moved_state(value, torch.device("cpu")) for name, value in values.items()})

    def marks(self, optimizer: torch.optim.Optimizer, layout: Layout | None) -> list[partial[None]]:
        """Return functions, to be called at once, that note the step of the due parameters and the states' layout."""
        marks = [partial(setattr, record, "done", mark_of(record)) for record in self.due]
        return marks if self.plan.is_resident else [*marks, partial(setattr, self, "layout", layout)]

    def new_entries(
        self, state: Mapping[Any, Any], layout: Layout | None, made: Iterable[tuple[StateRecord, dict[Any, Any]]]
    ) -> list[tuple[Tensor, dict[Any, Any]]]:
        """Return new entries for `optimizer.state`, by parameter, with tensors in host memory."""
        entered: list[tuple[Tensor, dict[Any, Any]]] = []
        stepped = set()
        for record, entries in made:
            stepped.add(id(record))
            if entries or state.get(record.parameter):
                host = layout.host[record.index] if layout is not None else {}
                entered.append((record.parameter, {name: host.get(name, value) for name, value in entries.items()}))
        if layout is not self.layout and layout is not None:
            for record, host in zip(self.records, layout.host, strict=True):
                if id(record) not in stepped and host:
                    entered.append((record.parameter, {**state[record.parameter], **host}))
        return entered

    def leaving(
        self, known: Iterable[Mapping[str, Tensor]], made: Iterable[tuple[StateRecord, Mapping[Any, Any]]]
    ) -> list[dict[str, Tensor]]:
        rows = [dict(row) for row in known] if self.layout is not None else [{} for _ in self.records]
        for record, entries in made:
            rows[record.index] = {name: value for name, value in entries.items() if may_leave(value)}
        return rows

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        state = self.states_in(optimizer)
        for parameter, made in self.entered:
            entries = state[parameter]
            for name in [name for name in entries if name not in made]:
                del entries[name]
            entries.update(made)
        self.entered = []

    def let_go(self) -> None:
        self.views, self.stand_ins, self._bound, self._cut_bytes = [], [], None, None


def stand_in_of(record: StateRecord, master: Tensor) -> nn.Parameter:
    stand_in = nn.Parameter(master, requires_grad=record.parameter.requires_grad)
    follow_attributes(stand_in, record.parameter)
    return stand_in


def follow_attributes(stand_in: Tensor, parameter: Tensor) -> None:
    vars(stand_in).update(vars(parameter))


def stand_ins_for(piece: Piece, tensors: Sequence[Sequence[Packed]]) -> tuple[dict[str, Any], ...]:
    rows = zip(piece.records, tensors, strict=True)
    return tuple({tensor.name: OnDisk(tensor.name, record.name, record) for tensor in row} for record, row in rows)


def lie_like(parameter: Tensor, tensors: Sequence[Packed]) -> bool:
    size, stride = parameter.size(), parameter.stride()
    return all(isinstance(one, PackedTensor) and (one.size, one.stride) == (size, stride) for one in map(local_packed, tensors))


def tensors_of_part(whole: Sequence[Packed], elements: slice) -> tuple[PackedTensor, ...]:
    tensors, offset = [], 0
    for tensor in map(local_packed, whole):
        assert isinstance(tensor, PackedTensor)
        start, end, _ = elements.indices(tensor.size.numel())
        num_bytes = (end - start) * tensor.dtype.itemsize
        tensors.append(PackedTensor(tensor.name, offset, num_bytes, torch.Size([end - start]), (1,), tensor.dtype))
        offset += aligned(num_bytes)
    return tuple(tensors)


def part_of(layout: Layout, elements: slice) -> Layout:
    """Return the layout of a window's states: one behind the other in a slot, a range of each whole state in host memory."""
    span = layout.span
    assert span is not None
    tensors, ranges = tensors_of_part(layout.tensors[0], elements), []
    for tensor, part in zip(map(local_packed, layout.tensors[0]), tensors, strict=True):
        assert isinstance(tensor, PackedTensor)
        begin = tensor.offset + elements.start * tensor.dtype.itemsize
        ranges.append(span.whole[begin : begin + aligned(part.num_bytes)])
    host = {part.name: local_of(layout.host[0][part.name]).view(-1)[elements] for part in tensors}
    span = replace(span, num_bytes=sum(map(len, ranges)), pieces=tuple(ranges), ranges=(), whole=None)
    return Layout(span, (tensors,), (host,))


class Window(Piece):
    def __init__(self, plan: StatePiece, whole: CutPiece, start: int, flat: Tensor) -> None:
        self._whole = whole
        self._left: Event | None = None
        self.elements = slice(start, start + plan.numel)
        (record,) = whole.records
        self.view = flat[self.elements]
        self._counts: dict[Any, Tensor] = {}
        stand_in = stand_in_of(record, self.view)
        super().__init__(plan, [StateRecord(record.name, stand_in, has_master=record.has_master)])

    @property
    def left(self) -> Event | None:
        return self._left

    @left.setter
    def left(self, done: Event | None) -> None:
        self._left = self._whole.left = done

    @property
    def whole(self) -> CutPiece:
        return self._whole

    @property
    def is_last(self) -> bool:
        return self is self._whole.windows[-1]

    def await_turn(self) -> None:
        number = self._whole.windows.index(self)
        if number and not self._whole.windows[number - 1].is_stepped:
            raise StateOffloadError(f"a part of {self.names} that comes first was not stepped")

    @property
    def may_come_early(self) -> bool:
        return self.layout is not None and self._whole.layout is self._whole.seen

    @property
    def parameter(self) -> Tensor:
        return self.records[0].parameter

    def own(self, name: Any, value: Any) -> Any:
        """Return its own copy of a state without dimensions (a count), which this window steps; a plain one is reused."""
        known = self._counts.get(name)
        if known is not None and is_number_on_host(value) and known.dtype == value.dtype:
            return known.copy_(value)
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        made = self._counts[name] = value.detach().clone()
        return made

    def follow(self, flat: Tensor) -> None:
        self.view = self.parameter.data = flat[self.elements]

    def leave(self) -> None:
        self.view = self.parameter.data = self.view.new_empty(0)

    def let_gradients_go(self) -> None:
        self.parameter.grad = None

    def put_parameters(self) -> None:
        if self.parameter.data_ptr() != self.view.data_ptr():
            self.view.copy_(self.parameter)
            self.parameter.data = self.view

    def states_in(self, optimizer: torch.optim.Optimizer) -> MutableMapping[Any, Any]:
        return self._whole.states

    def may_lie_as_before(self) -> bool:
        return self is self._whole.windows[0] or self._whole.coming is self._whole.layout

    def lay_out(self, place: HostStates | DiskStates, tensors: PackedRows, num_bytes: int) -> Layout | None:
        return self._whole.lay_out_window(self, place, tensors, num_bytes)

    def marks(self, optimizer: torch.optim.Optimizer, layout: Layout | None) -> list[partial[None]]:
        return [partial(setattr, self, "layout", layout), *self._whole.marks_behind(self, optimizer)]

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        super().enter(optimizer)
        self.let_gradients_go()
        if self.is_last:
            self._whole.enter(optimizer)


class CutPiece(Piece):
    """A large parameter, stepped window by window if its elements, and its states', lie side by side in order."""

    def __init__(self, plan: StatePiece, records: list[StateRecord]) -> None:
        super().__init__(plan, records)
        self.windows: list[Window] = []
        self.states: dict[Any, Any] = defaultdict(dict)
        self.coming: Layout | None = None
        self.seen: Layout | None = None
        self._numbers: dict[Any, Any] = {}
        self._address = _NOWHERE

    @property
    def may_come_early(self) -> bool:
        return False  # it may come in windows

    @property
    def parts(self) -> Sequence[Piece]:
        return self.windows if self._is_cut else (self,)

    @property
    def alternatives(self) -> Sequence[Piece]:
        return self.windows

    def prepare(self, state: Mapping[Any, Any]) -> None:
        (record,) = self.records
        parameter, grad = local_of(record.parameter), record.parameter.grad
        entries = state.get(record.parameter) or {}
        assert grad is not None
        self._is_cut = self._is_in_windows(parameter, entries)
        super().prepare(state)
        if not self._is_cut:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._follow(parameter)
            flat = local_of(grad).detach().reshape(-1)
            self.coming = self.layout
            for window in self.windows:
                own = window.records[0]
                own.group, own.position = record.group, record.position
                own.parameter.grad = flat[window.elements]
                follow_attributes(own.parameter, record.parameter)
                window.due = [own]
                host = window.layout.host[0] if window.layout is not None else {}
                known = {name: host.get(name, value) for name, value in entries.items()}
                if not window.is_last:
                    known.update({name: window.own(name, value) for name, value in entries.items() if name not in host})
                if known:
                    self.states[own.parameter] = known
                else:
                    self.states.pop(own.parameter, None)

    def forget_loss(self) -> None:
        if self.lost is not None:
            self.seen = Layout(None, (), ())  # no layout that was loaded: the windows' own are of a step that was broken off
        super().forget_loss()

    def _may_be_cut(self, parameter: Tensor) -> bool:
        is_dense = parameter.layout is torch.strided and parameter.is_contiguous()
        return is_dense and parameter.numel() == self.plan.numel

    def _is_in_windows(self, parameter: Tensor, entries: Mapping[Any, Any]) -> bool:
        if not self._may_be_cut(parameter):
            return False
        tensors = self.layout.tensors[0] if self.layout is not None else ()
        if (self.seen is not self.layout or not self.windows) and not lie_like(parameter, tensors):
            return False
        return _are_all(entries, tensors)

    # On a disk, its windows lie one by one; or all of it, where it is stepped as a whole.

    @property
    def stored(self) -> Sequence[Piece]:
        return self.windows if self.layout is not None and self.layout.copy is None else (self,)

    @property
    def copies(self) -> Sequence[DiskCopy]:
        return super().copies or [copy for window in self.windows for copy in window.copies]

    def lies_as_it_goes(self, entries: Mapping[Any, Any]) -> bool:
        (record,) = self.records
        return self.layout is None or (self.layout.copy is None) == self._is_in_windows(local_of(record.parameter), entries)

    def cut(
        self, tensors: PackedRows, num_bytes: int, rows: Rows, entries: Mapping[Any, Any]
    ) -> Sequence[tuple[Piece, PackedRows, int, Rows]]:
        (record,), (row,), (values,) = self.records, tensors, rows
        parameter = local_of(record.parameter)
        if not self._may_be_cut(parameter) or not lie_like(parameter, row) or not _are_all(entries, row):
            return super().cut(tensors, num_bytes, rows, entries)
        with torch.inference_mode(False), torch.no_grad():
            self._follow(parameter)
        self.seen = None  # until `note_put`: where that is not reached, chunks of windows are forgotten
        found: list[tuple[Piece, PackedRows, int, Rows]] = []
        for window in self.windows:
            part = tensors_of_part(row, window.elements)
            own = {name: local_of(value).detach().view(-1)[window.elements] for name, value in values.items()}
            found.append((window, (part,), sum(aligned(tensor.num_bytes) for tensor in part), [own]))
        return found

    def note_put(self, tensors: PackedRows) -> None:
        layout = Layout(None, tensors, stand_ins_for(self, tensors))
        self.layout = self.seen = layout

    def empty_rows(self) -> list[dict[str, Tensor]]:
        if self.stored[0] is self:
            return super().empty_rows()
        assert self.layout is not None
        (record,) = self.records
        row = [tensor for tensor in map(local_packed, self.layout.tensors[0]) if isinstance(tensor, PackedTensor)]
        made = {one.name: torch.empty_strided(one.size, one.stride, dtype=one.dtype) for one in row}
        return [{name: shard_like(record.parameter, local) for name, local in made.items()}]

    def fill(self, rows: list[dict[str, Tensor]], part: Piece, found: Rows) -> None:
        if not isinstance(part, Window):
            super().fill(rows, part, found)
            return
        for name, value in rows[0].items():
            local_of(value).view(-1)[part.elements].copy_(found[0][name])

    def _follow(self, parameter: Tensor) -> None:
        flat = parameter.detach().view(-1)
        if not self.windows:
            start = 0
            for plan in self.plan.windows:
                self.windows.append(Window(plan, self, start, flat))
                start += plan.numel
        elif self._address != parameter.data_ptr():
            for window in self.windows:
                window.follow(flat)
        self._address = parameter.data_ptr()
        if self.seen is not self.layout:
            for window in self.windows:
                is_apart = self.layout is None or self.plan.is_on_disk
                window.layout = None if is_apart or self.layout is None else part_of(self.layout, window.elements)
            self.seen = self.layout

    def lay_out_window(
        self, window: Window, place: HostStates | DiskStates, tensors: PackedRows, num_bytes: int
    ) -> Layout | None:
        """Return where states of a window are: in host memory among the others', on a disk by themselves."""
        (record,), (row,) = self.records, tensors
        if window is self.windows[0]:
            dtypes = {one.name: self._dtype(one, window) for one in row}
            size = local_of(record.parameter).size()
            made = {name: torch.empty(size, dtype=dtype, device="meta") for name, dtype in dtypes.items()}
            whole = {name: shard_like(record.parameter, local) for name, local in made.items()}
            planned, whole_bytes = pack([whole])
            if not whole_bytes:
                self.coming = None
            elif self.plan.is_on_disk:
                self.coming = Layout(None, planned, stand_ins_for(self, planned))
            else:  # windows that are yet to come have their states where these are
                self.coming = place.layout_of(self, planned, whole_bytes, is_apart=self.layout is not None)
        expected = ((),) if self.coming is None else (tensors_of_part(self.coming.tensors[0], window.elements),)
        if expected != tensors:
            raise self._not_elementwise()
        if self.coming is None:
            return None
        return place.layout_of(window, tensors, num_bytes) if self.plan.is_on_disk else part_of(self.coming, window.elements)

    def _dtype(self, packed: Packed, window: Window) -> torch.dtype:
        if not isinstance(packed, PackedTensor) or packed.size != window.parameter.size():
            raise self._not_elementwise()
        return packed.dtype

    def marks_behind(self, window: Window, optimizer: torch.optim.Optimizer) -> list[partial[None]]:
        numbers = {name: value for _, made in window.entered for name, value in made.items() if is_number(value)}
        if window is self.windows[0]:
            self._numbers = numbers
        known = self._numbers
        if numbers.keys() != known.keys() or not all(are_same_number(value, known[name]) for name, value in numbers.items()):
            raise self._not_elementwise()
        if not window.is_last:
            return [partial(setattr, window, "is_stepped", True)]
        (record,) = self.records
        made = dict(window.entered[0][1]) if window.entered else {}
        entered = self.new_entries(optimizer.state, self.coming, [(record, made)])
        marks = [partial(setattr, record, "done", mark_of(record)), partial(setattr, self, "entered", entered)]
        marks += [partial(setattr, self, "layout", self.coming), partial(setattr, self, "seen", self.coming)]
        return marks + [partial(setattr, other, "is_stepped", False) for other in self.windows]

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        super().enter(optimizer)
        note_written(self.records[0].parameter)

    def leave_parameters(self) -> None:
        if self._address == _NOWHERE:
            return
        self._address = _NOWHERE
        with torch.inference_mode(False), torch.no_grad():
            for window in self.windows:
                window.leave()

    def forget_step(self) -> None:
        for window in self.windows:
            window.is_stepped = False
            window.let_gradients_go()

    def _not_elementwise(self) -> StateOffloadError:
        return StateOffloadError(
            f"StateOffload steps {self.names}, a large parameter, in windows, and its optimizer keeps other states for one of "
            "them than for the others: it steps each element by itself no more. Use one that does, or none that changes"
        )

    def let_go(self) -> None:
        super().let_go()
        self.states.clear()
        self.coming = self.seen = None
        self._is_cut = False
        self.windows = []  # they hold views of states


def _are_all(entries: Mapping[Any, Any], tensors: Sequence[Packed]) -> bool:
    return sum(map(is_number, entries.values())) + len(tensors) == len(entries)
