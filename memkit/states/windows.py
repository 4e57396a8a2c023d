"""Large parameters, whose states move in flat windows, each stepped by itself: between steps they are like all others."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memkit.core.torch_state import local_of
from memkit.device.base import Event
from memkit.errors import StateOffloadError
from memkit.plan import StatePiece
from memkit.plan.states import aligned
from memkit.states.packing import Packed, PackedTensor, are_same_number, is_number, is_number_on_host, local_packed, pack
from memkit.states.pieces import (
    Layout,
    Piece,
    Place,
    Rows,
    StateRecord,
    follow_attributes,
    mark_of,
    stand_in_of,
    stand_ins_for,
)
from memkit.states.shards import note_written, shard_like
from memkit.transfer.disk import DiskCopy


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
    assert span.whole is not None
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

    def lay_out(self, place: Place, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int) -> Layout | None:
        return self._whole.lay_out_window(self, place, tensors, num_bytes)

    def marks(self, optimizer: torch.optim.Optimizer, layout: Layout | None) -> list[partial[None]]:
        return [partial(setattr, self, "layout", layout), *self._whole.marks_behind(self, optimizer)]

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        super().enter(optimizer)
        self.let_gradients_go()
        if self.is_last:
            self._whole.enter(optimizer)


class CutPiece(Piece):
    """A large parameter. Its states are in host memory as those of any other piece; in a step, windows of them move.

    If a step fails between two windows, the others are stepped at once, or the parameter is lost. A parameter whose elements,
    or its states', do not lie side by side in order is stepped as a whole, in a slot that grows.
    """

    def __init__(self, plan: StatePiece, records: list[StateRecord]) -> None:
        super().__init__(plan, records)
        self.windows: list[Window] = []
        self.states: dict[Any, Any] = defaultdict(dict)
        self.coming: Layout | None = None
        """The states' layout once all windows are stepped."""
        self.seen: Layout | None = None
        """The layout that the windows' layouts were made from."""
        self._numbers: dict[Any, Any] = {}
        """The first window's states without dimensions in a step: all others' must be equal."""
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
        self, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int, rows: Rows, entries: Mapping[Any, Any]
    ) -> Sequence[tuple[Piece, tuple[tuple[Packed, ...], ...], int, Rows]]:
        (record,), (row,), (values,) = self.records, tensors, rows
        parameter = local_of(record.parameter)
        if not self._may_be_cut(parameter) or not lie_like(parameter, row) or not _are_all(entries, row):
            return super().cut(tensors, num_bytes, rows, entries)
        with torch.inference_mode(False), torch.no_grad():
            self._follow(parameter)
        self.seen = None  # until `note_put`: where that is not reached, chunks of windows are forgotten
        found: list[tuple[Piece, tuple[tuple[Packed, ...], ...], int, Rows]] = []
        for window in self.windows:
            part = tensors_of_part(row, window.elements)
            own = {name: local_of(value).detach().view(-1)[window.elements] for name, value in values.items()}
            found.append((window, (part,), sum(aligned(tensor.num_bytes) for tensor in part), [own]))
        return found

    def note_put(self, tensors: tuple[tuple[Packed, ...], ...]) -> None:
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
        self, window: Window, place: Place, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int
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


_NOWHERE = -1


def _are_all(entries: Mapping[Any, Any], tensors: Sequence[Packed]) -> bool:
    return sum(map(is_number, entries.values())) + len(tensors) == len(entries)


def piece_of(plan: StatePiece, records: list[StateRecord]) -> Piece:
    return CutPiece(plan, records) if len(plan.parts) > 1 else Piece(plan, records)
