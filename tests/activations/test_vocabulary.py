"""Every context has a plan, figures, a text that describes it, and the same kinds of arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import CpuDevice, Device, ReferenceDevice

DOES: dict[str, tuple[Callable[[], object], str]] = {
    "offload": (
        lambda: memkit.CPUOffload(0.3, "resnet"),
        '<CPUOffload(tag="resnet"): 30% of the saved bytes move to host memory; storages under 1.00 MiB stay>',
    ),
    "offload nothing": (
        lambda: memkit.CPUOffload(0, min_bytes="2KiB"),
        '<CPUOffload(tag="default"): nothing moves to host memory; storages under 2.00 KiB stay>',
    ),
    "offload by a schedule": (
        lambda: memkit.CPUOffload(memkit.schedules.linear(0, 1, num_iterations=9)),
        '<CPUOffload(tag="default"): a share set by a schedule moves to host memory; storages under 1.00 MiB stay>',
    ),
    "offload what hides": (
        lambda: memkit.CPUOffload("auto"),
        '<CPUOffload(tag="default"): what hides behind the computation moves to host memory; storages under 1.00 MiB stay>',
    ),
    "offload all sizes": (
        lambda: memkit.CPUOffload(0.5, min_bytes=0),
        '<CPUOffload(tag="default"): 50% of the saved bytes move to host memory>',
    ),
    "recompute to a share": (
        lambda: memkit.Rematerialize(0.3, "resnet"),
        '<Rematerialize(tag="resnet"): at most 30% of the saved bytes stay; the others are recomputed>',
    ),
    "recompute to bytes": (
        lambda: memkit.Rematerialize("512MiB"),
        '<Rematerialize(tag="default"): at most 512.00 MiB of saved tensors stay; the others are recomputed>',
    ),
    "no offload": (memkit.no_offload, "<no_offload: nothing that is saved here moves>"),
}


@pytest.mark.parametrize("name", DOES)
def test_text_says_what_it_does(name: str) -> None:
    make, text = DOES[name]

    assert repr(make()) == text


@pytest.mark.parametrize(("num_slots", "slots"), [(1, "1 slot"), (2, "2 slots")])
def test_text_of_streamed_layers(num_slots: int, slots: str) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).requires_grad_(False)
    with memkit.LayerOffload(model, offload_ratio=0.5, num_slots=num_slots, device=ReferenceDevice()) as offload:
        text = repr(offload)

    assert text == f'<LayerOffload of Sequential: 4 of 8 layers (6.00 KiB) stream through {slots} on cpu, train="frozen">'
    assert repr(offload) == "<LayerOffload of Sequential: closed>"


def _model(device: Device) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()) for _ in range(4)))
    return model.to(device.torch_device), torch.randn(8, 16, device=device.torch_device)


def test_attached_exception_to_an_offload(device: Device) -> None:
    model, x = _model(device)
    memkit.attach(model[1], memkit.no_offload())
    memkit.attach(model, memkit.CPUOffload(1.0, "but one", min_bytes=0, window_bytes=0, device=device))
    model(x).sum().backward()
    moved_bytes = memkit.stats("but one").moved_out_bytes
    memkit.detach(model)
    memkit.attach(model, memkit.CPUOffload(1.0, "all", min_bytes=0, window_bytes=0, device=device))
    model(x).sum().backward()

    assert 0 < moved_bytes < memkit.stats("all").moved_out_bytes


def test_streamed_layers_are_attached_by_themselves() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).requires_grad_(False)
    with (
        memkit.LayerOffload(model, offload_ratio=0.5, num_slots=2, device=ReferenceDevice()) as offload,
        pytest.raises(TypeError, match="A LayerOffload works from when it is made on"),
    ):
        memkit.attach(model, offload)  # type: ignore[arg-type]  # that is the test


def test_figures_of_two_contexts_under_one_tag(device: Device) -> None:
    model, x = _model(device)
    offload = memkit.CPUOffload(1.0, "both", min_bytes=0, window_bytes=0, device=device)
    for _ in range(3):
        with offload, memkit.Rematerialize(0.5, "both", min_bytes=0, device=device):
            loss = model(x).square().sum()
        loss.backward()
    stats = memkit.stats("both")

    assert stats == offload.stats()
    assert stats.contexts == ("CPUOffload", "Rematerialize")
    assert stats.num_iterations == 3
    assert (stats.moved_out_bytes > 0, stats.num_dropped > 0, stats.live_records) == (True, True, 0)
    assert {"ratio asked / reached", "#dropped"} <= {line[:21].strip() for line in str(stats).splitlines()}


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), CpuDevice()])
def test_device_is_a_name_a_torch_device_or_a_device(device: str | torch.device | Device) -> None:
    offload, remat = memkit.CPUOffload(0.5, device=device), memkit.Rematerialize(0.5, device=device)

    assert isinstance(offload.device, CpuDevice)
    assert isinstance(remat._options.device, CpuDevice)


def test_sizes_are_bytes_or_text() -> None:
    offload = memkit.CPUOffload(0.5, min_bytes="4KiB", window_bytes="1GiB", host_limit_bytes="8 GiB")

    assert (offload.min_bytes, offload.window_bytes, offload.host_limit_bytes) == (2**12, 2**30, 2**33)
