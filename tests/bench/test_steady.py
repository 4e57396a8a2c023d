"""What `examples/bench/bench_steady.py` measures: that its parts run, and that their figures are computed right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memkit.device import ReferenceDevice
from memkit.transfer import Link
from tests.bench.cases import BENCHES, bench_module, layers, lines_of_part, measuring

PARTS = [
    "chain",
    "region",
    "remat_gpt2",
    "remat_whisper",
    "offload_gpt2",
    "offload_whisper",
    "remat_llama",
    "remat_resnet50",
    "offload_resnet50",
    "offload_llama",
    "compiled",
    "reserved",
    "host",
    "flat",
]
OF_REMAT = ["remat_keep_all", "remat_spaced_peaks", *["remat_spaced"] * 4, "remat_rises"]


def _script(*arguments: str, status: int = 0) -> list[dict[str, Any]]:
    pytest.importorskip("transformers")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHES / "bench_steady.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def alternating() -> ModuleType:
    return bench_module("alternating")


@pytest.fixture
def remat_spaced() -> ModuleType:
    return bench_module("remat_spaced")


def _step(alternating: ModuleType, step_s: float, **figures: Any) -> Any:
    found = {"forward_s": step_s / 3, "backward_s": 2 * step_s / 3, "host_s": step_s, "forward_host_s": step_s / 4}
    found["peak_allocated_bytes"] = None
    return alternating.Step(step_s=step_s, **{**found, **figures})


# Steps by turns


def test_steps_of_engines_take_turns_after_one_of_each(alternating: ModuleType) -> None:
    entered: list[str] = []

    def named(name: str) -> Callable[[], Any]:
        return lambda: (entered.append(name), measuring.plain())[1]

    found = alternating.alternate(
        layers(torch.randn(4, 16)), {"a": named("a"), "b": named("b")}, ReferenceDevice(), num_steps=2
    )

    assert entered == ["a", "b"] * 3
    assert set(found) == {"a", "b"}
    assert found["a"].step_s >= max(found["a"].forward_s, found["a"].backward_s)


def test_medians_and_the_largest_peak_are_told(alternating: ModuleType) -> None:
    steps = [_step(alternating, seconds, peak_allocated_bytes=peak) for seconds, peak in ((1.0, 5), (9.0, 7), (2.0, 6))]

    found = alternating.median_of(steps)

    assert (found.step_s, found.peak_allocated_bytes) == (2.0, 7)


def test_nobody_counts_peaks_on_the_cpu(alternating: ModuleType) -> None:
    assert alternating.largest([None, None]) is None
    assert alternating.largest([None, 3]) == 3


# Ratios


@dataclass
class _Stats:
    moved_out_bytes: int = 400
    moved_in_bytes: int = 300
    unique_bytes: int = 800
    window_bytes: int = 10
    num_copies_out: int = 4
    num_copies_in: int = 3
    d2h_bytes_per_s: float | None = None
    h2d_bytes_per_s: float | None = None
    stall_out_s: float = 0.0
    stall_in_s: float = 0.0


def test_roofline_is_the_longer_of_computing_and_copying_each_way(alternating: ModuleType) -> None:
    alone = _step(alternating, 3.0, forward_s=1.0, backward_s=2.0)
    found = _step(alternating, 9.0, peak_allocated_bytes=100)
    warm = alternating.Warm(peak_allocated_bytes=110, peak_reserved_bytes=165, step_s=9.0)
    link = Link(d2h_bytes_per_s=100.0, h2d_bytes_per_s=300.0)

    line = bench_module("offload_ratios").row(alone, found, warm, _Stats(), link)

    assert line["roofline_s"] == max(1.0, 400 / 100) + max(2.0, 300 / 300)
    assert line["to_roofline"] == 9.0 / 6.0
    assert line["to_plain"] == 3.0
    assert line["reserved_to_allocated"] == 1.5


# Checkpointed layers


@pytest.mark.parametrize(
    ("num_layers", "count", "expected"),
    [(24, 1, [0]), (24, 4, [0, 6, 12, 18]), (16, 3, [0, 5, 10]), (4, 3, [0, 1, 2]), (4, 4, [0, 1, 2, 3]), (4, 0, [])],
)
def test_layers_are_evenly_spaced(remat_spaced: ModuleType, num_layers: int, count: int, expected: list[int]) -> None:
    assert remat_spaced.evenly_spaced(num_layers, count) == expected


@pytest.mark.parametrize(("target", "expected"), [(100, 0), (99, 1), (80, 3), (60, 4), (59, None), (None, 4)])
def test_fewest_layers_reach_a_peak(remat_spaced: ModuleType, target: int | None, expected: int | None) -> None:
    peaks = {0: 100, 1: 90, 2: 95, 3: 70, 4: 60}

    assert remat_spaced.fewest_within(peaks, target) == expected


def test_rise_is_the_most_that_a_higher_budget_takes_longer(remat_spaced: ModuleType) -> None:
    assert remat_spaced.most_rise([(0.7, 1.2), (0.5, 1.0), (0.3, 1.1)]) == pytest.approx(1.2)
    assert remat_spaced.most_rise([(0.7, 1.0), (0.5, 2.0)]) == 0.5
    assert remat_spaced.most_rise([]) == 1.0


def test_step_is_compared_with_all_layers_where_none_reach_its_peak(remat_spaced: ModuleType, alternating: ModuleType) -> None:
    line = remat_spaced.compared(_step(alternating, 1.0), _step(alternating, 2.0), None, 24)

    assert (line["to_spaced"], line["num_checkpointed"], line["spaced_reaches_peak"]) == (0.5, 24, False)


def test_checkpointing_gives_back_a_forward_of_the_modules_own() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    mine = one.forward = torch.compile(one.forward, backend="eager")

    with measuring.checkpointed_each([one, other]):
        assert one.forward is not mine

    assert one.forward is mine
    assert "forward" not in other.__dict__


def _flops_of_backward(kept_ops: Sequence[Any]) -> int:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with measuring.checkpointed_each([layer], kept_ops=kept_ops):
        loss = layer(torch.ones(2, 4)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops()


def test_checkpointing_keeps_the_results_of_ops_that_are_named() -> None:
    assert _flops_of_backward([]) == 2 * _flops_of_backward([torch.ops.aten.addmm.default]) > 0


# What the host takes


def test_each_storage_takes_what_is_beyond_plain(alternating: ModuleType) -> None:
    line = bench_module("host_chains").per_storage(_step(alternating, 1.0), _step(alternating, 3.0, host_s=2.0), 10)

    assert line["host_us_per_storage"] == pytest.approx(1e5)
    assert line["us_per_storage"] == pytest.approx(2e5)


def test_a_step_that_takes_long_is_repeated_a_few_times() -> None:
    steps_within = bench_module("host_chains").steps_within

    assert [steps_within(room_s, 2.0, 10) for room_s in (100.0, 12.0, 1.0)] == [10, 5, 2]


def test_call_of_a_region_takes_what_is_beyond_plain_and_one_more_forward() -> None:
    line = bench_module("host_region").per_call({"plain": (1e-3, 3e-3), "torch": (2e-3, 9e-3)}, 5)

    assert line["torch_us_beyond"] == pytest.approx(1000.0)
    assert line["plain_forward_us"] == pytest.approx(200.0)


def test_what_stays_takes_what_is_left_over_by_what_moves() -> None:
    tenth = {"num_saves": 110, "num_moved": 10, "step_s": 0.5e-3 + 1e-3, "plain_s": 1e-3}

    assert bench_module("bench_host").what_stays(tenth, {"us_per_moved": 30.0}) == {
        "num_stay": 100,
        "us_per_stay": pytest.approx(2.0),
    }


# Compiled blocks


def test_budget_is_the_largest_that_was_tried_within_a_peak() -> None:
    peak_at: Mapping[str, Callable[[int], int]] = {"smooth": lambda budget: budget + 50, "steps": lambda b: b // 40 * 40 + 50}
    largest_within = bench_module("bench_compiled").largest_within

    assert largest_within(peak_at["smooth"], 100, first=80, most=200)[0] == 50
    budget, tries = largest_within(peak_at["steps"], 100, first=150, most=200)
    assert (budget, len(tries)) == (max(b for b, peak in tries if peak <= 100), 4)
    assert largest_within(lambda _: 1000, 100, first=80, most=200)[0] is None
    assert largest_within(lambda _: None, 100, first=80, most=200)[0] == 80


# All of it


def test_names_of_parts_are_those_that_are_described() -> None:
    steady = bench_module("bench_steady")

    assert list(steady.PARTS) == PARTS
    for name in PARTS:
        assert f"\n    {name} " in steady.__doc__


@pytest.mark.slow
def test_nothing_is_measured_without_a_gpu() -> None:
    assert [line["part"] for line in _script() if "skipped" in line] == PARTS


@pytest.mark.slow
def test_parts_run_one_after_the_other() -> None:
    lines = _script("--tiny", "--steps", "1", "--only", "chain", "region")

    assert [line["part"] for line in lines if "taken_s" in line] == ["chain", "region"]
    assert [line for line in lines if "error" in line] == []
    (_, one) = (line for line in lines if line.get("bench") == "host_chain")
    assert one["num_moved"] == 37
    regions = [line for line in lines if line.get("bench") == "host_region"]
    assert {line["name"] for line in regions} == {"norm_gelu", "norm_dropout"}
    assert all(line["is_equal"]["torch"] for line in regions if "is_equal" in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "figure", "found"),
    [("flat", "num_storages", [10, 100]), ("offload_whisper", "ratio", [0.0, 0.1, 0.2, 0.5, 1.0])],
)
def test_part_runs(part: str, figure: str, found: list[float]) -> None:
    pytest.importorskip("transformers")
    lines = lines_of_part("bench_steady", part)

    assert [line for line in lines if "error" in line] == []
    assert [line[figure] for line in lines if line["bench"] in ("host_flat", "offload_ratios")] == found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["whisper", "llama"])
def test_budgets_run_beside_checkpointed_layers(model: str) -> None:
    pytest.importorskip("transformers")
    lines = lines_of_part("bench_steady", f"remat_{model}")

    assert [line["bench"] for line in lines] == OF_REMAT
    for line in lines:
        if line["bench"] == "remat_spaced":
            assert line["to_spaced"] == line["step_s"] / line["spaced_s"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiled_code_is_left")
def test_compiled_blocks_run() -> None:
    pytest.importorskip("transformers")
    lines = lines_of_part("bench_steady", "compiled")

    kinds = ["compiled_plain", "compiled_offload", "compiled_remat"]
    assert [(line["way"], line["bench"]) for line in lines] == [(way, kind) for way in ("forward", "call") for kind in kinds]
    for line in lines[:2]:
        assert (line["new_graphs"], line["new_graph_breaks"]) == (0, 0)
    assert lines[0]["graphs"] > 0


@pytest.mark.slow
def test_part_that_takes_too_long_is_ended_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    steady = bench_module("bench_steady")

    assert steady.SCRIPT.run_parts(["chain", "region"], ["--tiny", "--steps=1"], 1.0, scale=1e-6) == 1

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["part"] for line in lines] == ["chain", "region"]
    assert all("took longer" in line["error"] for line in lines)


@pytest.mark.slow
def test_part_for_which_no_time_is_left_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_module("bench_steady").SCRIPT.run_parts(["chain"], ["--tiny", "--steps=1"], 0.0) == 0

    assert "no time was left" in json.loads(capsys.readouterr().out)["skipped"]
