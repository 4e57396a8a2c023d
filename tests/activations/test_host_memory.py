"""Host memory is held as the plan needs it, is used again, and is not pinned again and again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

import memkit
from memkit.device import Device, ReferenceDevice
from tests.activations.chains import leaf_on, step
from tests.activations.conftest import Offload


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the arena grow by pages, so that a test sees growth."""
    for name in ("SMALLEST_SEGMENT_BYTES", "LARGEST_SEGMENT_BYTES"):
        monkeypatch.setattr(f"memkit.transfer.host_memory.{name}", 2**21)


def sines(num_saves: int, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Let autograd save so many storages of 2 MiB, and use them again."""
    x = torch.randn(2**19).requires_grad_().clone()
    with context():
        for _ in range(num_saves):
            x = x.sin().clone()
    x.sum().backward()


@pytest.mark.slow
@pytest.mark.usefixtures("small_segments")
def test_nothing_is_pinned_after_the_second_step_however_often_the_host_waits() -> None:
    device = ReferenceDevice()
    pins = []
    for number in range(9):
        sines(10, lambda: memkit.CPUOffload(0.4, "waits", device=device, window_bytes=2**23))
        if number % 3 == 2:
            device.synchronize()
            gc.collect()
        pins.append(memkit.stats("waits").num_pins)

    assert pins[2:] == [pins[1]] * 7


@pytest.mark.usefixtures("small_segments")
def test_a_smaller_ratio_gives_host_memory_back() -> None:
    device = ReferenceDevice()
    held = []
    for ratio in (1.0, 1.0, 0.3, 0.3, 0.0):
        sines(10, lambda ratio=ratio: memkit.CPUOffload(ratio, "smaller", device=device, window_bytes=0))
        held.append(memkit.stats("smaller").host_held_bytes // 2**21)

    assert held == [10, 10, 3, 3, 0]


@pytest.mark.usefixtures("small_segments")
def test_shapes_in_turn_keep_what_the_largest_needs() -> None:
    device = ReferenceDevice()
    pins = []
    for num_saves in (10, 10, 4, 10, 4, 10):
        sines(num_saves, lambda: memkit.CPUOffload(1.0, "turns", device=device, window_bytes=0))
        pins.append(memkit.stats("turns").num_pins)

    assert pins[2:] == [pins[1]] * 4


UNITS = (3, 1, 2, 5, 1, 1, 4, 2)


def test_ratios_that_change_pin_no_more_than_the_highest_needs(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    step(x, UNITS, lambda: offloading(1.0, "ratios", window_bytes=0))
    num_pins = memkit.stats("ratios").num_pins
    for count in range(40):
        step(x, UNITS, lambda: offloading((count % 5) / 4 or 0.1, "ratios", window_bytes=0))  # noqa: B023

    assert memkit.stats("ratios").num_pins == num_pins
