"""Draw time against peak from what bench_budget.py has printed: a picture for each model of which there are lines.

python examples/bench/bench_budget.py > lines.jsonl
python examples/bench/draw_budget.py lines.jsonl "docs/benchmarks/budget_{model}_h200_2026-11.svg"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from budget_tables import COMPILED, FRONTS
from draw_steady import NAMES, draw_curve, picture
from shared import Line

MIB = 2**20
MOST_OF_PLAIN = 2.2
"""Steps that take longer, as those that copy one tensor at a time, are left out of the picture."""
BUDGETS: Mapping[str, Sequence[str]] = {"llama": ("llama", "llama_b8")}
"""The names that the budgets of a model are told under, where there are several."""
_KINDS: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "checkpointed blocks": ("D:", lambda which: "blocks checkpointed" in which and "OffloadActivations" not in which),
    "selective checkpointing": ("d", lambda which: which.startswith("selective")),
    "save_on_cpu": ("v", lambda which: "save_on_cpu" in which),
    "TRL OffloadActivations, alone or over checkpoints": ("^", lambda which: "OffloadActivations" in which),
    "CPUOffload, by hand": ("o", lambda which: which.startswith("CPUOffload")),
    "Rematerialize, by hand": ("s", lambda which: which.startswith("Rematerialize")),
    "compiled as a whole": ("x", lambda which: which.startswith("compiled")),
}


def draw(lines: Sequence[Line], pattern: str) -> list[Path]:
    """Draw what was measured of each model, and return the paths: the pattern with the model in the place of `{model}`."""
    eager = [_eager(lines, model, pattern) for model in FRONTS]
    compiled = [_compiled(lines, model, pattern) for model in COMPILED]
    return [path for path in (*eager, *compiled) if path is not None]


def _eager(lines: Sequence[Line], model: str, pattern: str) -> Path | None:
    by_hand = [*_of(lines, "budget_front_other", [model]), *_of(lines, "budget_front_whole", [model])]
    budgets = [*_of(lines, "budget_front", [model]), *_of(lines, "budget", BUDGETS.get(model, [model]))]
    if not by_hand:
        return None
    path = Path(pattern.format(model=model))
    with picture(path, f"{NAMES[model]} on {_device(lines)}: a step by its peak") as axes:
        _draw(axes, "r.-", "MemoryBudget", budgets)
        plains = [(_bytes(line["plain_peak_mib"]), line["plain_s"]) for line in budgets if line.get("plain_peak_mib")]
        draw_curve(axes, "k*", "plain", plains[:1], markersize=12)
        for label, (style, is_of) in _KINDS.items():
            _draw(axes, style, label, [line for line in by_hand if is_of(line["which"])])
        axes.set_xlim(left=0)
    return path


def _compiled(lines: Sequence[Line], model: str, pattern: str) -> Path | None:
    by_hand, budgets = (_of(lines, f"budget_compiled{kind}", [model]) for kind in ("_by_hand", ""))
    if not by_hand:
        return None
    path = Path(pattern.format(model=f"{model}_compiled"))
    with picture(path, f"{NAMES[model]}, blocks compiled, on {_device(lines)}: a step by its peak") as axes:
        _draw(axes, "r.-", "MemoryBudget", budgets)
        _draw(axes, "D", "mixed by hand", by_hand)
        axes.set_xlim(left=0)
    return path


def _draw(axes: Any, style: str, label: str, lines: Sequence[Line]) -> None:
    """Draw steps, but for those that take far longer than plain ones."""
    shown = [line for line in lines if line["step_s"] <= MOST_OF_PLAIN * line.get("plain_s", line["step_s"])]
    points = sorted((_bytes(line["peak_allocated_mib"]) or 0, line["step_s"]) for line in shown)
    if points:
        draw_curve(axes, style, label, points)


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else int(mib * MIB)


def _of(lines: Sequence[Line], bench: str, models: Sequence[str]) -> list[Line]:
    return [line for line in lines if line.get("bench") == bench and line.get("model") in models and "step_s" in line]


def _device(lines: Sequence[Line]) -> str:
    return str(next(line["device"] for line in lines if "device" in line))


if __name__ == "__main__":
    lines_path, name_pattern = sys.argv[1:]
    for drawn in draw([json.loads(line) for line in Path(lines_path).read_text().splitlines()], name_pattern):
        print(drawn)
