"""Devices to offload from: the reference device in three moods, and CUDA."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

import memkit
from memkit.device import CudaDevice, Device, ReferenceDevice
from tests.gpus import ON_GPU

Offload = Callable[..., memkit.CPUOffload]


def open_test_device(name: str) -> Device:
    if name == "cuda":
        return CudaDevice(torch.device("cuda"))
    return ReferenceDevice(seed=None if name == "late" else int(name.split()[1]))


DEVICES = ["late", pytest.param("seed 0", marks=pytest.mark.slow), *ON_GPU]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = open_test_device(request.param)
    yield device
    device.synchronize()  # raises the finalizers' findings


@pytest.fixture
def offloading(device: Device) -> Offload:
    """Return `CPUOffload` for the device, with no storage too small."""
    return functools.partial(memkit.CPUOffload, device=device, min_bytes=0)


@pytest.fixture
def only_new_objects() -> None:
    """Hide all existing objects from the garbage collector, so that a test can count the ones that it finds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two runs of the same computation give the same bits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)
