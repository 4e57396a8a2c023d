"""Devices to keep budgets of: the reference device in its moods, and CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memkit.device import Device
from tests.activations.conftest import open_test_device


@pytest.fixture(params=["late", "seed 0", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = open_test_device(request.param)
    yield device
    device.synchronize()  # raises what finalizers have found


@pytest.fixture
def torch_device(device: Device) -> torch.device:
    return device.torch_device
