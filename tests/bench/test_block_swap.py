"""The block-swap loop that streaming is compared with: exact where layers are checkpointed, and one layer ahead."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from memkit.device import Device, ReferenceDevice
from tests.bench.cases import bench_module
from tests.weights.cases import Stack, checkpointed, inputs, only_lora, run_step

BlockSwap = bench_module("block_swap").BlockSwap

NUM_LAYERS = 6


@pytest.fixture(params=[None, 0, 1], ids=["late", "random", "another"])
def device(request: pytest.FixtureRequest) -> ReferenceDevice:
    return ReferenceDevice(seed=request.param)


def _frozen_bytes(layer: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in layer.parameters() if not parameter.requires_grad)


def _counted_peak(device: Device) -> int:
    counter = device.memory_counter()
    assert counter is not None
    return counter.peak_bytes()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_are_those_of_a_plain_step(device: ReferenceDevice, use_reentrant: bool) -> None:
    model = only_lora(Stack(NUM_LAYERS, run=checkpointed(use_reentrant)))
    plain, batches = copy.deepcopy(model), inputs(device)
    swap = BlockSwap([*model.layers], device)

    for _ in range(3):
        found, expected = run_step(model, batches), run_step(plain, batches)
        device.synchronize()

        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    swap.close()


def test_layers_compute_with_what_is_on_the_device(device: ReferenceDevice) -> None:
    model = only_lora(Stack(NUM_LAYERS, run=checkpointed(use_reentrant=False)))
    seen = []
    for layer in model.layers:
        layer.up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.data_ptr()))
    swap = BlockSwap([*model.layers], device)
    on_host = {parameter.data_ptr() for parameter in swap.parameters}

    run_step(model, inputs(device)[:1])
    swap.close()

    assert len(seen) == 2 * NUM_LAYERS
    assert not on_host & set(seen)


def test_two_layers_are_on_the_device(device: ReferenceDevice) -> None:
    model = only_lora(Stack(NUM_LAYERS, run=checkpointed(use_reentrant=False)))
    swap = BlockSwap([*model.layers], device)

    run_step(model, inputs(device))
    with torch.no_grad():
        model(inputs(device)[0])
    swap.close()

    assert _counted_peak(device) == 2 * _frozen_bytes(model.layers[0])


def test_forwards_are_those_of_a_plain_model(device: ReferenceDevice) -> None:
    model = only_lora(Stack(NUM_LAYERS))
    plain, batches = copy.deepcopy(model), inputs(device)
    swap = BlockSwap([*model.layers], device)

    with torch.no_grad():
        for batch in batches:
            assert torch.equal(model(batch), plain(batch))
    swap.close()

    device.synchronize()


def test_close_leaves_weights_on_the_host_and_no_hooks(device: ReferenceDevice) -> None:
    model = only_lora(Stack(NUM_LAYERS))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    swap = BlockSwap([*model.layers], device)
    with torch.no_grad():
        model(inputs(device)[0])

    swap.close()

    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_refuses_layers_that_are_trained() -> None:
    layers: list[nn.Module] = [nn.Linear(4, 4)]

    with pytest.raises(ValueError, match="it moves frozen weights only; found none in the layers"):
        BlockSwap(layers, ReferenceDevice())
