"""The bytes of parameters' states, and of pieces of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from memkit.core.sizes import ALIGNMENT_BYTES, rounded


class Update(enum.Enum):
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCosts:
    """The bytes of one parameter of an optimizer.

    Attributes:
        name: its name.
        numel: its elements.
        parameter_bytes: its bytes.
        state_bytes: bytes of its states, with the float32 copy if there is one.
        has_master: whether the optimizer steps a float32 copy of it.
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
        """Return the bytes that a step on the host sends there: the gradient, and the parameter unless an up-to-date float32
        copy is there."""
        is_enough = self.has_master and not runs_ahead
        return self.gradient_bytes + (0 if is_enough else self.parameter_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """Parameters whose states move together, and are stepped together.

    Attributes:
        parameters: their indices, in the order of the optimizer's groups.
        numel: their elements.
        parameter_bytes: their bytes.
        gradient_bytes: bytes of their gradients as they are stepped, in float32 if there are float32 copies; as many come back
            from the host.
        sent_bytes: bytes that a step on the host sends there if nobody wrote to parameters ahead of it.
        state_bytes: the bytes of their states, each rounded up to 512.
        is_resident: whether the states stay on the device.
        is_on_disk: whether the states are on a disk between steps.
        update: where they are stepped.
        slot: the slot that they use; -1 if they need none. Stepped within the backward, pieces take slots in turn, in the order
            of the previous backward.
        windows: the parts of a large parameter, in its order: each moves, and is stepped, by itself. Empty for others.
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
        """Bytes of gradients and parameters on their way to the host, with padding."""
        between = (2 * len(self.parameters) + 1) * ALIGNMENT_BYTES
        return aligned(self.gradient_bytes) + aligned(self.parameter_bytes) + between


def aligned(num_bytes: int) -> int:
    """Return bytes rounded up, so that the next item is aligned like an allocation of its own."""
    return rounded(num_bytes, ALIGNMENT_BYTES)
