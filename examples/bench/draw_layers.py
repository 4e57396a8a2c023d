"""Draw time against peak of LoRA with checkpoints, from what bench_layers.py has printed.

python examples/bench/bench_layers.py --steps 6 --only lora_checkpoint lora_checkpoint_offload peers_lora > lines.jsonl
python examples/bench/draw_layers.py lines.jsonl layers.svg
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from matplotlib.figure import Figure
from shared import Line

GIB = 2**30


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
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
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
    axes.set(title=f"{ratios[0]['name']} on {ratios[0]['where']}", xlabel="peak allocated (GiB)", ylabel="step (ms)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _place(line: Line) -> tuple[float, float]:
    return line["peak_allocated_bytes"] / GIB, line["step_s"] * 1e3


if __name__ == "__main__":
    lines_path, picture_path = map(Path, sys.argv[1:])
    draw([json.loads(line) for line in lines_path.read_text().splitlines()], picture_path)
