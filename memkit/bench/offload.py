"""`memkit bench offload`: time and peak of a training step against the share of saved bytes that moves to the host."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from memkit.activations import CPUOffload, reset, stats
from memkit.bench import engines
from memkit.bench.curves import draw_curve, draw_names, draw_others, headline, mib, ms, picture, to_json_line, where_of
from memkit.bench.measure import Engine, Measurement, Workload, timer
from memkit.device import Device
from memkit.plan import Action, check_ratio, plan_ratio, roofline_s, simulate_lanes
from memkit.profile import MemoryReport, timed_saves
from memkit.terminal import columns_of, table_text, wrapped
from memkit.transfer import Link, measure_link

_log = logging.getLogger("memkit.bench")

_TAG = "memkit bench"
MIN_BYTES = 2**20
_HEADERS = (
    "ratio",
    "moved\n(MiB)",
    "allocated\n(MiB)",
    "reserved\n(MiB)",
    "plain\n(ms)",
    "synchronous\n(ms)",
    "memkit\n(ms)",
    "speed-up",
    "roofline\n(ms)",
    "memkit /\nroofline",
)
_GO = ("synchronous\n(ms)", "speed-up", "reserved\n(MiB)", "roofline\n(ms)")
"""The columns that are left out first if the table is too wide."""
_OTHERS = ("others", "allocated\n(MiB)", "reserved\n(MiB)", "time\n(ms)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRow:
    """One ratio. Seconds are of a whole step."""

    ratio: float
    """The offload ratio."""
    moved_bytes: int
    """Bytes that leave in a step. Of these, what is still on the device when the backward begins is not fetched."""
    window_bytes: int
    """Bytes that the device may hold beside what the ratio keeps."""
    memkit_s: float
    """With `CPUOffload`."""
    peak_allocated_bytes: int | None
    """None where the allocator does not count."""
    peak_reserved_bytes: int | None
    """None where the allocator does not count."""
    plain_s: float
    """Without memkit, in the same run."""
    synchronous_s: float | None
    """With synchronous copies of as many bytes; with `torch.autograd.graph.save_on_cpu` at ratio 1. None if nothing moves."""
    synchronous_allocated_bytes: int | None
    """The peak of that step."""
    roofline_s: float
    """What moving these bytes takes at least, from the plain forward, the plain backward and the link of the same run."""

    @property
    def speed_up(self) -> float | None:
        """How many times as fast as the synchronous copies."""
        return None if self.synchronous_s is None else self.synchronous_s / self.memkit_s

    @property
    def to_roofline(self) -> float:
        """The step's seconds over the roofline."""
        return self.memkit_s / self.roofline_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBench:
    """What a bench has measured, or predicted."""

    name: str
    """What was run."""
    where: str
    """The device; or what the prediction is made from."""
    plain: Measurement
    """The step without memkit."""
    link: Link
    """Bandwidth of the copies."""
    saved_bytes: int
    """Bytes of the distinct storages that may leave."""
    rows: tuple[OffloadRow, ...]
    """One row for each ratio."""
    peers: Mapping[str, Measurement]
    """Steps with other means, by their names."""

    def to_text(self, *, width: int | None = None) -> str:
        """Return the tables, for reading, with no line longer than `width`, if that is given."""
        plain = self.plain
        first = (
            f"{headline(self.name, self.where, plain)}, peak {mib(plain.peak_allocated_bytes)} MiB allocated, "
            f"{mib(plain.peak_reserved_bytes)} reserved; {mib(self.saved_bytes)} MiB may leave; {self.link}"
        )
        rows = [
            (
                f"{row.ratio:g}",
                mib(row.moved_bytes),
                mib(row.peak_allocated_bytes),
                mib(row.peak_reserved_bytes),
                ms(row.plain_s),
                ms(row.synchronous_s),
                ms(row.memkit_s),
                "-" if row.speed_up is None else f"{row.speed_up:.2f}",
                ms(row.roofline_s),
                f"{row.to_roofline:.3f}",
            )
            for row in self.rows
        ]
        lines = [wrapped(first, width), "", table_text(columns_of(_HEADERS, rows, left=0, order=_GO), width)]
        if self.peers:
            others = [
                (name, mib(peer.peak_allocated_bytes), mib(peer.peak_reserved_bytes), ms(peer.step_s))
                for name, peer in self.peers.items()
            ]
            lines += ["", table_text(columns_of(_OTHERS, others), width)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return everything as one line of JSON, with the versions that were used."""
        figures = {
            "plain": asdict(self.plain),
            "link": asdict(self.link),
            "saved_bytes": self.saved_bytes,
            "rows": [{**asdict(row), "to_roofline": row.to_roofline, "speed_up": row.speed_up} for row in self.rows],
            "peers": {name: asdict(peer) for name, peer in self.peers.items()},
        }
        return to_json_line("offload", self.name, self.where, figures)

    def plot(self, path: Path) -> None:
        """Write a picture of time against peak. Its kind follows from the file's name.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        with picture(path, f"{self.name} on {self.where}") as axes:
            draw_curve(axes, "o-", "memkit", [(row.peak_allocated_bytes, row.memkit_s) for row in self.rows])
            draw_curve(axes, "k--", "roofline", [(row.peak_allocated_bytes, row.roofline_s) for row in self.rows], linewidth=1)
            draw_names(axes, [(row.peak_allocated_bytes, row.memkit_s, f"{row.ratio:g}") for row in self.rows])
            slow = [
                (row.synchronous_allocated_bytes, row.synchronous_s)
                for row in self.rows
                if row.synchronous_s is not None and row.synchronous_allocated_bytes is not None
            ]
            if slow:
                draw_curve(axes, "s:", "synchronous copies", slow)
            draw_others(axes, {"no saving": self.plain, **self.peers})


def bench_offload(
    workload: Workload,
    ratios: Sequence[float],
    device: Device,
    *,
    num_steps: int = 20,
    num_warmup: int = 4,
    with_synchronous: bool = True,
    peers: Mapping[str, Engine] = MappingProxyType({}),
) -> OffloadBench:
    """Measure a training step with no saving, at each ratio, and with other means; all in one run.

    Args:
        workload: the step.
        ratios: what to give `CPUOffload`.
        device: where the model is. The bench times with its events.
        num_steps, num_warmup: steps that count, and steps ahead of them that do not, for each line.
        with_synchronous: whether to time synchronous copies of the same bytes as well.
        peers: what to time as well, by name.

    Raises:
        ValueError: a ratio is not from 0 to 1.
    """
    ratios = [check_ratio(ratio, where="a ratio") for ratio in ratios]
    _log.info("measuring the link")
    link = measure_link(device)
    timed = timer(workload, device, num_steps=num_steps, num_warmup=num_warmup)
    plain = timed("no saving", engines.plain)
    rows, saved_bytes = [], 0
    for ratio in ratios:
        reset(_TAG)
        fast = timed(f"ratio {ratio:g}", partial(CPUOffload, ratio, _TAG, min_bytes=MIN_BYTES, device=device))
        found = stats(_TAG)
        reset(_TAG)
        saved_bytes = found.unique_bytes
        slow = None
        if with_synchronous and found.moved_out_bytes:
            copies = partial(engines.synchronous, found.moved_out_bytes, min_bytes=MIN_BYTES)
            slow = timed(f"ratio {ratio:g}, synchronous copies", engines.save_on_cpu if ratio == 1 else copies)
        rows.append(
            OffloadRow(
                ratio=ratio,
                moved_bytes=found.moved_out_bytes,
                window_bytes=found.window_bytes,
                memkit_s=fast.step_s,
                peak_allocated_bytes=fast.peak_allocated_bytes,
                peak_reserved_bytes=fast.peak_reserved_bytes,
                plain_s=plain.step_s,
                synchronous_s=None if slow is None else slow.step_s,
                synchronous_allocated_bytes=None if slow is None else slow.peak_allocated_bytes,
                roofline_s=roofline_s(
                    forward_s=plain.forward_s,
                    backward_s=plain.backward_s,
                    out_bytes=found.moved_out_bytes,
                    back_bytes=found.moved_in_bytes,
                    link=link,
                ),
            )
        )
    return OffloadBench(
        name=workload.name,
        where=where_of(device),
        plain=plain,
        link=link,
        saved_bytes=saved_bytes,
        rows=tuple(rows),
        peers={name: timed(name, engine) for name, engine in peers.items()},
    )


def predict_offload(report: MemoryReport, ratios: Sequence[float], link: Link) -> OffloadBench:
    """Return what `bench_offload` would find, from a report with times and the speed of a link. Measures nothing.

    The time is that of a simulation of the two lanes, the peak is the report's less the bytes that leave.

    Raises:
        ValueError: the report has no times, or a ratio is not from 0 to 1.
    """
    saves = timed_saves(report, MIN_BYTES)
    forward_s, backward_s = report.forward_s, report.backward_s
    if forward_s is None or backward_s is None:
        raise ValueError("the report has no times: profile on a GPU, with backward=True")
    sizes = [save.num_bytes for save in saves]
    held = frozenset(index for index, save in enumerate(saves) if save.is_held)
    window_bytes = 2 * max((size for index, size in enumerate(sizes) if index not in held), default=0)
    peaks = [peak for peak in (report.forward_peak_bytes, report.backward_peak_bytes) if peak is not None]
    plain = Measurement(
        num_steps=1,
        step_s=forward_s + backward_s,
        forward_s=forward_s,
        backward_s=backward_s,
        peak_allocated_bytes=max(peaks, default=None),
        peak_reserved_bytes=report.reserved_peak_bytes,
    )
    rows, saved_bytes = [], 0
    for ratio in ratios:
        plan = plan_ratio(sizes, check_ratio(ratio, where="a ratio"), window_bytes=window_bytes, held=held)
        offloaded = {index for index, action in enumerate(plan.actions) if action is Action.OFFLOAD}
        time = simulate_lanes(
            saves, offloaded, forward_s=forward_s, backward_s=backward_s, link=link, limit_bytes=plan.limit_bytes
        )
        moved_bytes, saved_bytes = plan.offload_bytes, plan.saved_bytes
        both_ways_s = moved_bytes / link.d2h_bytes_per_s + moved_bytes / link.h2d_bytes_per_s
        rows.append(
            OffloadRow(
                ratio=ratio,
                moved_bytes=moved_bytes,
                window_bytes=window_bytes,
                memkit_s=time.step_s,
                peak_allocated_bytes=None if plain.peak_allocated_bytes is None else plain.peak_allocated_bytes - moved_bytes,
                peak_reserved_bytes=None,
                plain_s=plain.step_s,
                synchronous_s=plain.step_s + both_ways_s if moved_bytes else None,
                synchronous_allocated_bytes=None,
                roofline_s=roofline_s(
                    forward_s=forward_s, backward_s=backward_s, out_bytes=moved_bytes, back_bytes=moved_bytes, link=link
                ),
            )
        )
    return OffloadBench(
        name=report.run.model,
        where=f"a prediction from a report of {report.run.device}",
        plain=plain,
        link=link,
        saved_bytes=saved_bytes,
        rows=tuple(rows),
        peers={},
    )
