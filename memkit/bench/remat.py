"""`memkit bench remat`: time and peak of a training step against the budget of its saved tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from memkit.activations import Rematerialize, SavedTensorStats, reset, stats
from memkit.bench import engines
from memkit.bench.curves import draw_curve, draw_names, draw_others, headline, mib, ms, picture, to_json_line, where_of
from memkit.bench.measure import Engine, Measurement, Workload, timer
from memkit.device import Device
from memkit.sizes import check_budget, format_mib
from memkit.terminal import columns_of, table_text, wrapped

_TAG = "memkit bench"
_HEADERS = (
    "budget",
    "ledger\n(MiB)",
    "allocated\n(MiB)",
    "reserved\n(MiB)",
    "time\n(ms)",
    "time /\nplain",
    "replayed\nops",
    "estimated\n(ms)",
    "measured\n(ms)",
    "kept",
    "dropped",
)
_GO = ("estimated\n(ms)", "measured\n(ms)", "replayed\nops", "kept", "dropped", "reserved\n(MiB)")
"""The columns that are left out first if the table is too wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RematRow:
    """One budget. Seconds are of a whole step; what was replayed and dropped is that of the last step."""

    budget: int | float | str
    """As it was asked for: bytes, text such as "8GiB", or a share of the saved bytes."""
    memkit: Measurement
    """The step with `Rematerialize`."""
    plain_s: float
    """Without memkit, in the same run."""
    stats: SavedTensorStats
    """What `Rematerialize` did."""

    @property
    def to_plain(self) -> float:
        """The step's seconds over those of the plain step of the same run."""
        return self.memkit.step_s / self.plain_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RematBench:
    """What a bench has measured."""

    name: str
    """What was run."""
    where: str
    """The device."""
    plain: Measurement
    """The step without memkit."""
    saved_bytes: int
    """Bytes of the distinct storages that may be dropped."""
    rows: tuple[RematRow, ...]
    """One row for each budget."""
    peers: Mapping[str, Measurement]
    """Steps with other means, by their names."""

    def to_text(self, *, width: int | None = None) -> str:
        """Return the table, for reading, with no line longer than `width`, if that is given."""
        first = f"{headline(self.name, self.where, self.plain)}; {mib(self.saved_bytes)} MiB may be dropped"
        lines = [self._line("plain", self.plain), *map(self._row, self.rows)]
        lines += [self._line(name, peer) for name, peer in self.peers.items()]
        return f"{wrapped(first, width)}\n\n{table_text(columns_of(_HEADERS, lines, order=_GO), width)}"

    def _row(self, row: RematRow) -> tuple[str, ...]:
        stats = row.stats
        return self._line(
            budget_text(row.budget),
            row.memkit,
            ledger=mib(stats.ledger_peak_bytes),
            counts=(
                str(stats.num_replayed_ops),
                ms(stats.estimated_replay_s),
                ms(stats.measured_replay_s),
                str(stats.num_kept),
                str(stats.num_dropped),
            ),
        )

    def _line(
        self, name: str, found: Measurement, *, ledger: str = "-", counts: tuple[str, ...] = ("-",) * 5
    ) -> tuple[str, ...]:
        peaks = mib(found.peak_allocated_bytes), mib(found.peak_reserved_bytes)
        return (name, ledger, *peaks, ms(found.step_s), f"{found.step_s / self.plain.step_s:.3f}", *counts)

    def to_json(self) -> str:
        """Return everything as one line of JSON, with the versions that were used."""
        figures = {
            "plain": asdict(self.plain),
            "saved_bytes": self.saved_bytes,
            "rows": [
                {"budget": row.budget, "to_plain": row.to_plain, **asdict(row.memkit), "stats": asdict(row.stats)}
                for row in self.rows
            ],
            "peers": {name: {**asdict(peer), "to_plain": peer.step_s / self.plain.step_s} for name, peer in self.peers.items()},
        }
        return to_json_line("remat", self.name, self.where, figures)

    def plot(self, path: Path) -> None:
        """Write a picture of time against peak. Its kind follows from the file's name.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        points = [(row.memkit.peak_allocated_bytes, row.memkit.step_s, budget_text(row.budget)) for row in self.rows]
        with picture(path, f"{self.name} on {self.where}") as axes:
            draw_curve(axes, "o-", "memkit", [(peak_bytes, seconds) for peak_bytes, seconds, _ in points])
            draw_names(axes, points)
            draw_others(axes, {"plain": self.plain, **self.peers})


def bench_remat(
    workload: Workload,
    budgets: Sequence[int | float | str],
    device: Device,
    *,
    num_steps: int = 20,
    num_warmup: int = 4,
    peers: Mapping[str, Engine] = MappingProxyType({}),
    min_bytes: int = 2**20,
) -> RematBench:
    """Measure a training step as it is, at each budget, and with other means; all in one run.

    Args:
        workload: the step.
        budgets: what to give `Rematerialize`.
        device: where the model is. The bench times with its events.
        num_steps, num_warmup: steps that count, and steps ahead of them that do not, for each line. The first step is
            recorded, the second is timed op by op: a plan from measured times is followed from the third on.
        peers: what to time as well, by name.
        min_bytes: storages smaller than this stay.

    Raises:
        TypeError: a budget is neither a number nor text.
        ValueError: a budget is out of range.
    """
    for budget in budgets:
        check_budget(budget)
    timed = timer(workload, device, num_steps=num_steps, num_warmup=num_warmup)
    plain = timed("plain", engines.plain)
    rows: list[RematRow] = []
    for budget in budgets:
        reset(_TAG)
        found = timed(f"budget {budget_text(budget)}", partial(Rematerialize, budget, _TAG, min_bytes=min_bytes, device=device))
        rows.append(RematRow(budget=budget, memkit=found, plain_s=plain.step_s, stats=stats(_TAG)))
        reset(_TAG)
    return RematBench(
        name=workload.name,
        where=where_of(device),
        plain=plain,
        saved_bytes=rows[-1].stats.saved_bytes if rows else 0,
        rows=tuple(rows),
        peers={name: timed(name, engine) for name, engine in peers.items()},
    )


def budget_text(budget: int | float | str) -> str:
    """Return a budget as it is printed: a share as a number, bytes with their unit."""
    if isinstance(budget, int):
        return format_mib(budget)
    return f"{budget:g}" if isinstance(budget, float) else budget
