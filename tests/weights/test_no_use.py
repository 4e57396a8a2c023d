"""`LayerOffload` that frees nothing says so, with the bytes, and what would."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.device import CpuDevice, Device, ReferenceDevice
from memkit.plan import LayerCosts, plan_streamed_ratio
from memkit.weights import layer_offload
from tests.weights.cases import Stack

KIB = 1024


def _linears(*widths: int) -> nn.Module:
    """Return layers without bias, of `width` KiB and a half each."""
    model = nn.ModuleList(nn.Linear(16, 16 * width, bias=False) for width in widths)
    return model.requires_grad_(False)


def _open(model: nn.Module, **options: Any) -> None:
    memkit.LayerOffload(model, **{"device": ReferenceDevice(), **options}).close()


@pytest.fixture
def refusing_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("model", "options", "found", "advice"),
    [
        (
            partial(_linears, 4, 4, 4),
            {"offload_ratio": 1.0},
            r"3 layers stream \(13.50 KiB\), and the slots on the device take 13.50 KiB, up to 3 for layers of about one size",
            r"Take fewer slots \(num_slots=2 frees 4.50 KiB\)\.",
        ),
        (
            partial(_linears, 4, 4),
            {"num_resident": 0},
            r"2 layers stream \(9.00 KiB\), and the slots on the device take 9.00 KiB",
            r"Take fewer slots \(num_slots=1 frees 4.50 KiB\)\.",
        ),
        (
            partial(_linears, *[4] * 8),
            {"offload_ratio": 0.1},
            r"1 layer streams \(4.50 KiB\), and the slots on the device take 4.50 KiB",
            r"Let more stream \(offload_ratio=1.0 frees 22.50 KiB\)\.",
        ),
        (
            partial(_linears, *[4] * 3),
            {"num_resident": 1},
            r"2 layers stream \(9.00 KiB\), and the slots on the device take 9.00 KiB",
            r"Let more stream \(offload_ratio=1.0, num_slots=2 frees 4.50 KiB\)\.",
        ),
        (
            partial(_linears, 1, 2, 4, 8),
            {"offload_ratio": "auto"},
            r"4 layers stream \(17.00 KiB\), and the slots on the device take 17.00 KiB",
            r"Leave LayerOffload out, or name modules that are smaller and of about one size \(layers=\)\.",
        ),
    ],
)
def test_nothing_is_freed(model: Callable[[], nn.Module], options: dict[str, Any], found: str, advice: str) -> None:
    with pytest.warns(UserWarning, match=rf"LayerOffload frees no memory on the device: {found}.*{advice}") as caught:
        _open(model(), **options)

    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.usefixtures("refusing_warnings")
@pytest.mark.parametrize(
    "options",
    [
        {"offload_ratio": 0.0},
        {"num_resident": 8},
        {"budget": "1MiB"},
        {"offload_ratio": 1.0},
        {"offload_ratio": 0.5},
        {"offload_ratio": "auto"},
        {"budget": 6 * 4 * KIB},
    ],
)
def test_what_frees_something_or_is_to_stream_nothing_does_not_warn(options: dict[str, Any]) -> None:
    _open(_linears(*[4] * 8), **options)


@pytest.mark.usefixtures("refusing_warnings")
def test_gradients_that_go_to_the_host_count_as_freed() -> None:
    _open(Stack(3), offload_ratio=1.0, train="host")


def test_gradients_that_are_stepped_on_the_device_do_not_count_as_freed() -> None:
    with pytest.warns(UserWarning, match="frees no memory on the device"):
        _open(Stack(3), offload_ratio=1.0, optimizer=partial(torch.optim.SGD, lr=0.1))


def test_plan_says_what_it_frees() -> None:
    costs = [LayerCosts(name=str(index), num_bytes=num_bytes) for index, num_bytes in enumerate([64, 64, 64, 64, 16])]

    assert plan_streamed_ratio(costs, 1.0, num_slots=3).freed_bytes == 64
    assert plan_streamed_ratio(costs, 0.5, num_slots=3).freed_bytes <= 0
    assert plan_streamed_ratio(costs, 0.0, num_slots=3).freed_bytes == 0


def test_without_a_gpu_it_says_how_to_try_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_offload, "cuda_is_available", lambda: False)
    with pytest.warns(
        UserWarning,
        match=r"LayerOffload: the CPU has no memory apart from the host's, so moving bytes to the host frees nothing\. .* "
        r"pass device=memkit\.device\.ReferenceDevice\(\) to try it out",
    ) as caught:
        _open(_linears(*[4] * 8), offload_ratio=1.0, device=None)

    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), CpuDevice()])
def test_cpu_that_is_asked_for_is_no_device_to_stream_to(device: str | torch.device | Device) -> None:
    with pytest.warns(UserWarning, match="LayerOffload: the CPU has no memory apart from the host's") as caught:
        _open(_linears(*[4] * 8), offload_ratio=1.0, device=device)

    assert [warning.filename for warning in caught] == [__file__]
