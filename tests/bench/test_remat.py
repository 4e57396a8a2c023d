"""`memkit bench remat`: the table, the figures, the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import memkit
from memkit import commands
from memkit.bench import RematBench, bench_remat, engines
from memkit.bench.remat import budget_text
from memkit.device import CpuDevice, ReferenceDevice
from tests.bench.cases import NUM_LAYERS, assert_draws, assert_fails, run_command, square_layers

pytestmark = pytest.mark.full

WIDTH = 64  # each saved storage is 16 KiB


@pytest.fixture(scope="module")
def result() -> RematBench:
    workload = square_layers(WIDTH)
    return bench_remat(
        workload,
        [1.0, 0.5, "64KiB"],
        ReferenceDevice(),
        num_steps=2,
        num_warmup=4,
        peers=engines.checkpointing(workload.model),
        min_bytes=0,
    )


def test_budgets_are_kept_to(result: RematBench) -> None:
    saved_bytes = (2 * NUM_LAYERS - 1) * 2**14  # each GELU's input and each Linear's, the model's own input apart

    assert result.saved_bytes == saved_bytes
    assert [row.stats.budget_bytes for row in result.rows] == [saved_bytes, saved_bytes // 2, 2**16]
    for row in result.rows:
        assert row.stats.follows_plan
        assert row.stats.ledger_peak_bytes <= row.stats.budget_bytes


def test_only_what_was_dropped_is_replayed(result: RematBench) -> None:
    whole, half, _ = result.rows

    assert (whole.stats.num_dropped, whole.stats.num_replayed_ops) == (0, 0)
    assert half.stats.num_dropped > 0
    assert half.stats.num_replayed_ops > 0


def test_compares_with_the_plain_step_of_the_same_run(result: RematBench) -> None:
    for row in result.rows:
        assert row.plain_s == result.plain.step_s
        assert row.to_plain == row.memkit.step_s / result.plain.step_s


def test_text_has_a_line_for_plain_each_budget_and_checkpointing(result: RematBench) -> None:
    lines = result.to_text().splitlines()

    assert lines[0].startswith("layers on reference, torch ")
    assert [line.split("  ")[0] for line in lines[-5:]] == ["plain", "1", "0.5", "64KiB", "checkpoint per child"]
    assert lines[-3].split()[-2:] == [str(result.rows[1].stats.num_kept), str(result.rows[1].stats.num_dropped)]
    assert lines[-1].split()[-1] == "-"


@pytest.mark.parametrize("width", [80, 100, 172])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int, result: RematBench) -> None:
    lines, wide = result.to_text(width=width).splitlines(), result.to_text().splitlines()

    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[-5:]] == [line.split()[0] for line in wide[-5:]]  # each row is one line still


def test_json_holds_all_figures_and_versions(result: RematBench) -> None:
    figures = json.loads(result.to_json())

    assert (figures["memkit"], figures["torch"]) == (memkit.__version__, torch.__version__)
    assert [row["budget"] for row in figures["rows"]] == [1, 0.5, "64KiB"]
    assert figures["rows"][1]["step_s"] == result.rows[1].memkit.step_s
    assert figures["rows"][1]["stats"]["num_dropped"] == result.rows[1].stats.num_dropped
    assert figures["plain"]["step_s"] == result.plain.step_s
    assert list(figures["peers"]) == ["checkpoint per child"]


def test_picture_is_written(result: RematBench, tmp_path: Path) -> None:
    assert_draws(result, tmp_path)


def test_runs_without_counters_and_peers() -> None:
    found = bench_remat(square_layers(WIDTH), [0.5], CpuDevice(), num_steps=1, num_warmup=0, min_bytes=0)

    assert found.plain.peak_allocated_bytes is None
    assert found.peers == {}
    assert found.to_text().splitlines()[-2].split()[:4] == ["plain", "-", "-", "-"]


def test_refuses_budgets_out_of_range_before_it_measures() -> None:
    with pytest.raises(ValueError, match=r"above 0 and at most 1; found 1\.5"):
        bench_remat(square_layers(WIDTH), [0.5, 1.5], ReferenceDevice())


@pytest.mark.parametrize(("budget", "text"), [(1.0, "1"), (0.25, "0.25"), ("8GiB", "8GiB"), (2**20, "1.00 MiB")])
def test_budgets_are_printed_as_they_were_given(budget: int | float | str, text: str) -> None:
    assert budget_text(budget) == text


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])), "checkpoint per block"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "checkpoint per child"),
        (nn.Linear(4, 4), "checkpoint of the whole"),
    ],
    ids=["blocks", "children", "leaf"],
)
def test_checkpointing_suits_the_model(model: nn.Module, name: str) -> None:
    batch = torch.randn(2, 4)
    model(batch).sum().backward()
    expected = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()

    ((found, engine),) = engines.checkpointing(model).items()
    with engine():
        output = model(batch)
    output.sum().backward()

    assert found == name
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x:y"], "required: --input"),
        (["x:y", "--input", "2", "--budgets", "0"], "needs shares above 0 and up to 1, or bytes"),
        (["x:y", "--input", "2", "--budgets", "1,-0.5"], "found '-0.5'"),
        (["x:y", "--input", "2", "--budgets", "nan"], "found 'nan'"),
        (["x:y", "--input", "2", "--budgets", "0.5,,1"], "found ''"),
        (["x:y", "--input", "2", "--budgets", "8GBit"], "found '8GBit'"),
        (["x:y", "--input", "2", "--iters", "0"], "needs a whole number, 1 or more"),
        (["x:y", "--input", "2", "--plot", "/no/such/folder/x.png"], "No such file or directory"),
    ],
)
def test_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert_fails(capsys, ["bench", "remat", *arguments], message)


def test_command_prints_and_writes_what_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commands, "cuda_is_available", lambda: True)
    monkeypatch.setattr(commands, "open_device", lambda _: CpuDevice())
    found = tmp_path / "bench.json"
    arguments = ["torchvision:resnet18", "--input", "2x3x64x64", "--budgets", "1,2MiB", "--iters", "1"]

    status, out, err = run_command(capsys, "bench", "remat", *arguments, "--json", str(found))

    assert status == 0, err
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["plain", "1", "2MiB"]
    assert [row["budget"] for row in json.loads(found.read_text())["rows"]] == [1.0, "2MiB"]


@pytest.mark.gpu
def test_command_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = tmp_path / "bench.json"
    arguments = ["torchvision:resnet18", "--input", "32x3x128x128", "--budgets", "1,0.5", "--iters", "2"]

    status, out, _ = run_command(capsys, "bench", "remat", *arguments, "--json", str(found))

    assert status == 0
    assert "budget" in out
    whole, half = json.loads(found.read_text())["rows"]
    assert half["stats"]["num_dropped"] > 0
    assert half["peak_allocated_bytes"] < whole["peak_allocated_bytes"]
