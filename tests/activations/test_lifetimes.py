"""Two hundred steps leave what three did, and host memory is no more than plans need."""

from __future__ import annotations

import pytest

import memkit
from memkit.device import Device
from tests.activations.chains import leaf_on, step
from tests.activations.conftest import Offload

pytestmark = pytest.mark.usefixtures("only_new_objects")

UNITS = (3, 1, 2, 5, 1, 1, 4, 2)


def test_ratios_that_change_pin_no_more_than_the_highest_needs(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    step(x, UNITS, lambda: offloading(1.0, "ratios", window_bytes=0))
    num_pins = memkit.stats("ratios").num_pins
    for count in range(40):
        step(x, UNITS, lambda: offloading((count % 5) / 4 or 0.1, "ratios", window_bytes=0))  # noqa: B023

    assert memkit.stats("ratios").num_pins == num_pins


def test_host_memory_that_no_plan_needs_is_given_back(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(2):
        step(x, UNITS, lambda: offloading(1.0, "back", window_bytes=0))
    device.synchronize()
    assert memkit.stats("back").host_held_bytes > 0
    step(x, UNITS, lambda: offloading(0.0, "back", window_bytes=0))

    assert memkit.stats("back").host_held_bytes == 0
