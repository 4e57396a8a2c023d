"""Devices to rematerialize on: the plain CPU, the reference device in its moods, and CUDA."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

import memkit
from memkit.activations.recomputing import region_plan
from memkit.device import CpuDevice, Device
from memkit.plan import remat as planner
from tests.activations.conftest import open_test_device
from tests.gpus import ON_GPU

Remat = Callable[..., memkit.Rematerialize]

NO_PLAN_FITS = "ignore:.*(It is exceeded by as little as can be|no plan holds for these steps|with all its layers recomputed)"
"""Tests that are not about budgets use tight ones."""


@pytest.fixture(params=["cpu", "late", pytest.param("seed 0", marks=pytest.mark.slow), *ON_GPU])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = CpuDevice() if request.param == "cpu" else open_test_device(request.param)
    yield device
    device.synchronize()  # raises the finalizers' findings


_SHOWN_BY_THE_REFERENCE_DEVICE = (
    *("test_budget", "test_region_buffers", "test_region_reasons", "test_regions_in_steps", "test_spans", "test_steady"),
)
"""Slow test files with the same results on the CPU and on the reference device: on the latter, all but the bits of one model is
left to `slow`."""


def pytest_itemcollected(item: pytest.Item) -> None:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    is_shown = item.path.stem in _SHOWN_BY_THE_REFERENCE_DEVICE
    if is_shown and params.get("device") == "cpu" and params.get("name") != "dropout":
        item.add_marker(pytest.mark.slow)


@pytest.fixture
def torch_device(device: Device) -> torch.device:
    return device.torch_device


@pytest.fixture
def remat_on(device: Device) -> Remat:
    """Return `Rematerialize` for the device, with no storage too small."""
    return functools.partial(memkit.Rematerialize, device=device, min_bytes=0)


@pytest.fixture
def quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for better plans for a moment only, since any plan has to lead to the same bits."""
    monkeypatch.setattr(planner, "_MOST_WORK", 5_000)
    monkeypatch.setattr(planner, "_EXCHANGED", 1_000)


@pytest.fixture
def dear_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have regions chosen wherever they fit, at any speed of this machine's ops and steps."""
    monkeypatch.setattr(region_plan, "_lacks_ops", lambda *_, **__: False)
    monkeypatch.setattr(region_plan, "_seconds_of_ops", lambda *_: 1e9)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Free objects only by the count of their references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
