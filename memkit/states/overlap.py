"""Stepping beside the next forward: a stream for the steps, and modules that wait for their own parameters only."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.device.base import Device, Event, Stream
from memkit.errors import StateOffloadError, warn_user

if TYPE_CHECKING:
    from memkit.states.one_step import OneStep
    from memkit.states.pieces import Piece
    from memkit.states.stepping import Stepping


class ForwardOverlap:
    """Runs steps on a stream of their own.

    The step lets gradients go: zeroing them would come while they are still being read. They, and all other tensors that a step
    reads, are held here until their memory's stream has waited for the step.

    Pieces are stepped in the order in which the forward before has come to them: a model with a head waits for the head at
    once, since it might read its parameters.

    [Note: all at once] All steps on the device are issued before `step()` returns, though the host launches no forward until
    then. Issued by the hooks of the forward, a piece would be stepped under the forward's modes: autocast, inference mode, a
    transform of `torch.func`, a graph that is captured. It would need its gradient back in `grad`, where another backward's may
    be by then, and draw its random numbers between the forward's. A class's counts in its groups would overwrite what a
    scheduler has set since, and a failure would be raised when nobody can step again. Worst, the link would idle for as long as
    the loop does anything else between the step and the forward. A thread beside the forward has most of these problems too,
    and would share the lanes, the slots and each gradient with it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, *, in_order: bool) -> None:
        self._optimizer = optimizer
        self._device = device
        self._leaving: dict[Piece, None] = {}
        self._stream = device.new_stream("step")
        self._pending: dict[int, Piece] = {}
        """Pieces whose step no other stream has waited for yet, by the id of each parameter."""
        self._stepped: dict[Piece, Event] = {}
        self._read: dict[Piece, list[Tensor]] = {}
        self._held: dict[Piece, list[Tensor]] = {}
        self._marks: dict[Piece, list[tuple[int, int]]] = {}
        """Address and version of each parameter since memkit has last written to it."""
        self._written: str | None = None
        """Parameters that somebody else has written to before any stream waited for their step."""
        self._in_order = in_order
        self._places: dict[Piece, int] = {}
        self._met: dict[Piece, int] = {}
        self._own: Stream | None = None
        """The stream that has begun the step: gradients are in its memory, and it waits for every piece."""
        self._run: OneStep | None = None
        self.stepping: Stepping

    def __del__(self) -> None:
        """Warn if dropped with its optimizer: steps on the host no longer come back."""
        if self._leaving and not sys.is_finalizing():
            names = next(iter(self._leaving)).names
            more = f" and {len(self._leaving) - 1} more pieces" if len(self._leaving) > 1 else ""
            warn_user(
                f"StateOffload was dropped without close() or wait() while what was stepped on the host was yet to come back: "
                f"{names}{more} are as before the last step"
            )

    def run(self, pieces: Sequence[Piece], run: OneStep) -> None:
        self.join()
        if not self._in_order:
            self._places, self._met = {**self._places, **self._met}, {}
            pieces = sorted(pieces, key=lambda piece: self._places.get(piece, len(self._places)))
        self._run = run
        device, stream = self._device, self._stream
        self._own = device.current_stream()
        self._read = {piece: piece.read_by_step(self._optimizer) for piece in pieces}
        read = list(itertools.chain.from_iterable(self._read.values())) if device.takes_notes else []
        for tensor in read:
            device.note_written(tensor.untyped_storage(), torch_private.version_of(tensor))
        device.wait_event(stream, device.record_event(timed=False))
        try:
            with device.on_stream(stream):
                for tensor in read:
                    device.note_read(tensor.untyped_storage())
                self.stepping.run(pieces, run, note_stepped=self._note_stepped, note_left=self._note_left)
        except BaseException:
            self._forget()
            raise
        self._read = {}
        for piece in pieces:
            for record in piece.due:
                record.parameter.grad = None

    def _forget(self) -> None:
        self._leaving.clear()
        self._stepped.clear()
        self._pending.clear()
        self._device.synchronize()
        self._read.clear()
        self._held.clear()
        self._marks.clear()
        self._run = self._written = None

    def _note_left(self, piece: Piece) -> None:
        self._hold(piece)
        for part in piece.parts:
            part.let_gradients_go()
        self._leaving[piece], self._marks[piece] = None, _marks_of(piece)

    def _hold(self, piece: Piece) -> None:
        self._held[piece] = self._read.pop(piece)
        for record in piece.due:
            self._pending[id(record.parameter)] = piece

    def _note_stepped(self, piece: Piece) -> None:
        if piece not in self._held:
            self._hold(piece)
        device = self._device
        if device.takes_notes:
            for record in piece.due:
                parameter = record.parameter
                device.note_written(parameter.untyped_storage(), torch_private.version_of(parameter))
        self._stepped[piece], self._marks[piece] = device.record_event(self._stream, timed=False), _marks_of(piece)

    def _join(self, pieces: Sequence[Piece]) -> None:
        assert self._run is not None
        self._written = next((piece.names for piece in pieces if self._marks[piece] != _marks_of(piece)), self._written)
        try:
            self.stepping.is_broken = True  # whatever comes: `mend` has the parameters come back
            with self._device.on_stream(self._stream):
                self.stepping.join(pieces, beside=list(self._leaving))
                for piece in pieces:
                    self._note_stepped(piece)
                    self._leaving.pop(piece, None)
            if not self._leaving:
                self._run.write_changes()
        except BaseException:
            left = list(self._leaving)
            self._forget()
            self.stepping.mend(left)  # here: nobody waits for their parameters any more
            raise

    def refuse_foreign_writes(self) -> None:
        """Raise if somebody has written to a parameter while it was stepped: either may have come first."""
        if self._written is not None:
            self.join()  # the rest may be written to again from now on
            name, self._written = self._written, None
            raise StateOffloadError(
                f"{name} was written to beside its step, with overlap_forward=True, and may have the bits of either. Call "
                "states.wait() first; now load the model and the optimizer again"
            )

    def before_forward(self, module: nn.Module, _: object) -> None:
        """Let the current stream wait for the parameters of a module and of its childless children, which it may read."""
        if not self._pending:
            return
        if self._leaving:
            self._join_those_over()
        self._await(torch_private.parameters_of(module))
        if not isinstance(module, nn.Sequential):
            for child in torch_private.children_of(module).values():
                if child is not None and not torch_private.children_of(child):
                    self._await(torch_private.parameters_of(child))
        self.refuse_foreign_writes()

    def _join_those_over(self) -> None:
        over = list(itertools.takewhile(self.stepping.is_over, self._leaving))
        if over:
            self._join(over)

    def _await(self, parameters: dict[str, nn.Parameter | None]) -> None:
        for parameter in parameters.values():
            piece = self._pending.get(id(parameter))
            if piece is not None:
                self._met.setdefault(piece, len(self._met))
                self._await_piece(piece)
            if parameter is not None and self._device.takes_notes and self._is_own(parameter):
                self._device.note_read(parameter.untyped_storage())

    def _is_own(self, parameter: nn.Parameter) -> bool:
        return any(own is parameter for group in self._optimizer.param_groups for own in group["params"])

    def _await_piece(self, piece: Piece) -> None:
        if piece in self._leaving:
            self._join([piece])
        current = self._device.current_stream()
        self._device.wait_event(current, self._stepped[piece])
        if current != self._own:
            return  # other streams have yet to wait
        if self._marks[piece] != _marks_of(piece):
            self._written = piece.names
        for record in piece.due:
            self._pending.pop(id(record.parameter), None)
        for known in (self._held, self._stepped, self._marks):
            known.pop(piece, None)
        if not self._stepped and not self._leaving:
            self._run = None

    def join(self) -> None:
        if self._leaving:
            self._join(list(self._leaving))
        for piece in list(self._stepped):
            self._await_piece(piece)
        if self._stepped and self._own is not None:  # this stream has waited, and another one has begun the step
            with self._device.on_stream(self._own):
                for piece in list(self._stepped):
                    self._await_piece(piece)


def _marks_of(piece: Piece) -> list[tuple[int, int]]:
    parameters = [record.parameter for record in piece.due]
    return [(parameter.data_ptr(), torch_private.version_of(parameter)) for parameter in parameters]
