"""A forward lives as long as its graph, and no longer."""

from __future__ import annotations

import gc

import memkit
from memkit.activations.saved.state import offload_states
from memkit.device import Device
from tests.activations.cases import inputs_on, mlp
from tests.activations.conftest import Offload


def _live_forwards(tag: str) -> int:
    windows = offload_states[tag].windows()
    scheduled = [window.scheduled for window in windows if window.scheduled is not None and not window.scheduled.is_over]
    return sum(len(window.forwards.live()) for window in windows) + len(scheduled)


def test_forward_ends_with_its_backward_without_the_garbage_collector(device: Device, offloading: Offload) -> None:
    x, w = inputs_on(device.torch_device)
    gc.disable()
    try:
        for _ in range(3):
            with offloading(1.0, "ended", window_bytes=0):
                loss = mlp(x, w).sum()
            assert _live_forwards("ended") == 1
            loss.backward()
            assert _live_forwards("ended") == 0
    finally:
        gc.enable()

    assert memkit.stats("ended").moved_in_bytes > 0


def test_forward_ends_with_a_graph_that_is_dropped(device: Device, offloading: Offload) -> None:
    x, w = inputs_on(device.torch_device)
    with offloading(1.0, "dropped", window_bytes=0):
        loss = mlp(x, w).sum()

    del loss
    memkit.stats("dropped")
    assert _live_forwards("dropped") == 0
