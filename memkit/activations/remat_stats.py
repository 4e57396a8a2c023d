"""What a rematerialization did: counts of one iteration while it runs, and the frozen figures that users read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from tabulate import tabulate

from memkit.activations.ledger import Ledger
from memkit.activations.recording_cost import recording_cost_s
from memkit.activations.stats import EventPairs
from memkit.device.base import MemoryCounter
from memkit.sizes import format_bytes


@dataclass(slots=True, eq=False)
class RematCounts:
    """What one iteration has done so far."""

    budget: int | float = 1.0
    """As it was asked for."""
    budget_bytes: float = math.inf
    follows_plan: bool = False
    num_ops: int = 0
    num_saved: int = 0
    saved_bytes: int = 0
    num_dropped: int = 0
    dropped_bytes: int = 0
    peak_bytes: int = 0
    largest_bytes: int = 0
    """The most that one op has made in forwards without a plan."""
    is_to_be_judged: bool = False
    """Whether nobody has looked yet at whether it kept to the budget."""
    num_replays: int = 0
    num_replayed_ops: int = 0
    replayed_s: float = 0.0
    replayed: EventPairs = field(default_factory=EventPairs)

    @property
    def exceeds_budget(self) -> bool:
        """Whether the score alone has not kept to the budget, beside what one op makes."""
        return not self.follows_plan and self.peak_bytes > self.budget_bytes + self.largest_bytes

    def stats(
        self,
        *,
        tag: str,
        num_iterations: int,
        num_deviations: int,
        ledgers: Sequence[Ledger],
        counter: MemoryCounter | None,
    ) -> RematStats:
        """Return the figures for users."""
        return RematStats(
            tag=tag,
            num_iterations=num_iterations,
            num_deviations=num_deviations,
            budget_bytes=None if math.isinf(self.budget_bytes) else math.ceil(self.budget_bytes),
            follows_plan=self.follows_plan,
            num_ops=self.num_ops,
            recorder_s=self.num_ops * recording_cost_s(),
            num_saved=self.num_saved,
            saved_bytes=self.saved_bytes,
            num_kept=self.num_saved - self.num_dropped,
            num_dropped=self.num_dropped,
            dropped_bytes=self.dropped_bytes,
            ledger_peak_bytes=self.peak_bytes,
            num_replays=self.num_replays,
            num_replayed_ops=self.num_replayed_ops,
            estimated_replay_s=self.replayed_s,
            measured_replay_s=self.replayed.total_s(),
            live_records=sum(ledger.num_records for ledger in ledgers),
            live_bytes=sum(ledger.live_bytes for ledger in ledgers),
            peak_allocated_bytes=None if counter is None else counter.peak_bytes(),
            peak_reserved_bytes=None if counter is None else counter.peak_reserved_bytes(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RematStats:
    """What `Rematerialize` did under one tag. But for the first three, figures are those of the last iteration.

    Only what may be dropped at all is counted as saved: distinct storages of at least `min_bytes` that ops in the context made.
    """

    tag: str
    num_iterations: int
    """Entries with grad mode on, since the tag was new or reset."""
    num_deviations: int
    """Forwards that have left the trace whose plan they followed."""
    budget_bytes: int | None
    """The budget in bytes; None if there is no bound."""
    follows_plan: bool
    """Whether the iteration has followed a plan to its end, or was carried by the score."""
    num_ops: int
    """Ops that were seen in the forward."""
    recorder_s: float
    """Seconds of the host that recording them took, estimated: their number times what a small op in a chain takes. What saving
    takes is left out."""
    num_saved: int
    saved_bytes: int
    num_kept: int
    """Saved values that were not dropped."""
    num_dropped: int
    """Saved values that were dropped in the forward or in the backward, each counted once."""
    dropped_bytes: int
    ledger_peak_bytes: int
    """The most bytes of saved values and replay temporaries that were on the device at once."""
    num_replays: int
    """Requests of the backward that ran ops again."""
    num_replayed_ops: int
    estimated_replay_s: float
    """What these ops took in the forward, or were thought to take."""
    measured_replay_s: float
    """What they took: on a device read from events, as far as they are reached."""
    live_records: int
    """Saved values that a graph may still ask for."""
    live_bytes: int
    """Bytes of those that are on the device."""
    peak_allocated_bytes: int | None
    """Of the allocator; None where it does not count."""
    peak_reserved_bytes: int | None

    def __str__(self) -> str:
        rows = [
            (item.name.removesuffix("_bytes").removesuffix("_s").replace("_", " "), self._cell(item.name))
            for item in fields(self)
        ]
        return tabulate(rows, tablefmt="plain", disable_numparse=True)

    def _cell(self, name: str) -> str:
        value = getattr(self, name)
        if value is None:
            return "-"
        if name.endswith("_bytes"):
            return format_bytes(value)
        if name.endswith("_s"):
            return f"{1e3 * value:.2f} ms"
        return str(value)
