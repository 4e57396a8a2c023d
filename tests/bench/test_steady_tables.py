"""The tables that `examples/bench/steady_tables.py` makes of what `bench_steady.py` prints."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.bench.cases import BENCHES, bench_module

PAGE = BENCHES.parents[1] / "docs" / "benchmarks" / "steady_h200_2026-11.md"
ABOUT = {"device": "NVIDIA H200", "cuda": "13.0", "torch": "2.11.0", "memkit": "0.1.0", "steps": 10}
OFFLOAD = {
    "bench": "offload_ratios",
    "part": "offload_gpt2",
    "name": "gpt2_24x1280",
    "ratio": 0.1,
    "plain_s": 0.1,
    "plain_peak_bytes": 10 * 2**20,
    "step_s": 0.12,
    "to_plain": 1.2,
    "roofline_s": 0.11,
    "to_roofline": 12 / 11,
    "moved_out_bytes": 2**20,
    "num_copies_out": 3,
    "peak_allocated_bytes": 8 * 2**20,
    "peak_reserved_bytes": 10 * 2**20,
    "reserved_to_allocated": 1.25,
    **ABOUT,
}
KEEPS_ALL = {"bench": "remat_keep_all", "part": "remat_gpt2", "plain_s": 0.1, "plain_peak_bytes": 2**20, "step_s": 0.1}
BUDGET = {
    "bench": "remat_spaced",
    "part": "remat_gpt2",
    "budget": 0.5,
    "step_s": 0.11,
    "step_peak_bytes": 2**20,
    "spaced_s": 0.12,
    "spaced_peak_bytes": 2**20,
    "num_layers": 24,
    "num_checkpointed": 13,
    "spaced_reaches_peak": True,
    "to_spaced": 11 / 12,
    "peak_reserved_bytes": 2**21,
    "recorder_s": 0.0,
    "least_bytes": None,
}
REGION = {
    "bench": "host_region",
    "name": "norm_gelu",
    "plain_us": 60.0,
    "torch_us_beyond": 250.0,
    "torch_bare_us_beyond": 180.0,
}
COMPILED = {"bench": "compiled_remat", "way": "forward", "checkpointed": [0, 4, 8, 12]}


@pytest.fixture
def steady_tables() -> ModuleType:
    return bench_module("steady_tables")


def _cells(table: str) -> list[list[str]]:
    """Return the rows of a table below its ruler."""
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_only_tables_of_which_there_are_lines_are_made(steady_tables: ModuleType) -> None:
    assert set(steady_tables.tables([OFFLOAD])) == {"machine", "offload_gpt2"}
    assert steady_tables.tables([{"part": "chain", "taken_s": 3.0}]) == {}


def test_ratios_stand_below_plain(steady_tables: ModuleType) -> None:
    made = steady_tables.tables([OFFLOAD])

    assert _cells(made["offload_gpt2"]) == [
        ["plain", "-", "-", "100.0", "-", "-", "-", "10", "-", "-"],
        ["0.1", "3", "1", "120.0", "1.200", "110.0", "**1.091**", "8", "10", "1.250"],
    ]
    assert _cells(made["machine"]) == [["NVIDIA H200", "2.11.0", "13.0", "0.1.0", "10"]]


def test_budget_tells_how_it_is_kept_to_and_beside_what(steady_tables: ModuleType) -> None:
    ops = {**BUDGET, "budget": 0.3, "recorder_s": 0.01, "spaced_reaches_peak": False, "least_bytes": 5}

    _, regions_row, ops_row = _cells(steady_tables.tables([KEEPS_ALL, BUDGET, ops])["remat_gpt2"])

    assert regions_row == ["0.5", "regions", "110.0", "13 of 24", "120.0", "**0.917**", "1", "1", "2"]
    assert ops_row[:4] == ["0.3 (the least)", "single ops", "110.0", "13 of 24 (needs more)"]


def test_what_costs_nothing_is_one_row_for_each_model(steady_tables: ModuleType) -> None:
    offload = {**OFFLOAD, "ratio": 0.0, "step_s": 0.1, "to_plain": 1.0}

    made = steady_tables.tables([offload, {**KEEPS_ALL, "to_plain": 1.004}])

    assert _cells(made["nothing"]) == [["gpt2", "100.0", "100.0", "**1.000**", "100.0", "100.0", "**1.004**"]]


@pytest.mark.parametrize("what", ["error", "refused", "skipped"])
def test_what_was_not_measured_says_why(steady_tables: ModuleType, what: str) -> None:
    table = steady_tables.tables([{**COMPILED, what: "no | budget"}])["compiled"]

    assert _cells(table) == [
        ["`torch.compile(block.forward)`", "`Rematerialize`, beside 4 checkpointed blocks", f"{what}: no / budget", *["-"] * 6]
    ]


def test_missing_region_is_told_apart_from_one_with_other_bits(steady_tables: ModuleType) -> None:
    measured: dict[str, Any] = {**REGION, "memkit_us_beyond": 100.0, "is_equal": {"memkit": True}}

    assert _cells(steady_tables.tables([measured])["region"])[0][-2:] == ["**100.0**", "yes"]
    assert _cells(steady_tables.tables([{**measured, "is_equal": {"memkit": False}}])["region"])[0][-1] == "no"
    assert _cells(steady_tables.tables([{**REGION, "is_equal": {"plain": True}}])["region"])[0][-2:] == ["**-**", "-"]


def test_lines_of_the_last_run_count(steady_tables: ModuleType) -> None:
    again = {**OFFLOAD, "step_s": 0.2}

    assert _cells(steady_tables.tables([OFFLOAD, again])["offload_gpt2"])[1][3] == "200.0"


def test_page_has_a_place_for_each_table(steady_tables: ModuleType) -> None:
    made = dict.fromkeys(steady_tables._TABLES, "| a |\n")

    page = steady_tables.filled(PAGE.read_text(), made)

    assert page.count("| a |\n<!-- end -->") == len(made) == page.count("<!-- end -->")
    assert "To be measured" not in page
    assert steady_tables.filled(page, {}) == page
    assert steady_tables.filled(page, {"chain": "| b |\n"}).count("| b |") == 1


def test_table_without_a_place_is_refused(steady_tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="no place in the page for chain"):
        steady_tables.filled("# Page\n", {"chain": "| a |\n"})


def test_picture_of_each_model_is_drawn_from_the_same_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{**OFFLOAD, "step_peak_bytes": 8 * 2**20}, BUDGET, {**BUDGET, "budget": 0.3, "error": "x"}, KEEPS_ALL, REGION]

    paths = bench_module("draw_steady").draw(lines, str(tmp_path / "steady_{model}.svg"))

    assert paths == [tmp_path / "steady_gpt2.svg"]
    texts = re.findall(r"<!-- (.*?) -->", paths[0].read_text())
    assert {"plain", "CPUOffload, by ratio", "Rematerialize, by budget", "0.1", "0.5"} <= set(texts)
    assert "GPT-2 on NVIDIA H200: a step by its peak" in texts
