"""The parameters that an optimizer has now, and the pieces that they are in."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memkit.core.forks import forked
from memkit.core.torch_state import local_of
from memkit.errors import StateOffloadError
from memkit.optimizers import KeptState, needs_master
from memkit.plan import ParameterCosts, StatePlan
from memkit.plan.states import aligned, is_large
from memkit.states.packing import MASTER, bytes_of, may_leave
from memkit.states.pieces import Piece, StateRecord, piece_of
from memkit.states.trial import find_elementwise, refuse_mixed_shards, try_out


class Members:
    def __init__(self, optimizer: torch.optim.Optimizer, *, master: torch.dtype | None, torch_device: torch.device) -> None:
        self._optimizer, self._master, self._torch_device = optimizer, master, torch_device
        self._process = os.getpid()
        self._replaced: Any = None
        self.kept: dict[int, list[KeptState]] = {}
        self.draws = False
        """Whether steps draw random numbers, so that parameters must be stepped in the order of the groups."""
        self._known: list[list[int]] = []
        self.pieces: list[Piece] = []

    def try_out(self) -> None:
        self.kept, self.draws = try_out(self._optimizer, torch_device=self._torch_device, master=self._master)
        refuse_mixed_shards(self._optimizer, torch_device=self._torch_device, master=self._master)

    def costs(self) -> list[ParameterCosts]:
        costs = {record: self._cost(record) for record in self.records()}
        large = defaultdict[int, list[StateRecord]](list)
        for record, cost in costs.items():
            if is_large(cost) and local_of(record.parameter).is_contiguous():
                large[record.group].append(record)
        groups = [
            {**self._optimizer.param_groups[number], "params": [record.parameter for record in records]}
            for number, records in large.items()
        ]
        found = find_elementwise(self._optimizer, groups, torch_device=self._torch_device, master=self._master)
        for records, is_elementwise in zip(large.values(), found, strict=True):
            costs.update({record: replace(costs[record], is_elementwise=is_elementwise) for record in records})
        return list(costs.values())

    def _cost(self, record: StateRecord) -> ParameterCosts:
        parameter = local_of(record.parameter)
        entries = self._optimizer.state.get(record.parameter) or {}
        sizes = [bytes_of(value) for value in entries.values() if may_leave(value)]
        if not sizes:
            sizes = [state.num_bytes for state in self.kept[id(record.parameter)] if not state.is_number]
        if record.has_master and MASTER not in entries:
            sizes.append(4 * parameter.numel())
        return ParameterCosts(
            name=record.name,
            numel=parameter.numel(),
            parameter_bytes=aligned(parameter.nbytes),
            state_bytes=sum(map(aligned, sizes)),
            has_master=record.has_master,
        )

    def records(self) -> Iterator[StateRecord]:
        master = self._master
        for number, group in enumerate(self._optimizer.param_groups):
            names = group.get("param_names") or []
            if len(names) != len(group["params"]):
                names = [f"parameter {number}.{index}" for index in range(len(group["params"]))]
            for position, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
                record = StateRecord(name, parameter, has_master=master is not None and needs_master(parameter, master))
                record.group, record.position = number, position
                yield record

    def add(self, plan: StatePlan, records: list[StateRecord]) -> list[Piece]:
        added = [piece_of(planned, [records[index] for index in planned.parameters]) for planned in plan.pieces]
        self.pieces = [*self.pieces, *added]
        return added

    def refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise forked("StateOffload")

    def refuse_use(self) -> None:
        self.refuse_fork()
        if self.is_half_loaded:
            raise StateOffloadError(f"{HALF_LOADED}. Load the optimizer and the model again")
        self._replaced = None

    @property
    def is_half_loaded(self) -> bool:
        return self._replaced is not None and self._replaced is not self._optimizer.state

    def begin_loading(self) -> None:
        """Until `end_loading`, the states are not the old ones once torch has put others in their place."""
        if not self.is_half_loaded:
            self._replaced = self._optimizer.state

    def end_loading(self) -> None:
        self._replaced = None

    def have_changed(self) -> bool:
        if os.getpid() != self._process or self._replaced is not None:
            self.refuse_use()
        return [[*map(id, group["params"])] for group in self._optimizer.param_groups] != self._known

    def are_as_many(self) -> bool:
        return list(map(len, self._known)) == [len(group["params"]) for group in self._optimizer.param_groups]

    def place(self) -> None:
        groups = self._optimizer.param_groups
        places: dict[int, tuple[int, int]] = {
            id(parameter): (number, position)
            for number, group in enumerate(groups)
            for position, parameter in enumerate(group["params"])
        }
        for piece in self.pieces:
            for record in piece.records:
                record.group, record.position = places.get(id(record.parameter), (-1, -1))
        self._known = [[*map(id, group["params"])] for group in groups]

    def find_due(self, *, leaves_done: bool) -> list[Piece]:
        found = []
        for piece in self.pieces:
            piece.due = [record for record in piece.records if record.is_due() and not (leaves_done and record.is_done())]
            if piece.due:
                found.append(piece)
        return found


HALF_LOADED = "optimizer.load_state_dict() was interrupted: some parameters have loaded states, others none"


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
