"""What a `StateOffload` did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tabulate import tabulate

from memkit.plan import StatePlan, Update
from memkit.sizes import format_bytes
from memkit.states.host_memory import HostStates
from memkit.states.slots import StateSlots

if TYPE_CHECKING:
    from memkit.states.on_disk import DiskStates


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
    host_step_s: float = 0.0
    """Seconds that steps on the host have taken, without what these have waited for gradients."""
    disk_bytes: int = 0
    """Bytes of states that lie on the disk, as planned."""
    disk_read_bytes: int = 0
    """Bytes that were read from there."""
    disk_written_bytes: int = 0
    """Bytes that were written there."""

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
        if self.num_on_host:
            rows.append(("stepped on the host", f"{self.host_step_s:.3g} s"))
        if self.disk_bytes:
            rows += [
                ("states on the disk", format_bytes(self.disk_bytes)),
                ("read from there", format_bytes(self.disk_read_bytes)),
                ("written there", format_bytes(self.disk_written_bytes)),
            ]
        return tabulate(rows, tablefmt="plain", disable_numparse=True)


def in_words(plan: StatePlan, place: torch.device, update: str) -> str:
    """Return where states are, and where they are stepped."""
    on_disk = f"{format_bytes(plan.disk_bytes)} on the disk, " if plan.disk_bytes else ""
    return (
        f"{format_bytes(plan.host_bytes)} of states in host memory, {on_disk}{format_bytes(plan.resident_bytes)} on {place}, "
        f'update="{update}"'
    )


def stats_of(
    plan: StatePlan, host: HostStates, slots: StateSlots | None, disk: DiskStates | None, *, undo_bytes: int, num_steps: int
) -> StateStats:
    """Return what was moved so far, and what is taken now.

    Args:
        plan: where the states are.
        host: the host memory.
        slots: the room on the device; None if there is none any more, or yet.
        disk: where other states are; None for nowhere.
        undo_bytes: what is taken there beside.
        num_steps: steps so far.
    """
    return StateStats(
        num_pieces=len(plan.pieces),
        num_resident=sum(piece.is_resident for piece in plan.pieces),
        num_on_host=sum(piece.update is Update.HOST for piece in plan.pieces),
        num_steps=num_steps,
        host_bytes=host.arena.held_bytes,
        room_bytes=slots.num_bytes + undo_bytes if slots is not None and slots.slots else 0,
        resident_bytes=plan.resident_bytes,
        h2d_bytes=0 if slots is None else slots.h2d_bytes,
        d2h_bytes=0 if slots is None else slots.d2h_bytes,
        host_step_s=0.0 if slots is None else slots.host_step_s,
        disk_bytes=plan.disk_bytes,
        disk_read_bytes=0 if disk is None else disk.read_bytes,
        disk_written_bytes=0 if disk is None else disk.written_bytes,
    )
