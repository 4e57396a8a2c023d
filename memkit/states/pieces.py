"""The states of some parameters, which move together: where they are, in host memory and in a slot on the device."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.plan import StatePiece
from memkit.states.packing import Packed
from memkit.transfer.lanes import Transfer
from memkit.transfer.spans import Span

MASTER = "master"
"""The name in `optimizer.state[parameter]` of a parameter's float32 copy."""


class Residency(enum.Enum):
    """Where the bytes of a piece are that count.

    HOST: in host memory alone. IN_FLIGHT: there, and on their way to a slot. STEPPING: in host memory; in the slot, and in the
    parameters, a step may have written half of it, and the parameters as they were are kept. DIRTY: in the slot, stepped, and
    on their way to host memory. DEVICE: they stay there.
    """

    HOST = enum.auto()
    IN_FLIGHT = enum.auto()
    STEPPING = enum.auto()
    DIRTY = enum.auto()
    DEVICE = enum.auto()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the states of a piece are, record by record, once there are any.

    Attributes:
        span: the host memory, of just their bytes.
        tensors: how they lie in it.
        host: the tensors there, by name, which is what `optimizer.state` has.
    """

    span: Span
    tensors: tuple[tuple[Packed, ...], ...]
    host: tuple[dict[str, Tensor], ...]


class StateRecord:
    """What is known of one parameter.

    Args:
        name: what to call it.
        parameter: the user's.
        has_master: whether a copy of higher precision is stepped in its place.
    """

    __slots__ = ("done", "group", "has_master", "name", "numbers", "parameter", "position", "undo")

    def __init__(self, name: str, parameter: Tensor, *, has_master: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.has_master = has_master
        self.group = self.position = -1
        """Where the optimizer has it: which group, and which parameter there; -1 where it has it no more."""
        self.undo: Tensor | None = None
        """The parameter as it was, while it is stepped."""
        self.numbers: list[tuple[Tensor, Tensor]] = []
        """States that do not leave, each with what it was before the step."""
        self.done: tuple[weakref.ref[Tensor], int] | None = None
        """With which gradient it was stepped in a step that was broken off."""

    def is_done(self) -> bool:
        """Tell whether a step that was broken off has stepped it with the gradient that it has now."""
        grad = self.parameter.grad
        if self.done is None or grad is None:
            return False
        ref, version = self.done
        return ref() is grad and version == torch_private.version_of(grad)


class Piece:
    """Parameters whose states move together.

    Args:
        plan: what was planned of it.
        records: one for each parameter.
    """

    def __init__(self, plan: StatePiece, records: list[StateRecord]) -> None:
        self.plan = plan
        self.records = records
        self.residency = self.rest
        self.room: Span | None = None
        """Host memory that was set aside ahead."""
        self.layout: Layout | None = None
        self.left: Transfer | None = None
        """The last copy to host memory."""
        self.views: list[dict[str, Tensor]] = []
        """The states of each record in the slot."""
        self.stand_ins: list[nn.Parameter | None] = []
        """What is stepped in a slot instead of each record's parameter."""
        self._bound: tuple[torch.UntypedStorage, Layout] | None = None
        """In which slot, and how, the views lie."""
        self.due: list[StateRecord] = []
        """Which records the step that is under way steps."""
        self.entered: list[tuple[Tensor, dict[Any, Any]]] = []
        """What a step that is done has yet to put into `optimizer.state`: of a parameter, its new entries."""

    @property
    def rest(self) -> Residency:
        """Where the states are between steps."""
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

    def note_entries(
        self, state: Mapping[Any, Any], layout: Layout | None, made: Iterable[tuple[StateRecord, dict[Any, Any]]]
    ) -> None:
        """Note what is to be put into `optimizer.state`: what a step has made, with tensors in host memory. Where these lie
        otherwise than before, the states of what was not due are among them.

        Args:
            state: what `optimizer.state` has.
            layout: where the states are from now on.
            made: what was stepped, with its new entries.
        """
        index_of = {id(record): index for index, record in enumerate(self.records)}
        entered: list[tuple[Tensor, dict[Any, Any]]] = []
        stepped = set()
        for record, entries in made:
            stepped.add(id(record))
            if entries or state.get(record.parameter):
                host = layout.host[index_of[id(record)]] if layout is not None else {}
                entered.append((record.parameter, {name: host.get(name, value) for name, value in entries.items()}))
        if layout is not self.layout and layout is not None:
            for record, host in zip(self.records, layout.host, strict=True):
                if id(record) not in stepped and host:
                    entered.append((record.parameter, {**state[record.parameter], **host}))
        self.entered = entered

    def enter(self, state: MutableMapping[Any, Any]) -> None:
        """Put into `optimizer.state` what a step has made. Calling it again does what was broken off."""
        while self.entered:
            parameter, made = self.entered[-1]
            entries = state[parameter]
            for name in [name for name in entries if name not in made]:
                del entries[name]
            entries.update(made)
            self.entered.pop()

    def let_go(self) -> None:
        """Hold nothing of a slot any more."""
        self.views, self.stand_ins, self._bound = [], [], None


def stand_in_of(record: StateRecord, master: Tensor) -> nn.Parameter:
    """Return a parameter over a copy of higher precision, with what Python has put on the one that it stands for."""
    stand_in = nn.Parameter(master, requires_grad=record.parameter.requires_grad)
    vars(stand_in).update(vars(record.parameter))
    return stand_in


def mark_of(record: StateRecord) -> tuple[weakref.ref[Tensor], int] | None:
    """Return what tells the gradient of a parameter, as it is now, from others."""
    grad = record.parameter.grad
    return None if grad is None else (weakref.ref(grad), torch_private.version_of(grad))
