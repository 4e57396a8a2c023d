"""Compares two reports of a step, or a report with what a context of memkit has measured: figures and sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

from memkit.profile.alive import MemoryCategory
from memkit.profile.words import PLURALS
from memkit.sizes import unit_of
from memkit.terminal import TextColumn, table_text, wrapped

if TYPE_CHECKING:
    from memkit.profile.report import MemoryReport


class TakenStep(Protocol):
    """What `memkit.stats` returns for a step under a `MemoryBudget`."""

    @property
    def step_peak_bytes(self) -> int | None:
        """Most bytes on the device at once."""

    @property
    def step_s(self) -> float | None:
        """Seconds of the step."""

    @property
    def plain_s(self) -> float | None:
        """Seconds that it would take without memkit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """One figure before and after: bytes, or seconds. None if it is unknown."""

    name: str
    """What the figure is."""
    before: float | None
    """Bytes or seconds in the first report."""
    after: float | None
    """Bytes or seconds in the second report."""
    in_s: bool = False
    """Whether it is in seconds; else in bytes."""

    @property
    def change(self) -> float | None:
        """The relative change: -0.25 is a quarter less; None if a figure is unknown, or the first is 0."""
        return None if self.before is None or self.after is None or not self.before else self.after / self.before - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two steps side by side. Its `str()` is a verdict in one sentence and a table."""

    figures: tuple[ComparedFigure, ...]
    """The peak of the step first, then its parts, largest first, then times."""

    @property
    def peak(self) -> ComparedFigure:
        """The peak of the step, or of the forward if one of the two has no backward."""
        return self.figures[0]

    @property
    def time(self) -> ComparedFigure | None:
        """Forward and backward together, if both were timed."""
        return next((figure for figure in self.figures if figure.name == _TIME and figure.change is not None), None)

    @property
    def helped(self) -> bool:
        """Whether the peak is lower."""
        return self.peak.change is not None and self.peak.change < 0

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, width: int | None = None) -> str:
        """Return the verdict and the table; see `MemoryReport.to_text` for `width`."""
        largest = max((figure.before or 0) for figure in self.figures if not figure.in_s)
        unit, unit_bytes = unit_of(int(largest))

        def cell(figure: ComparedFigure, value: float | None) -> str:
            if value is None:
                return "-"
            return f"{1e3 * value:.2f}" if figure.in_s else f"{value / unit_bytes:.2f}"

        shown = [figure for figure in self.figures if figure.before or figure.after]
        table = table_text(
            [
                TextColumn(
                    heading="", cells=[f"{it.name} ({'ms' if it.in_s else unit})" for it in shown], right=False, shortens=True
                ),
                TextColumn(heading="before", cells=[cell(it, it.before) for it in shown]),
                TextColumn(heading="after", cells=[cell(it, it.after) for it in shown]),
                TextColumn(
                    heading="change (%)", cells=["-" if it.change is None else f"{100 * it.change:+.1f}" for it in shown]
                ),
            ],
            width,
        )
        return f"{wrapped(self._verdict(unit, unit_bytes), width)}\n\n{table}"

    def _verdict(self, unit: str, unit_bytes: int) -> str:
        peak, time = self.peak, self.time
        if peak.before is None or peak.after is None or peak.change is None:
            return f"The {peak.name} is not known of both."
        sizes = f"{peak.before / unit_bytes:.2f} to {peak.after / unit_bytes:.2f} {unit}"
        took = "" if time is None or time.change is None else f"; forward and backward take {1 + time.change:.2f} times as long"
        if abs(peak.change) < _NO_CHANGE:
            return f"It made no difference: the {peak.name} went from {sizes}{took}."
        less = f"{100 * abs(peak.change):.0f} % {'less' if peak.change < 0 else 'more'}"
        return f"It {'helped' if self.helped else 'did not help'}: the {peak.name} went from {sizes}, {less}{took}."


_NO_CHANGE = 0.005
_TIME = "forward and backward"
_PEAK = "peak of the step"


def compare(before: MemoryReport, after: MemoryReport | TakenStep) -> Comparison:
    """See `MemoryReport.compare`."""
    if not _is_report(after):
        return _with_taken(before, after)
    if before.step_peak_bytes is None or after.step_peak_bytes is None:
        first = ComparedFigure(name="peak of the forward", before=before.forward_peak_bytes, after=after.forward_peak_bytes)
    else:
        first = ComparedFigure(name=_PEAK, before=before.step_peak_bytes, after=after.step_peak_bytes)
    parts = [
        ComparedFigure(name=f"... {PLURALS[category]}", before=_at_peak(before, category), after=_at_peak(after, category))
        for category in MemoryCategory
    ]
    parts.sort(key=lambda figure: -max(figure.before or 0, figure.after or 0))
    kept = ComparedFigure(name="saved activations", before=before.activation_bytes, after=after.activation_bytes)
    times = ComparedFigure(name=_TIME, before=_seconds(before), after=_seconds(after), in_s=True)
    return Comparison(figures=(first, *parts, kept, times))


def _is_report(step: MemoryReport | TakenStep) -> TypeGuard[MemoryReport]:
    return hasattr(step, "step_memory")


def _with_taken(before: MemoryReport, taken: MemoryReport | TakenStep) -> Comparison:
    if not hasattr(taken, "step_s"):
        raise TypeError(f"a report is compared with another, or with what memkit.stats returns; found {type(taken).__name__}")
    peak = ComparedFigure(name=_PEAK, before=before.step_peak_bytes, after=taken.step_peak_bytes)
    plain_s = getattr(taken, "plain_s", None)
    plain_s = plain_s if plain_s is not None else _seconds(before)
    return Comparison(figures=(peak, ComparedFigure(name=_TIME, before=plain_s, after=taken.step_s, in_s=True)))


def _at_peak(report: MemoryReport, category: MemoryCategory) -> int | None:
    memory = report.step_memory
    return None if memory is None or not memory.moments else memory.levels[category][memory.peak]


def _seconds(report: MemoryReport) -> float | None:
    """Return the seconds of forward and backward together, if both were timed."""
    if report.forward_s is None or report.backward_s is None:
        return None
    return report.forward_s + report.backward_s
