"""A front as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memkit.extras import library
from memkit.fronts.front import Front

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 2**30


def draw(front: Front, path: Path) -> None:
    """Draw step / plain against the peak, one line for each mechanism, into a file whose name says the kind of picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = library("matplotlib.figure", "a picture").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_line(axes, "o-", "best mix", [(row.peak_bytes, row.step_s) for row in front.rows], front.plain_s)
    _draw_line(axes, "_:", "lower bound", [(row.budget_bytes, row.bound_s) for row in front.rows], front.plain_s)
    _draw_line(axes, "s--", "offload alone", [(row.budget_bytes, row.offload_s) for row in front.rows], front.plain_s)
    _draw_line(axes, "^--", "recompute alone", [(row.budget_bytes, row.recompute_s) for row in front.rows], front.plain_s)
    blocks = {row.checkpoint.num_blocks: row.checkpoint for row in front.rows if row.checkpoint is not None}
    points = [(found.peak_bytes, found.step_s) for _, found in sorted(blocks.items())]
    _draw_line(axes, "D", "checkpointed blocks", points, front.plain_s)
    how = "predicted" if front.is_measured else "predicted; not measured"
    axes.set(xlabel="peak allocated (GiB)", ylabel="step / plain", title=f"{front.model} on {front.gpu} ({how})")
    shares = [row.step_s / front.plain_s for row in front.rows if row.step_s is not None]
    # what takes more than twice the plain step, as offload alone, would flatten all others
    most = max([share for share in shares if share <= 2] or shares, default=1.0)
    axes.set_ylim(0.98, max(1.3, 1.15 * most))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.savefig(path)


def _draw_line(axes: Axes, style: str, label: str, points: Sequence[tuple[int | None, float | None]], plain_s: float) -> None:
    there = [(peak / _GIB, seconds / plain_s) for peak, seconds in points if peak is not None and seconds is not None]
    if there:
        axes.plot([peak for peak, _ in there], [share for _, share in there], style, label=label)
