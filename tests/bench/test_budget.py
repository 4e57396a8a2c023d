"""What `examples/bench/bench_budget.py` measures: that its parts run, that its figures are computed right, and its tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memkit
from memkit.device import ReferenceDevice
from tests.bench.cases import BENCHES, bench_module, layers, lines_of_part, measuring

FRONTS = ["front_resnet50", "front_llama", "front_gpt2", "front_whisper"]
PARTS = [
    *("resnet50", "llama", "gpt2", "whisper", "fits", "cap", "others", "compiled_llama", "compiled_resnet50"),
    *(*FRONTS, "changes"),
]
PAGE = BENCHES.parents[1] / "docs" / "benchmarks" / "budget_h200_2026-11.md"
ABOUT = {"device": "NVIDIA H200", "cuda": "13.0", "torch": "2.11.0", "memkit": "0.1.0", "steps": 10}
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
CAPPED = {"bench": "budget_cap", "part": "cap", "model": "unet", "share": 0.3, "is_least": True}


@pytest.fixture
def budget_steps() -> ModuleType:
    return bench_module("budget_steps")


@pytest.fixture
def budget_tables() -> ModuleType:
    return bench_module("budget_tables")


@pytest.fixture
def setting() -> Any:
    """Return one for tiny runs."""
    found = {"steps": 1, "fast": False, "tiny": True, "ends_s": 0.0}
    return bench_module("setting").Setting(device=ReferenceDevice(), **found)


def _script(*arguments: str) -> list[dict[str, Any]]:
    pytest.importorskip("transformers")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHES / "bench_budget.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _cells(table: str) -> list[list[str]]:
    """Return the rows of a table below its ruler."""
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


# Steps


def test_budget_is_a_share_of_what_plain_steps_take(budget_steps: ModuleType) -> None:
    assert budget_steps.of_plain(0.5, 2**30) == f"{2**29}B"
    assert budget_steps.of_plain(0.5, None) == 0.5
    assert budget_steps.of_plain(1.1, None) == "1GiB"


def test_nothing_is_left_free_for_states_of_what_has_stepped(budget_steps: ModuleType) -> None:
    model = torch.nn.Linear(8, 8)

    assert budget_steps.has_stepped(model).state


def test_learned_budget_is_timed_by_turns_with_plain_steps(budget_steps: ModuleType, setting: Any) -> None:
    line = budget_steps.measured(layers(torch.randn(64, 64)), 0.5, setting, {"again": measuring.plain})

    assert line["way"] in ("plan", "regions", "regions and copies")
    assert line["ratio"] == line["step_s"] / line["plain_s"]
    assert line["to_again"] == line["step_s"] / line["again_s"]
    assert line["num_plans"] == len(line["plan_each_s"]) >= 1
    assert budget_steps.NUM_LEARNING <= len(line["learning_host_s"]) == line["num_learning"]
    assert line["is_settled"] or line["num_learning"] >= budget_steps.NUM_LEARNING  # on this clock another way may be tried
    assert line["warned"] == []
    memkit.reset("bench")


def test_budget_that_cannot_be_kept_to_is_told(budget_steps: ModuleType, setting: Any) -> None:
    line = budget_steps.measured(layers(torch.randn(64, 64)), 0.01, setting)

    assert "cannot be kept to" in line["warned"][0]
    assert line["peak_to_budget"] > 1
    memkit.reset("bench")


# Fronts


def _by_hand(**steps: tuple[float, float]) -> dict[str, dict[str, Any]]:
    found = {"bench": "budget_front_other", "model": "gpt2", "plain_s": 0.1, "updates_once": True, **ABOUT}
    return {
        which: {**found, "which": which, "step_s": step_s, "ratio": step_s / 0.1, "peak_allocated_mib": peak_mib}
        for which, (step_s, peak_mib) in steps.items()
    }


def test_budgets_are_set_beside_what_nothing_else_is_better_than() -> None:
    best_of = bench_module("budget_fronts").best_of
    found = _by_hand(
        slow=(0.2, 900.0), least=(0.3, 100.0), half=(0.15, 500.0), faster_than_plain=(0.09, 1000.0), most=(0.11, 990.0)
    )

    assert best_of(found) == ["least", "half", "most"]
    assert best_of(found, 2) == ["least", "most"]
    assert best_of({**found, "failed": {"error": "x"}}) == ["least", "half", "most"]


def test_what_is_set_by_hand_stands_beside_a_budget_of_its_peak(budget_tables: ModuleType) -> None:
    lines = list(_by_hand(half=(0.15, 500.0), slow=(0.2, 900.0)).values())
    budget = {"bench": "budget_front", "model": "gpt2", "which": "half", "step_s": 0.12, "to_other": 0.8, "way": "regions"}

    (half, slow) = _cells(budget_tables.tables([*lines, {**budget, "peak_allocated_mib": 490.0}])["front_gpt2"])

    assert half == ["half", "yes", "150.0", "**1.500**", "500", "120.0", "490", "regions", "**0.800**"]
    assert slow == ["slow", "yes", "200.0", "**2.000**", "900", "-", "-", "-", "**-**"]


@pytest.mark.slow
def test_picture_has_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = list(_by_hand(**{"1 of 2 blocks checkpointed": (0.15, 500.0), "CPUOffload(0.1)": (0.11, 900.0)}).values())
    mixed = {"bench": "budget_compiled_by_hand", "model": "llama", "step_s": 0.08, "eager_s": 0.1, "peak_allocated_mib": 700.0}

    made = bench_module("draw_budget").draw([*lines, {**BUDGET, "model": "gpt2"}, mixed], str(tmp_path / "{model}.svg"))

    assert [path.name for path in made] == ["gpt2.svg", "llama_compiled.svg"]
    assert all(path.stat().st_size > 1000 for path in made)


# Tables


def test_budget_is_a_row_of_each_table_that_it_is_in(budget_tables: ModuleType) -> None:
    made = budget_tables.tables([BUDGET])

    assert set(made) == {"machine", "resnet50", "beside", "planning"}
    (row,) = _cells(made["resnet50"])
    assert row[:5] == ["6396", "100.0", "110.0", "**1.100**", "1.090"]
    assert row[5:] == ["6380", "0.998", "**1.002**", "**1.010**", "1", "plan", "30", "512", "1.0"]
    assert _cells(made["beside"]) == [["6396", "110.0", "6380", "0.23", "120.0", "6400", "**0.917**", "-", "-"]]


def test_budget_that_failed_says_why(budget_tables: ModuleType) -> None:
    made = budget_tables.tables([{**CAPPED, "error": "out of memory in step 2"}, {**BUDGET, "error": "x"}])

    assert _cells(made["cap"])[0][:3] == ["unet", "0.3 (the least)", "error: out of memory in step 2"]
    assert _cells(made["resnet50"])[0][:2] == ["6396", "error: x"]


def test_page_has_a_place_for_each_table(budget_tables: ModuleType) -> None:
    made = dict.fromkeys(budget_tables._TABLES, "| a |\n")

    page = budget_tables.filled(PAGE.read_text(), made)

    assert page.count("| a |\n<!-- end -->") == len(made) == page.count("<!-- end -->")


# All of it


def test_names_of_parts_are_those_that_are_described() -> None:
    script = bench_module("bench_budget")

    assert list(script.PARTS) == PARTS
    for name in PARTS:
        assert f"\n    {name} " in script.__doc__


@pytest.mark.slow
def test_script_runs_each_part_in_a_process_of_its_own(budget_tables: ModuleType) -> None:
    names = ["cap", "whisper"]

    lines = _script("--tiny", "--steps", "1", "--only", *names)

    assert [line["part"] for line in lines if "taken_s" in line] == names
    _assert_are_told(names, lines, budget_tables)
    for line in lines:
        assert "follows_plan" not in line or line["allocator"] == "expandable_segments:True"


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiled_code_is_left")
@pytest.mark.parametrize("name", ["llama", "gpt2", "fits", "others", "compiled_llama", "changes"])
def test_part_runs(name: str, budget_tables: ModuleType) -> None:
    pytest.importorskip("transformers")

    _assert_are_told([name], lines_of_part("bench_budget", name), budget_tables)


def _assert_are_told(names: list[str], lines: list[dict[str, Any]], budget_tables: ModuleType) -> None:
    assert [line for line in lines if "error" in line] == []
    assert {line["part"] for line in lines if "follows_plan" in line} == set(names) - {"changes"}
    assert budget_tables.tables(lines).keys() > {"machine"}
