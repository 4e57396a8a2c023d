"""Stepping beside the next forward: a stream for the steps, and modules that wait for their own parameters only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from memkit import torch_private
from memkit.device.base import Device, Event

if TYPE_CHECKING:
    from memkit.states.one_step import OneStep
    from memkit.states.pieces import Piece
    from memkit.states.stepping import Stepping


class ForwardOverlap:
    """Runs steps on a stream of their own.

    Gradients are let go by the step: whoever zeroed them would do so while they are still being read. They are held here until
    the stream whose memory they are in has waited for the step.

    Args:
        device: where the parameters are.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream("step")
        self._pending: dict[int, Piece] = {}
        """Pieces whose step no other stream has waited for yet, by the id of each parameter."""
        self._stepped: dict[Piece, Event] = {}
        self._held: dict[Piece, list[Tensor]] = {}
        self._run: OneStep | None = None
        """What the step reads beside."""

    def run(self, stepping: Stepping, pieces: Sequence[Piece], run: OneStep) -> None:
        """Step pieces, behind what the current stream has been given so far."""
        self.wait()
        self._run = run
        device, stream = self._device, self._stream
        device.wait_event(stream, device.record_event(timed=False))
        try:
            with device.on_stream(stream):
                stepping.run(pieces, run, note_stepped=self._note_stepped)
        except BaseException:
            self._stepped.clear()
            self._pending.clear()
            device.synchronize()
            self._held.clear()
            raise
        for piece in pieces:
            for record in piece.due:
                record.parameter.grad = None

    def _note_stepped(self, piece: Piece) -> None:
        device = self._device
        self._held[piece] = [record.parameter.grad for record in piece.due if record.parameter.grad is not None]
        if device.takes_notes:
            for record in piece.due:
                parameter = record.parameter
                device.note_written(parameter.untyped_storage(), torch_private.version_of(parameter))
        self._stepped[piece] = device.record_event(self._stream, timed=False)
        for record in piece.due:
            self._pending[id(record.parameter)] = piece

    def before_forward(self, module: nn.Module, _: object) -> None:
        """A module's forward begins: let the current stream wait for the parameters that it may read itself.

        That are its own, and those of modules in it that have no others in them: `nn.MultiheadAttention` reads those of its
        last projection without calling it.
        """
        if not self._pending:
            return
        self._await(torch_private.parameters_of(module))
        if not isinstance(module, nn.Sequential):
            for child in torch_private.children_of(module).values():
                if child is not None and not torch_private.children_of(child):
                    self._await(torch_private.parameters_of(child))

    def _await(self, parameters: dict[str, nn.Parameter | None]) -> None:
        for parameter in parameters.values():
            piece = self._pending.get(id(parameter))
            if piece is not None:
                self._await_piece(piece)
            if parameter is not None and self._device.takes_notes:
                self._device.note_read(parameter.untyped_storage())

    def _await_piece(self, piece: Piece) -> None:
        self._device.wait_event(self._device.current_stream(), self._stepped[piece])
        for record in piece.due:
            self._pending.pop(id(record.parameter), None)
        self._stepped.pop(piece, None)
        self._held.pop(piece, None)
        if not self._stepped:
            self._run = None

    def wait(self) -> None:
        """Let the current stream wait for all that is stepped."""
        for piece in list(self._stepped):
            self._await_piece(piece)
