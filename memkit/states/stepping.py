"""One step of an optimizer, piece by piece: what is fetched when, and what becomes of a step that is broken off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from memkit.device.base import Device
from memkit.errors import StateOffloadError, note_on
from memkit.plan import Update
from memkit.states.device_steps import DeviceSteps
from memkit.states.host_steps import HostSteps
from memkit.states.one_step import OneStep
from memkit.states.pieces import Piece, Residency


class Stepping:
    """Steps all pieces in which something is due.

    Args:
        optimizer: whose step it is.
        device: where the parameters are.
        on_device: steps pieces there.
        on_host: steps pieces on the host.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, on_device: DeviceSteps, on_host: HostSteps) -> None:
        self._optimizer = optimizer
        self._device = device
        self._on_device = on_device
        self._on_host = on_host
        self.unfinished: OneStep | None = None
        """A step that has begun, and of which torch has not said yet that it is over: it may have been broken off."""
        self.is_broken = False
        """Whether pieces may be half way."""

    def run(self, pieces: Sequence[Piece], run: OneStep, *, note_stepped: Callable[[Piece], object] = lambda _: None) -> None:
        """Step pieces, with the next ones on their way: those on the host in a thread, and meanwhile others on the device.

        Args:
            pieces: in which something is due.
            run: the step.
            note_stepped: called behind each piece that was stepped on the device.
        """
        self.unfinished, self.is_broken = run, True
        try:
            for piece in pieces:
                piece.prepare(self._optimizer.state)
            self._run([part for piece in pieces for part in piece.parts], run, note_stepped)
            run.write_changes()
        except BaseException as error:
            try:
                self.mend(pieces)
            finally:
                self._note(error, pieces)
            raise
        self.is_broken = False

    def _run(self, parts: Sequence[Piece], run: OneStep, note_stepped: Callable[[Piece], object] = lambda _: None) -> None:
        on_host = [part for part in parts if part.plan.update is Update.HOST]
        on_device = [part for part in parts if part.plan.update is Update.DEVICE]
        num_begun = num_stepped = 0
        for number, part in enumerate(on_host):
            num_begun = self._begin(self._on_host, on_host, num_begun)
            self._on_host.start(part, run)
            # as much as the link moves meanwhile, no more: gradients of the next one would have to wait behind it
            share = len(on_device) * (number + 1) // len(on_host)
            self._step_on_device(on_device[num_stepped:share], run, note_stepped)
            num_stepped = share
            self._on_host.join(part)
        self._step_on_device(on_device[num_stepped:], run, note_stepped)

    def _step_on_device(self, parts: Sequence[Piece], run: OneStep, note_stepped: Callable[[Piece], object]) -> None:
        num_begun = 0
        for part in parts:
            num_begun = self._begin(self._on_device, parts, num_begun)
            self._on_device.step(part, run)
            if part.is_last:
                note_stepped(part.whole)

    @staticmethod
    def _begin(side: DeviceSteps | HostSteps, pieces: Sequence[Piece], num_begun: int) -> int:
        """Have pieces be on their way for which there is a slot. Return how many are, or were."""
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

    def mend(self, pieces: Sequence[Piece], *, gives_up: bool = False) -> None:
        """Have every piece be as before its step, or as after it: one that is stepped in part is stepped to its end.

        Args:
            pieces: which may be half way.
            gives_up: whether to leave one in part where that fails.

        Raises:
            StateOffloadError: stepped states cannot be brought to host memory, or a parameter is stepped in part.
        """
        self.is_broken = True
        self._settle(pieces)
        for piece in pieces:
            if piece.is_half_way:
                try:
                    self._go_on(piece)
                except Exception:
                    if not gives_up:
                        raise
                    self._settle(pieces)
                    piece.give_up()
        self.is_broken = False

    def _settle(self, pieces: Sequence[Piece]) -> None:
        """Have nothing be under way, and every part be as before its step, or as after it."""
        self._on_host.settle()
        self._device.synchronize()
        failed: list[tuple[Piece, Exception]] = []
        for part in [part for piece in pieces for part in piece.parts]:
            side = self._on_host if part.plan.update is Update.HOST else self._on_device
            if part.residency is Residency.STEPPING:
                self._on_device.undo(part)
            elif part.residency is Residency.DIRTY:
                try:
                    side.finish(part)
                except Exception as error:
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

    def _go_on(self, piece: Piece) -> None:
        """Step the rest of a piece that is stepped in part.

        Raises:
            StateOffloadError: that has failed.
        """
        assert self.unfinished is not None
        try:
            self._run(piece.remaining(), self.unfinished)
        except Exception as error:
            raise StateOffloadError(
                f"the step was broken off within {piece.names}, and the rest of it failed: {type(error).__name__}: {error}. A "
                "part of the parameter, and of its states, is as after the step, the others as before. Another "
                "optimizer.step() goes on with it, as state_dict() does; to leave it, load a checkpoint of the model and the "
                "optimizer"
            ) from error
        self._device.synchronize()
