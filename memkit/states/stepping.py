"""One step of an optimizer, piece by piece: what is fetched when, and what becomes of a step that is broken off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        device: where the parameters are.
        on_device: steps pieces there.
        on_host: steps pieces on the host.
    """

    def __init__(self, device: Device, on_device: DeviceSteps, on_host: HostSteps) -> None:
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
            self._run(pieces, run, note_stepped)
            run.write_changes()
        except BaseException as error:
            self._note(error, pieces)
            self.mend(pieces)
            raise
        self.is_broken = False

    def _run(self, pieces: Sequence[Piece], run: OneStep, note_stepped: Callable[[Piece], object]) -> None:
        on_host = [piece for piece in pieces if piece.plan.update is Update.HOST]
        on_device = [piece for piece in pieces if piece.plan.update is Update.DEVICE]
        num_begun = num_stepped = 0
        for number, piece in enumerate(on_host):
            num_begun = self._begin(self._on_host, on_host, num_begun)
            self._on_host.start(piece, run)
            # as much as the link moves meanwhile, no more: gradients of the next one would have to wait behind it
            share = len(on_device) * (number + 1) // len(on_host)
            self._step_on_device(on_device[num_stepped:share], run, note_stepped)
            num_stepped = share
            self._on_host.join(piece)
        self._step_on_device(on_device[num_stepped:], run, note_stepped)

    def _step_on_device(self, pieces: Sequence[Piece], run: OneStep, note_stepped: Callable[[Piece], object]) -> None:
        num_begun = 0
        for piece in pieces:
            num_begun = self._begin(self._on_device, pieces, num_begun)
            self._on_device.step(piece, run)
            note_stepped(piece)

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

    def mend(self, pieces: Sequence[Piece]) -> None:
        """Have every piece be as before its step, or as after it.

        Raises:
            StateOffloadError: stepped states cannot be brought to host memory.
        """
        self.is_broken = True
        self._on_host.settle()
        self._device.synchronize()
        failed: list[tuple[Piece, Exception]] = []
        for piece in pieces:
            side = self._on_host if piece.plan.update is Update.HOST else self._on_device
            if piece.residency is Residency.STEPPING:
                self._on_device.undo(piece)
            elif piece.residency is Residency.DIRTY:
                try:
                    side.finish(piece)
                except Exception as error:
                    failed.append((piece, error))
            else:
                side.drop(piece)
        self._device.synchronize()
        if failed:
            piece, why = failed[0]
            raise StateOffloadError(
                f"the states of {piece.names} were stepped, and could not be brought to host memory: {type(why).__name__}: "
                f"{why}. They are still on the device; the next step tries again"
            ) from why
        self.is_broken = False
