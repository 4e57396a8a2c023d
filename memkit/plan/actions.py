"""What is to happen to each saved storage: the frozen answer of every planner."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tabulate import tabulate

from memkit.sizes import format_bytes, format_mib


class Action(str, Enum):
    """What to do with one saved storage."""

    KEEP = "keep"
    """Leave it on the device."""
    OFFLOAD = "offload"
    """Copy it to host memory, let go of it, and have it back for the backward."""
    RECOMPUTE = "recompute"
    """Let go of it, and run the ops that made it again for the backward."""


def limit_of(seen_bytes: int, ratio: float, window_bytes: int) -> int:
    """Return the most bytes of saved tensors that the device may hold: what the ratio keeps and a quarter of the window beside
    it, so that the last copies of a forward need not be over when it ends; or the whole window if that is more."""
    return max(round((1 - ratio) * seen_bytes) + window_bytes // 4, window_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One action for each storage that a forward saves, in the order of first saves."""

    sizes_bytes: tuple[int, ...]
    actions: tuple[Action, ...]
    ratio: float
    """The share that was asked for."""
    window_bytes: int
    held: frozenset[int]
    """Storages, by index, that somebody else keeps alive: they stay, and no total counts them."""
    seen_bytes: int
    """Bytes of all storages that are not held."""
    offload_bytes: int
    """Of these, the bytes that leave."""

    @property
    def kept_bytes(self) -> int:
        """The bytes that stay."""
        return self.seen_bytes - self.offload_bytes

    @property
    def limit_bytes(self) -> int:
        """The most bytes of these storages that the device holds at once: see `limit_of`."""
        return limit_of(self.seen_bytes, self.ratio, self.window_bytes)

    def __str__(self) -> str:
        return f"offload {format_bytes(self.offload_bytes)} of {format_bytes(self.seen_bytes)}, in {len(self.actions)} storages"

    def explain(self) -> str:
        """Return the plan as a table, one line per storage, with the totals in the last three."""
        rows = [
            (index, format_mib(size), "held" if index in self.held else action.value)
            for index, (size, action) in enumerate(zip(self.sizes_bytes, self.actions, strict=True))
        ]
        table = tabulate(rows, headers=("save", "size", "action"), colalign=("right", "right", "left"), disable_numparse=True)
        return "\n".join(
            (
                table,
                f"saved: {format_mib(self.seen_bytes)}",
                f"kept: {format_mib(self.kept_bytes)}",
                f"offloaded: {format_mib(self.offload_bytes)}",
            )
        )
