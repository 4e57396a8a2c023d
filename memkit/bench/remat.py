"""`memkit bench remat`: time and peak of a training step against the budget that its saved tensors are held to."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

from memkit._version import __version__
from memkit.activations import Rematerialize, RematStats, remat_stats, reset
from memkit.activations.remat import check_budget
from memkit.bench import engines
from memkit.bench.measure import Engine, Measurement, Workload, measure
from memkit.device import Device
from memkit.sizes import format_mib

_log = logging.getLogger("memkit.bench")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RematRow:
    """One budget. Seconds are of a whole step; what was replayed and dropped is that of the last step."""

    budget: int | float | str
    """As it was asked for: bytes, text such as "8GiB", or a share of the saved bytes."""
    memkit: Measurement
    plain_s: float
    stats: RematStats

    @property
    def to_plain(self) -> float:
        """The step's seconds over those of the plain step of the same run."""
        return self.memkit.step_s / self.plain_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RematBench:
    """What a bench has measured."""

    name: str
    where: str
    """The device."""
    plain: Measurement
    saved_bytes: int
    """Bytes of the distinct storages that may be dropped."""
    rows: tuple[RematRow, ...]
    peers: Mapping[str, Measurement]

    def to_text(self) -> str:
        """Return the table, for reading."""
        plain = self.plain
        first = (
            f"{self.name} on {self.where}: step {_ms(plain.step_s)} ms (forward {_ms(plain.forward_s)}, backward "
            f"{_ms(plain.backward_s)}); {_mib(self.saved_bytes)} MiB may be dropped"
        )
        lines = [self._line("plain", plain), *map(self._row, self.rows)]
        lines += [self._line(name, peer) for name, peer in self.peers.items()]
        aligned = ("left", *("right",) * (len(_HEADERS) - 1))
        return f"{first}\n\n{tabulate(lines, headers=_HEADERS, disable_numparse=True, colalign=aligned)}"

    def _row(self, row: RematRow) -> tuple[str, ...]:
        stats = row.stats
        return self._line(
            budget_text(row.budget),
            row.memkit,
            ledger=_mib(stats.ledger_peak_bytes),
            counts=(
                str(stats.num_replayed_ops),
                _ms(stats.estimated_replay_s),
                _ms(stats.measured_replay_s),
                str(stats.num_kept),
                str(stats.num_dropped),
            ),
        )

    def _line(
        self, name: str, found: Measurement, *, ledger: str = "-", counts: tuple[str, ...] = ("-",) * 5
    ) -> tuple[str, ...]:
        peaks = _mib(found.peak_allocated_bytes), _mib(found.peak_reserved_bytes)
        return (name, ledger, *peaks, _ms(found.step_s), f"{found.step_s / self.plain.step_s:.3f}", *counts)

    def to_json(self) -> str:
        """Return everything as one line of JSON, with the versions that were used."""
        figures = {
            "bench": "remat",
            "name": self.name,
            "where": self.where,
            "memkit": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "plain": asdict(self.plain),
            "saved_bytes": self.saved_bytes,
            "rows": [
                {"budget": row.budget, "to_plain": row.to_plain, **asdict(row.memkit), "stats": asdict(row.stats)}
                for row in self.rows
            ],
            "peers": {name: {**asdict(peer), "to_plain": peer.step_s / self.plain.step_s} for name, peer in self.peers.items()},
        }
        return json.dumps(figures)

    def plot(self, path: Path) -> None:
        """Write a picture of time against peak. Its kind follows from the file's name.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        gib = 2**30
        points = [
            (row.memkit.peak_allocated_bytes / gib, row.memkit.step_s * 1e3, budget_text(row.budget))
            for row in self.rows
            if row.memkit.peak_allocated_bytes is not None
        ]
        axes.plot([peak for peak, _, _ in points], [time for _, time, _ in points], "o-", label="memkit")
        for peak, time, text in points:
            axes.annotate(text, (peak, time), textcoords="offset points", xytext=(4, 6), fontsize=8)
        for name, peer in {"plain": self.plain, **self.peers}.items():
            if peer.peak_allocated_bytes is not None:
                axes.plot([peer.peak_allocated_bytes / gib], [peer.step_s * 1e3], "D", label=name)
        axes.set(xlabel="peak allocated (GiB)", ylabel="step (ms)", title=f"{self.name} on {self.where}")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        figure.savefig(path)


def bench_remat(
    workload: Workload,
    budgets: Sequence[int | float | str],
    device: Device,
    *,
    num_steps: int = 20,
    num_warmup: int = 4,
    with_peers: bool = False,
    min_bytes: int = 2**20,
) -> RematBench:
    """Measure a training step as it is, at each budget, and with checkpointing; all in one run.

    Args:
        workload: the step.
        budgets: what to give `Rematerialize`.
        device: where the model is. The bench times with its events.
        num_steps, num_warmup: steps that count, and steps ahead of them that do not, for each line. The first step is
            recorded, the second is timed op by op: a plan from measured times is followed from the third on.
        with_peers: whether to time checkpointing as well.
        min_bytes: storages smaller than this stay.

    Raises:
        TypeError: a budget is neither a number nor text.
        ValueError: a budget is out of range.
    """
    for budget in budgets:
        check_budget(budget)

    def timed(what: str, engine: Engine) -> Measurement:
        _log.info("%s: %s", workload.name, what)
        return measure(workload, engine, device, num_steps=num_steps, num_warmup=num_warmup)

    plain = timed("plain", engines.plain)
    rows: list[RematRow] = []
    for budget in budgets:
        reset(_TAG)
        found = timed(f"budget {budget_text(budget)}", partial(Rematerialize, budget, _TAG, min_bytes=min_bytes, device=device))
        rows.append(RematRow(budget=budget, memkit=found, plain_s=plain.step_s, stats=remat_stats(_TAG)))
        reset(_TAG)
    others = {name: timed(name, engine) for name, engine in engines.checkpointing(workload.model).items()} if with_peers else {}
    return RematBench(
        name=workload.name,
        where=f"{device.name}, torch {torch.__version__}",
        plain=plain,
        saved_bytes=rows[-1].stats.saved_bytes if rows else 0,
        rows=tuple(rows),
        peers=others,
    )


def budget_text(budget: int | float | str) -> str:
    """Return a budget as it is printed: a share as a number, bytes with their unit."""
    if isinstance(budget, int):
        return format_mib(budget)
    return f"{budget:g}" if isinstance(budget, float) else budget


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_mib(num_bytes).removesuffix(" MiB")
