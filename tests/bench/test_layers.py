"""`memkit bench layers`: the table, the figures, the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import memkit
from memkit import commands
from memkit.bench import (
    LayerBench,
    LayerRow,
    Measurement,
    bench_layers,
    freeze_layers,
    measure_ratio,
)
from memkit.bench.layers import StepOf
from memkit.device import CpuDevice, ReferenceDevice
from memkit.transfer import Link
from tests.bench.cases import NUM_LAYERS, STACK_WIDTH, Stack, assert_draws, assert_fails, run_command, stack_step

pytestmark = pytest.mark.full

LAYER_BYTES = 4 * (STACK_WIDTH * STACK_WIDTH + STACK_WIDTH)
LINK = Link(d2h_bytes_per_s=1e9, h2d_bytes_per_s=2e9)
RATIOS = [0.0, 0.5, 1.0]


def _bench(model: nn.Module, step_of: StepOf, *, train: str = "auto") -> LayerBench:
    return bench_layers(
        step_of,
        model,
        RATIOS,
        ReferenceDevice(),
        train=train,
        num_steps=2,
        num_warmup=2,
        link=LINK,
    )


@pytest.fixture(scope="module")
def result() -> LayerBench:
    model = Stack()
    freeze_layers(model)
    return _bench(model, stack_step(), train="frozen")


def _measured(
    forward_s: float, backward_s: float = 0.0, peak_bytes: int | None = None, in_a_row_s: float | None = None
) -> Measurement:
    return Measurement(
        num_steps=1,
        step_s=forward_s + backward_s,
        forward_s=forward_s,
        backward_s=backward_s,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=None,
        in_a_row_s=in_a_row_s,
    )


def _row(plain: Measurement | None, found: Measurement, *, d2h_bytes: float = 0.0) -> LayerRow:
    """A row of what takes 2 seconds to move to the device."""
    return LayerRow(
        ratio=0.5,
        memkit=found,
        plain=plain,
        link=Link(d2h_bytes_per_s=10.0, h2d_bytes_per_s=50.0),
        num_streamed=2,
        streamed_bytes=100,
        slot_bytes=30,
        d2h_bytes=d2h_bytes,
        num_fetches=2.0,
        num_demand_fetches=0.0,
        num_overflows=0,
        stall_s=0.0,
    )


# Figures


def test_streams_what_the_ratios_say(result: LayerBench) -> None:
    assert (result.num_layers, result.layer_bytes) == (NUM_LAYERS, NUM_LAYERS * LAYER_BYTES)
    assert [row.num_streamed for row in result.rows] == [0, 3, 6]
    for row in result.rows:
        assert row.streamed_bytes >= row.num_streamed * LAYER_BYTES
        assert (row.num_fetches > 0) == (row.num_streamed > 0)
        assert row.d2h_bytes == 0
        assert row.link == LINK
        assert row.plain is result.plain


def test_roofline_is_the_longer_of_compute_and_transfer_in_each_pass() -> None:
    row = _row(_measured(1.0, 3.0), _measured(2.5, 4.5))

    assert (row.forward_roofline_s, row.backward_roofline_s, row.roofline_s) == (2.0, 3.0, 5.0)
    assert row.to_roofline == 7 / 5
    assert row.to_plain == 7 / 4
    assert row.in_a_row_to_plain is None


def test_steps_in_a_row_are_compared_with_plain_ones_in_a_row() -> None:
    row = _row(_measured(1.0, 3.0, in_a_row_s=3.5), _measured(2.5, 4.5, in_a_row_s=5.25))

    assert row.in_a_row_to_plain == 1.5


def test_what_leaves_in_the_backward_counts_in_its_roofline() -> None:
    row = _row(_measured(3.0, 3.0), _measured(3.0, 10.0), d2h_bytes=100.0)

    assert (row.forward_roofline_s, row.backward_roofline_s) == (3.0, 10.0)


def test_roofline_of_a_forward_has_no_backward() -> None:
    row = _row(_measured(1.0), _measured(2.5))

    assert (row.backward_roofline_s, row.roofline_s, row.to_roofline) == (0.0, 2.0, 1.25)


def test_nothing_is_compared_with_a_plain_step_that_has_not_run() -> None:
    row = _row(None, _measured(2.5, 4.5, peak_bytes=7))

    assert {row.forward_roofline_s, row.backward_roofline_s, row.roofline_s, row.to_roofline, row.to_plain} == {None}
    assert row.in_a_row_to_plain is None
    assert row.peak_over_expected_bytes is None


@pytest.mark.parametrize(("d2h_bytes", "over_bytes"), [(0.0, 20), (100.0, 120)])
def test_expected_peak_is_the_plain_one_without_what_streams(d2h_bytes: float, over_bytes: int) -> None:
    row = _row(_measured(1.0, 1.0, peak_bytes=1000), _measured(1.0, 1.0, peak_bytes=950), d2h_bytes=d2h_bytes)

    assert row.peak_over_expected_bytes == over_bytes


def test_gradients_leave_with_host_and_weights_with_fused() -> None:
    host, fused = _bench(Stack(), stack_step(), train="host"), _bench(Stack(), stack_step(), train="fused")

    assert [row.d2h_bytes for row in host.rows] == [row.num_streamed * LAYER_BYTES for row in host.rows]
    assert [row.d2h_bytes for row in fused.rows] == [row.streamed_bytes for row in fused.rows]


def test_plain_step_of_fused_steps_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda _: steps.append(1))

    bench_layers(stack_step(), Stack(), [], ReferenceDevice(), train="fused", num_steps=2, num_warmup=1, link=LINK)

    assert len(steps) == 1 + 2 + 1 + 2


@pytest.mark.parametrize("train", ["frozen", "host", "fused"])
def test_model_is_left_as_it_was(train: str) -> None:
    model = Stack()
    if train == "frozen":
        freeze_layers(model)
    before = {name: (parameter, parameter.clone(), parameter.requires_grad) for name, parameter in model.named_parameters()}

    _bench(model, stack_step(), train=train)

    for name, parameter in model.named_parameters():
        same, value, requires_grad = before[name]
        assert parameter is same
        assert torch.equal(parameter, value)
        assert parameter.requires_grad == requires_grad
        assert parameter.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_engine_is_around_each_forward() -> None:
    made: list[int] = []

    def engine() -> nullcontext[None]:
        made.append(1)
        return nullcontext()

    measure_ratio(
        stack_step()(Stack()), 1.0, ReferenceDevice(), plain=None, link=LINK, engine=engine, num_steps=2, num_warmup=1
    )

    assert len(made) == 1 + 2 + 1 + 2


def test_freezes_layers_and_nothing_else() -> None:
    model = Stack()

    freeze_layers(model)

    frozen = {name.split(".")[0] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    trained = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert (frozen, trained) == ({"layers"}, {"stem", "head"})


@pytest.mark.parametrize(
    ("ratios", "model", "message"),
    [
        ([0.5, 1.5], Stack(), r"a ratio must be from 0 .* found 1\.5"),
        ([0.5], nn.Linear(4, 4), "Linear has no layers that could be found"),
    ],
)
def test_refuses_before_it_measures(ratios: list[float], model: nn.Module, message: str) -> None:
    step_of = stack_step(seen=lambda: pytest.fail("it ran"))

    with pytest.raises(ValueError, match=message):
        bench_layers(step_of, model, ratios, ReferenceDevice(), link=LINK)


# No room


def _out_of_memory_at(call: int) -> Callable[[], None]:
    """Be a device that has no room in one of the forwards."""
    calls: list[int] = []

    def seen() -> None:
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("no room")

    return seen


def test_model_that_does_not_fit_plainly_is_measured_nevertheless() -> None:
    found = _bench(Stack(), stack_step(seen=_out_of_memory_at(1)))

    assert found.plain is None
    assert [row.ratio for row in found.rows] == RATIOS
    plain, *rows = found.to_text().splitlines()[-4:]
    assert plain.split("  ")[0] == "plain"
    assert "out of memory" in plain
    for line in rows:
        assert line.split()[5:7] == ["-", "-"]
    assert json.loads(found.to_json())["plain"] is None


def test_picture_does_without_a_plain_step(tmp_path: Path) -> None:
    assert_draws(_bench(Stack(), stack_step(seen=_out_of_memory_at(1))), tmp_path)


def test_ratio_that_does_not_fit_is_told() -> None:
    model = Stack()

    found = _bench(model, stack_step(seen=_out_of_memory_at(10)))  # the plain step takes eight forwards

    assert [row.ratio for row in found.rows] == [0.5, 1.0]
    assert "out of memory" in found.to_text().splitlines()[-3]
    assert all(parameter.grad is None for parameter in model.parameters())


# What is told


def test_text_has_a_line_for_plain_and_each_ratio(result: LayerBench) -> None:
    lines = result.to_text().splitlines()

    assert lines[0].startswith("stack on reference, torch ")
    assert "6 layers, 0.01 MiB; train=frozen; 1.0 GB/s to the host, 2.0 GB/s back" in lines[0]
    assert [line.split()[0] for line in lines[-4:]] == ["plain", "0", "0.5", "1"]
    assert [line.split()[1] for line in lines[-4:]] == ["-", "0", "3", "6"]
    assert lines[-4].split()[5:8] == ["1.000", "-", "1.000"]
    last = result.rows[-1]
    assert lines[-1].split()[5:8] == [f"{x:.3f}" for x in (last.to_plain, last.to_roofline, last.in_a_row_to_plain)]


def test_text_of_a_forward_has_no_backward() -> None:
    found = _bench(Stack(), stack_step(backward=False))

    lines = found.to_text().splitlines()

    assert "; forward only; " in lines[0]
    assert {line.split()[4] for line in lines[-4:]} == {"-"}


@pytest.mark.parametrize("width", [80, 100, 172])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int, result: LayerBench) -> None:
    lines, wide = result.to_text(width=width).splitlines(), result.to_text().splitlines()

    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[-4:]] == [line.split()[0] for line in wide[-4:]]  # each row is one line still


def test_json_holds_all_figures_and_versions(result: LayerBench) -> None:
    figures = json.loads(result.to_json())

    assert (figures["bench"], figures["memkit"], figures["torch"]) == ("layers", memkit.__version__, torch.__version__)
    assert [row["ratio"] for row in figures["rows"]] == figures["ratios"] == RATIOS
    assert figures["rows"][1]["step_s"] == result.rows[1].memkit.step_s
    assert figures["rows"][1]["roofline_s"] == result.rows[1].roofline_s
    assert figures["plain"]["step_s"] == result.plain.step_s


def test_picture_is_written(result: LayerBench, tmp_path: Path) -> None:
    assert_draws(result, tmp_path)


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x:y"], "required: --input"),
        (["x:y", "--input", "2", "--ratios", "0,2"], "needs numbers from 0 to 1 joined by commas"),
        (["x:y", "--input", "2", "--ratios", "half"], "found 'half'"),
        (["x:y", "--input", "2", "--train", "auto"], "argument --train: invalid choice: 'auto'"),
        (["x:y", "--input", "2", "--train", "host", "--no-backward"], "--train host needs a backward; found --no-backward"),
        (["x:y", "--input", "2", "--iters", "0"], "needs a whole number, 1 or more"),
        (["x:y", "--input", "2", "--plot", "/no/such/folder/x.png"], "No such file or directory"),
    ],
)
def test_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert_fails(capsys, ["bench", "layers", *arguments], message)


@pytest.fixture
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "cuda_is_available", lambda: True)
    monkeypatch.setattr(commands, "open_device", lambda _: CpuDevice())
    monkeypatch.setattr("memkit.bench.layers.measure_link", lambda _: LINK)


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize(
    "options",
    [[], ["--train", "host"], ["--train", "fused"], ["--no-backward"]],
    ids=["frozen", "host", "fused", "forward"],
)
def test_command_prints_and_writes_what_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    found, drawn = tmp_path / "bench.json", tmp_path / "bench.svg"
    outputs = ["--json", str(found), "--plot", str(drawn)]
    arguments = ["tests.bench.cases:Stack", "--input", "4x16", "--ratios", "0,1", "--iters", "1", *options, *outputs]

    status, out, err = run_command(capsys, "bench", "layers", *arguments)

    assert status == 0, err
    assert [line.split()[:2] for line in out.splitlines()[-3:]] == [["plain", "-"], ["0", "0"], ["1", str(NUM_LAYERS)]]
    figures = json.loads(found.read_text())
    assert [row["num_streamed"] for row in figures["rows"]] == [0, NUM_LAYERS]
    assert figures["backward"] == ("--no-backward" not in options)
    assert drawn.exists()


@pytest.mark.usefixtures("_on_cpu")
def test_frozen_layers_have_a_backward_though_nothing_is_trained_in_front_of_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_layers.py").write_text(
        "from torch import nn\ndef model():\n    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    status, out, err = run_command(
        capsys, "bench", "layers", "only_layers:model", "--input", "2x4", "--ratios", "1", "--iters", "1"
    )

    assert status == 0, err
    assert out.splitlines()[-1].split()[:2] == ["1", "3"]


@pytest.mark.gpu
def test_command_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = tmp_path / "bench.json"
    arguments = ["torchvision:vit_b_16", "--input", "4x3x224x224", "--ratios", "0,1", "--iters", "2"]

    status, out, err = run_command(capsys, "bench", "layers", *arguments, "--json", str(found))

    assert status == 0, err
    assert "ratio" in out
    figures = json.loads(found.read_text())
    none, whole = figures["rows"]
    assert (none["num_streamed"], whole["num_streamed"]) == (0, figures["num_layers"])
    assert whole["peak_allocated_bytes"] < none["peak_allocated_bytes"]
