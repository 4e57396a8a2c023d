"""Two hundred steps leave what three did."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from torch import Tensor

import memkit
from memkit.activations.offload import _states
from memkit.device import Device, ReferenceDevice
from tests.activations.chains import UNIT_BYTES, Context, chain, leaf_on, step
from tests.activations.conftest import Offload

pytestmark = pytest.mark.usefixtures("only_new_objects")

UNITS = (3, 1, 2, 5, 1, 1, 4, 2)


def _held(tag: str, device: Device) -> dict[str, object]:
    """What may not grow with the number of steps."""
    gc.collect()
    stats = memkit.stats(tag)
    (window,) = _states[tag].windows()
    figures: dict[str, object] = {
        "held": stats.host_held_bytes,
        "pins": stats.num_pins,
        "records": stats.live_records,
        "peak": stats.peak_live_bytes,
        "passes": len(window._passes),
        "traces": len(window.traces),
        "tensors": sum(type(thing) is Tensor for thing in gc.get_objects()),
    }
    if isinstance(device, ReferenceDevice):
        figures["allocated peak"] = stats.peak_allocated_bytes
    return figures


def _same_step(x: Tensor, context: Context) -> None:
    step(x, UNITS, context)


def _two_micro_batches(x: Tensor, context: Context) -> None:
    for _ in range(2):
        with context():
            loss = chain(x, UNITS).sum()
        loss.backward()


def _two_graphs_alive(x: Tensor, context: Context) -> None:
    losses = []
    for _ in range(2):
        with context():
            losses.append(chain(x, UNITS).sum())
    for loss in losses:
        loss.backward()


def _two_shapes(x: Tensor, context: Context) -> None:
    step(x, UNITS, context)
    step(x, [2, *UNITS[:4]], context)


def _graph_dropped_unused(x: Tensor, context: Context) -> None:
    with context():
        chain(x, UNITS)
    step(x, UNITS, context)


def _graph_retained(x: Tensor, context: Context) -> None:
    with context():
        loss = chain(x, UNITS).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _error(x: Tensor, context: Context) -> None:
    def fail() -> None:
        with context():
            chain(x, UNITS[:4])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    step(x, UNITS, context)


STEPS = [_same_step, _two_micro_batches, _two_graphs_alive, _two_shapes, _graph_dropped_unused, _graph_retained, _error]


@pytest.mark.parametrize("train", STEPS, ids=lambda train: train.__name__.strip("_"))
def test_many_steps(train: Callable[[Tensor, Context], None], device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    context = offloading(0.7, "many", window_bytes=4 * UNIT_BYTES)
    for _ in range(3):
        train(x, lambda: context)
    device.synchronize()
    before = _held("many", device)
    for _ in range(20):
        train(x, lambda: context)
    device.synchronize()

    assert _held("many", device) == before
    assert memkit.stats("many").host_in_use_bytes == 0


def test_two_hundred_steps(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    for count in range(203):
        step(x, UNITS, lambda: offloading(1.0, "200", window_bytes=4 * UNIT_BYTES))
        if count == 2:
            before = _held("200", device)

    assert _held("200", device) == before
    device.synchronize()
    (window,) = _states["200"].windows()
    window.settle()
    assert (memkit.stats("200").host_in_use_bytes, len(window.ledger.deaths), len(window.ledger._orphans)) == (0, 0, 0)


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


def test_saved_tensors_die_with_the_graph(device: Device, offloading: Offload) -> None:
    x, storages = leaf_on(device.torch_device), []
    gc.disable()
    try:
        for _ in range(3):
            with offloading(0.5, "die", window_bytes=2 * UNIT_BYTES):
                y = x.clone()
                for _ in range(6):
                    y = y.clone()
                    storages.append(weakref.ref(y.untyped_storage()))
                    y = y.sin()
            y.sum().backward()
            del y
            device.synchronize()
            memkit.stats("die")

            assert [storage() for storage in storages] == [None] * len(storages)
    finally:
        gc.enable()


def test_objects_of_an_iteration_die_with_it(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    step(x, UNITS, lambda: offloading(1.0, "objects", window_bytes=0))
    contexts = []

    def make() -> memkit.CPUOffload:
        context = offloading(1.0, "objects", window_bytes=0)
        contexts.append(weakref.ref(context))
        return context

    gc.disable()
    try:
        for _ in range(3):
            step(x, UNITS, make)

            assert [context() for context in contexts] == [None] * len(contexts)
    finally:
        gc.enable()
