"""`memkit bench offload`: the table, the prediction, the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import memkit
from memkit.bench import OffloadBench, bench_offload, predict_offload
from memkit.device import ReferenceDevice
from memkit.plan import Action, plan_ratio, simulate_lanes
from memkit.profile import timed_saves
from memkit.transfer import Link
from tests.bench.cases import NUM_LAYERS, assert_draws, assert_fails, run_command, square_layers

pytestmark = pytest.mark.full

WIDTH = 512  # each saved storage is 1 MiB


@pytest.fixture(scope="module")
def result() -> OffloadBench:
    return bench_offload(square_layers(WIDTH), [0, 0.5, 1], ReferenceDevice(), num_steps=2, num_warmup=2)


def test_moves_what_the_plan_of_the_ratio_moves(result: OffloadBench) -> None:
    sizes = [2**20] * (2 * NUM_LAYERS - 1)  # each GELU's input and each Linear's, the model's own input apart

    for row in result.rows:
        assert row.window_bytes == 2 * 2**20
        assert row.moved_bytes == plan_ratio(sizes, row.ratio, window_bytes=row.window_bytes).offload_bytes
    assert result.saved_bytes == sum(sizes)


def test_compares_with_the_plain_step_of_the_same_run(result: OffloadBench) -> None:
    for row in result.rows:
        assert row.plain_s == result.plain.step_s
        assert row.roofline_s >= max(result.plain.forward_s, result.plain.backward_s)
        assert row.to_roofline == row.memkit_s / row.roofline_s


def test_nothing_is_compared_with_synchronous_copies_of_nothing(result: OffloadBench) -> None:
    assert result.rows[0].synchronous_s is None
    assert result.rows[0].speed_up is None
    assert result.rows[1].speed_up == result.rows[1].synchronous_s / result.rows[1].memkit_s


def test_text_has_a_line_for_each_ratio(result: OffloadBench) -> None:
    lines = result.to_text().splitlines()

    assert lines[0].startswith("layers on reference, torch ")
    assert [line.split()[0] for line in lines[-3:]] == ["0", "0.5", "1"]
    assert lines[-1].split()[1] == f"{result.rows[-1].moved_bytes / 2**20:.2f}"


@pytest.mark.parametrize("width", [80, 100, 172])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int, result: OffloadBench) -> None:
    lines, wide = result.to_text(width=width).splitlines(), result.to_text().splitlines()

    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[-3:]] == [line.split()[0] for line in wide[-3:]]  # each row is one line still


def test_json_holds_all_figures_and_versions(result: OffloadBench) -> None:
    figures = json.loads(result.to_json())

    assert figures["memkit"] == memkit.__version__
    assert figures["torch"] == torch.__version__
    assert [row["ratio"] for row in figures["rows"]] == [0, 0.5, 1]
    assert figures["rows"][1]["memkit_s"] == result.rows[1].memkit_s
    assert figures["plain"]["step_s"] == result.plain.step_s


def test_picture_is_written(result: OffloadBench, tmp_path: Path) -> None:
    assert_draws(result, tmp_path)


def test_refuses_ratios_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"a ratio must be from 0 .* found 1\.5"):
        bench_offload(square_layers(WIDTH), [1.5], ReferenceDevice())


@pytest.fixture(scope="module")
def report() -> memkit.profile.MemoryReport:
    workload = square_layers(WIDTH)
    batch = torch.randn(512, 512)
    return memkit.profile_memory(workload.model, batch, backward=True, print_table=False, tag="predicted")


def test_prediction_is_that_of_the_lane_simulation(report: memkit.profile.MemoryReport) -> None:
    link = Link(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9)
    saves = timed_saves(report, 2**20)
    sizes = [save.num_bytes for save in saves]
    held = frozenset(index for index, save in enumerate(saves) if save.is_held)
    plan = plan_ratio(sizes, 0.5, window_bytes=2 * 2**20, held=held)

    (row,) = predict_offload(report, [0.5], link).rows

    assert row.moved_bytes == plan.offload_bytes > 0
    time = simulate_lanes(
        saves,
        {index for index, action in enumerate(plan.actions) if action is Action.OFFLOAD},
        forward_s=report.forward_s or 0.0,
        backward_s=report.backward_s or 0.0,
        link=link,
        limit_bytes=plan.limit_bytes,
    )
    assert row.memkit_s == time.step_s
    assert row.synchronous_s == row.plain_s + 2 * row.moved_bytes / 1e9
    assert row.memkit_s <= row.synchronous_s


def test_prediction_needs_times() -> None:
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(512, 512), nn.GELU()), torch.empty(512, 512)
    report = memkit.profile_memory(model, batch, backward=True, print_table=False)

    with pytest.raises(ValueError, match="the report has no times"):
        predict_offload(report, [0.5], Link(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9))


def test_command_predicts_from_a_report(
    capsys: pytest.CaptureFixture[str], report: memkit.profile.MemoryReport, tmp_path: Path
) -> None:
    saved = tmp_path / "report.json"
    saved.write_text(report.to_json())
    found = tmp_path / "bench.json"

    status, out, err = run_command(
        capsys, "bench", "offload", str(saved), "--predict", "--link-gbps", "55", "--ratios", "0,0.5,1", "--json", str(found)
    )

    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["0", "0.5", "1"]
    assert json.loads(found.read_text())["where"] == "a prediction from a report of cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.json", "--predict"], "--predict needs --link-gbps"),
        (["x.json", "--predict", "--link-gbps", "5", "--input", "2"], "leave out --input"),
        (["x:y"], "--input is needed"),
        (["x:y", "--input", "2", "--link-gbps", "5"], "--link-gbps is for --predict"),
        (["x:y", "--input", "2", "--ratios", "0,2"], "needs numbers from 0 to 1 joined by commas"),
        (["x:y", "--input", "2", "--ratios", "a"], "needs numbers from 0 to 1 joined by commas"),
        (["x:y", "--input", "2", "--iters", "0"], "needs a whole number, 1 or more"),
        (["x.json", "--predict", "--link-gbps", "-1"], "needs a positive number of GB/s"),
    ],
)
def test_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert_fails(capsys, ["bench", "offload", *arguments], message)


@pytest.mark.gpu
def test_command_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = tmp_path / "bench.json"
    arguments = ["torchvision:resnet18", "--input", "32x3x128x128", "--ratios", "0,0.5", "--iters", "2"]

    status, out, _ = run_command(capsys, "bench", "offload", *arguments, "--json", str(found))

    assert status == 0
    assert "ratio" in out
    assert json.loads(found.read_text())["rows"][1]["moved_bytes"] > 0
