"""Devices that the tests of streamed weights run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memkit.device import CudaDevice, Device, ReferenceDevice
from tests.gpus import ON_GPU
from tests.weights import cases


@pytest.fixture(params=["late", pytest.param("seed 0", marks=pytest.mark.slow), *ON_GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Return a device; in the end no race was found on it."""
    if request.param == "cuda":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        yield CudaDevice(torch.device("cuda", 0))
        torch.use_deterministic_algorithms(False)
        return
    device = ReferenceDevice(seed=None if request.param == "late" else int(request.param.split()[1]))
    yield device
    device.synchronize()
    assert not device.races


@pytest.fixture
def new_nodes() -> Iterator[None]:
    with cases.new_nodes():
        yield
