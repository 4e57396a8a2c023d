"""What `examples/bench/bench_states.py` measures: that its parts run, and what its tables compare a step with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.cases import BENCHES, bench_module, lines_of_part

PAGE = BENCHES.parents[1] / "docs" / "benchmarks" / "states_h200_2026-11.md"
MACHINE = {
    "bench": "states_machine",
    "d2h_bytes_per_s": 50e9,
    "h2d_bytes_per_s": 50e9,
    "both_bytes_per_s": 40e9,
    "shared_bytes_per_s": 30e9,
    "host_updates_per_s": {"1": 1e9, "8": 4e9},
    "host_cast_updates_per_s": {"1": 1e9, "8": 2e9},
    "shared_updates_per_s": 3e9,
}
PLAIN = {"forward_s": 0.1, "backward_s": 0.3, "update_s": 0.05, "step_s": 0.5}
NUMEL = 10**9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "rows"),
    [
        ("states", 8),
        ("micro", 2),
        ("nothing", 3),
        ("streamed", 3),
        ("capped", 1),
        ("compared", 3),
        ("disk", 2),
        ("peer_by_hand", 2),
        ("peer_fsdp", 1),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_parts_run(part: str, rows: int) -> None:
    pytest.importorskip("transformers")

    lines = [line for line in lines_of_part("bench_states", part) if line["bench"] != "states_machine"]

    assert len(lines) == rows
    assert [line["error"] for line in lines if "error" in line] == []
    assert all(line["step_s"] > 0 and line["numel"] > 0 for line in lines)
    assert all(line["to_r"] > 0 for line in lines if line.get("row") == "all streams")
    assert all(line["are_losses_equal"] for line in lines if line.get("bench") == "states_compared")


@pytest.mark.parametrize(
    ("row", "expected_s"),
    [
        ("device", 0.45 + 0.3),
        ("device, within the backward", 0.15 + 0.3),
        ("device, beside the next forward", 0.35 + 0.3),
        ("device, half stays", 0.45 + 0.15),
        ("host", 0.45 + 0.25),
        ("plain", None),
    ],
)
def test_least_that_a_step_takes(row: str, expected_s: float | None) -> None:
    bound_s = bench_module("states_tables").bound_s(row, PLAIN, MACHINE, NUMEL)

    assert bound_s == (None if expected_s is None else pytest.approx(expected_s))


def test_page_has_a_place_for_what_was_measured(tmp_path: Path) -> None:
    tables, filled = bench_module("states_tables").tables, bench_module("markdown_tables").filled
    about: dict[str, Any] = {"bench": "states", "numel": NUMEL, **PLAIN, "memory": {"peak_allocated_bytes": 2**31}}
    lines = [MACHINE, {**about, "row": "plain"}, {**about, "row": "device", "step_s": 0.75}]

    made = tables([json.loads(json.dumps(line)) for line in lines])

    assert "| device | 0.750 | 1.500 | 0.750 | **1.000** | 0.050 | 2.00 | - | - |" in filled(PAGE.read_text(), made)
