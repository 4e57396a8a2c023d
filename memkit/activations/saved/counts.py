"""The counters of a running iteration, from which `memkit.stats` reports."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memkit.device.base import CopyBatch, Event, busy_s_of
from memkit.transfer.lanes import Transfer

if TYPE_CHECKING:
    from memkit.activations.saved.settled import TimedWays


_Timed = tuple[Event, Event]


def reached_s(pairs: Iterable[_Timed]) -> float:
    return sum(start.elapsed_s(end) for start, end in pairs if end.is_reached())


@dataclass(slots=True, eq=False)
class Copies:
    alone: list[Transfer] = field(default_factory=list)
    waits: list[_Timed] = field(default_factory=list)
    batches: list[CopyBatch] = field(default_factory=list)

    def _all(self) -> list[Transfer | CopyBatch]:
        return [*self.alone, *self.batches]

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._all())

    @property
    def num_copies(self) -> int:
        return len(self.alone) + sum(batch.num_storages for batch in self.batches)

    def stall_s(self) -> float:
        return reached_s(self.waits) + sum(batch.stall_s() for batch in self.batches)

    def rate(self) -> float | None:
        if not all(copy.done.is_reached() for copy in self._all()):
            return None
        busy_s = sum(copy.started.elapsed_s(copy.done) for copy in self.alone) + busy_s_of(self.batches)
        return self.num_bytes / busy_s if busy_s > 0 else None


@dataclass(slots=True, eq=False)
class Counts:
    ratio: float = 0.0
    window_bytes: int = 0
    seen_bytes: int = 0
    unique_bytes: int = 0
    kept_bytes: int = 0
    served_bytes: int = 0
    wasted_bytes: int = 0
    moved_out: Copies = field(default_factory=Copies)
    moved_in: Copies = field(default_factory=Copies)

    budget: int | float = 1.0
    budget_bytes: float = math.inf
    follows_plan: bool = False
    num_ops: int = 0
    num_saved: int = 0
    saved_bytes: int = 0
    opless_bytes: dict[str, int] = field(default_factory=dict)  # saved values that no recorded op makes, by the reason why
    num_dropped: int = 0
    dropped_bytes: int = 0
    peak_bytes: int = 0
    largest_bytes: int = 0
    is_to_be_judged: bool = False
    trial: TimedWays | None = None
    has_mismatch: bool = False
    num_replays: int = 0
    num_replayed_ops: int = 0
    replayed_s: float = 0.0
    ops_of_region: int = 0
    region_s: float = 0.0
    replayed: list[_Timed] = field(default_factory=list)

    def note_opless(self, why: str | None, num_bytes: int) -> None:
        if why is not None:
            self.opless_bytes[why] = self.opless_bytes.get(why, 0) + num_bytes

    @property
    def exceeds_budget(self) -> bool:
        return not self.follows_plan and self.peak_bytes > self.budget_bytes + self.largest_bytes

    def figures_of_copies(self) -> dict[str, Any]:
        return {
            "moved_out_bytes": self.moved_out.num_bytes,
            "moved_in_bytes": self.moved_in.num_bytes,
            "served_bytes": self.served_bytes,
            "wasted_bytes": self.wasted_bytes,
            "num_copies_out": self.moved_out.num_copies,
            "num_copies_in": self.moved_in.num_copies,
            "stall_out_s": self.moved_out.stall_s(),
            "stall_in_s": self.moved_in.stall_s(),
            "d2h_bytes_per_s": self.moved_out.rate(),
            "h2d_bytes_per_s": self.moved_in.rate(),
        }
