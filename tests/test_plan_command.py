"""`memkit plan`: from arguments to a table, files, or one line of what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.cli.plan_command import shards_of, trace_on_rank
from memkit.plan import MemoryPlan
from memkit.plan.gpu import find_gpu
from tests.bench.cases import assert_fails, run_command

MIB = 2**20
MODELS = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

def blocks():
    return nn.Sequential(*[Block() for _ in range(6)])

def bilinear():
    return nn.Bilinear(64, 64, 8)

class Two(nn.Bilinear):
    def __init__(self):
        super().__init__(4, 4, 1)

    def forward(self, x, y):
        return self.weight.sum() * x.sum() + y.sum()
"""
PLAN = ["plan", "models_to_plan:blocks", "--input", "4096x256", "--gpu", "RTX 4090"]


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_to_plan.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)


def peak_mib(out: str) -> float:
    return float(re.findall(r"plain peak: ([\d.]+) MiB", out)[0])


def rows_of(out: str) -> list[list[str]]:
    lines = out.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("---"))
    return [line.split() for line in lines[begin + 1 : lines.index("", begin)]]


def test_budgets_run_from_the_plain_peak_to_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(capsys, *PLAN, "--steps", "3")

    rows = rows_of(out)
    assert status == 0
    assert out.startswith("Sequential, float32[4096, 256], on RTX 4090 (predicted; not measured)\n")
    assert max(map(len, out.splitlines())) <= 80
    assert [len(row) for row in rows] == [11, 11, 11]
    assert rows[0][3] == "1.000"
    assert float(rows[0][0]) == pytest.approx(peak_mib(out))
    assert float(rows[-1][0]) == pytest.approx(float(re.findall(r"least budget: ([\d.]+) MiB", out)[0]))
    assert all(float(row[1]) <= float(row[0]) for row in rows)
    times = [float(row[3]) for row in rows]
    assert times == sorted(times)


def test_files_hold_the_rows_and_the_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "front.json"

    run_command(capsys, *PLAN, "--budget", "200MiB,0.6", "--optimizer", "adamw", "--json", str(path))

    content: dict[str, Any] = json.loads(path.read_text())
    assert (content["gpu"], content["optimizer"], content["is_measured"]) == ("RTX 4090", "adamw", False)
    assert [row["budget_bytes"] for row in content["rows"]] == [200 * MIB, int(0.6 * content["plain_peak_bytes"])]
    for row in content["rows"]:
        plan = MemoryPlan.from_json(json.dumps(content["plans"][str(row["budget_bytes"])]))
        assert plan.predicted_peak_bytes == row["peak_bytes"] <= row["budget_bytes"]
        assert plan.predicted_s == row["step_s"] <= min(row["offload_s"] or 1e9, row["recompute_s"] or 1e9)


@pytest.mark.slow
def test_states_of_the_optimizer_and_dtypes_count(capsys: pytest.CaptureFixture[str]) -> None:
    def plain_peak_mib(*options: str) -> float:
        return peak_mib(run_command(capsys, *PLAN, "--budget", "1.0", *options)[1])

    params_mib = 6 * (256 * 1024 * 2 + 1024 + 256) * 4 / MIB
    plain = plain_peak_mib()
    assert plain_peak_mib("--optimizer", "adamw") == pytest.approx(plain + 2 * params_mib, abs=0.02)
    assert plain_peak_mib("--optimizer", "rmsprop") == pytest.approx(plain + params_mib, abs=0.02)
    assert plain_peak_mib("--dtype", "bf16") == pytest.approx(plain / 2, rel=0.05)
    assert plain_peak_mib("--autocast", "bf16") < plain


@pytest.mark.slow
def test_one_of_several_ranks_is_planned_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "front.json"

    def front_of(*options: str) -> tuple[str, dict[str, Any]]:
        out = run_command(capsys, *PLAN, "--budget", "1.0", "--optimizer", "adamw", "--json", str(path), *options)[1]
        return " ".join(out.split()), json.loads(path.read_text())

    layer = (256 * 1024 * 2 + 1024 + 256) * 4
    (_, whole), (text, one) = front_of(), front_of("--ranks", "8")
    shards = one["ranks"]

    assert whole["ranks"] is None
    assert (shards["num_ranks"], shards["param_bytes"], shards["grad_bytes"]) == (8, 6 * layer // 8, 6 * layer // 8)
    assert shards["state_bytes"] == 2 * 6 * layer // 8
    assert shards["gathered_bytes"] == 2 * layer
    assert "on each of 8 ranks: parameters 1.50 MiB, gradients 1.50 MiB, states 3.01 MiB, gathered at a time 4.01 MiB" in text
    assert one["plain_peak_bytes"] < whole["plain_peak_bytes"] - 2 * 6 * layer
    assert one["plain_s"] == whole["plain_s"]

    text, offloaded = front_of("--ranks", "8", "--offload-params")
    brought_bytes = 2 * (layer // 8 + 512 - 256 * 4 // 8)  # the smaller bias is filled up
    assert offloaded["ranks"]["brought_bytes"] == brought_bytes
    assert "gathered at a time 4.01 MiB, on the way there 514.00 KiB; in host memory parameters 1.50 MiB, gradients" in text
    held_bytes = 4 * 6 * layer // 8  # parameters, gradients and two states
    assert one["plain_peak_bytes"] - offloaded["plain_peak_bytes"] == held_bytes - brought_bytes


def test_the_base_of_a_rank_is_its_shards() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(4)))
        x = torch.empty(512, 64)
    report = memkit.profile_memory(model, x, device="meta", backward=True, trace=True, print_table=False)
    shards = shards_of(model, 4, optimizer=None)

    trace = trace_on_rank(report, model, shards)

    weight, inputs = 64 * 64 * 4, 512 * 64 * 4
    assert shards.state_bytes == 0
    assert trace.base_bytes == inputs + weight + weight + 2 * weight  # shards of four, their gradients, two gathered
    less = [whole - one for whole, one in zip(report.trace.live_bytes, trace.live_bytes, strict=True)]
    assert less == sorted(less)
    assert less[-1] == 2 * weight  # of four whole gradients, those of the last two layers are there at the end


def test_a_budget_that_is_too_small_is_a_row_without_figures(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(run_command(capsys, *PLAN, "--budget", "150MiB,10MiB")[1])

    assert rows[0][2] != "-"
    assert rows[1] == ["10.00", *["-"] * 10]


def test_a_measured_spec_is_read_and_models_without_blocks_have_no_checkpoints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(find_gpu("H200").to_json().replace('"H200"', '"mine"'))
    inputs = ["--input", "4096x64"] * 2

    out = run_command(capsys, "plan", "models_to_plan:bilinear", *inputs, "--gpu", str(path), "--budget", "1.0")[1]

    assert ", on mine (predicted)\n" in out
    assert rows_of(out)[0][-1] == "-"


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    def plain_peak_mib(batch: int) -> float:
        return peak_mib(run_command(capsys, *PLAN[:3], f"{batch}x256", *PLAN[4:], "--budget", "1.0")[1])

    out = run_command(capsys, *PLAN, "--budget", "200MiB", "--batch-search")[1]

    plain, planned = map(int, re.findall(r"fits in 200.00 MiB: plain (\d+), planned (\d+)", out)[0])
    assert planned > plain
    assert plain_peak_mib(plain) <= 200 < plain_peak_mib(plain + 1)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [["--budget", "200MiB"], []])
def test_the_largest_batch_is_the_same_from_a_start_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], budget: list[str], tmp_path: Path
) -> None:
    paths = {"--json": tmp_path / "front.json", "--html": tmp_path / "front.html", "--plot": tmp_path / "front.svg"}
    files = [str(part) for pair in paths.items() for part in pair]

    def found(batch: int, *options: str) -> tuple[str, str]:
        arguments = [*PLAN[:3], f"{batch}x256", *PLAN[4:], *budget, "--batch-search", *options]
        status, out, _ = run_command(capsys, *arguments)
        assert status == 0
        return out, out.partition("the largest batch that fits in ")[2]

    (_, answer), (table, from_above) = found(8), found(100_000_000, *files)

    assert from_above == answer
    assert re.search(r"plain [1-9]\d*, planned [1-9]\d*", answer)
    assert rows_of(table)[0][1:] == ["-"] * 10
    assert json.loads(paths["--json"].read_text())["plans"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN, "--offload-params"], "--offload-params says where the shards of --ranks N are: add that, or leave it out"),
        ([*PLAN, "--ranks", "0"], "--ranks: needs a whole number, 1 or more; found '0'"),
        (
            [*PLAN, "--ranks", "2", "--html", "plan.html"],
            "--html draws the step of the whole model: leave out --html or --ranks",
        ),
        (
            ["plan", "models_to_plan:bilinear", *["--input", "8x64"] * 2, "--gpu", "H200", "--ranks", "2"],
            "Bilinear has no layers that could be found",
        ),
        (["plan", "torch.nn:ReLU", "--input", "2"], "required: --gpu (see `memkit plan --help`)"),
        ([*PLAN[:5], "RTX 4080"], "--gpu: memkit knows H200, H100"),
        ([*PLAN[:5], "no_such.json"], "No such file or directory: 'no_such.json'"),
        ([*PLAN[:5], __file__], "is not the spec of a GPU: it is not JSON"),
        ([*PLAN, "--budget", "1,30GiB"], "--budget: a budget must be within what the RTX 4090 has, 23.50 GiB"),
        ([*PLAN, "--budget", "30MiB"], "a budget of 30.00 MiB cannot be kept to"),
        ([*PLAN, "--budget", "0.5", "--steps", "2"], "argument --steps: not allowed with argument --budget"),
        ([*PLAN, "--steps", "0"], "argument --steps: needs a whole number, 1 or more"),
        ([*PLAN, "--optimizer", "lion"], "--optimizer: optimizer must be one of adadelta, "),
    ],
)
def test_failures_are_one_line_and_status_two(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert_fails(capsys, arguments, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN[:3], "4096x255", *PLAN[4:]], "memkit: raised in 0.up (Linear)"),
        (
            ["plan", "models_to_plan:bilinear", "--input", "8x64", "--input", "4x64", "--gpu", "H200", "--batch-search"],
            "raised in (model)",
        ),
        (["plan", "torch.nn:ReLU", "--input", "8", "--gpu", "H200"], "nothing requires grad"),
    ],
)
def test_failures_of_the_model_are_one_line_and_status_one(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_fails(capsys, arguments, message, status=1)


def test_what_no_batch_is_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [*("--input", "8x4"), *("--input", "3x4")]

    assert_fails(
        capsys,
        ["plan", "models_to_plan:Two", *inputs, "--gpu", "H200", "--batch-search", "--budget", "1.0"],
        "--batch-search needs inputs whose first sizes are the batch: equal, and 1 or more; found 8x4, 3x4. Leave it out",
    )


def test_a_step_that_no_card_of_the_kind_has_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAN[:3], "9000000x256", *PLAN[4:5], "RTX 3060"]

    assert_fails(capsys, arguments, "at the least; the RTX 3060 has 11.60 GiB. Make the batch smaller, or name another GPU")
