"""What a `StateOffload` did."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate

from memkit.sizes import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStats:
    """What a `StateOffload` has moved since it was made, and what it takes now."""

    num_pieces: int
    """Pieces that the states are in."""
    num_resident: int
    """Pieces whose states stay on the device."""
    num_on_host: int
    """Pieces that are stepped on the host."""
    num_steps: int
    """Steps of the optimizer."""
    host_bytes: int
    """Host memory that is held, pinned where the system does that."""
    room_bytes: int
    """Bytes of the device for pieces on their way, and for the parameters of one piece as they were before its step."""
    resident_bytes: int
    """Bytes of states that stay on the device, as planned."""
    h2d_bytes: int
    """Bytes that were copied to the device."""
    d2h_bytes: int
    """Bytes that were copied to the host."""

    def __str__(self) -> str:
        rows = [
            ("pieces", f"{self.num_pieces}, {self.num_resident} of them stay, {self.num_on_host} are stepped on the host"),
            ("steps", str(self.num_steps)),
            ("host memory", format_bytes(self.host_bytes)),
            ("room on the device", format_bytes(self.room_bytes)),
            ("states that stay there", format_bytes(self.resident_bytes)),
            ("moved to the device", format_bytes(self.h2d_bytes)),
            ("moved to the host", format_bytes(self.d2h_bytes)),
        ]
        return tabulate(rows, tablefmt="plain", disable_numparse=True)
