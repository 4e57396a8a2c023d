"""The tables and pictures that `examples/bench` makes of what its scripts print, and the pages that they are on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bench.cases import BENCHMARKS, bench_module, cells
from tests.bench.test_figures import ABOUT, STATES_MACHINE, STATES_NUMEL, STATES_PLAIN, by_hand

PAGES = {name: BENCHMARKS / f"{name}_h200_2026-11.md" for name in ("budget", "states", "steady")}
MIB = 2**20
BUDGET = {
    "bench": "budget",
    "part": "resnet50",
    "model": "resnet50",
    "asked": "6396MiB",
    "budget_mib": 6396.0,
    "plain_s": 0.1,
    "step_s": 0.11,
    "ratio": 1.1,
    "predicted_ratio": 1.09,
    "peak_allocated_mib": 6380.4,
    "peak_to_budget": 0.9976,
    "peak_to_predicted": 1.002,
    "seconds_to_predicted": 1.01,
    "num_plans": 1,
    "way": "plan",
    "num_replayed_ops": 30,
    "moved_mib": 512.0,
    "stall_s": 0.001,
    "num_saved": 181,
    "plan_s": 0.5,
    "learning_s": 3.0,
    "num_deviations": 0,
    "plain_forward_host_s": 0.01,
    "forward_host_s": 0.02,
    "remat_share": 0.23,
    "remat_s": 0.12,
    "remat_peak_mib": 6400.0,
    "to_remat": 11 / 12,
    **ABOUT,
}
OFFLOAD = {
    "bench": "offload_ratios",
    "part": "offload_gpt2",
    "name": "gpt2_24x1280",
    "ratio": 0.1,
    "plain_s": 0.1,
    "plain_peak_bytes": 10 * MIB,
    "step_s": 0.12,
    "to_plain": 1.2,
    "roofline_s": 0.11,
    "to_roofline": 12 / 11,
    "moved_out_bytes": MIB,
    "num_copies_out": 3,
    "peak_allocated_bytes": 8 * MIB,
    "peak_reserved_bytes": 10 * MIB,
    "reserved_to_allocated": 1.25,
    **ABOUT,
}
KEEPS_ALL = {"bench": "remat_keep_all", "part": "remat_gpt2", "plain_s": 0.1, "plain_peak_bytes": MIB, "step_s": 0.1}
SPACED = {
    "bench": "remat_spaced",
    "part": "remat_gpt2",
    "budget": 0.5,
    "step_s": 0.11,
    "step_peak_bytes": MIB,
    "spaced_s": 0.12,
    "spaced_peak_bytes": MIB,
    "num_layers": 24,
    "num_checkpointed": 13,
    "spaced_reaches_peak": True,
    "to_spaced": 11 / 12,
    "peak_reserved_bytes": 2 * MIB,
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


def _tables(name: str, *lines: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = bench_module(f"{name}_tables").tables(list(lines))
    return found


# Pages


@pytest.mark.parametrize("name", ["budget", "steady"])
def test_page_has_a_place_for_each_table(name: str) -> None:
    module = bench_module(f"{name}_tables")
    made = dict.fromkeys(module._TABLES, "| a |\n")

    page = module.filled(PAGES[name].read_text(), made)

    assert page.count("| a |\n<!-- end -->") == len(made) == page.count("<!-- end -->")
    assert module.filled(page, {}) == page
    assert module.filled(page, {next(iter(made)): "| b |\n"}).count("| b |") == 1
    with pytest.raises(ValueError, match="no place in the page for chain"):
        module.filled("# Page\n", {"chain": "| a |\n"})


def test_page_has_a_place_for_steps_of_states() -> None:
    about = {"bench": "states", "numel": STATES_NUMEL, **STATES_PLAIN, "memory": {"peak_allocated_bytes": 2**31}}
    lines = [STATES_MACHINE, {**about, "row": "plain"}, {**about, "row": "device", "step_s": 0.75}]

    made = _tables("states", *[json.loads(json.dumps(line)) for line in lines])

    row = "| device | 0.750 | 1.500 | 0.750 | **1.000** | 0.050 | 2.00 | - | - |"
    assert row in bench_module("markdown_tables").filled(PAGES["states"].read_text(), made)


# Budgets


def test_budget_is_a_row_of_each_table_that_it_is_in() -> None:
    made = _tables("budget", BUDGET)

    assert set(made) == {"machine", "resnet50", "beside", "planning"}
    (row,) = cells(made["resnet50"])
    assert row[:5] == ["6396", "100.0", "110.0", "**1.100**", "1.090"]
    assert row[5:] == ["6380", "0.998", "**1.002**", "**1.010**", "1", "plan", "30", "512", "1.0"]
    assert cells(made["beside"]) == [["6396", "110.0", "6380", "0.23", "120.0", "6400", "**0.917**", "-", "-"]]


# Steady steps


def test_ratios_stand_below_plain_and_lines_of_the_last_run_count() -> None:
    made = _tables("steady", {**OFFLOAD, "step_s": 0.2}, OFFLOAD)

    assert set(made) == {"machine", "offload_gpt2"}
    assert cells(made["offload_gpt2"]) == [
        ["plain", "-", "-", "100.0", "-", "-", "-", "10", "-", "-"],
        ["0.1", "3", "1", "120.0", "1.200", "110.0", "**1.091**", "8", "10", "1.250"],
    ]
    assert cells(made["machine"]) == [["NVIDIA H200", "2.11.0", "13.0", "0.1.0", "10"]]
    assert _tables("steady", {"part": "chain", "taken_s": 3.0}) == {}


# Pictures


def _texts(picture: Path) -> set[str]:
    return set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_pictures_are_drawn_from_the_same_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{**OFFLOAD, "step_peak_bytes": 8 * MIB}, SPACED, {**SPACED, "budget": 0.3, "error": "x"}, KEEPS_ALL, REGION]
    (steady,) = bench_module("draw_steady").draw(lines, str(tmp_path / "steady_{model}.svg"))
    hands = by_hand(**{"1 of 2 blocks checkpointed": (0.15, 500.0), "CPUOffload(0.1)": (0.11, 900.0)}).values()
    mixed = {"bench": "budget_compiled_by_hand", "model": "llama", "step_s": 0.08, "eager_s": 0.1, "peak_allocated_mib": 700.0}
    budgets = bench_module("draw_budget").draw([*hands, {**BUDGET, "model": "gpt2"}, mixed], str(tmp_path / "{model}.svg"))

    words = {"plain", "CPUOffload, by ratio", "Rematerialize, by budget", "0.1", "0.5"}
    assert words | {"GPT-2 on NVIDIA H200: a step by its peak"} <= _texts(steady)
    assert [path.name for path in (steady, *budgets)] == ["steady_gpt2.svg", "gpt2.svg", "llama_compiled.svg"]
    assert all(path.stat().st_size > 1000 for path in budgets)


def test_picture_of_layers_is_drawn_from_lines_that_were_printed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw, path, name = bench_module("draw_layers").draw, tmp_path / "layers.svg", "llama_3.2b_lora16_checkpointed"
    line = {"name": name, "backward": True, "where": "a GPU", "step_s": 0.5, "peak_allocated_bytes": 2**33}
    lines = [{**line, "bench": "layers", "ratio": x, "offload_ratio": None} for x in (0.0, 1.0)]
    lines += [{**line, "bench": "layers_peers", "engine": engine} for engine in ("plain", "memkit", "block swap")]
    other = {**line, "bench": "layers", "ratio": 0.5, "offload_ratio": None, "name": "dit_8+16_lora16_checkpointed"}

    draw([*lines, other, {"bench": "layers_auto"}], path)

    assert {"LayerOffload", "block swap", "0 streamed", "1 streamed", f"{name} on a GPU"} <= _texts(path)
    assert not {"plain", "memkit", "0.5 streamed"} & _texts(path)
    with pytest.raises(ValueError, match="lora_checkpoint"):
        draw([other], tmp_path / "none.svg")


PICTURE = BENCHMARKS.parent / "pictures" / "ways_resnet50.svg"


def _drawn(picture: Path) -> set[str]:
    return set(re.findall(r'<g id="([^"]+ of plain)">', picture.read_text()))


def test_picture_of_all_ways_shows_what_the_page_tells(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_ways, page = bench_module("draw_ways"), PAGES["budget"].read_text()
    points = draw_ways.points_in(page)
    names = {draw_ways.name_of(point) for point in points}

    assert len(names) > 15
    assert _drawn(PICTURE) == names, "the page has changed: draw the picture again with draw_ways.py"
    assert {point.way for point in points} == {"plain PyTorch", *draw_ways.WAYS}
    draw_ways.draw(draw_ways.points_in(page.replace("| 17419 |", "| 17000 |")), tmp_path / "ways.svg")
    assert {"17000" in name for name in _drawn(tmp_path / "ways.svg") ^ names} == {True, False}


def test_figures_in_the_text_are_those_of_the_picture() -> None:
    draw_ways, text = bench_module("draw_ways"), " ".join((BENCHMARKS.parent / "start-here.md").read_text().split())
    points = draw_ways.points_in(PAGES["budget"].read_text())
    plain = next(point for point in points if point.way == "plain PyTorch")

    assert f"from {plain.peak_mib / 1024:.1f} GiB to" in text
    said = {(float(gib), float(percent)) for gib, percent in re.findall(r"to ([\d.]+) GiB for ([\d.]+) %", text)}
    budgets = [point for point in points if point.way == draw_ways.BUDGET]
    known = {(round(point.peak_mib / 1024, 1), round(100 * (point.over_plain - 1), 1)) for point in budgets}
    assert len(said & known) == 2
