"""Draw time against peak of LoRA with checkpoints, from what bench_layers.py has printed.

python examples/bench/bench_layers.py --steps 6 --only lora_checkpoint lora_checkpoint_offload peers_lora > lines.jsonl
python examples/bench/draw_layers.py lines.jsonl layers.svg
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from draw_steady import GIB, picture
from shared import Line


def draw(lines: list[Line], path: Path) -> None:
    """Draw a point for each line: the curve of memkit's ratios, and beside it whatever streams all layers.

    Raises:
        ValueError: there is no line of `lora_checkpoint` among them.
    """
    measured = [line for line in lines if line.get("peak_allocated_bytes") is not None and line.get("backward")]
    curves = [
        line for line in measured if line["bench"] == "layers" and re.match(r"llama.*_lora\d+_checkpointed$", line["name"])
    ]
    ratios = sorted((line for line in curves if line["offload_ratio"] is None), key=lambda line: float(line["ratio"]))
    if not ratios:
        raise ValueError("found no line of the bench lora_checkpoint, with the peak of a GPU")
    with picture(path, f"{ratios[0]['name']} on {ratios[0]['where']}") as axes:
        _draw(axes, measured, curves, ratios)


def _draw(axes: Any, measured: list[Line], curves: list[Line], ratios: list[Line]) -> None:
    axes.plot(*zip(*map(_place, ratios), strict=True), "o-", label="LayerOffload")
    for line in ratios:
        axes.annotate(
            f"{line['ratio']:g} streamed", _place(line), textcoords="offset points", xytext=(0, -14), ha="center", size=8
        )
    for line in curves:
        if line["offload_ratio"] is not None:
            axes.plot(*_place(line), "s", label=f"LayerOffload, and CPUOffload({line['offload_ratio']:g})")
    for line in measured:
        if line["bench"] == "layers_peers" and line["engine"] not in ("plain", "memkit"):
            axes.plot(*_place(line), "D", label=line["engine"])
    axes.set_xlim(left=0)


def _place(line: Line) -> tuple[float, float]:
    return line["peak_allocated_bytes"] / GIB, line["step_s"] * 1e3


if __name__ == "__main__":
    lines_path, picture_path = map(Path, sys.argv[1:])
    draw([json.loads(line) for line in lines_path.read_text().splitlines()], picture_path)
