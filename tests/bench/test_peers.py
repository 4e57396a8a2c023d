"""What streaming layers is compared with in `examples/bench`: a block-swap loop of its own, and others' packages."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor, distributed, nn

from memkit.device import CpuDevice, Device, ReferenceDevice
from tests.bench.cases import NUM_LAYERS, STACK_WIDTH, StepOf, Workload, bench_module, measuring
from tests.weights import cases
from tests.weights.cases import checkpointed, inputs, only_lora, run_step

BlockSwap, adaptors = bench_module("block_swap").BlockSwap, bench_module("layers_adaptors")
Measurement = measuring.Measurement
PEERS = {peer.name: peer for peer in adaptors.PEERS}
FORWARD_ONLY = [name for name, peer in PEERS.items() if not peer.has_backward]

# The block-swap loop


@pytest.fixture(params=[None, 0], ids=["late", "random"])
def device(request: pytest.FixtureRequest) -> ReferenceDevice:
    return ReferenceDevice(seed=request.param)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_are_those_of_a_plain_step(device: ReferenceDevice, use_reentrant: bool) -> None:
    model = only_lora(cases.Stack(NUM_LAYERS, run=checkpointed(use_reentrant)))
    plain, batches = copy.deepcopy(model), inputs(device)
    swap = BlockSwap([*model.layers], device)

    for _ in range(3):
        found, expected = run_step(model, batches), run_step(plain, batches)
        device.synchronize()

        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    swap.close()


def test_two_layers_are_on_the_device_until_it_is_closed(device: ReferenceDevice) -> None:
    model = only_lora(cases.Stack(NUM_LAYERS, run=checkpointed(use_reentrant=False)))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    handles = [
        layer.up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.data_ptr())) for layer in model.layers
    ]
    swap = BlockSwap([*model.layers], device)
    on_host = {parameter.data_ptr() for parameter in swap.parameters}

    run_step(model, inputs(device)[:1])
    swap.close()

    assert len(seen) == 2 * NUM_LAYERS
    assert not on_host & set(seen)
    frozen = [parameter.nbytes for parameter in model.layers[0].parameters() if not parameter.requires_grad]
    counter = device.memory_counter()
    assert counter.peak_bytes() == 2 * sum(frozen)
    for handle in handles:
        handle.remove()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Others' packages


class Stack(nn.Module):
    """A stem, layers in a list, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(STACK_WIDTH, STACK_WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(STACK_WIDTH, STACK_WIDTH), nn.GELU()) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(STACK_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Take [batch, width], return [batch, 4]."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack_step(*, backward: bool = True) -> StepOf:
    """Return what makes the step of a `Stack`."""
    batch = torch.randn(8, STACK_WIDTH)
    return lambda model: Workload(name="stack", model=model, forward=lambda: model(batch), loss=Tensor.sum, backward=backward)


def _measure(name: str, model: nn.Module, device: Device | None = None, *, backward: bool = True) -> Measurement | str:
    step_of = stack_step(backward=backward)
    return adaptors.measure_peer(PEERS[name], step_of, model, device or CpuDevice(), num_steps=1, num_warmup=1)


def _frozen() -> Stack:
    model = Stack()
    model.layers.requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block swap", "FSDP2 CPUOffloadPolicy"])
@pytest.mark.parametrize("backward", [False, True])
def test_peers_that_need_no_package_are_measured(name: str, backward: bool) -> None:
    model = _frozen()
    found = _measure(name, model, backward=backward)

    assert isinstance(found, Measurement)
    assert (found.backward_s > 0) == backward
    assert not distributed.is_initialized()
    assert type(model) is Stack


@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_peers_that_cannot_run_are_left_out_with_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _measure(name, _frozen()) == "it runs forwards only, and this step has a backward"

    for package in ("diffusers", "diffusers.hooks", "accelerate"):
        monkeypatch.setitem(sys.modules, package, None)
    assert str(_measure(name, _frozen(), backward=False)).startswith("not installed (import of ")


def test_fsdp_leaves_a_group_alone_that_is_there() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        found = _measure("FSDP2 CPUOffloadPolicy", Stack())

        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()
    assert "found one that is there already" in str(found)
