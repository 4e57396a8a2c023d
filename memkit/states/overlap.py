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
from memkit.errors import warn_user

if TYPE_CHECKING:
    from memkit.states.one_step import OneStep
    from memkit.states.pieces import Piece
    from memkit.states.stepping import Stepping


class ForwardOverlap:
    """Runs steps on a stream of their own.

    Gradients are let go by the step: whoever zeroed them would do so while they are still being read. They are held here until
    the stream whose memory they are in has waited for the step, and so is whatever else a step reads.

    Pieces are stepped in the order in which the forward before has come to them: a model that has a head waits for that at
    once, since it might read what is in it.

    [Note: all at once] Those stepped on the device are all given out before `step()` returns, though the host launches no
    forward until then. Given out by the hooks of the forward, a piece would be stepped under what is on around that: autocast,
    inference mode, a transform of `torch.func`, a graph that is captured. It would need its gradient back in `grad`, where that
    of another backward may be by then, and draw its random numbers between the forward's. What a class counts in its groups
    would be written over what a scheduler has set since, and a failure would be raised when nobody can step again. Worst, the
    link would have nothing to do for as long as the loop does anything else between the step and the forward. A thread beside
    the forward has most of these in common, and the lanes, the slots and each gradient would be two threads' at once.

    Args:
        in_order: whether pieces have to be stepped in the order of the optimizer's groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, *, in_order: bool) -> None:
        self._optimizer = optimizer
        self._device = device
        self._leaving: dict[Piece, None] = {}
        """Pieces that are stepped on the host, and are yet to come back."""
        self._stream = device.new_stream("step")
        self._pending: dict[int, Piece] = {}
        """Those whose step no other stream has waited for yet, by the id of each parameter."""
        self._stepped: dict[Piece, Event] = {}
        self._read: dict[Piece, list[Tensor]] = {}
        """What steps read that are not noted as given to the stream yet."""
        self._held: dict[Piece, list[Tensor]] = {}
        self._in_order = in_order
        self._places: dict[Piece, int] = {}
        """Which piece the forward before has come to when."""
        self._met: dict[Piece, int] = {}
        """The same of the forward that goes on."""
        self._own: Stream | None = None
        """The stream that has begun the step: gradients are in its memory, and it waits for every piece."""
        self._run: OneStep | None = None
        """What the step reads beside."""
        self._stepping: Stepping | None = None

    def __del__(self) -> None:
        """Dropped with its optimizer: nobody has what was stepped on the host come back any more."""
        if self._leaving and not sys.is_finalizing():
            names = next(iter(self._leaving)).names
            more = f" and {len(self._leaving) - 1} more pieces" if len(self._leaving) > 1 else ""
            warn_user(
                f"StateOffload was dropped without close() or wait() while what was stepped on the host was yet to come back: "
                f"{names}{more} are as before the last step"
            )

    def run(self, stepping: Stepping, pieces: Sequence[Piece], run: OneStep) -> None:
        """Step pieces, behind what the current stream has been given so far."""
        self.join()
        if not self._in_order:
            self._places, self._met = {**self._places, **self._met}, {}
            pieces = sorted(pieces, key=lambda piece: self._places.get(piece, len(self._places)))
        self._run, self._stepping = run, stepping
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
                stepping.run(pieces, run, note_stepped=self._note_stepped, note_left=self._note_left)
        except BaseException:
            self._forget()
            raise
        self._read = {}
        for piece in pieces:
            for record in piece.due:
                record.parameter.grad = None

    def _forget(self) -> None:
        """What was under way was put right, by the host."""
        self._leaving.clear()
        self._stepped.clear()
        self._pending.clear()
        self._device.synchronize()
        self._read.clear()
        self._held.clear()
        self._run = None

    def _note_left(self, piece: Piece) -> None:
        self._hold(piece)
        for part in piece.parts:
            part.let_gradients_go()
        self._leaving[piece] = None

    def _hold(self, piece: Piece) -> None:
        self._held[piece] = self._read.pop(piece)
        for record in piece.due:
            self._pending[id(record.parameter)] = piece

    def _note_stepped(self, piece: Piece) -> None:
        if piece not in self._held:
            self._hold(piece)
        self._note_written(piece)

    def _note_written(self, piece: Piece) -> None:
        """The parameters of a piece are written to by what the stream has been given so far."""
        device = self._device
        if device.takes_notes:
            for record in piece.due:
                parameter = record.parameter
                device.note_written(parameter.untyped_storage(), torch_private.version_of(parameter))
        self._stepped[piece] = device.record_event(self._stream, timed=False)

    def _join(self, pieces: Sequence[Piece]) -> None:
        assert self._stepping is not None
        assert self._run is not None
        try:
            self._stepping.is_broken = True  # whatever comes: `mend` has the parameters come back
            with self._device.on_stream(self._stream):
                self._stepping.join(pieces, beside=list(self._leaving))
                for piece in pieces:
                    self._note_written(piece)
                    self._leaving.pop(piece, None)
            if not self._leaving:
                self._run.write_changes()
        except BaseException:
            left = list(self._leaving)
            self._forget()
            self._stepping.mend(left)  # here: nobody waits for their parameters any more
            raise

    def before_forward(self, module: nn.Module, _: object) -> None:
        """A module's forward begins: let the current stream wait for the parameters that it may read itself.

        That are its own, and those of modules in it that have no others in them: `nn.MultiheadAttention` reads those of its
        last projection without calling it.
        """
        if not self._pending:
            return
        if self._leaving:
            self._join_those_over()
        self._await(torch_private.parameters_of(module))
        if not isinstance(module, nn.Sequential):
            for child in torch_private.children_of(module).values():
                if child is not None and not torch_private.children_of(child):
                    self._await(torch_private.parameters_of(child))

    def _join_those_over(self) -> None:
        """Have parameters be on their way back whose step on the host is over: nobody waits for them yet."""
        assert self._stepping is not None
        over = list(itertools.takewhile(self._stepping.is_over, self._leaving))
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
        """Tell whether a parameter is stepped here: of another optimizer's, that one's hook is still to wait for the step."""
        return any(own is parameter for group in self._optimizer.param_groups for own in group["params"])

    def _await_piece(self, piece: Piece) -> None:
        if piece in self._leaving:
            self._join([piece])
        current = self._device.current_stream()
        self._device.wait_event(current, self._stepped[piece])
        if current != self._own:
            return  # other streams have yet to wait
        for record in piece.due:
            self._pending.pop(id(record.parameter), None)
        self._held.pop(piece, None)
        self._stepped.pop(piece, None)
        if not self._stepped and not self._leaving:
            self._run = None

    def join(self) -> None:
        """Let the current stream wait for all that is stepped."""
        if self._leaving:
            self._join(list(self._leaving))
        for piece in list(self._stepped):
            self._await_piece(piece)
        if self._stepped and self._own is not None:  # this stream has waited, and another one has begun the step
            with self._device.on_stream(self._own):
                for piece in list(self._stepped):
                    self._await_piece(piece)
