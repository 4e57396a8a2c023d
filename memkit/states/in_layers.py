"""Stepping what a `LayerOffload(train="fused")` streams, in the slots of that.

[Note: who does what] `FusedSteps`, a `memkit.steppers.LayerStepper`, sees when a gradient is complete, puts the parameter to
its slot and the gradient to `grad`, has it be stepped here, lets the gradient go, and has the layer written back once all of it
is stepped. Here each is stepped with its states, on the stream for that. The slot is not written back, nor used by anything but
the layer's own backward, before that stream has come so far.

Each backward that is within no other is a step. It may be ended by `optimizer.step()`; the next backward ends it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.errors import StateOffloadError
from memkit.optimizers.shells import hollow_shell, step_of
from memkit.owners import owner_of
from memkit.plan.chunks import Residency
from memkit.stand_ins import GradientStandIn
from memkit.states.asked import refuse_gradients
from memkit.states.in_backward import BackwardSteps
from memkit.states.pieces import Piece
from memkit.states.records import StateRecord
from memkit.steppers import LayerStepper, stepper_of

if TYPE_CHECKING:
    from memkit.device.base import Event, Stream
    from memkit.hooks import HookSet
    from memkit.states.one_step import OneStep


class LayeredSteps(BackwardSteps):
    """Steps the parameters that a `LayerStepper` hands over: see [Note: who does what].

    Args:
        given: what `BackwardSteps` is given.
        layers: who hands them over.
    """

    is_whole_step = True

    def __init__(self, *given: Any, layers: LayerStepper) -> None:
        super().__init__(*given)
        self._layers: LayerStepper | None = layers
        """None once it is closed."""
        self._piece_of: dict[int, Piece] = {}
        """The pieces, by the ids of their parameters."""

    @property
    def stream(self) -> Stream:
        return self._stream

    def watch(self, pieces: list[Piece], hooks: HookSet) -> None:
        """Have pieces be stepped when they are handed over."""
        self._note_pieces(pieces)
        self._piece_of.update({id(piece.records[0].parameter): piece for piece in pieces})
        if self._layers is not None:
            self._layers.have_stepped_by(self)

    def begin_backward(self) -> None:
        if self._stepping.is_broken:
            self.mend(self._pieces)
        self._end_step()
        self._follow_groups()

    def step(self, parameter: Tensor) -> Event:
        piece = self._piece_of[id(parameter)]
        (record,) = piece.records
        if record.group < 0:  # the optimizer has it no more
            return self._device.record_event(self._stream, timed=False)
        refuse_gradients(piece.records)
        stepped = self._step_whole(piece)
        for part in piece.parts:
            part.let_gradients_go()
        piece.leave_parameters()
        return stepped

    def await_steps(self) -> None:
        self._let_go()

    def end_backward(self) -> None:
        if self._stepping.is_broken:
            with suppress(StateOffloadError):  # whoever asks for the next step is told
                self.mend(self._pieces)
        self.join()
        self._on_device.wait()  # a loop need not call `step()`, which waits: who reads `optimizer.state` finds what was stepped
        for piece in self._pieces:
            piece.leave_parameters()
        run = self._stepping.unfinished
        if run is not None and self._met:
            self._write(run)
            setattr(self._optimizer, torch_private.STEPPED_MARK, True)
            self._options.note()
            self._stepping.num_steps += 1

    def _end_step(self) -> None:
        """End the step of an earlier backward, unless `optimizer.step()` has done so."""
        run = self._stepping.unfinished
        if self.end() and run is not None:
            self._write(run)
        self.forget_done()
        self._stepping.unfinished = None

    def _write(self, run: OneStep) -> None:
        """Write to groups what a step writes there, while they are what it was made with."""
        run.write_changes()
        hollow = hollow_shell(self._optimizer)
        step_of(self._optimizer)(hollow)
        run.write_of_others(hollow)

    def leave(self) -> None:
        self._layers = None

    def check_options(self) -> None:
        if self._layers is None:
            raise StateOffloadError(
                'StateOffload steps the parameters of a LayerOffload(train="fused") within the backward, and that is closed. '
                "Close the StateOffload as well; then make another one for what is on the device"
            )
        super().check_options()
        for parameter in self._layers.streamed():
            piece, grad = self._piece_of.get(id(parameter)), parameter.grad
            if piece is not None and grad is not None and not isinstance(grad, GradientStandIn):
                raise StateOffloadError(
                    f'{piece.names} streams, and has a gradient that no backward has brought: LayerOffload(train="fused") '
                    "steps within the backward alone. Set the gradient to None"
                )

    def accumulate(self) -> AbstractContextManager[None]:
        raise StateOffloadError(
            'StateOffload: each backward is a step beside a LayerOffload(train="fused"), and nothing is accumulated. Use '
            'train="host", which accumulates'
        )

    def close(self) -> None:
        if self._layers is not None:
            self._layers.have_stepped_by(None)
        if not self._stepping.is_broken:
            self._end_step()
        super().close()

    def mend(self, pieces: Sequence[Piece], *, gives_up: bool = False) -> None:
        super().mend(pieces, gives_up=gives_up)
        for piece in pieces:
            piece.leave_parameters()

    def _in_place(self) -> AbstractContextManager[object]:
        stack, layers = ExitStack(), self._layers
        for piece in self._pieces:
            is_begun = piece.is_half_way or any(part.residency is Residency.STEPPING for part in piece.parts)
            if layers is not None and is_begun:
                stack.enter_context(layers.in_place(piece.records[0].parameter))
        return stack

    def _consume(self, record: StateRecord) -> None:
        """Who has handed the parameter over lets its gradient go."""

    # What a device that looks for races is told: of a slot, in which others are read meanwhile, by its `write_back`

    def _note_brought(self, parameter: Tensor, gradient: Tensor) -> None:
        if owner_of(parameter.untyped_storage()) is None:
            super()._note_brought(parameter, gradient)
        else:
            self._device.note_written(gradient.untyped_storage(), torch_private.version_of(gradient))

    def _note_begun(self, parameter: Tensor, gradient: Tensor) -> None:
        if owner_of(parameter.untyped_storage()) is not None:
            self._device.note_read(parameter.untyped_storage())
            self._device.note_read(gradient.untyped_storage())

    def _note_stepped(self, parameter: Tensor) -> None:
        if owner_of(parameter.untyped_storage()) is None:
            super()._note_stepped(parameter)


def steps_in_backward(optimizer: torch.optim.Optimizer, *given: Any) -> BackwardSteps:
    """Return what steps an optimizer's parameters within the backward: those that a `LayerStepper` hands over, if it has one.

    Args:
        optimizer: whose step it is.
        given: what `BackwardSteps` is given beside that.
    """
    layers = stepper_of(optimizer)
    if layers is None:
        return BackwardSteps(optimizer, *given)
    return LayeredSteps(optimizer, *given, layers=layers)
