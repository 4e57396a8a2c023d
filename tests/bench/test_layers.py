"""`memkit bench layers`: the table, the figures, the peers, the command."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

import memkit
from memkit import commands
from memkit.bench import (
    LayerBench,
    LayerRow,
    Measurement,
    Workload,
    bench_layers,
    freeze_layers,
    layer_peers,
    measure_ratio,
    sum_of_outputs,
)
from memkit.bench.layer_peers import LayerPeer, StepOf, measure_peers
from memkit.device import CpuDevice, ReferenceDevice
from memkit.transfer import Link
from tests.bench.cases import assert_draws, assert_fails, run_command

pytestmark = pytest.mark.full

WIDTH, NUM_LAYERS = 16, 6
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
LINK = Link(d2h_bytes_per_s=1e9, h2d_bytes_per_s=2e9)
RATIOS = [0.0, 0.5, 1.0]


class Stack(nn.Module):
    """A stem, layers in a list, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Take [batch, width], return [batch, 4]."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _step_of(*, backward: bool = True, seen: Callable[[], None] = lambda: None) -> StepOf:
    batch = torch.randn(8, WIDTH)

    def step_of(model: nn.Module) -> Workload:
        def forward() -> Tensor:
            seen()
            return model(batch)

        return Workload(name="stack", model=model, forward=forward, loss=sum_of_outputs, backward=backward)

    return step_of


def _bench(model: nn.Module, step_of: StepOf, *, train: str = "auto", with_peers: bool = False) -> LayerBench:
    return bench_layers(
        step_of,
        model,
        RATIOS,
        ReferenceDevice(),
        train=train,
        num_steps=2,
        num_warmup=2,
        link=LINK,
        with_peers=with_peers,
    )


@pytest.fixture(scope="module")
def result() -> LayerBench:
    model = Stack()
    freeze_layers(model)
    return _bench(model, _step_of(), train="frozen")


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
    host, fused = _bench(Stack(), _step_of(), train="host"), _bench(Stack(), _step_of(), train="fused")

    assert [row.d2h_bytes for row in host.rows] == [row.num_streamed * LAYER_BYTES for row in host.rows]
    assert [row.d2h_bytes for row in fused.rows] == [row.streamed_bytes for row in fused.rows]


def test_plain_step_of_fused_steps_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda _: steps.append(1))

    bench_layers(_step_of(), Stack(), [], ReferenceDevice(), train="fused", num_steps=2, num_warmup=1, link=LINK)

    assert len(steps) == 1 + 2 + 1 + 2


@pytest.mark.parametrize("train", ["frozen", "host", "fused"])
def test_model_is_left_as_it_was(train: str) -> None:
    model = Stack()
    if train == "frozen":
        freeze_layers(model)
    before = {name: (parameter, parameter.clone(), parameter.requires_grad) for name, parameter in model.named_parameters()}

    _bench(model, _step_of(), train=train)

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

    measure_ratio(_step_of()(Stack()), 1.0, ReferenceDevice(), plain=None, link=LINK, engine=engine, num_steps=2, num_warmup=1)

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
    step_of = _step_of(seen=lambda: pytest.fail("it ran"))

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
    found = _bench(Stack(), _step_of(seen=_out_of_memory_at(1)))

    assert found.plain is None
    assert [row.ratio for row in found.rows] == RATIOS
    plain, *rows = found.to_text().splitlines()[-4:]
    assert plain.split("  ")[0] == "plain"
    assert "out of memory" in plain
    for line in rows:
        assert line.split()[5:7] == ["-", "-"]
    assert json.loads(found.to_json())["plain"] is None


def test_picture_does_without_a_plain_step(tmp_path: Path) -> None:
    assert_draws(_bench(Stack(), _step_of(seen=_out_of_memory_at(1))), tmp_path)


def test_ratio_that_does_not_fit_is_told() -> None:
    model = Stack()

    found = _bench(model, _step_of(seen=_out_of_memory_at(10)))  # the plain step takes eight forwards

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
    found = _bench(Stack(), _step_of(backward=False))

    lines = found.to_text().splitlines()

    assert "; forward only; " in lines[0]
    assert {line.split()[4] for line in lines[-4:]} == {"-"}


def test_json_holds_all_figures_and_versions(result: LayerBench) -> None:
    figures = json.loads(result.to_json())

    assert (figures["bench"], figures["memkit"], figures["torch"]) == ("layers", memkit.__version__, torch.__version__)
    assert [row["ratio"] for row in figures["rows"]] == figures["ratios"] == RATIOS
    assert figures["rows"][1]["step_s"] == result.rows[1].memkit.step_s
    assert figures["rows"][1]["roofline_s"] == result.rows[1].roofline_s
    assert figures["plain"]["step_s"] == result.plain.step_s
    assert (figures["peers"], figures["left_out"]) == ({}, {})


def test_picture_is_written(result: LayerBench, tmp_path: Path) -> None:
    assert_draws(replace(result, peers={"a peer": _measured(1.0, 1.0, peak_bytes=2**20)}), tmp_path)


# Peers


def _peers(*names: str) -> list[LayerPeer]:
    return [peer for peer in layer_peers.PEERS if peer.name in names]


def _measure(step_of: StepOf, model: nn.Module) -> tuple[dict[str, Measurement], dict[str, str]]:
    return measure_peers(step_of, model, CpuDevice(), num_steps=1, num_warmup=1)


def test_peers_are_not_touched_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkit.bench.layers.measure_peers", lambda *_, **__: pytest.fail("peers"))

    assert _bench(Stack(), _step_of()).peers == {}


def test_peers_that_run_forwards_only_are_left_out_of_a_training_step() -> None:
    model = Stack()
    freeze_layers(model)

    found, left_out = _measure(_step_of(), model)

    assert list(found) == ["block swap", "FSDP2 CPUOffloadPolicy"]
    assert len(left_out) == 3
    assert set(left_out.values()) == {"it runs forwards only, and this step has a backward. Measure with --no-backward"}


def test_peers_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("diffusers", "diffusers.hooks", "accelerate"):
        monkeypatch.setitem(sys.modules, name, None)

    model = Stack()
    freeze_layers(model)

    found, left_out = _measure(_step_of(backward=False), model)

    assert list(found) == ["block swap", "FSDP2 CPUOffloadPolicy"]
    assert len(left_out) == 3
    assert all(reason.startswith("not installed (import of ") for reason in left_out.values())


def test_block_swap_is_left_out_where_layers_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_peers, "PEERS", _peers("block swap"))

    found, left_out = _measure(_step_of(), Stack())

    assert found == {}
    assert "it moves frozen weights only" in left_out["block swap"]


def test_peer_that_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("no such layer\nand more")

    monkeypatch.setitem(sys.modules, "accelerate", types.SimpleNamespace(cpu_offload=fail))
    monkeypatch.setattr(layer_peers, "PEERS", _peers("accelerate cpu_offload"))

    found, left_out = _measure(_step_of(backward=False), Stack())

    assert found == {}
    assert left_out["accelerate cpu_offload"].startswith("it failed: KeyError: 'no such layer")


def test_accelerate_is_measured_in_a_copy_and_its_peak_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[nn.Module, object]] = []
    fake = types.SimpleNamespace(cpu_offload=lambda model, *, execution_device: seen.append((model, execution_device)))
    monkeypatch.setitem(sys.modules, "accelerate", fake)
    monkeypatch.setattr(layer_peers, "PEERS", _peers("accelerate cpu_offload"))
    model = Stack()

    found, _ = measure_peers(_step_of(backward=False), model, ReferenceDevice(), num_steps=1, num_warmup=0)

    ((its_own, execution_device),) = seen
    assert its_own is not model
    assert execution_device == torch.device("cpu")
    assert found["accelerate cpu_offload"].peak_allocated_bytes is None


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_diffusers_is_given_the_module_that_holds_the_list_of_layers(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    seen: list[tuple[nn.Module, dict[str, object]]] = []
    fake = types.SimpleNamespace(apply_group_offloading=lambda module, **options: seen.append((module, options)))
    monkeypatch.setitem(sys.modules, "diffusers", types.ModuleType("diffusers"))
    monkeypatch.setitem(sys.modules, "diffusers.hooks", fake)
    model: nn.Module = Stack()
    for _ in range(depth):
        model = nn.Sequential(model)

    _measure(_step_of(backward=False), model)

    assert [type(module) for module, _ in seen] == [Stack, Stack]
    assert [options["record_stream"] for _, options in seen] == [False, True]
    assert all(options["use_stream"] for _, options in seen)


def test_diffusers_is_left_out_where_the_model_is_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", types.ModuleType("diffusers"))
    monkeypatch.setitem(sys.modules, "diffusers.hooks", types.SimpleNamespace())
    monkeypatch.setattr(layer_peers, "PEERS", _peers("diffusers group offloading"))

    _, left_out = _measure(_step_of(backward=False), nn.Sequential(*Stack().layers))

    assert "it needs a list of layers inside of one module" in left_out["diffusers group offloading"]


@pytest.mark.parametrize("train", ["frozen", "host", "fused"])
def test_fsdp_leaves_neither_group_nor_wrapper(monkeypatch: pytest.MonkeyPatch, train: str) -> None:
    monkeypatch.setattr(layer_peers, "PEERS", _peers("FSDP2 CPUOffloadPolicy"))
    model = Stack()
    if train == "frozen":
        freeze_layers(model)

    found = _bench(model, _step_of(), train=train, with_peers=True)

    assert found.left_out == {}
    assert found.peers["FSDP2 CPUOffloadPolicy"].backward_s > 0
    assert found.to_text().splitlines()[-1].startswith("FSDP2 CPUOffloadPolicy ")
    assert not distributed.is_initialized()
    assert type(model) is Stack


def test_fsdp_leaves_a_group_alone_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_peers, "PEERS", _peers("FSDP2 CPUOffloadPolicy"))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        _, left_out = _measure(_step_of(), Stack())

        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()
    assert "found one that is there already" in left_out["FSDP2 CPUOffloadPolicy"]


def test_left_out_peers_are_told_below_the_table(result: LayerBench) -> None:
    text = replace(result, left_out={"a peer": "not installed"}).to_text()

    assert text.splitlines()[-2:] == ["", "a peer is left out: not installed"]


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
    arguments = ["tests.bench.test_layers:Stack", "--input", "4x16", "--ratios", "0,1", "--iters", "1", *options, *outputs]

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
    arguments = ["torchvision:vit_b_16", "--input", "4x3x224x224", "--ratios", "0,1", "--iters", "2", "--peers"]

    status, out, err = run_command(capsys, "bench", "layers", *arguments, "--json", str(found))

    assert status == 0, err
    assert "ratio" in out
    figures = json.loads(found.read_text())
    none, whole = figures["rows"]
    assert (none["num_streamed"], whole["num_streamed"]) == (0, figures["num_layers"])
    assert whole["peak_allocated_bytes"] < none["peak_allocated_bytes"]
    assert "FSDP2 CPUOffloadPolicy" in figures["peers"]
