"""Stepping each parameter within the backward, once its gradient is complete, on a stream of its own."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from memkit.core import backwards, torch_private
from memkit.core.hooks import HookSet
from memkit.core.owners import GradientStandIn, owner_of
from memkit.device.base import Device, Event, Stream
from memkit.errors import StateOffloadError, warn_user
from memkit.optimizers.steppers import LayerStepper, stepper_of
from memkit.plan.chunks import Residency
from memkit.plan.states import Update
from memkit.states.asked import refuse_gradients, weakly
from memkit.states.one_step import OneStep
from memkit.states.pieces import Accumulating, ConsumedGradient, Piece, StateRecord, let_go_of_consumed, refuse_another

if TYPE_CHECKING:
    from memkit.states.at_rest import StatesAtRest
    from memkit.states.device_steps import DeviceSteps
    from memkit.states.host_steps import HostSteps
    from memkit.states.stepping import Stepping

_AHEAD = 3
_HELD_BYTES = 256 * 2**20  # bytes of gradients that may wait for their states: the backward goes on meanwhile


class BackwardSteps(Accumulating):
    """Steps pieces of one parameter each, as gradients come. The next ones are fetched ahead, in the order of the backward
    before.

    [Note: held gradients] Steps wait for states, and run on a stream of their own so that the backward does not wait for them.
    A gradient is held until its memory's stream has waited for its step, since the next allocation may get that memory. Once
    `_HELD_BYTES` are held, the stream waits for the oldest ones. When the backward is over, it waits for all.
    """

    is_whole_step = False  # whether a backward is a step, and the optimizer's own steps do nothing

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: Device,
        stepping: Stepping,
        on_device: DeviceSteps,
        on_host: HostSteps,
        rest: StatesAtRest,
        follow_groups: Callable[[], object],
    ) -> None:
        self._optimizer, self._device, self._stepping = optimizer, device, stepping
        self._on_device, self._on_host, self._rest, self._follow_groups = on_device, on_host, rest, follow_groups
        self.stream = device.new_stream("step")
        self._held: deque[tuple[Stream, Event, list[Tensor]]] = deque()  # steps' events, and what they read, gradient first
        self._held_bytes = 0
        self._end: backwards.BackwardEnd | None = None
        self._ends = set[backwards.BackwardEnd]()
        self._behind_failure = HookSet()
        self._has_failed = False
        self._leaving: dict[Piece, None] = {}
        self._pieces: list[Piece] = []
        self._watches_replicas = False
        self._order: list[Piece] = []
        self._places: dict[Piece, int] = {}
        self._begun: list[Piece] = []
        self._met: dict[Piece, None] = {}

    def watch(self, pieces: list[Piece], hooks: HookSet) -> None:
        for piece in pieces:
            (record,) = piece.records
            if record.parameter.requires_grad:
                ref = weakref.ref(piece)
                before, after = partial(weakly(self._before), ref), partial(weakly(self._after), ref)
                hooks.add(record.parameter.register_hook(before))
                hooks.add(record.parameter.register_post_accumulate_grad_hook(after))
        if not self._watches_replicas and torch.distributed.is_available() and torch.distributed.is_initialized():
            self._watches_replicas = True  # without a group of processes there are none
            hooks.ahead_of_all_forwards(weakly(self._refuse_replica, when_gone=hooks.remove))
        self._note_pieces(pieces)

    def _note_pieces(self, pieces: list[Piece]) -> None:
        self._pieces = [*self._pieces, *pieces]
        self._follow([*reversed(pieces), *self._order])

    def _refuse_replica(self, module: nn.Module, _: object) -> None:
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            return
        reduced = {id(parameter) for parameter in module.parameters()}
        for piece in self._pieces:
            if id(piece.records[0].parameter) in reduced:
                raise StateOffloadError(
                    f'{piece.records[0].name} is trained within DistributedDataParallel, and when="backward" would step it '
                    'with the gradient of one process, before it is reduced. Use when="step"'
                )

    def _follow(self, order: list[Piece]) -> None:
        self._order, self._places = order, {piece: place for place, piece in enumerate(order)}

    def _before(self, ref: weakref.ref[Piece], _: Tensor) -> None:
        piece = ref()
        assert piece is not None  # it is held here
        (record,) = piece.records
        if type(record.parameter.grad) is ConsumedGradient:
            if piece in self._met:
                refuse_another(record)
            record.parameter.grad = None

    def _after(self, ref: weakref.ref[Piece], _: Tensor) -> None:
        piece = ref()
        assert piece is not None  # it is held here
        (record,) = piece.records
        if self.num_accumulating:
            return
        if self._end is None or self._end.is_over:
            self._end = backwards.on_end(weakly(self._end_backward), among=self._ends)
            if self._has_failed and not any(type(met.records[0].parameter.grad) is ConsumedGradient for met in self._met):
                self._end_step()
            self.check_options()
            self._follow_groups()
        if record.group < 0:
            return
        if piece in self._met:
            refuse_another(record)
        self._step_whole(piece)
        self._consume(record)
        for part in piece.parts:
            part.let_gradients_go()

    def _step_whole(self, piece: Piece) -> Event:
        """Step a piece whole or not at all, as a part of the optimizer's step. Return an event behind that."""
        stepping = self._stepping
        if stepping.is_broken:
            self.mend(self._pieces)
        run = stepping.unfinished
        if run is None:
            stepping.tell()
            self._on_device.disk.tidy(self._pieces)
            are_late = any(piece.plan.update is Update.HOST for piece in self._pieces)  # stepped behind the backward perhaps
            run = stepping.unfinished = OneStep(self._optimizer, copies=are_late)
            run.note_options()
        stepping.is_broken = True
        try:
            piece.due = list(piece.records)
            stepped = self._step_beside(piece, run)
            self._met[piece] = None
        except BaseException:
            self.mend(self._pieces, goes_on=True)
            raise
        stepping.is_broken = False
        return stepped

    def _step_beside(self, piece: Piece, run: OneStep) -> Event:
        """Step a piece on the stream for that, and hold its gradient until then: see [Note: held gradients]."""
        (record,) = piece.records
        device, own, gradient = self._device, self._device.current_stream(), record.parameter.grad
        assert gradient is not None
        while self._held and self._held_bytes + gradient.nbytes > _HELD_BYTES:
            self._let_go_of(self._held[0])
        held = piece.read_by_step(self._optimizer)
        storage, is_in_slot = record.parameter.untyped_storage(), False
        if device.takes_notes:
            is_in_slot = owner_of(storage) is not None  # others are read there meanwhile: its `write_back` tells of writes
            brought = gradient if is_in_slot else record.parameter
            device.note_written(brought.untyped_storage(), torch_private.version_of(brought))
        device.wait_event(self.stream, device.record_event(own, timed=False))
        with device.on_stream(self.stream):
            if device.takes_notes:
                device.note_read(storage)
                device.note_read(gradient.untyped_storage())
            ahead = piece.parts
            if not self._rest.is_at_home(piece):
                self.drop_ahead()
                self._rest.adopt_due([piece], self._pieces)
            piece.prepare(self._optimizer.state)
            for part in [part for part in ahead if part in self._begun and part not in piece.parts]:
                self._drop(part)
            for part in piece.parts:
                self._step(part, run)
            if device.takes_notes and not is_in_slot:
                device.note_written(storage, torch_private.version_of(record.parameter))
            stepped = device.record_event(self.stream, timed=False)
        self._held.append((own, stepped, held))
        self._held_bytes += gradient.nbytes
        return stepped

    def _end_backward(self, has_failed: bool) -> None:
        if has_failed and not self._has_failed:
            self._has_failed = True
            self._behind_failure.ahead_of_all_forwards(weakly(self._before_forward, when_gone=self._behind_failure.remove))
        try:
            self._join_host()
        except StateOffloadError as error:
            if not has_failed:
                raise
            self._stepping.untold = error
        finally:
            self._let_go()

    def _let_go(self) -> None:
        device, current = self._device, self._device.current_stream()
        for entry in tuple(self._held):  # a backward that has failed may end in its own thread, beside a step
            self._let_go_of(entry)
        device.wait_event(current, device.record_event(self.stream, timed=False))
        if device.takes_notes:
            for piece in self._met:
                device.note_read(piece.records[0].parameter.untyped_storage())

    def _before_forward(self, *_: object) -> None:
        if torch_private.backward_task() == -1:
            self._end_step()

    def _end_step(self) -> None:
        if self._stepping.is_broken:
            self.mend(self._pieces)
        run = self._stepping.unfinished
        if self.end() and run is not None:
            run.write_all()
        self.forget_done()
        self._stepping.unfinished = None

    def _let_go_of(self, entry: tuple[Stream, Event, list[Tensor]]) -> None:
        stream, stepped, held = entry
        self._device.wait_event(stream, stepped)
        with suppress(ValueError):
            self._held.remove(entry)
            self._held_bytes -= held[0].nbytes

    def _step(self, part: Piece, run: OneStep) -> None:
        if part.plan.update is Update.HOST:
            self._leaving[part.whole] = None
            self._on_host.begin(part)
            self._on_host.start(part, run)
            return
        coming = self._coming_after(part)
        self._on_device.disk.read_ahead([part, *coming])
        if part not in self._begun:
            for other in [other for other in self._begun if not self._on_device.is_free_for(part)]:
                if other.slot == part.slot and not other.plan.is_resident:
                    self._drop(other)  # it is not needed yet
            self._begin(part)
        self._on_device.step(part, run)
        self._begun.remove(part)
        for other in coming:
            if other not in self._begun and self._on_device.is_free_for(other):
                self._begin(other)

    def join(self) -> None:
        """Wait for a backward that has failed, or whose end was interrupted, and may yet step something."""
        if self._ends and torch_private.backward_task() == -1:
            backwards.join(self._ends)
        try:
            self._join_host()
        finally:
            self._let_go()

    def _join_host(self) -> None:
        if not self._leaving:
            return
        self._stepping.is_broken = True  # on any error `mend` copies the parameters back
        self._device.wait_event(self.stream, self._device.record_event(timed=False))  # it may still read parameters
        with self._device.on_stream(self.stream):
            try:
                self._stepping.join(list(self._leaving))
            finally:
                self._leaving.clear()

    def _begin(self, piece: Piece) -> None:
        self._begun.append(piece)
        self._on_device.begin(piece)

    def _drop(self, piece: Piece) -> None:
        self._begun.remove(piece)
        self._on_device.drop(piece)

    def drop_ahead(self) -> None:
        with self._device.on_stream(self.stream):
            for piece in list(self._begun):
                self._drop(piece)

    def _coming_after(self, part: Piece) -> list[Piece]:
        piece = part.whole
        order, place = self._order, self._places.get(piece)
        rest = list(piece.parts)
        coming = rest[rest.index(part) + 1 :]
        if place is not None:
            others = [other for other in order[place + 1 : place + 1 + _AHEAD] if other not in self._met]
            coming += [part for other in others for part in other.parts]
        return [other for other in coming[:_AHEAD] if other.may_come_early and other.plan.update is Update.DEVICE]

    def end(self) -> list[Piece]:
        self.drop_ahead()
        self.join()
        self._behind_failure.remove()
        self._has_failed = False
        met = list(self._met)
        if met and met != self._order:
            self._follow(met)
            self._on_device.follow(met)
        self._met.clear()
        if self._stepping.unfinished is not None:
            self._stepping.unfinished.forget_options()
        return met

    def check_options(self) -> None:
        if self._stepping.unfinished is not None:
            self._stepping.unfinished.check_options()

    def close(self) -> None:
        try:
            self.end()
        except StateOffloadError as error:
            warn_user(f"StateOffload: {error}")
        let_go_of_consumed(piece.records[0] for piece in self._pieces)

    def forget_done(self) -> None:
        for piece in self._pieces:
            piece.records[0].done = None

    def mend(self, pieces: Sequence[Piece], *, goes_on: bool = False) -> None:
        self._begun.clear()
        self._leaving.clear()
        with self._in_place():
            self._stepping.mend(pieces, goes_on=goes_on)  # the host waits for all of the device
        self._held.clear()
        self._held_bytes = 0
        for piece in pieces:
            (record,) = piece.records
            assert piece.residency is not Residency.STEPPING
            if record.is_done() and piece not in self._met:  # it was stepped, and the rest of the hook was not reached
                self._met[piece] = None
                self._consume(record)

    def _in_place(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _consume(self, record: StateRecord) -> None:
        record.parameter.grad = ConsumedGradient.of(record.parameter)


class LayeredSteps(BackwardSteps):
    """Steps the parameters that a `LayerStepper` hands over, in its slots.

    [Note: who does what] `FusedSteps`, a `LayerStepper`, sees when a gradient is complete, puts the parameter to its slot and
    the gradient to `grad`, has it stepped here with its states, on a stream of its own, lets the gradient go, and writes the
    layer back once all of it is stepped. Each outermost backward is a step.
    """

    is_whole_step = True

    def __init__(self, optimizer: torch.optim.Optimizer, *given: Any) -> None:
        super().__init__(optimizer, *given)
        self._layers: LayerStepper | None = stepper_of(optimizer)
        self._piece_of: dict[int, Piece] = {}

    def watch(self, pieces: list[Piece], hooks: HookSet) -> None:
        self._note_pieces(pieces)
        self._piece_of.update({id(piece.records[0].parameter): piece for piece in pieces})
        if self._layers is not None:
            self._layers.have_stepped_by(self)

    def begin_backward(self) -> None:
        self._end_step()
        self._follow_groups()

    def step(self, parameter: Tensor) -> Event:
        piece = self._piece_of[id(parameter)]
        (record,) = piece.records
        if record.group < 0:  # the optimizer has it no more
            return self._device.record_event(self.stream, timed=False)
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
            with suppress(StateOffloadError):  # the next step raises it
                self.mend(self._pieces)
        self.join()
        self._on_device.slots.wait()  # a loop need not call `step()`, which waits: `optimizer.state` is then up to date
        for piece in self._pieces:
            piece.leave_parameters()
        run = self._stepping.unfinished
        if run is not None and self._met:
            run.write_all()
            setattr(self._optimizer, torch_private.STEPPED_MARK, True)
            run.note_options()
            self._stepping.num_steps += 1

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

    def accumulate(self) -> NoReturn:
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

    def mend(self, pieces: Sequence[Piece], *, goes_on: bool = False) -> None:
        super().mend(pieces, goes_on=goes_on)
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
        """The `LayerStepper` lets the gradient go."""
