"""The results of `memkit bench layers`: figures, a table, JSON, a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from memkit.bench.curves import mib, ms, pictures_by_ratio, to_json_line
from memkit.bench.measure import Measurement
from memkit.terminal import columns_of, table_text, wrapped
from memkit.transfer import Link

_GIB = 2**30
_HEADERS = (
    "ratio",
    "layers\nstreamed",
    "streamed\n(MiB)",
    "forward\n(ms)",
    "backward\n(ms)",
    "time /\nplain",
    "time /\nroofline",
    "in a row\n/ plain",
    "allocated\n(MiB)",
    "reserved\n(MiB)",
    "slots\n(MiB)",
    "stalls\n(ms)",
)
_GO = ("in a row\n/ plain", "reserved\n(MiB)", "stalls\n(ms)", "slots\n(MiB)", "layers\nstreamed", "streamed\n(MiB)")
"""The columns that are left out first if the table is too wide."""
_NO_ROOM = "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One ratio. Bytes moved and seconds waited are those of one step, on average over the counted steps."""

    ratio: float
    """The offload ratio."""
    memkit: Measurement
    """The step with `LayerOffload`."""
    plain: Measurement | None
    """The plain step of the same run; None if the device has no room for it."""
    link: Link
    """Bandwidth measured in the same run."""
    num_streamed: int
    """Layers that stream."""
    streamed_bytes: int
    """Bytes of the layers that stream: what each pass moves to the device."""
    slot_bytes: int
    """Bytes of the device that slots take."""
    d2h_bytes: float
    """Bytes to the host in the backward: gradients with train="host", weights with train="fused"."""
    num_fetches: float
    """Copies of a layer to the device."""
    num_demand_fetches: float
    """Fetches that began only when the layer was needed."""
    num_overflows: int
    """How often all slots were in use, in all steps including the warm-up."""
    stall_s: float
    """How long the device waited for layers."""

    @property
    def forward_roofline_s(self) -> float | None:
        """The plain forward, or the copies of what streams, whichever is longer. None without a plain step."""
        return None if self.plain is None else max(self.plain.forward_s, self._fetch_s)

    @property
    def backward_roofline_s(self) -> float | None:
        """The same for the backward, where bytes also leave; both directions of the link are taken to be independent."""
        if self.plain is None:
            return None
        if not self.plain.backward_s:
            return 0.0
        return max(self.plain.backward_s, self._fetch_s, self.d2h_bytes / self.link.d2h_bytes_per_s)

    @property
    def roofline_s(self) -> float | None:
        """The least time of the step: the sum over its passes."""
        forward_s, backward_s = self.forward_roofline_s, self.backward_roofline_s
        return None if forward_s is None or backward_s is None else forward_s + backward_s

    @property
    def to_roofline(self) -> float | None:
        """The step's seconds over the roofline."""
        return None if self.roofline_s is None else self.memkit.step_s / self.roofline_s

    @property
    def to_plain(self) -> float | None:
        """The step's seconds over those of the plain step."""
        return None if self.plain is None else self.memkit.step_s / self.plain.step_s

    @property
    def in_a_row_to_plain(self) -> float | None:
        """The same for steps that follow each other without the host waiting in between."""
        return None if self.plain is None else _in_a_row_to_plain(self.memkit, self.plain)

    @property
    def peak_over_expected_bytes(self) -> int | None:
        """The peak minus the expected one: that of the plain step, without what streams (and its gradients, if they move), with
        slots."""
        plain_bytes = None if self.plain is None else self.plain.peak_allocated_bytes
        if plain_bytes is None or self.memkit.peak_allocated_bytes is None:
            return None
        gone_bytes = self.streamed_bytes * (2 if self.d2h_bytes else 1)
        return self.memkit.peak_allocated_bytes - (plain_bytes - gone_bytes + self.slot_bytes)

    @property
    def _fetch_s(self) -> float:
        return self.streamed_bytes / self.link.h2d_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBench:
    """The results of a bench."""

    name: str
    """The name of the workload."""
    where: str
    """The device."""
    train: str
    """The argument of `LayerOffload`."""
    backward: bool
    """Whether the step has one."""
    num_layers: int
    """Layers of the model."""
    layer_bytes: int
    """Bytes of the layers' parameters."""
    plain: Measurement | None
    """None if the device has no room for the plain step."""
    link: Link
    """Bandwidth measured in this run."""
    ratios: tuple[float, ...]
    """As they were asked for."""
    rows: tuple[LayerRow, ...]
    """The ratios for which the device has room."""

    def to_text(self, *, width: int | None = None) -> str:
        """Return the table, for reading, with no line longer than `width`, if that is given."""
        how = f"train={self.train}" if self.backward else "forward only"
        layers = f"{self.num_layers} layers, {mib(self.layer_bytes)} MiB"
        lines = [self._line("plain", self.plain), *map(self._row, self.ratios)]
        table = table_text(columns_of(_HEADERS, lines, order=_GO), width)
        first = f"{self.name} on {self.where}: {layers}; {how}; {self.link}"
        return "\n".join([wrapped(first, width), "", table])

    def _row(self, ratio: float) -> tuple[str, ...]:
        row = next((row for row in self.rows if row.ratio == ratio), None)
        if row is None:
            return self._line(f"{ratio:g}", None)
        return self._line(
            f"{ratio:g}",
            row.memkit,
            streamed=(str(row.num_streamed), mib(row.streamed_bytes)),
            to_roofline=_ratio(row.to_roofline),
            waits=(mib(row.slot_bytes), ms(row.stall_s)),
        )

    def _line(
        self,
        name: str,
        found: Measurement | None,
        *,
        streamed: tuple[str, str] = ("-", "-"),
        to_roofline: str = "-",
        waits: tuple[str, str] = ("-", "-"),
    ) -> tuple[str, ...]:
        if found is None:
            return (name, *streamed, _NO_ROOM, *("-",) * (len(_HEADERS) - 4))
        times = ms(found.forward_s), ms(found.backward_s or None)
        to_plain = _ratio(None if self.plain is None else found.step_s / self.plain.step_s)
        peaks = mib(found.peak_allocated_bytes), mib(found.peak_reserved_bytes)
        in_a_row = _ratio(None if self.plain is None else _in_a_row_to_plain(found, self.plain))
        return (name, *streamed, *times, to_plain, to_roofline, in_a_row, *peaks, *waits)

    def to_json(self) -> str:
        """Return everything as one line of JSON, with the versions that were used."""
        figures = {
            "train": self.train,
            "backward": self.backward,
            "num_layers": self.num_layers,
            "layer_bytes": self.layer_bytes,
            "plain": None if self.plain is None else asdict(self.plain),
            "link": asdict(self.link),
            "ratios": self.ratios,
            "rows": [_figures(row) for row in self.rows],
        }
        return to_json_line("layers", self.name, self.where, figures)

    def plot(self, path: Path) -> None:
        """Write a picture of time, and of peak below it, against the ratio. Its kind follows from the file's name.

        The plain step is a line across.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        rows = sorted(self.rows, key=lambda row: row.ratio)
        rooflines = [(row.ratio, row.roofline_s * 1e3) for row in rows if row.roofline_s is not None]
        with pictures_by_ratio(path, f"{self.name} on {self.where}") as (times, peaks):
            times.plot([row.ratio for row in rows], [row.memkit.step_s * 1e3 for row in rows], "o-", label="memkit")
            times.plot([x for x, _ in rooflines], [y for _, y in rooflines], "k--", label="roofline", linewidth=1)
            counted = [(row.ratio, row.memkit.peak_allocated_bytes) for row in rows]
            held = [(x, num_bytes / _GIB) for x, num_bytes in counted if num_bytes is not None]
            peaks.plot([x for x, _ in held], [y for _, y in held], "o-", label="memkit")
            if self.plain is not None:
                times.axhline(self.plain.step_s * 1e3, color="gray", linestyle=":", label="plain")
                if self.plain.peak_allocated_bytes is not None:
                    peaks.axhline(self.plain.peak_allocated_bytes / _GIB, color="gray", linestyle=":", label="plain")


def _in_a_row_to_plain(found: Measurement, plain: Measurement) -> float | None:
    return None if found.in_a_row_s is None or plain.in_a_row_s is None else found.in_a_row_s / plain.in_a_row_s


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _figures(row: LayerRow) -> dict[str, object]:
    figures = asdict(row)
    for name in ("memkit", "plain", "link"):
        del figures[name]  # the first is told flat, the others are those of the bench
    names = (
        "forward_roofline_s",
        "backward_roofline_s",
        "roofline_s",
        "to_roofline",
        "to_plain",
        "in_a_row_to_plain",
        "peak_over_expected_bytes",
    )
    return {**figures, **asdict(row.memkit), **{name: getattr(row, name) for name in names}}
