"""Draw every way to save memory that was measured for ResNet-50: how much a step needs, and how much longer it takes.

python examples/bench/draw_ways.py docs/benchmarks/budget_h200_2026-11.md docs/pictures/ways_resnet50.svg

What is drawn is read from the tables of that page, so the picture says what the page says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB_PER_GIB = 1024


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to run the step."""

    way: str
    setting: str
    peak_mib: int
    over_plain: float
    """Time of a step over that of the plain one."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the points of one way are drawn and labeled."""

    is_of: Callable[[str], bool]
    color: str
    marker: str
    setting: Callable[[str], str]
    label: str
    label_place: tuple[float, float]
    """Peak in GiB, and time over plain, less one."""


def _number_in(which: str) -> float:
    found = re.search(r"\(([\d.]+)\)", which)
    assert found is not None
    return float(found[1])


BUDGET = "memkit MemoryBudget"
WAYS: Mapping[str, Way] = {
    BUDGET: Way(
        is_of=lambda which: False,  # it has columns of its own
        color="#c1121f",
        marker="o",
        setting=lambda which: "",
        label="memkit MemoryBudget\n(picks the mix for you)",
        label_place=(2.6, 0.085),
    ),
    "memkit Rematerialize": Way(
        is_of=lambda which: which.startswith("Rematerialize"),
        color="#1d5fa8",
        marker="s",
        setting=lambda which: f"keep {100 * _number_in(which):.0f} %",
        label="memkit Rematerialize\n(recompute the cheapest)",
        label_place=(9.6, 0.41),
    ),
    "memkit CPUOffload": Way(
        is_of=lambda which: which.startswith("CPUOffload"),
        color="#1b7f4b",
        marker="D",
        setting=lambda which: f"move {100 * _number_in(which):.0f} %",
        label="memkit CPUOffload\n(move to host memory)",
        label_place=(14.2, 1.5),
    ),
    "torch.utils.checkpoint": Way(
        is_of=lambda which: "blocks checkpointed" in which and "OffloadActivations" not in which,
        color="#6b6b6b",
        marker="^",
        setting=lambda which: which.removesuffix(" blocks checkpointed"),
        label="torch.utils.checkpoint\non residual blocks*",
        label_place=(14.9, 0.044),
    ),
    "selective checkpointing": Way(
        is_of=lambda which: which.startswith("selective"),
        color="#6b6b6b",
        marker="v",
        setting=lambda which: "selective checkpointing*",
        label="",
        label_place=(0, 0),
    ),
    "save_on_cpu": Way(
        is_of=lambda which: "save_on_cpu" in which,
        color="#6b6b6b",
        marker="P",
        setting=lambda which: "torch save_on_cpu",
        label="",
        label_place=(0, 0),
    ),
    "TRL OffloadActivations": Way(
        is_of=lambda which: "OffloadActivations" in which,
        color="#6b6b6b",
        marker="X",
        setting=lambda which: (
            "TRL OffloadActivations over checkpoints*" if "checkpointed" in which else "TRL OffloadActivations"
        ),
        label="",
        label_place=(0, 0),
    ),
}
_PLACES: Mapping[str, tuple[float, float]] = {
    "keep 30 %": (-24, -17),
    "keep 50 %": (-22, -17),
    "keep 70 %": (-18, -17),
    "4 of 16": (5, 4),
    "8 of 16": (2, 7),
    "12 of 16": (2, 7),
    "16 of 16": (2, 7),
}
"""Where settings are written, in points from their markers, if not on the right."""


def points_in(page: str) -> list[Point]:
    """Return what a page of budgets tells of ResNet-50, the plain step first."""
    plain = next(row for row in _rows(page, "checkpoints") if row[0] == "resnet50")
    points = [Point(way="plain PyTorch", setting="", peak_mib=int(plain[3]), over_plain=1.0)]
    for which, _, step_ms, over_plain, peak_mib, budget_ms, budget_mib, *_ in _rows(page, "front_resnet50"):
        if which.startswith("compiled"):
            continue
        (way,) = [name for name, found in WAYS.items() if found.is_of(which)]
        setting = WAYS[way].setting(which)
        points.append(Point(way=way, setting=setting, peak_mib=int(peak_mib), over_plain=float(over_plain)))
        if budget_ms != "-":
            over = float(over_plain) * float(budget_ms) / float(step_ms)  # by the plain step of this row
            points.append(Point(way=BUDGET, setting="", peak_mib=int(budget_mib), over_plain=round(over, 3)))
    return points


def _rows(page: str, table: str) -> Iterator[list[str]]:
    found = re.search(rf"<!-- table: {table} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found is not None, f"found no table {table} in the page"
    for line in found[1].splitlines()[2:]:
        yield [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]


def name_of(point: Point) -> str:
    """Return what the picture calls a point, by which a test finds it."""
    return f"{point.way}: {point.peak_mib} MiB, {point.over_plain:g} of plain"


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw the points, each of a way in its color, with words beside them."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "memkit"
    figure = Figure(figsize=(9.4, 6.0), layout="constrained")
    axes = figure.subplots()
    plain, *others = points
    axes.set_yscale("log")
    axes.set_ylim(0.014, 14)
    axes.set_xlim(0, 22.4)
    axes.axvline(plain.peak_mib / MIB_PER_GIB, color="black", linewidth=1, linestyle=":", gid=name_of(plain))
    axes.annotate(
        f"plain PyTorch\nneeds {plain.peak_mib / MIB_PER_GIB:.1f} GiB",
        (plain.peak_mib / MIB_PER_GIB, 3.2),
        textcoords="offset points",
        xytext=(-6, 0),
        ha="right",
        fontsize=10,
    )
    for name, way in WAYS.items():
        _draw_way(axes, way, sorted((point for point in others if point.way == name), key=lambda point: point.peak_mib))
    ticks = {0.02: "+2 %", 0.05: "+5 %", 0.1: "+10 %", 0.2: "+20 %", 0.5: "+50 %", 1: "twice", 2: "3 times", 5: "6 times"}
    ticks[10] = "11 times"
    axes.set_yticks([*ticks], labels=[*ticks.values()], fontsize=10)
    axes.set_yticks([], minor=True)
    axes.set_xticks(range(0, 23, 2))
    axes.tick_params(axis="x", labelsize=10)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("Peak memory of a training step (GiB); further left fits on a smaller GPU", fontsize=11)
    axes.set_ylabel("How much longer a step takes; lower is better", fontsize=11)
    axes.set_title("ResNet-50, batch 256, on an H200: every way to save memory, and what it costs", fontsize=12)
    axes.text(0.25, 0.0165, "* updates batch norm statistics twice, so results differ from plain training", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def _draw_way(axes: Axes, way: Way, points: Sequence[Point]) -> None:
    is_ours = way.color != "#6b6b6b"
    places = [(point.peak_mib / MIB_PER_GIB, point.over_plain - 1) for point in points]
    if len(places) > 2:
        axes.plot(*zip(*places, strict=True), color=way.color, linewidth=2.4 if is_ours else 1.2, alpha=0.7)
    for point, (x, y) in zip(points, places, strict=True):
        axes.plot([x], [y], way.marker, color=way.color, markersize=9 if is_ours else 7, gid=name_of(point))
        offset = _PLACES.get(point.setting, (9, -3))
        axes.annotate(point.setting, (x, y), textcoords="offset points", xytext=offset, fontsize=9, color=way.color)
    if way.label:
        axes.text(*way.label_place, way.label, color=way.color, fontsize=11, fontweight="bold" if is_ours else "normal")


if __name__ == "__main__":
    page_path, picture_path = map(Path, sys.argv[1:])
    draw(points_in(page_path.read_text()), picture_path)
    print(picture_path)
