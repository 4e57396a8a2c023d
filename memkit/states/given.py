"""What the optimizer's step of a piece is given on the host, and what it has made of that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.states.masters import follow
from memkit.states.packing import MASTER, may_leave
from memkit.states.pieces import Layout, follow_attributes
from memkit.states.records import StateRecord
from memkit.states.shards import are_one, shard_like
from memkit.torch_state import local_of

if TYPE_CHECKING:
    from memkit.states.host_routes import Route

Entries = dict[Any, Any]


class Given:
    """What the optimizer steps on the host instead of the user's parameters: stand-ins with their states, in host memory.

    [Note: a steady step on the host] While the thread that steps runs Python, the cores have nothing to do. So whatever a step
    has in common with the one before is looked up once. That is so where `optimizer.state` has the very tensors that it had,
    and they lie where the last step has left them: then which of them are numbers, where float32 copies are, and that nothing
    has to be laid out anew, is known.

    Args:
        due: what is stepped.
        route: where gradients come from and parameters go to.
    """

    def __init__(self, due: Iterable[StateRecord], route: Route) -> None:
        self._due = list(due)
        self._route = route
        self.keys = route.stand_ins
        """The stand-ins: float32 copies, or copies of parameters that have none."""
        self.state: dict[Any, Entries] = defaultdict(dict)
        """The `state` of the optimizer during the step."""
        self.rows: list[Entries] = [{} for _ in self._due]
        """The entries of `optimizer.state` for each parameter, as they were when they were last looked up."""
        self._given: list[Entries] = []
        """The same without float32 copies."""
        self._layout: Layout | None = None
        self._masters: list[Tensor | None] = []
        """The float32 copy of each parameter; of a shard, this rank's part."""
        self._numbers: list[tuple[Tensor, Tensor]] = []
        """States that are not copied (counts of steps), each with its value before the step."""
        self._is_at_home = False
        """Whether all other states are where the layout says."""
        self.has_copies = False
        """Whether there is a float32 copy of each parameter that is to have one."""

    def take(self, layout: Layout | None, known: Mapping[Any, Any]) -> None:
        """Point the stand-ins at float32 copies, gradients and states. Parameters are still being copied: see `follow`.

        Args:
            layout: where the states are.
            known: what `optimizer.state` has.
        """
        rows = [dict(known.get(record.parameter) or ()) for record in self._due]
        if layout is not None and layout is self._layout and all(map(_are_same, rows, self.rows)):
            for value, before in self._numbers:
                before.copy_(value)
        else:
            self._look_up(layout, rows)
        self.state = defaultdict(dict)
        grads = self._route.on_host.grads
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
        self._layout = None  # until all is: an interrupt may come in between
        masters = [row.get(MASTER) if record.has_master else None for record, row in zip(self._due, rows, strict=True)]
        self._masters = [None if master is None else local_of(master) for master in masters]
        copies = zip(self._due, self._masters, strict=True)
        self.has_copies = all(master is not None or not record.has_master for record, master in copies)
        values = [value for row in rows for value in row.values() if isinstance(value, Tensor) and not may_leave(value)]
        self._numbers = [(value, value.clone()) for value in values]
        hosts = self._route.rows_of(layout)
        self._is_at_home = hosts is not None and all(map(_is_at_home, rows, hosts))
        self._given = [
            {name: value for name, value in row.items() if not record.has_master or name != MASTER}
            for record, row in zip(self._due, rows, strict=True)
        ]
        self.rows, self._layout = rows, layout

    def follow(self, *, is_unwritten: bool) -> None:
        """Have float32 copies take over what others wrote to the parameters, once these are here if they are needed.

        Args:
            is_unwritten: whether the copies are what the parameters were rounded from.
        """
        on_host = self._route.on_host
        for number, (record, key, master) in enumerate(zip(self._due, self.keys, self._masters, strict=True)):
            if record.has_master and master is None:
                key.data = on_host.parameters[number].to(torch.float32)
                key.grad = on_host.grads[number]
            elif master is not None and not is_unwritten:
                follow(key.data, on_host.parameters[number])  # by which no write counts: others tell users' by that

    def is_written_in_place(self) -> bool:
        """Tell whether a step wrote its results in place, to states that are where the layout says: `rows` are the results
        then."""
        return self._is_at_home and all(map(self._is_in_place, range(len(self.keys))))

    def _is_in_place(self, number: int) -> bool:
        key, master = self.keys[number], self._masters[number]
        place = self._route.on_host.parameters[number] if master is None else master
        return key.data_ptr() == place.data_ptr() and _are_same(self.state.get(key, {}), self._given[number])

    def made(self) -> list[Entries]:
        """Return the states after the step, float32 copies among them. A parameter without one is in host memory, to be
        copied."""
        found = []
        for number, (record, key) in enumerate(zip(self._due, self.keys, strict=True)):
            entries = dict(self.state[key]) if key in self.state else {}
            view = self._route.on_host.parameters[number]
            if record.has_master:
                entries[MASTER] = shard_like(record.parameter, key.data)
            elif key.data_ptr() != view.data_ptr():  # the class has put another tensor there
                view.copy_(key)
                key.data = view
            found.append(entries)
        return found

    def put_numbers_back(self) -> None:
        """Restore the states that are not copied, after a step that has failed."""
        for value, before in self._numbers:
            value.copy_(before)

    def let_go(self, *, is_steady: bool) -> None:
        """Drop references to gradients.

        Args:
            is_steady: whether states are where they were. Otherwise references to them are dropped as well.
        """
        for key in self.keys:
            key.grad = None
        self.state = defaultdict(dict)
        if not is_steady:
            self.rows, self._layout, self._masters, self._numbers, self._given = [], None, [], [], []


def _are_same(one: Entries, other: Entries) -> bool:
    """Tell whether two dicts have the same keys in the same order, and identical (`is`) values."""
    return len(one) == len(other) and all(map(is_, one.values(), other.values())) and [*one] == [*other]


def _is_at_home(row: Entries, host: Mapping[str, Any]) -> bool:
    """Tell whether those states of a row that are copied are the tensors of a layout."""
    leaving = {name: value for name, value in row.items() if may_leave(value)}
    return lie_as(leaving, host)


def lie_as(leaving: Mapping[Any, Any], host: Mapping[str, Any]) -> bool:
    """Tell whether states are those that a layout has."""
    return leaving.keys() == host.keys() and all(
        value is host[name] or (name == MASTER and are_one(value, host[name])) for name, value in leaving.items()
    )
