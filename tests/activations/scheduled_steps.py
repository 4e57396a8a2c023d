"""Steps under one tag that follow a schedule, or leave it: shared by several tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.saved.state import offload_states
from memkit.device import Device
from memkit.plan import copies
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES

TAG = "scheduled"
IN_BATCHES = [*[1] * 8, 4, 4, 4]
"""Units of a chain; several storages come back together, once one of the large ones has gone."""
SETTINGS = [{"ratio": 1.0, "window_units": 0}, {"ratio": 0.5, "window_units": 0}, {"ratio": 1.0, "window_units": 6}]


@pytest.fixture(params=[copies.BATCH_BYTES, pytest.param(1, marks=pytest.mark.slow)], ids=["together", "one by one"])
def batch_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small storages are copied together, or each by itself."""
    monkeypatch.setattr(copies, "BATCH_BYTES", request.param)


class Offloads:
    """Makes contexts under one tag, on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(self, ratio: float = 1.0, window_units: int = 0, **options: Any) -> memkit.CPUOffload:
        options = {"min_bytes": 0, "window_bytes": window_units * UNIT_BYTES, "device": self.device, **options}
        return memkit.CPUOffload(ratio, TAG, **options)

    @property
    def follows(self) -> bool:
        """Whether the last forward has followed a schedule to its end, and a graph may still ask for the storages that left, if
        any."""
        (window,) = offload_states[TAG].windows()
        forward = window.scheduled
        return forward is not None and forward.is_complete and not (forward.is_over and any(forward.sized.host_bytes))

    @property
    def moved_units(self) -> float:
        """Units that the last forward has moved."""
        return memkit.stats(TAG).moved_out_bytes / UNIT_BYTES

    def learn(self, forward: Callable[[], Tensor], **options: Any) -> None:
        """Take enough steps for the next one to follow a schedule."""
        for _ in range(2):
            with self(**options):
                loss = forward()
            loss.sum().backward()

    def assert_nothing_is_left(self) -> None:
        """Fail if memory is held that no graph needs."""
        self.device.synchronize()
        stats = memkit.stats(TAG)
        assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)


@pytest.fixture
def offloads(device: Device) -> Iterator[Offloads]:
    made = Offloads(device)
    yield made
    if TAG in offload_states:
        made.assert_nothing_is_left()


def gradient_of(y: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y.sum(), x)
    return found


def learned(offloads: Offloads, forward: Callable[[], Tensor], **options: Any) -> Tensor:
    """Return the output of a forward that has followed a schedule."""
    offloads.learn(forward, **options)
    with offloads(**options):
        y = forward()
    assert offloads.follows
    return y


def assert_steps_are_plain(offloads: Offloads, forward: Callable[[int], Tensor], x: Tensor, **options: Any) -> None:
    """Take steps, each the gradient of a forward that gets the number of the step."""
    for number in range(5):
        wanted = gradient_of(forward(number), x)
        with offloads(**options):
            y = forward(number)
        found = gradient_of(y, x)
        del y
        offloads.device.synchronize()
        assert_same_bits([found], [wanted])
