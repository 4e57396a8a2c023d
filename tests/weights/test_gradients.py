"""Outputs and gradients with streamed weights are those of the plain run, bit for bit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import memkit
from memkit.core.tensors import storage_key
from memkit.device import Device
from tests.weights.cases import RUNS, Stack, compare, inputs, only_lora

pytestmark = pytest.mark.slow


@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [1, 2, 3, 6])
@pytest.mark.parametrize("run", RUNS)
def test_frozen_layers_with_lora(run: str, slots: int, device: Device) -> None:
    model = only_lora(Stack(run=RUNS[run]))

    stats = compare(model, device, offload_ratio=1.0, num_slots=slots)

    assert stats.num_streamed == 6
    assert stats.num_fetches > 0


@pytest.mark.parametrize("num_layers", [4, 5, 6])
def test_next_forward_begins_in_the_slots_that_are_free_first(num_layers: int, device: Device) -> None:
    model = only_lora(Stack(num_layers)).to(device.torch_device)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=3, device=device), torch.no_grad():
        slots = []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda layer, _: slots.append(storage_key(layer.up.weight.untyped_storage())))
        for _ in range(4):
            model(inputs(device)[0])

    assert len(set(slots)) == 3
    assert slots == slots[:3] * (len(slots) // 3) + slots[: len(slots) % 3]


@pytest.mark.parametrize("run", ["reversed", "branching", "reused"])
def test_order_of_the_last_time_is_fetched_ahead(run: str, device: Device) -> None:
    model, batch = only_lora(Stack(8, run=RUNS[run])).to(device.torch_device), inputs(device)[0]
    found = []
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device) as offload:
        for _ in range(3):
            before = offload.stats().num_demand_fetches
            model(batch).sum().backward()
            with torch.no_grad():
                model(batch)
            found.append(offload.stats().num_demand_fetches - before)

    assert found[0] > 0
    assert found[1:] == [0, 0]


@pytest.mark.parametrize("train", ["frozen", "host"])
@pytest.mark.parametrize("run", ["in order", "checkpoint", "reentrant checkpoint"])
def test_nothing_is_left_to_the_garbage_collector(run: str, train: str, device: Device) -> None:
    model = (only_lora(Stack(run=RUNS[run])) if train == "frozen" else Stack(run=RUNS[run])).to(device.torch_device)
    left: list[int] = []
    with memkit.LayerOffload(model, device=device, offload_ratio=1.0, train=train):
        for _ in range(3):
            gc.collect()
            gc.disable()
            try:
                (batch,) = inputs(device, 1)
                seen = weakref.WeakSet[torch.UntypedStorage]()
                handle = model.get_submodule("layers.1").register_forward_pre_hook(
                    lambda _, args, seen=seen: seen.add(args[0].untyped_storage())
                )
                model(batch).square().mean().backward()
                handle.remove()
                left.append(len(seen))
            finally:
                gc.enable()

    assert left == [0, 0, 0]


@pytest.mark.parametrize("train", ["frozen", "host"])
@pytest.mark.parametrize("run", ["checkpoint", "reentrant checkpoint"])
def test_checkpointed_layers_are_fetched_once_in_a_backward(run: str, train: str, device: Device) -> None:
    model = Stack(8, run=RUNS[run])
    stats = compare(only_lora(model) if train == "frozen" else model, device, offload_ratio=1.0, num_steps=3, train=train)

    assert stats.num_fetches == 3 * 2 * (8 + 8 - 3)
    assert stats.num_demand_fetches == 0
