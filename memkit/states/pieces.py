"""`Piece`: parameters whose states are copied and stepped together, where these are, and a record of each parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol

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
from memkit.states.packing import MASTER, OnDisk, Packed, PackedTensor, local_packed, may_leave, moved_state
from memkit.transfer.disk import DiskCopy
from memkit.transfer.host_memory import Span


class StateRecord:
    def __init__(self, name: str, parameter: Tensor, *, has_master: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.has_master = has_master
        self.is_shard = is_dtensor(parameter)
        """Whether it is a `DTensor`, whose local tensor is stepped: see `memkit.states.shards`."""
        self.index = 0
        self.group = self.position = -1
        """The number of its group, and its position there; -1 once the optimizer does not have it any more."""
        self.undo: Tensor | None = None
        self.numbers: list[tuple[Tensor, Tensor]] = []
        self.done: tuple[weakref.ref[Tensor], int] | None = None
        """The gradient of its last step, with its version: see `mark_of`."""
        self.spoiled: tuple[weakref.ref[Tensor], int] | None = None
        """A gradient written to by a step that was undone, as a fused step unscales it."""

    def is_due(self) -> bool:
        grad = self.parameter.grad
        return grad is not None and self.group >= 0 and type(grad) is not ConsumedGradient

    def is_done(self) -> bool:
        """Tell whether a broken-off step has stepped it with its present gradient."""
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
    """Return a tensor's version. A `DTensor` and its local tensor count apart: the sum of both."""
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


Rows = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a piece's states are: packed `tensors` in a host `span`, or the chunk `copy` on a disk; `host`: their entries."""

    span: Span | None
    tensors: tuple[tuple[Packed, ...], ...]
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


class Place(Protocol):
    def layout_of(
        self, piece: Piece, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int, *, is_apart: bool = False
    ) -> Layout:
        """Return where states of a piece are from now on, with room for them."""


class Piece:
    """Parameters whose states are copied and stepped together. See also `memkit.states.windows`."""

    is_stepped = False
    """Whether a step has stepped it, and not all of `whole` yet."""

    def __init__(self, plan: StatePiece, records: list[StateRecord]) -> None:
        self.plan = plan
        self.records = records
        for index, record in enumerate(records):
            record.index = index
        self._is_cut = False
        """Whether the step under way, or the last one, steps it window by window."""
        self.slot = plan.slot
        """The number of its slot on the device; -1 if it needs none."""
        self.residency = self.rest
        self.room: Span | None = None
        self.layout: Layout | None = None
        self.left: Event | None = None
        self.views: list[dict[str, Tensor]] = []
        self.stand_ins: list[nn.Parameter | None] = []
        """For each record, the float32 copy in the slot that is stepped instead of the parameter, as a parameter; or None."""
        self._bound: tuple[torch.UntypedStorage, Layout] | None = None
        """The slot's storage and the layout that `views` were made for."""
        self._cut_bytes: tuple[torch.UntypedStorage, Span, Sequence[Tensor]] | None = None
        """A slot's storage, a span, and the bytes of the slot split like the pieces of the span."""
        self.due: list[StateRecord] = []
        self._versions: list[int] = []
        self.lost: str | None = None
        """Why it can't be stepped or saved any more: a step left it, or its states, half written. Loading ends that."""
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
        """Return a slot's first bytes, split like the pieces of a span; kept for later steps if that is the piece's own."""
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
        """The units with a place on the disk each: its windows, or the piece itself."""
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
        """Return the due records whose gradient the step may have written to or dropped. Fused unscaling changes no version."""
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
            if (
                record.spoiled is not None
                and record.spoiled[0]() is grad
                and record.spoiled[1] == torch_private.version_of(grad)
            ):
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

    def lay_out(self, place: Place, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int) -> Layout | None:
        return place.layout_of(self, tensors, num_bytes) if num_bytes else None

    def lies_as_it_goes(self, entries: Mapping[Any, Any]) -> bool:
        return True

    def cut(
        self, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int, rows: Rows, entries: Mapping[Any, Any]
    ) -> Sequence[tuple[Piece, tuple[tuple[Packed, ...], ...], int, Rows]]:
        """Cut states into units for the disk. Return for each: the unit, its packed tensors, their bytes, and the states."""
        return [(self, tensors, num_bytes, rows)]

    def note_put(self, tensors: tuple[tuple[Packed, ...], ...]) -> None:
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
