"""A profile of a model whose layers stream: it saves what the plain model saves, and weights are shown where they are."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.profile import MemoryReport, ModuleRecord
from tests.weights.cases import RUNS, WIDTH, Block, Stack, assert_same, inputs, only_lora, results, run_step

pytestmark = pytest.mark.slow


def linears(num_layers: int = 6) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


_OF_STACKS = ("checkpoint", "reentrant checkpoint", "segments", "reused")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": linears,
    "blocks": Stack,
    **{name: functools.partial(Stack, run=RUNS[name]) for name in _OF_STACKS},
}
RATIOS = [(name, (0.5, 1.0)[number % 2]) for number, name in enumerate(MODELS)]


def trained_as(train: str, model: nn.Module) -> nn.Module:
    """Have a model be one that goes with a mode of `LayerOffload`."""
    if train == "frozen":
        if isinstance(model, Stack):
            return only_lora(model)
        model.requires_grad_(False)
    return model


def profile(model: nn.Module, *args: Tensor, **options: object) -> MemoryReport:
    return memkit.profile_memory(model, *args, print_table=False, **options)


def _as_plain(row: ModuleRecord, like: ModuleRecord) -> ModuleRecord:
    """Return a row without what tells that weights stream; times, and peaks on CUDA, are never the same."""
    return replace(
        row,
        host_param_bytes=0,
        marks=tuple(mark for mark in row.marks if mark != "streamed"),
        forward_s=like.forward_s,
        backward_s=like.backward_s,
        peak_bytes=like.peak_bytes,
        backward_peak_bytes=like.backward_peak_bytes,
    )


def assert_same_but_for_weights(found: MemoryReport, expected: MemoryReport) -> None:
    """See that two reports say the same, but for where weights are, for times and for peaks."""
    assert len(found.modules) == len(expected.modules)
    for row, like in zip(found.modules, expected.modules, strict=True):
        assert _as_plain(row, like) == like
    assert len(found.saved) == len(expected.saved)
    for record, kept in zip(found.saved, expected.saved, strict=True):
        assert replace(record, saved_at_s=kept.saved_at_s, needed_at_s=kept.needed_at_s) == kept
    assert found.run == expected.run
    assert found.buffer_bytes == expected.buffer_bytes


def peaks(report: MemoryReport) -> list[int]:
    return [report.before_bytes, report.forward_peak_bytes, report.backward_peak_bytes]


def host_copies(offload: memkit.LayerOffload) -> set[int]:
    return {id(item.parameter) for chunk in offload._chunks for item in chunk.parameters}


@pytest.mark.parametrize(("train", "backward"), [("frozen", False), ("host", True)])
@pytest.mark.parametrize(("name", "ratio"), RATIOS)
def test_saves_are_those_of_the_plain_model(name: str, train: str, ratio: float, backward: bool, device: Device) -> None:
    model = trained_as(train, MODELS[name]()).to(device.torch_device)
    batch = inputs(device, 1)[0].requires_grad_()
    expected = profile(model, batch, backward=backward)
    with memkit.LayerOffload(model, offload_ratio=ratio, num_slots=2, train=train, device=device) as offload:
        report = profile(model, batch, backward=backward)

        assert_same_but_for_weights(report, expected)
        streamed_bytes = sum(p.nbytes for p in model.parameters() if id(p) in host_copies(offload))
        assert report.host_param_bytes == streamed_bytes > 0
        assert report.device_param_bytes == expected.param_bytes - streamed_bytes
        assert report.slot_bytes == offload.stats().slot_bytes
        assert offload.stats().num_overflows == 0


@pytest.mark.parametrize("target", [None, "cpu", "cuda"])
@pytest.mark.parametrize(("name", "ratio"), RATIOS)
def test_peaks_are_those_of_the_plain_model_less_weights_plus_slots(name: str, ratio: float, target: str | None) -> None:
    device, rounding = ReferenceDevice(), 512 if target == "cuda" else 1
    model = trained_as("frozen", MODELS[name]())
    batch = inputs(device, 1)[0].requires_grad_()
    options = {"backward": True} if target is None else {"backward": True, "device": "meta", "target": target}
    expected = profile(model, batch, **options)
    with memkit.LayerOffload(model, offload_ratio=ratio, num_slots=2, train="frozen", device=device) as offload:
        report = profile(model, batch, **options)
        moved = [p.nbytes for p in model.parameters() if id(p) in host_copies(offload)]

    less = sum(-(-num_bytes // rounding) * rounding for num_bytes in moved) - report.slot_bytes
    assert peaks(report) == [plain - less for plain in peaks(expected)]
    assert report.unaccounted_bytes == expected.unaccounted_bytes
    for row, like in zip(report.modules, expected.modules, strict=True):
        assert (row.peak_bytes, row.backward_peak_bytes) == (like.peak_bytes, like.backward_peak_bytes), row.fqn


@pytest.mark.gpu
def test_counter_of_the_device_sees_weights_on_the_device_and_slots() -> None:
    device = memkit.device.CudaDevice(torch.device("cuda", 0))
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).requires_grad_(False).cuda()
    batch = torch.randn(256, 1024, device="cuda", requires_grad=True)
    expected = profile(model, batch, backward=True)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device):
        report = profile(model, batch, backward=True)

    for found, plain in zip(peaks(report), peaks(expected), strict=True):
        assert abs(found - (plain - report.host_param_bytes + report.slot_bytes)) < report.slot_bytes / 4


@pytest.mark.parametrize(("train", "ratio"), [("frozen", 0.5), ("host", 1.0)])
def test_without_data_it_is_that_of_the_plain_model(ratio: float, train: str, device: Device) -> None:
    model = trained_as(train, Stack()).to(device.torch_device)
    batch, backward = inputs(device, 1)[0], train == "frozen"
    expected = profile(model, batch, device="meta", backward=backward)
    with memkit.LayerOffload(model, offload_ratio=ratio, num_slots=2, train=train, device=device) as offload:
        before = offload.stats()
        report = profile(model, batch, device="meta", backward=backward)

        assert_same_but_for_weights(report, expected)
        assert report.slot_bytes == before.slot_bytes
        assert report.host_param_bytes == sum(p.nbytes for p in model.parameters() if id(p) in host_copies(offload)) > 0
        assert replace(offload.stats(), stall_s=before.stall_s) == before


def test_without_data_gradients_that_go_to_the_host_cannot_be_followed() -> None:
    device, model = ReferenceDevice(), Stack()
    message = r"cannot follow gradients .* with backward=False, or before"
    with (
        memkit.LayerOffload(model, offload_ratio=1.0, train="host", device=device),
        pytest.raises(memkit.errors.ProfileError, match=message),
    ):
        profile(model, inputs(device)[0], device="meta", backward=True)


def test_weights_stream_again_after_a_run_without_data_that_failed(device: Device) -> None:
    class Looking(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() else x

    model = only_lora(Stack(4, block=Looking)).to(device.torch_device)
    plain, batches = copy.deepcopy(model), inputs(device)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device):
        with pytest.raises(memkit.errors.DataDependentError, match=r"layers\.0"):
            profile(model, batches[0], device="meta")

        assert_same(run_step(model, batches), run_step(plain, batches))


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_smallest_budget_is_that_of_the_plain_model(ratio: float) -> None:
    device, model = ReferenceDevice(), Stack()
    batch = inputs(device)[0]
    expected = memkit.Rematerialize.min_budget(model, batch, target="cpu", min_bytes=0)
    with memkit.LayerOffload(model, offload_ratio=ratio, num_slots=2, device=device):
        assert memkit.Rematerialize.min_budget(model, batch, target="cpu", min_bytes=0) == expected > 0


@pytest.mark.parametrize(
    ("train", "ratio", "backward"),
    [("frozen", 0.5, False), ("frozen", 1.0, True), ("host", 0.5, True), ("host", 1.0, False)],
)
def test_training_goes_on_as_without_a_profile(train: str, ratio: float, backward: bool, device: Device) -> None:
    model = trained_as(train, Stack()).to(device.torch_device)
    plain, batches = copy.deepcopy(model), inputs(device)
    with memkit.LayerOffload(model, offload_ratio=ratio, num_slots=2, train=train, device=device) as offload:
        steps = [torch.optim.AdamW([p for p in tested.parameters() if p.requires_grad]) for tested in (plain, model)]
        for number in range(4):
            if number:
                before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                profile(model, batches[0], backward=backward)
                assert_same(model.state_dict(), before)
                assert {p.device.type for p in model.parameters() if id(p) in host_copies(offload)} == {"cpu"}
                assert_same(results(model, []), results(plain, []))  # gradients are those of the last step
            for step in steps:
                step.zero_grad()
            # The weights of the plain model are stepped where they are; those in host memory by the CPU's arithmetic.
            assert_same(run_step(model, batches), run_step(plain, batches))
            if device.torch_device.type == "cpu":
                for step in steps:
                    step.step()
        stats = offload.stats()
        assert (stats.num_overflows, stats.slot_bytes) == (0, sum(offload.plan.slot_bytes))


def test_casts_of_streamed_weights_are_casts_of_parameters(device: Device) -> None:
    kind = device.torch_device.type
    model = only_lora(Stack()).to(device.torch_device)
    batch = inputs(device)[0]
    with torch.autocast(kind, torch.bfloat16):
        expected = profile(model, batch)
        with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device):
            report = profile(model, batch)

    assert expected.param_cast_bytes > 0
    assert_same_but_for_weights(report, expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks")
def test_weight_in_another_tensor_is_no_activation() -> None:
    """Handles are given for plain tensors; what wraps a weight is handed on, and is found to be in a slot."""

    class Sparse(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            columns = torch.arange(WIDTH).repeat(WIDTH)
            rows = torch.arange(0, WIDTH * WIDTH + 1, WIDTH)
            weight = torch.sparse_csr_tensor(
                rows, columns, self.weight.detach().view(-1), (WIDTH, WIDTH), check_invariants=True
            )
            return (weight @ x.t()).t()

    device = ReferenceDevice()
    model = nn.Sequential(*(Sparse(WIDTH, WIDTH, bias=False) for _ in range(3))).requires_grad_(False)
    batch = inputs(device)[0].requires_grad_()
    expected = profile(model, batch)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device):
        assert profile(model, batch).activation_bytes == expected.activation_bytes


def test_a_layer_by_itself(device: Device) -> None:
    model = only_lora(Stack()).to(device.torch_device)
    batch = inputs(device)[0]
    expected = profile(model.layers[2], batch)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device) as offload:
        report = profile(model.layers[2], batch)
        slot_bytes = offload.stats().slot_bytes

        assert_same_but_for_weights(report, expected)
        assert report.marked("streamed") == ("(model)",)
        assert report.slot_bytes == slot_bytes
        assert profile(model.head, batch).slot_bytes == profile(model.head, batch).host_param_bytes == 0


def test_steps_in_the_backward_are_refused(device: Device) -> None:
    model, batch = Stack().to(device.torch_device), inputs(device)[0]
    make = functools.partial(torch.optim.SGD, lr=0.1)
    with memkit.LayerOffload(model, offload_ratio=1.0, optimizer=make, device=device):
        with pytest.raises(memkit.errors.ProfileError, match="a profile would train the model"):
            profile(model, batch, backward=True)

        assert profile(model, batch).host_param_bytes > 0


def test_table_tells_streamed_layers_from_those_that_stay() -> None:
    device, model = ReferenceDevice(), only_lora(Stack(4))
    with memkit.LayerOffload(model, offload_ratio=0.5, device=device) as offload:
        report = profile(model, inputs(device)[0])

    assert report.marked("streamed") == offload.plan.streamed == ("layers.1", "layers.3")
    rows = {row.fqn: row for row in report.modules}
    norm_up_down = 4 * (2 * WIDTH + 25 * WIDTH - WIDTH + 24 + 24 * WIDTH)
    assert rows["layers.1"].host_param_bytes == norm_up_down
    assert rows["layers.1.up"].host_param_bytes == rows["layers.1.up"].param_bytes == 4 * 24 * (WIDTH + 1)
    assert rows["layers.1.lora_a"].host_param_bytes == rows["layers.0"].host_param_bytes == 0
    text = report.to_text(depth=2)
    assert "of it on the host (MiB)" in text
    assert "layers.1 [streamed]" in text
    assert "layers.0 " in text
    lines = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    assert lines["... in host memory, streamed"] == "0.01 MiB"
    assert lines["slots on the device for what streams"] == f"{report.slot_bytes / 2**20:.2f} MiB"


def test_json_of_a_report_keeps_it_and_older_ones_load() -> None:
    device, model = ReferenceDevice(), only_lora(Stack(4))
    with memkit.LayerOffload(model, offload_ratio=0.5, device=device):
        report = profile(model, inputs(device)[0])

    content = json.loads(report.to_json())
    assert MemoryReport.from_json(report.to_json()) == report
    del content["slot_bytes"]
    for row in content["modules"]:
        del row["host_param_bytes"]
    older = MemoryReport.from_json(json.dumps(content))
    assert (older.slot_bytes, older.host_param_bytes) == (0, 0)
