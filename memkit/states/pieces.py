"""The states of some parameters, which move together: where they are, in host memory and in a slot on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memkit.device.base import Event
from memkit.errors import StateOffloadError
from memkit.owners import owner_of
from memkit.plan import StatePiece, Update, aligned
from memkit.plan.chunks import Residency
from memkit.states.packing import MASTER, OnDisk, Packed, PackedTensor, local_packed, may_leave, moved_state
from memkit.states.records import StateRecord, mark_of
from memkit.storages import byte_view
from memkit.transfer.disk_store import DiskCopy
from memkit.transfer.spans import Span

Rows = Sequence[Mapping[str, Tensor]]
"""The states of a piece, record by record."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the states of a piece are, record by record, once there are any.

    Attributes:
        span: the host memory, of just their bytes; None if they are on a disk.
        tensors: how they lie in it.
        host: the tensors there, by name, which is what `optimizer.state` has; if they are on a disk, `OnDisk` for each.
        copy: what they are on the disk; None in host memory, and for a parameter whose windows are there one by one.
    """

    span: Span | None
    tensors: tuple[tuple[Packed, ...], ...]
    host: tuple[dict[str, Any], ...]
    copy: DiskCopy | None = None

    def is_in_place(self, index: int) -> bool:
        """Tell whether the states of a record in host memory have their bytes there yet: `data` may have been set."""
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
        """Return the host memory of all float32 copies, which lie ahead of all else; None if there are none."""
        found = [one for row in self.tensors for one in map(local_packed, row) if one.name == MASTER]
        ends = [one.offset + aligned(one.num_bytes) for one in found if isinstance(one, PackedTensor)]
        if not ends or self.span is None:
            return None
        if self.span.whole is not None:
            return self.span.part(0, max(ends))
        first = self.span.pieces[0]  # of a window, each of whose states is a range of others
        return replace(self.span, num_bytes=len(first), pieces=(first,))


class Place(Protocol):
    """Where states are between steps: host memory, or a disk."""

    def layout_of(
        self, piece: Piece, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int, *, is_apart: bool = False
    ) -> Layout:
        """Return where states of a piece are from now on, with room for them.

        Args:
            piece: whose states they are.
            tensors: how they lie.
            num_bytes: of all of them.
            is_apart: whether what is where they have been is needed yet.

        Raises:
            HostMemoryError: there is not as much.
            DiskError: there is not as much.
        """


class Piece:
    """Parameters whose states move together.

    Args:
        plan: what was planned of it.
        records: one for each parameter.
    """

    def __init__(self, plan: StatePiece, records: list[StateRecord]) -> None:
        self.plan = plan
        self.records = records
        for index, record in enumerate(records):
            record.index = index
        self._is_cut = False
        """Whether the step under way, or the last one, is made in windows."""
        self.slot = plan.slot
        """Which slot it comes to; -1 where it needs none."""
        self.residency = self.rest
        self.room: Span | None = None
        """Host memory that was set aside ahead."""
        self.layout: Layout | None = None
        self.left: Event | None = None
        """Behind the last copy to host memory, or from there where states stay in it: nobody may write to them before."""
        self.views: list[dict[str, Tensor]] = []
        """The states of each record in the slot."""
        self.stand_ins: list[nn.Parameter | None] = []
        """What is stepped in a slot instead of each record's parameter."""
        self._bound: tuple[torch.UntypedStorage, Layout] | None = None
        """In which slot, and how, the views lie."""
        self._cut_bytes: tuple[torch.UntypedStorage, Span, Sequence[Tensor]] | None = None
        """The bytes in a slot, cut as those of the span are."""
        self.due: list[StateRecord] = []
        """Which records the step that is under way steps."""
        self.entered: list[tuple[Tensor, dict[Any, Any]]] = []
        """What a step that is done has yet to put into `optimizer.state`: of a parameter, its new entries."""

    @property
    def rest(self) -> Residency:
        """Where the states are between steps."""
        if self.plan.is_on_disk:
            return Residency.DISK
        return Residency.DEVICE if self.plan.is_resident else Residency.HOST

    @property
    def names(self) -> str:
        first, last = self.records[0].name, self.records[-1].name
        return first if first == last else f"{first} to {last}"

    def bind(self, storage: torch.UntypedStorage) -> None:
        """Have the views lie in a slot."""
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
        """Return the bytes in a slot of what is in a span, cut as these are: where the span is the piece's own the same ones in
        each step."""
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
        """Return those states of one of its parameters, as `optimizer.state` has them, that do not leave with it."""
        if self.plan.is_resident:
            return [value for value in entries.values() if isinstance(value, Tensor)]
        # those that were put there are known: to ask what a tensor that wraps others is made of takes the host long
        host = self.layout.host[record.index] if self.layout is not None else {}
        others = [value for name, value in entries.items() if value is not host.get(name)]
        return [value for value in others if isinstance(value, Tensor) and not may_leave(value)]

    @property
    def parts(self) -> Sequence[Piece]:
        """What moves at once, and is stepped at once: the piece itself, or windows of it."""
        return (self,)

    @property
    def stored(self) -> Sequence[Piece]:
        """What lies on a disk at once: as `parts`, but between steps."""
        return (self,)

    @property
    def copies(self) -> Sequence[DiskCopy]:
        """What its states are on a disk."""
        return () if self.layout is None or self.layout.copy is None else (self.layout.copy,)

    @property
    def whole(self) -> Piece:
        """What it is a part of: itself, unless it is a window."""
        return self

    @property
    def alternatives(self) -> Sequence[Piece]:
        """What else its elements may be stepped in: what is known of them there is of another step."""
        return () if self.whole is self else (self.whole,)

    @property
    def is_last(self) -> bool:
        """Whether all of `whole` is stepped once it is."""
        return True

    @property
    def may_come_early(self) -> bool:
        """Whether its states may be brought to the slot before it is prepared."""
        return self.layout is not None

    @property
    def is_half_way(self) -> bool:
        """Whether some of its parts are stepped, and others are not."""
        return False

    def remaining(self) -> Sequence[Piece]:
        """Return the parts that are yet to be stepped, of one that is half way.

        Raises:
            StateOffloadError: they can't be any more.
        """
        return ()

    def await_turn(self) -> None:
        """Raise if something of the same parameter comes first that was not stepped."""

    def note_left_half_way(self) -> None:
        """Be half way for as long as the rest can't be stepped: nobody may write to the parameter meanwhile."""

    def give_up(self) -> None:
        """Be half way no more: the rest is not stepped."""

    def prepare(self, state: Mapping[Any, Any]) -> None:
        """A step of what is due begins, with these states of the optimizer. Nothing has moved yet.

        Raises:
            StateOffloadError: a gradient is of another dtype than what stands for its parameter.
        """
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
        """Return what of other streams' memory a step is about to read, gradients first: where the class puts another tensor in
        the place of one, that goes back to its stream at once, while the step may be yet to come. What an owner lends stays."""
        gradients = [record.parameter.grad for record in self.records if record.parameter.grad is not None]
        found = [record.parameter.detach() for record in self.records if owner_of(record.parameter.untyped_storage()) is None]
        state = self.states_in(optimizer)
        for record in self.records:
            entries = state.get(record.parameter)
            if entries:
                found += self.staying(record, entries)
        return gradients + found

    def let_gradients_go(self) -> None:
        """Hold no gradient any more: they were read."""

    def leave_parameters(self) -> None:
        """Hold no part of the bytes that the parameters lie in now: these are another's from now on."""

    def put_parameters(self) -> None:
        """The class has stepped parameters: have the user's be what it has made of those that stand for them."""

    def states_in(self, optimizer: torch.optim.Optimizer) -> MutableMapping[Any, Any]:
        """Return where the states of its parameters are between steps."""
        return optimizer.state

    def may_lie_as_before(self) -> bool:
        """Tell whether states that have not changed may stay where they are."""
        return True

    def lay_out(self, place: Place, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int) -> Layout | None:
        """Return where states are from now on, there as in the slot; None if there are none."""
        return place.layout_of(self, tensors, num_bytes) if num_bytes else None

    def lies_as_it_goes(self, entries: Mapping[Any, Any]) -> bool:
        """Tell whether what lies on a disk at once is what moves at once."""
        return True

    def cut(
        self, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int, rows: Rows, entries: Mapping[Any, Any]
    ) -> Sequence[tuple[Piece, tuple[tuple[Packed, ...], ...], int, Rows]]:
        """Return what of some states is to lie on a disk at once: of which part, how it lies, its bytes, and the states."""
        return [(self, tensors, num_bytes, rows)]

    def note_put(self, tensors: tuple[tuple[Packed, ...], ...]) -> None:
        """All parts of these states were put on a disk."""

    def empty_rows(self) -> list[dict[str, Tensor]]:
        """Return what `fill` fills."""
        return [{} for _ in self.records]

    def fill(self, rows: list[dict[str, Tensor]], part: Piece, found: Rows) -> None:
        """Copy the states of a part, or of all, to those of the piece."""
        for row, values in zip(rows, found, strict=True):
            row.update({name: moved_state(value, torch.device("cpu")) for name, value in values.items()})

    def marks(self, optimizer: torch.optim.Optimizer, layout: Layout | None) -> list[partial[None]]:
        """Return what notes, once called, that what is due was stepped, and where the states are."""
        marks = [partial(setattr, record, "done", mark_of(record)) for record in self.due]
        return marks if self.plan.is_resident else [*marks, partial(setattr, self, "layout", layout)]

    def new_entries(
        self, state: Mapping[Any, Any], layout: Layout | None, made: Iterable[tuple[StateRecord, dict[Any, Any]]]
    ) -> list[tuple[Tensor, dict[Any, Any]]]:
        """Return what is to be put into `optimizer.state`: what a step has made, with tensors in host memory. Where these lie
        otherwise than before, the states of what was not due are among them.

        Args:
            state: what `optimizer.state` has.
            layout: where the states are from now on.
            made: what was stepped, with its new entries.
        """
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

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Put into `optimizer.state` what a step has made. Calling it again does what was broken off."""
        state = self.states_in(optimizer)
        while self.entered:
            parameter, made = self.entered[-1]
            entries = state[parameter]
            for name in [name for name in entries if name not in made]:
                del entries[name]
            entries.update(made)
            self.entered.pop()

    def let_go(self) -> None:
        """Hold nothing of a slot any more."""
        self.views, self.stand_ins, self._bound, self._cut_bytes = [], [], None, None


def stand_in_of(record: StateRecord, master: Tensor) -> nn.Parameter:
    """Return a parameter over a copy of higher precision, with what Python has put on the one that it stands for."""
    stand_in = nn.Parameter(master, requires_grad=record.parameter.requires_grad)
    follow_attributes(stand_in, record.parameter)
    return stand_in


def follow_attributes(stand_in: Tensor, parameter: Tensor) -> None:
    """Have what stands for a parameter have what Python has put on it, as it is now."""
    vars(stand_in).update(vars(parameter))


def stand_ins_for(piece: Piece, tensors: Sequence[Sequence[Packed]]) -> tuple[dict[str, Any], ...]:
    """Return what `optimizer.state` has of states that are on a disk."""
    rows = zip(piece.records, tensors, strict=True)
    return tuple({tensor.name: OnDisk(tensor.name, record.name, record) for tensor in row} for record, row in rows)
