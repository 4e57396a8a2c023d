"""One step of an optimizer, piece by piece: the order of fetches, recovery of a broken-off step, a step beside a forward."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.device.base import Device, Event, Stream
from memkit.errors import StateOffloadError, note_on, warn_user
from memkit.plan.chunks import Residency
from memkit.plan.states import Update, interleaved
from memkit.states.device_steps import DeviceSteps
from memkit.states.host_steps import HostSteps
from memkit.states.one_step import OneStep
from memkit.states.pieces import ConsumedGradient, Piece, some_of
from memkit.states.trial import are_in_states, generators_of, states_of


class Stepping:
    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, on_device: DeviceSteps, on_host: HostSteps) -> None:
        self._optimizer, self._device, self._on_device, self._on_host = optimizer, device, on_device, on_host
        self.unfinished: OneStep | None = None  # has begun, and torch has not ended it: it may have been broken off
        self.num_steps = 0
        self.is_broken = False
        self._has_drawn = False  # whether a step has drawn random numbers though the trial's drew none
        self.untold: StateOffloadError | None = None  # of a step on the host; the next step raises it

    def run(
        self,
        pieces: Sequence[Piece],
        run: OneStep,
        *,
        in_order: bool = True,
        note_stepped: Callable[[Piece], object] = lambda _: None,
        note_left: Callable[[Piece], object] | None = None,
    ) -> None:
        """Step due pieces, those on the host in a thread; with `note_left` it is `join` that waits for these."""
        self.tell()
        self.unfinished, self.is_broken = run, True
        generators: list[torch.Generator] = []
        try:
            for piece in pieces:
                piece.prepare(self._optimizer.state)
            parts = [part for piece in pieces for part in piece.parts]
            if not in_order and not self._has_drawn:
                order = interleaved([part.plan for part in parts])
                generators = generators_of(self._device.torch_device) if order != sorted(order) else []
                parts = [parts[index] for index in order]
            before = states_of(generators)
            if note_left is not None:
                leaving = [part for part in parts if part.plan.update is Update.HOST]
                parts = [part for part in parts if part.plan.update is Update.DEVICE]
                run.awaited |= {record.group for part in leaving for record in part.due}
                self._send(leaving, run, note_left)
            self._run(parts, run, note_stepped)
            if not are_in_states(generators, before):
                self._has_drawn = True
                warn_user(
                    f"StateOffload: random numbers were drawn during a step of {type(self._optimizer).__name__}, and small "
                    "steps at the beginning had drawn none. If the step drew them, some went to other parameters than without "
                    "memkit: what stays on the device was stepped between what moves. Later steps keep to the order of the "
                    "groups. Make the StateOffload when steps draw already, or leave out device_budget"
                )
            if not run.awaited:
                run.write_changes()
        except BaseException as error:
            try:
                self.mend(pieces, goes_on=True)
            finally:
                self._note(error, pieces)
            raise
        self.is_broken = False

    def _send(self, parts: Sequence[Piece], run: OneStep, note_left: Callable[[Piece], object]) -> None:
        for part in parts:
            self._on_host.begin(part)
            self._on_host.start(part, run)
            if part.is_last:
                note_left(part.whole)

    def is_over(self, piece: Piece) -> bool:
        return all(map(self._on_host.is_over, piece.parts))

    def join(self, pieces: Sequence[Piece], *, beside: Sequence[Piece] = ()) -> None:
        self.is_broken, under_way = True, list(dict.fromkeys((*pieces, *beside)))
        try:
            for piece in pieces:
                for part in piece.parts:
                    self._on_host.join(part)
        except Exception as error:
            self._on_host.settle()
            failed = [piece for piece in under_way if any(map(self._on_host.failure_of, piece.parts))]
            try:
                self.mend(under_way, goes_on=True)
            finally:
                self.untold = None
            raise _failure(failed, error) from error
        except BaseException:
            self.mend(under_way, goes_on=True)
            raise
        self.is_broken = False

    def _run(self, parts: Sequence[Piece], run: OneStep, note_stepped: Callable[[Piece], object] = lambda _: None) -> None:
        on_host = [part for part in parts if part.plan.update is Update.HOST]
        on_device = [part for part in parts if part.plan.update is Update.DEVICE]
        if not on_host:
            self._step_on_device(on_device, run, note_stepped)
            return
        num_started = num_begun = 0
        for number, part in enumerate(on_host):
            num_begun = self._begin(self._on_host, on_host, num_begun)
            for other in on_host[num_started:num_begun]:  # ahead, so that the cores are never idle
                self._on_host.start(other, run)
            num_started = num_begun
            if not number:
                self._step_on_device(on_device, run, note_stepped)
            self._on_host.join(part)

    def tell(self) -> None:
        untold, self.untold = self.untold, None
        if untold is not None:
            raise untold

    def _step_on_device(self, parts: Sequence[Piece], run: OneStep, note_stepped: Callable[[Piece], object]) -> None:
        disk, num_begun = self._on_device.disk, 0
        for number, part in enumerate(parts):
            if disk.opened is not None:
                disk.read_ahead(parts[number:])
            num_begun = self._begin(self._on_device, parts, num_begun)
            if num_begun == number:  # it is not there yet
                self._on_device.begin(part)
                num_begun += 1
            self._on_device.step(part, run)
            if part.is_last:
                note_stepped(part.whole)

    @staticmethod
    def _begin(side: DeviceSteps | HostSteps, pieces: Sequence[Piece], num_begun: int) -> int:
        while num_begun < len(pieces) and side.is_free_for(pieces[num_begun]):
            side.begin(pieces[num_begun])
            num_begun += 1
        return num_begun

    def _note(self, error: BaseException, pieces: Sequence[Piece]) -> None:
        due = [record for piece in pieces for record in piece.due]
        num_done = sum(record.is_done() for record in due)
        note_on(
            error,
            f"memkit: the step was broken off when {num_done} of {len(due)} parameters were stepped; each is as before or as "
            "after the step. optimizer.step() with the same gradients steps the others only",
        )

    def mend(self, pieces: Sequence[Piece], *, goes_on: bool = False) -> None:
        """Leave every piece as before its step or as after it. A piece that is stepped in part is lost."""
        self.is_broken = True
        self._settle(pieces)
        for piece in pieces:
            if not piece.is_half_way:
                continue
            is_torn = piece.lost is not None
            piece.lost = (
                f"the step was broken off within {piece.names}: a part of the parameter, and of its states, is as after the "
                "step, the others as before. Load a checkpoint of the model and the optimizer"
            )
            if goes_on:
                self._go_on(piece, is_torn=is_torn)
            piece.forget_step()
        self.is_broken = False

    def _settle(self, pieces: Sequence[Piece]) -> None:
        self._on_host.settle()
        self._device.synchronize()
        failed: list[tuple[Piece, Exception]] = []
        gone = [piece for piece in pieces if any(map(self._on_host.failure_of, piece.parts)) and _has_let_go([piece])]
        if gone:
            error = next(filter(None, map(self._on_host.failure_of, gone[0].parts)))
            self.untold = _failure(gone, error)
            self.untold.__cause__ = error
        for part in [part for piece in pieces for part in piece.parts]:
            side = self._on_host if part.plan.update is Update.HOST else self._on_device
            if part.residency is Residency.STEPPING:
                self._on_device.undo(part)
            elif part.residency is Residency.DIRTY:
                try:
                    side.finish(part)
                except Exception as error:
                    if part.residency is Residency.DIRTY:  # else it is in host memory, and only a disk has failed
                        failed.append((part, error))
            else:
                side.drop(part)
        self._device.synchronize()
        if failed:
            part, why = failed[0]
            raise StateOffloadError(
                f"the states of {part.names} were stepped, and could not be brought to host memory: {type(why).__name__}: "
                f"{why}. They are still on the device; the next step tries again"
            ) from why

    def _go_on(self, piece: Piece, *, is_torn: bool) -> None:
        # a gradient that a step has written to, or unscaled as a fused kernel does, must not step the rest
        rest, run, error = [part for part in piece.parts if not part.is_stepped], self.unfinished, None
        try:
            has_own = not piece.spoiled_by(self._optimizer) and not _has_let_go(rest)  # as with gradients sent to the host
            if run is not None and not is_torn and has_own:
                self._run(rest, run)
                self._device.synchronize()
                piece.lost = None
                return
        except Exception as found:
            error = found
        self._settle([piece])
        piece.forget_step()
        said = "" if error is None else f". The rest failed: {type(error).__name__}: {error}"
        raise StateOffloadError(f"{piece.lost}{said}") from error


def _has_let_go(parts: Sequence[Piece]) -> bool:
    gradients = [record.parameter.grad for part in parts for record in part.due]
    return any(gradient is None or type(gradient) is ConsumedGradient for gradient in gradients)


def _failure(failed: Sequence[Piece], error: BaseException) -> StateOffloadError:
    names = some_of([piece.names for piece in failed])
    return StateOffloadError(
        f"the step of {names or 'parameters'} on the host has failed: {type(error).__name__}: {error}. Its gradient "
        "was let go: what has failed is as before the step, all else as after it"
    )


class ForwardOverlap:
    """Runs steps on a stream of their own, in the order in which the forward before has come to the pieces. All that a step
    reads is held here until its memory's stream has waited for the step.

    [Note: all at once] All steps on the device are issued before `step()` returns. Issued by the hooks of the forward, a piece
    would be stepped under the forward's modes, draw its random numbers between the forward's, overwrite what a scheduler has
    set since, and fail when nobody can step again; and the link would idle until the forward begins.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, *, in_order: bool) -> None:
        self._optimizer = optimizer
        self._device = device
        self._leaving: dict[Piece, None] = {}
        self._stream = device.new_stream("step")
        self._pending: dict[int, Piece] = {}  # by parameter's id, pieces whose step no other stream has waited for yet
        self._stepped: dict[Piece, Event] = {}
        self._read: dict[Piece, list[Tensor]] = {}
        self._held: dict[Piece, list[Tensor]] = {}
        self._marks: dict[Piece, list[tuple[int, int]]] = {}  # address and version of each parameter after memkit's last write
        self._written: str | None = None  # parameters that somebody else has written to before any stream waited for their step
        self._in_order = in_order
        self._places: dict[Piece, int] = {}
        self._met: dict[Piece, int] = {}
        self._own: Stream | None = None  # has begun the step, holds the gradients, and waits for every piece
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
        over = list(itertools.takewhile(self.stepping.is_over, self._leaving))
        if over:
            self._join(over)
        self._await(torch_private.parameters_of(module))
        if not isinstance(module, nn.Sequential):
            for child in torch_private.children_of(module).values():
                if child is not None and not torch_private.children_of(child):
                    self._await(torch_private.parameters_of(child))
        self.refuse_foreign_writes()

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
