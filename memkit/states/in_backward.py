"""Stepping each parameter within the backward, once its gradient is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit.errors import StateOffloadError
from memkit.hooks import HookSet
from memkit.states.one_step import OneStep
from memkit.states.pieces import Piece, Residency
from memkit.states.stepped import ConsumedGradient

if TYPE_CHECKING:
    from memkit.states.device_steps import DeviceSteps
    from memkit.states.stepping import Stepping

_AHEAD = 2


class BackwardSteps:
    """Steps pieces of one parameter each, as gradients come.

    The next ones are fetched ahead, in the order of the backward before; at first from the last parameter to the first.

    Args:
        optimizer: whose step it is.
        stepping: what becomes of a step that is broken off.
        on_device: steps pieces.
        is_at_home: tells whether `optimizer.state` has what was put there of a piece.
        adopt: takes over what others have put there.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stepping: Stepping,
        on_device: DeviceSteps,
        *,
        is_at_home: Callable[[Piece], bool],
        adopt: Callable[[Piece], None],
    ) -> None:
        self._optimizer = optimizer
        self._is_at_home = is_at_home
        self._adopt = adopt
        self._stepping = stepping
        self._on_device = on_device
        self._pieces: list[Piece] = []
        self._order: list[Piece] = []
        self._places: dict[Piece, int] = {}
        """Which piece comes when in the backward."""
        self._begun: list[Piece] = []
        """Which pieces are on their way to their slots."""
        self._met: dict[Piece, None] = {}
        """Which were stepped since the optimizer's last step, in this order."""
        self._num_accumulating = 0

    def watch(self, pieces: list[Piece], hooks: HookSet) -> None:
        """Have pieces be stepped when their gradients are complete."""
        for piece in pieces:
            (record,) = piece.records
            if record.parameter.requires_grad:
                hooks.add(record.parameter.register_hook(partial(self._before, piece)))
                hooks.add(record.parameter.register_post_accumulate_grad_hook(partial(self._after, piece)))
        self._pieces = [*self._pieces, *pieces]
        self._follow([*reversed(pieces), *self._order])

    def _follow(self, order: list[Piece]) -> None:
        self._order, self._places = order, {piece: place for place, piece in enumerate(order)}

    def _before(self, piece: Piece, _: Tensor) -> None:
        """A gradient comes."""
        (record,) = piece.records
        if type(record.parameter.grad) is ConsumedGradient:
            if piece in self._met:
                raise StateOffloadError(
                    f"{record.name} was stepped within an earlier backward of this step, and another brings it a gradient. To "
                    "accumulate, put `with states.accumulate():` around all backwards but the last one; after a backward that "
                    "has failed, call optimizer.step() first"
                )
            record.parameter.grad = None

    def _after(self, piece: Piece, _: Tensor) -> None:
        """A gradient is complete, unless more are to come."""
        (record,) = piece.records
        if self._num_accumulating or record.group < 0:
            return
        if piece in self._met:
            raise StateOffloadError(f"{record.name} is stepped twice in one step: it is used in backwards inside of a backward")
        stepping = self._stepping
        if stepping.is_broken:
            self._mend()
        run = stepping.unfinished
        if run is None:
            run = stepping.unfinished = OneStep(self._optimizer)
        stepping.is_broken = True
        try:
            piece.due = [record]
            if not self._is_at_home(piece):
                self._drop_ahead()
                self._adopt(piece)
            if piece not in self._begun:
                self._make_room(piece)
                self._begin(piece)
            self._on_device.step(piece, run)
            self._begun.remove(piece)
            self._met[piece] = None
            self._fetch_ahead(piece)
        except BaseException:
            self._mend()
            raise
        stepping.is_broken = False
        record.parameter.grad = ConsumedGradient(record.parameter)

    def _begin(self, piece: Piece) -> None:
        self._begun.append(piece)
        self._on_device.begin(piece)

    def _make_room(self, piece: Piece) -> None:
        """Drop what was fetched to the slot of a piece, and is not needed yet."""
        for other in [other for other in self._begun if not self._on_device.is_free_for(piece)]:
            if other.plan.slot == piece.plan.slot and not other.plan.is_resident:
                self._drop(other)

    def _drop(self, piece: Piece) -> None:
        self._on_device.drop(piece)  # what comes to the slot next does so on the same lane, behind the copy
        self._begun.remove(piece)

    def _drop_ahead(self) -> None:
        for piece in list(self._begun):
            self._drop(piece)

    def _fetch_ahead(self, piece: Piece) -> None:
        order, place = self._order, self._places.get(piece)
        if place is None:
            return
        for other in order[place + 1 : place + 1 + _AHEAD]:
            if other in self._met or other in self._begun or other.layout is None or not self._on_device.is_free_for(other):
                continue
            self._begin(other)

    def end(self) -> list[Piece]:
        """The optimizer's step begins: return which pieces were stepped already. Nothing is on its way any more."""
        self._drop_ahead()
        met = list(self._met)
        if met and met != self._order:
            self._follow(met)
        self._met.clear()
        return met

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Return a context whose backwards step nothing."""
        self._num_accumulating += 1
        try:
            yield
        finally:
            self._num_accumulating -= 1

    def forget_done(self) -> None:
        """The optimizer's step is over: gradients that are still there count again."""
        for piece in self._pieces:
            piece.records[0].done = None

    def _mend(self) -> None:
        self._begun.clear()
        self._stepping.mend(self._pieces)
        for piece in self._pieces:
            (record,) = piece.records
            assert piece.residency is not Residency.STEPPING
            if record.is_done() and piece not in self._met:  # it was stepped, and the rest of the hook was not reached
                self._met[piece] = None
                record.parameter.grad = ConsumedGradient(record.parameter)
