"""Draw time against peak from what bench_steady.py has printed: a picture for each model of which there are lines.

python examples/bench/bench_steady.py > lines.jsonl
python examples/bench/draw_steady.py lines.jsonl "docs/benchmarks/steady_{model}_h200_2026-11.svg"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared import Line
from steady_tables import MODELS

NAMES = {"resnet50": "ResNet-50", "llama": "Llama", "gpt2": "GPT-2", "whisper": "Whisper-small"}
GIB = 2**30
Point = tuple[int | None, float]


@contextmanager
def picture(path: Path, title: str) -> Iterator[Any]:
    """Give axes for seconds against peak bytes (see `draw_curve`), and write what was drawn when it is done."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.set(xlabel="peak allocated (GiB)", ylabel="step (ms)", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(path)


def draw_curve(axes: Any, style: str, label: str, points: Iterable[Point], **options: Any) -> None:
    """Draw steps, each by its peak in bytes and its seconds. Those whose peak was not counted are left out."""
    counted = [(peak_bytes / GIB, seconds * 1e3) for peak_bytes, seconds in points if peak_bytes is not None]
    axes.plot([peak for peak, _ in counted], [time for _, time in counted], style, label=label, **options)


def draw(lines: Sequence[Line], pattern: str) -> list[Path]:
    """Draw what was measured of each model, and return the paths: the pattern with the model in the place of `{model}`."""
    made = []
    for model in MODELS:
        offloads = {line["ratio"]: line for line in _measured(lines, "offload_ratios", f"offload_{model}")}
        remats = {line["budget"]: line for line in _measured(lines, "remat_spaced", f"remat_{model}")}
        plains = [
            (line["plain_peak_bytes"], line["plain_s"])
            for line in [*offloads.values(), *_measured(lines, "remat_keep_all", f"remat_{model}")]
        ]
        if not plains:
            continue
        made.append(path := Path(pattern.format(model=model)))
        where = next(line["device"] for line in lines if "device" in line)
        with picture(path, f"{NAMES[model]} on {where}: a step by its peak") as axes:
            draw_curve(axes, "k*", "plain", plains[-1:], markersize=12)
            moved = [(line["step_peak_bytes"], line["step_s"]) for line in offloads.values()]
            dropped = [(line["step_peak_bytes"], line["step_s"]) for line in remats.values()]
            draw_curve(axes, "o-", "CPUOffload, by ratio", moved)
            draw_curve(axes, "s-", "Rematerialize, by budget", dropped)
            draw_curve(axes, "D:", "checkpointed layers, the fewest for that", _spaced(remats.values()))
            for asked, points in ((offloads, moved), (remats, dropped)):
                for (peak_bytes, step_s), number in zip(points, asked, strict=True):
                    if peak_bytes is not None:
                        place = peak_bytes / GIB, step_s * 1e3
                        axes.annotate(f"{number:g}", place, textcoords="offset points", xytext=(4, 6), fontsize=8)
            axes.set_xlim(left=0)
    return made


def _measured(lines: Sequence[Line], bench: str, part: str) -> list[Line]:
    return [line for line in lines if line.get("bench") == bench and line.get("part") == part and "step_s" in line]


def _spaced(remats: Iterable[Line]) -> list[Point]:
    return sorted({(line["spaced_peak_bytes"], line["spaced_s"]) for line in remats}, reverse=True)


if __name__ == "__main__":
    lines_path, name_pattern = sys.argv[1:]
    for drawn in draw([json.loads(line) for line in Path(lines_path).read_text().splitlines()], name_pattern):
        print(drawn)
