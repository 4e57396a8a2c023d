"""What the states of parameters take, and of pieces of them: the words of a plan."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from memkit.core.sizes import ALIGNMENT_BYTES, rounded


class Update(enum.Enum):
    """Where a piece is stepped."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCosts:
    """What one parameter of an optimizer takes.

    Attributes:
        name: what to call it.
        numel: its elements.
        parameter_bytes: its bytes.
        state_bytes: bytes of its states, with the float32 copy if there is one.
        has_master: whether a float32 copy of it is stepped.
        is_elementwise: whether parts of it can be stepped apart.
    """

    name: str
    numel: int
    parameter_bytes: int
    state_bytes: int
    has_master: bool = False
    is_elementwise: bool = False

    @property
    def gradient_bytes(self) -> int:
        return aligned(4 * self.numel) if self.has_master else self.parameter_bytes

    def sent_bytes(self, *, runs_ahead: bool = False) -> int:
        """Return what goes to the host where it is stepped there: its gradient, and itself unless a float32 copy is there and
        nobody has written to it."""
        is_enough = self.has_master and not runs_ahead
        return self.gradient_bytes + (0 if is_enough else self.parameter_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """Parameters whose states move together, and are stepped together.

    Attributes:
        parameters: their numbers, in the order of the optimizer's groups.
        numel: their elements.
        parameter_bytes: their bytes.
        gradient_bytes: of their gradients as they are stepped, in float32 where float32 copies are; so many come back from the
            host.
        sent_bytes: what goes to the host in a step there to which nobody has written parameters ahead.
        state_bytes: the bytes of their states, each rounded up to 512.
        is_resident: whether the states stay on the device.
        is_on_disk: whether they lie on a disk between steps.
        update: where they are stepped.
        slot: which slot they come to; -1 where they need none. Stepped within the backward, they come to these by turns, in the
            order of the backward before.
        windows: the parts of a large parameter, in its order: each moves, and is stepped, by itself. None for others.
    """

    parameters: tuple[int, ...]
    numel: int
    parameter_bytes: int
    gradient_bytes: int
    sent_bytes: int
    state_bytes: int
    is_resident: bool = False
    is_on_disk: bool = False
    update: Update = Update.DEVICE
    slot: int = -1
    windows: tuple[StatePiece, ...] = ()

    @property
    def parts(self) -> tuple[StatePiece, ...]:
        """What moves at once: the windows, or else the piece."""
        return self.windows if self.windows and not self.is_resident else (self,)

    @property
    def way_bytes(self) -> int:
        """Bytes of gradients and parameters on their way to the host, with what lies between them."""
        between = (2 * len(self.parameters) + 1) * ALIGNMENT_BYTES
        return aligned(self.gradient_bytes) + aligned(self.parameter_bytes) + between


def aligned(num_bytes: int) -> int:
    """Return bytes rounded up, so that what comes next begins as an allocation of its own would."""
    return rounded(num_bytes, ALIGNMENT_BYTES)
