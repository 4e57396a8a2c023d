"""Draw time against peak from what bench_steady.py has printed: a picture for each model of which there are lines.

python examples/bench/bench_steady.py > lines.jsonl
python examples/bench/draw_steady.py lines.jsonl "docs/benchmarks/steady_{model}_h200_2026-11.svg"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from shared import Line
from steady_tables import MODELS

from memkit.bench.curves import draw_curve, draw_names, picture

NAMES = {"resnet50": "ResNet-50", "llama": "Llama", "gpt2": "GPT-2", "whisper": "Whisper-small"}
Point = tuple[int | None, float]


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
                texts = zip(points, asked, strict=True)
                draw_names(axes, [(peak_bytes, step_s, f"{number:g}") for (peak_bytes, step_s), number in texts])
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
