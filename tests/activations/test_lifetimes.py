"""Two hundred steps leave what three did, and host memory is no more than plans need."""

from __future__ import annotations

import gc

import pytest
from torch import Tensor

import memkit
from memkit.activations.saved.state import offload_states
from memkit.device import Device, ReferenceDevice
from tests.activations.chains import UNIT_BYTES, leaf_on, step
from tests.activations.conftest import Offload

pytestmark = pytest.mark.usefixtures("only_new_objects")

UNITS = (3, 1, 2, 5, 1, 1, 4, 2)


def _held(tag: str, device: Device) -> dict[str, object]:
    """What may not grow with the number of steps."""
    gc.collect()
    stats = memkit.stats(tag)
    (window,) = offload_states[tag].windows()
    figures: dict[str, object] = {
        "held": stats.host_held_bytes,
        "pins": stats.num_pins,
        "records": stats.live_records,
        "peak": stats.peak_live_bytes if device.torch_device.type == "cpu" else 0,  # when a copy lands is up to the GPU
        "forwards": len(window.forwards.references),
        "traces": len(window.traces),
        "tensors": sum(type(thing) is Tensor for thing in gc.get_objects()),
    }
    if isinstance(device, ReferenceDevice):
        figures["allocated peak"] = stats.peak_allocated_bytes
    return figures


@pytest.mark.full
def test_two_hundred_steps(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    for count in range(203):
        step(x, UNITS, lambda: offloading(1.0, "200", window_bytes=4 * UNIT_BYTES))
        if count == 2:
            before = _held("200", device)

    assert _held("200", device) == before
    device.synchronize()
    (window,) = offload_states["200"].windows()
    window.settle()
    assert (memkit.stats("200").host_in_use_bytes, len(window.ledger.deaths), len(window.ledger.orphans)) == (0, 0, 0)


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
