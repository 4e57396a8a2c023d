"""Steps that follow a schedule where another stream, or another device, is the current one at times."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import memkit
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.chains import chain, leaf_on
from tests.activations.scheduled_steps import (
    IN_BATCHES,
    TAG,
    Offloads,
    assert_steps_are_plain,
    batch_bytes,
    gradient_of,
    offloads,
)

__all__ = ["batch_bytes", "offloads"]

pytestmark = [
    pytest.mark.usefixtures("batch_bytes"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # of the plain run as well
]


class OnSide:
    """Runs on another stream, behind what the current one has by now; which then waits for it."""

    def __init__(self, device: Device) -> None:
        self._device, self._side = device, device.new_stream("side")

    def __call__(self, call: Callable[[], Any]) -> Any:
        device = self._device
        device.wait_event(self._side, device.record_event())
        with device.on_stream(self._side):
            made = call()
            done = device.record_event()
        device.wait_event(device.current_stream(), done)
        return made


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("from_step", [0, 3])
@pytest.mark.parametrize("units", [[1] * 6, [1, 3, 2, 1, 1, 2]])
def test_forward_goes_on_on_another_stream(offloads: Offloads, units: list[int], from_step: int, ratio: float) -> None:
    """At a half what is saved there stays, while what leaves was saved before."""
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)

    def forward(number: int) -> Tensor:
        y = chain(x, units)
        return on_side(lambda: chain(y, units)) if number >= from_step else chain(y, units)

    assert_steps_are_plain(offloads, forward, x, ratio=ratio, window_units=3)


def test_context_is_left_on_another_stream(offloads: Offloads) -> None:
    """Where something waits to be sent until its op has run."""
    x, side = leaf_on(offloads.device.torch_device), offloads.device.new_stream("side")

    def forward() -> Tensor:
        return functional.rrelu(chain(x, [1] * 6), training=True)

    for number in range(4):
        torch.manual_seed(number)
        wanted = gradient_of(forward(), x)
        context = offloads()
        torch.manual_seed(number)
        context.__enter__()
        y = forward()
        with offloads.device.on_stream(side):
            context.__exit__(None, None, None)
        assert offloads.follows == (number >= 2)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


@pytest.mark.parametrize("window_units", [0, 3, 6])
def test_backward_on_another_stream(offloads: Offloads, window_units: int) -> None:
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    offloads.learn(lambda: chain(x, IN_BATCHES), window_units=window_units)
    with offloads(window_units=window_units):
        y = chain(x, IN_BATCHES)
    assert offloads.follows

    assert_same_bits([on_side(lambda: gradient_of(y, x))], [wanted])


def test_backward_on_another_stream_stops_halfway(offloads: Offloads) -> None:
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)

    def forward() -> tuple[Tensor, Tensor]:
        middle = chain(x, IN_BATCHES[:6])
        return middle, chain(middle, IN_BATCHES[6:])

    offloads.learn(lambda: forward()[1], window_units=8)
    with offloads(window_units=8):
        made = forward()
    assert offloads.follows
    on_side(functools.partial(gradient_of, made[1], made[0]))
    del made

    offloads.assert_nothing_is_left()
    with offloads(window_units=8):
        y = forward()[1]
    assert_same_bits([gradient_of(y, x)], [wanted])


@pytest.mark.parametrize("units", [[1] * 6, [1, 3, 2, 1, 1, 2]])
def test_next_forward_is_on_another_stream(offloads: Offloads, units: list[int]) -> None:
    """It lets go of what the first has on its way."""
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)

    def forward() -> Tensor:
        return functional.rrelu(chain(x, units), 0.25, 0.25, training=True)

    wanted = gradient_of(forward(), x)
    offloads.learn(forward, window_units=2)
    with offloads(window_units=2):
        first = forward()
    assert offloads.follows

    def second_forward() -> Tensor:
        with offloads(window_units=2):
            return forward()

    second = on_side(second_forward)
    assert_same_bits([gradient_of(first, x), gradient_of(second, x)], [wanted] * 2)


def test_graph_is_dropped_while_another_stream_is_the_current_one(offloads: Offloads) -> None:
    x, side = leaf_on(offloads.device.torch_device), offloads.device.new_stream("side")

    def forward() -> Tensor:
        return functional.rrelu(chain(x, [1] * 6), 0.25, 0.25, training=True)

    offloads.learn(forward)
    with offloads():
        y = forward()
    assert offloads.follows
    del y
    with offloads.device.on_stream(side):
        offloads.assert_nothing_is_left()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_is_not_the_current_one() -> None:
    """To CUDA the default stream is that of the current device, whatever the tensors are on."""
    assert torch.cuda.current_device() == 0
    x = torch.randn(2**22, device="cuda:1", requires_grad=True)

    def forward() -> Tensor:
        y = x
        for _ in range(12):
            y = y.sin() * 1.5
        return y

    wanted = gradient_of(forward(), x)
    for _ in range(5):
        with memkit.CPUOffload(1.0, TAG, min_bytes=0, window_bytes=0):
            y = forward()
        for _ in range(20):
            torch.randn(2**20, device="cuda:0").sin()
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
