"""What streaming layers is compared with in `examples/bench`: who can do it, what it is given, what it leaves behind."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import distributed, nn

from memkit.device import CpuDevice, Device, ReferenceDevice
from tests.bench.cases import Stack, StepOf, bench_module, measuring, stack_step

pytestmark = pytest.mark.slow

adaptors = bench_module("layers_adaptors")
Measurement = measuring.Measurement
PEERS = {peer.name: peer for peer in adaptors.PEERS}
FORWARD_ONLY = [name for name, peer in PEERS.items() if not peer.has_backward]


def _measure(name: str, step_of: StepOf, model: nn.Module, device: Device | None = None) -> Measurement | str:
    return adaptors.measure_peer(PEERS[name], step_of, model, device or CpuDevice(), num_steps=1, num_warmup=1)


def _frozen() -> Stack:
    model = Stack()
    model.layers.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", ["block swap", "FSDP2 CPUOffloadPolicy"])
@pytest.mark.parametrize("backward", [False, True])
def test_peers_that_need_no_package_are_measured(name: str, backward: bool) -> None:
    found = _measure(name, stack_step(backward=backward), _frozen())

    assert isinstance(found, Measurement)
    assert (found.backward_s > 0) == backward


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_peers_that_run_forwards_only_are_left_out_of_a_training_step(name: str) -> None:
    found = _measure(name, stack_step(), _frozen())

    assert found == "it runs forwards only, and this step has a backward"


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_peers_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for package in ("diffusers", "diffusers.hooks", "accelerate"):
        monkeypatch.setitem(sys.modules, package, None)

    found = _measure(name, stack_step(backward=False), _frozen())

    assert str(found).startswith("not installed (import of ")


def test_block_swap_is_left_out_where_layers_are_trained() -> None:
    assert "it moves frozen weights only" in str(_measure("block swap", stack_step(), Stack()))


def test_peer_that_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("no such layer\nand more")

    monkeypatch.setitem(sys.modules, "accelerate", types.SimpleNamespace(cpu_offload=fail))

    found = _measure("accelerate cpu_offload", stack_step(backward=False), Stack())

    assert str(found).startswith("it failed: KeyError: 'no such layer")


def test_accelerate_is_measured_in_a_copy_and_its_peak_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[nn.Module, object]] = []
    fake = types.SimpleNamespace(cpu_offload=lambda model, *, execution_device: seen.append((model, execution_device)))
    monkeypatch.setitem(sys.modules, "accelerate", fake)
    model = Stack()

    found = _measure("accelerate cpu_offload", stack_step(backward=False), model, ReferenceDevice())

    ((its_own, execution_device),) = seen
    assert its_own is not model
    assert execution_device == torch.device("cpu")
    assert isinstance(found, Measurement)
    assert found.peak_allocated_bytes is None


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_diffusers_is_given_the_module_that_holds_the_list_of_layers(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    seen: list[tuple[nn.Module, dict[str, object]]] = []
    fake = types.SimpleNamespace(apply_group_offloading=lambda module, **options: seen.append((module, options)))
    monkeypatch.setitem(sys.modules, "diffusers", types.ModuleType("diffusers"))
    monkeypatch.setitem(sys.modules, "diffusers.hooks", fake)
    model: nn.Module = Stack()
    for _ in range(depth):
        model = nn.Sequential(model)

    for name in ("diffusers group offloading", "diffusers group offloading, record_stream"):
        _measure(name, stack_step(backward=False), model)

    assert [type(module) for module, _ in seen] == [Stack, Stack]
    assert [options["record_stream"] for _, options in seen] == [False, True]
    assert all(options["use_stream"] for _, options in seen)


def test_diffusers_is_left_out_where_the_model_is_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", types.ModuleType("diffusers"))
    monkeypatch.setitem(sys.modules, "diffusers.hooks", types.SimpleNamespace())

    found = _measure("diffusers group offloading", stack_step(backward=False), nn.Sequential(*Stack().layers))

    assert "it needs a list of layers inside of one module" in str(found)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_fsdp_leaves_neither_group_nor_wrapper(is_frozen: bool) -> None:
    model = _frozen() if is_frozen else Stack()

    found = _measure("FSDP2 CPUOffloadPolicy", stack_step(), model)

    assert isinstance(found, Measurement)
    assert not distributed.is_initialized()
    assert type(model) is Stack


def test_fsdp_leaves_a_group_alone_that_is_there() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        found = _measure("FSDP2 CPUOffloadPolicy", stack_step(), Stack())

        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()
    assert "found one that is there already" in str(found)
