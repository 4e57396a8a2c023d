"""Saving, loading, copying, casting and closing a model while its layers stream."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import memkit
from memkit.core.hooks import innermost_pack, stacked_owners
from memkit.core.owners import owner_of
from memkit.core.tensors import parts_of
from memkit.device import Device, ReferenceDevice
from tests.weights.cases import TRAIN, WIDTH, Stack, assert_same, inputs, only_lora, run_step, stack, streamed
from tests.weights.wrapped import BLOCKS, Wrapper, devices_of

ADVICE = r"Call offload.close\(\) first"


def _hooks(model: nn.Module) -> list[Any]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks", "_state_dict_hooks")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]


def _model(device: Device) -> nn.Module:
    return only_lora(Stack()).to(device.torch_device)


KINDS = [
    pytest.param(lambda: only_lora(Stack()), id="plain"),
    *(
        pytest.param(lambda block=BLOCKS[name]: Stack(block=block), id=name, marks=pytest.mark.slow)
        for name in ("int8", "int4")
    ),
]
"""Models of plain weights, and of weights that are made of other tensors."""


def _plain(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, Wrapper) else tensor


def test_state_that_was_taken_before_keeps_its_bytes_after_close(device: Device) -> None:
    with streamed(_model(device), device) as (model, plain, batches, offload):
        state, weight = model.state_dict(), model.layers[2].up.weight.data
        run_step(model, batches)
    del offload, model

    for name, tensor in plain.state_dict().items():
        assert torch.equal(state[name].cpu(), tensor.cpu()), name
    assert torch.equal(weight.cpu(), plain.layers[2].up.weight.data.cpu())


@pytest.mark.parametrize("make", KINDS)
def test_close_leaves_the_model_as_it_was(make: Callable[[], nn.Module], device: Device) -> None:
    model = make().to(device.torch_device)
    before = {name: _plain(tensor).clone() for name, tensor in model.state_dict().items()}
    parameters, strides = list(model.parameters()), [parameter.stride() for parameter in model.parameters()]

    offload = memkit.LayerOffload(model, offload_ratio=0.5, device=device)
    assert _hooks(model)
    run_step(model, inputs(device))
    offload.close()

    assert not _hooks(model)
    assert innermost_pack() is None
    assert not stacked_owners()
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert [parameter.stride() for parameter in model.parameters()] == strides
    for name, tensor in model.state_dict().items():
        assert torch.equal(_plain(tensor), before[name]), name
        assert devices_of(tensor) == {device.torch_device}
        for part in parts_of(tensor):
            assert part.untyped_storage().nbytes() == part.nbytes
            part.untyped_storage().resize_(0)  # its own, as it was


def test_what_is_kept_until_closed_goes_with_it(device: Device) -> None:
    model, seen = _model(device), list[str]()
    offload = memkit.LayerOffload(model, offload_ratio=1.0, device=device)

    offload.until_closed(model.register_forward_hook(lambda *_: seen.append("open")))
    model(inputs(device)[0])
    offload.close()
    offload.until_closed(model.register_forward_hook(lambda *_: seen.append("closed")))  # goes at once
    model(inputs(device)[0])

    assert seen == ["open"]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode, FlopCounterMode])
def test_weights_are_in_a_slot_while_their_layer_runs(mode: Callable[[], Any], device: Device) -> None:
    found = []
    with streamed(_model(device), device) as (model, _, (batch, _), _):
        for layer in model.layers:
            layer.up.register_forward_hook(lambda up, *_: found.append(owner_of(up.weight.untyped_storage()) is not None))
        with mode():
            model(batch)

    assert found == [True] * len(model.layers)


def test_gather_reads_and_writes(device: Device) -> None:
    with streamed(_model(device), device, num_slots=2) as (model, plain, batches, offload):
        run_step(model, batches)
        run_step(plain, batches)
        with offload.gather("layers.1") as layer:
            assert layer is model.layers[1]
            assert torch.equal(layer.up.weight.cpu(), plain.layers[1].up.weight.cpu())
            layer.up.weight.data.mul_(2)
        with offload.gather(model.layers[2]) as layer, torch.no_grad():
            layer.norm.bias.add_(1)
        plain.layers[1].up.weight.data.mul_(2)
        with torch.no_grad():
            plain.layers[2].norm.bias.add_(1)

        assert_same(run_step(model, batches), run_step(plain, batches))


def test_gather_of_a_resident_layer_and_of_none(device: Device) -> None:
    model = _model(device)
    missing = r"gather: 'layers.9' is not one of the layers \(layers.0, "
    with memkit.LayerOffload(model, num_resident=4, device=device) as offload:
        with offload.gather("layers.0") as layer:
            assert layer is model.layers[0]
        with pytest.raises(ValueError, match=missing), offload.gather("layers.9"):
            pass


def test_closed_one_does_not_gather(device: Device) -> None:
    with streamed(_model(device), device) as (model, plain, _, offload):
        pass

    with pytest.raises(ValueError, match="closed"), offload.gather("layers.0"):
        pass
    assert torch.equal(model.layers[0].up.weight, plain.layers[0].up.weight)


def test_backward_after_close_raises(device: Device) -> None:
    model = _model(device)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device):
        loss = model(inputs(device)[0]).sum()

    with pytest.raises(
        memkit.errors.LayerOffloadError, match=r'"layers.\d" do not stream any more: its LayerOffload is closed'
    ):
        loss.backward()


@pytest.mark.parametrize("train", TRAIN)
def test_nothing_is_left_to_the_garbage_collector_after_close(train: str, device: Device) -> None:
    model = stack(train).to(device.torch_device)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first one of a process loads Dynamo, which keeps the frames that it finds
    gc.collect()
    gc.disable()
    try:
        with memkit.LayerOffload(model, offload_ratio=1.0, device=device, **TRAIN[train]) as offload:
            run_step(model, inputs(device))
        left = [weakref.ref(model), weakref.ref(offload)]
        del model, offload
        assert [one() for one in left] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("make", KINDS)
def test_cast_raises_at_the_next_use(make: Callable[[], nn.Module], dtype: torch.dtype, device: Device) -> None:
    """Also ahead of the stem, which stays on the device, and for an input of the other dtype would raise torch's own error."""
    model = make().to(device.torch_device)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device):
        model.to(dtype)

        with pytest.raises(
            memkit.errors.LayerOffloadError, match=rf'"layers.0.norm.weight" streams as .* {dtype}.* \.half.*{ADVICE}'
        ):
            model(inputs(device)[0])


@pytest.mark.parametrize("train", ["frozen", "host"])
def test_cast_between_forward_and_backward_raises(train: str, device: Device) -> None:
    model = stack(train, 6).to(device.torch_device)
    with memkit.LayerOffload(model, offload_ratio=1.0, train=train, device=device):
        loss = model(inputs(device)[0]).square().mean()
        model.layers.half()

        with pytest.raises(memkit.errors.LayerOffloadError, match=rf'"layers.5.norm.weight" streams as .* \.half.*{ADVICE}'):
            loss.backward()


def test_parameters_are_replaced_between_forward_and_backward(device: Device) -> None:
    with streamed(_model(device), device) as (model, plain, batches, _):
        for one in (plain, model):
            loss = one(batches[0]).square().mean()
            state = {name: tensor.cpu() + 1 for name, tensor in one.layers.state_dict().items() if "lora" not in name}
            device_of = {name: tensor.device for name, tensor in one.layers.state_dict().items()}
            assigned = {name: tensor.to(device_of[name]) for name, tensor in state.items()}
            one.layers.load_state_dict(assigned, strict=False, assign=True)
            loss.backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)
        for one in (plain, model):
            one.zero_grad()
            one.layers.requires_grad_(False)
        assert_same(run_step(model, batches), run_step(plain, batches))


def test_cast_that_is_taken_back_goes_on(device: Device) -> None:
    with streamed(_model(device), device) as (model, plain, batches, _):
        model.double().float()
        if device.torch_device.type == "cpu":
            assert_same(run_step(model, batches), run_step(plain, batches))


def test_parameter_that_was_removed_raises(device: Device) -> None:
    model = _model(device)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device):
        del model.layers[1].up.weight
        with pytest.raises(memkit.errors.LayerOffloadError, match=r'"layers.1.up.weight" is gone from its module'):
            model(inputs(device)[0])


@pytest.mark.parametrize("train", ["frozen", "host"])
def test_parameters_that_are_tied_later_raise(train: str, device: Device) -> None:
    with streamed(stack(train, 6), device, num_slots=2, train=train) as (model, plain, batches, _):
        run_step(model, batches)
        model.zero_grad()
        own, model.layers[1].up.weight = model.layers[1].up.weight, model.layers[2].up.weight
        for _ in range(2):
            with pytest.raises(memkit.errors.LayerOffloadError, match=rf"layers.\d.up.*layers.\d.up.*one parameter.*{ADVICE}"):
                model(batches[0])
        model.layers[1].up.weight = own

        assert_same(run_step(model, batches), run_step(plain, batches))


def test_adapter_that_comes_later(device: Device) -> None:
    model, batches = _model(device), inputs(device)
    plain = copy.deepcopy(model)

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.scale = nn.Parameter(torch.ones(base.out_features, device=device.torch_device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) * self.scale

    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device):
        run_step(model, batches)
        run_step(plain, batches)
        for tested in (model, plain):
            tested.layers[1].up = Adapted(tested.layers[1].up)

        assert_same(run_step(model, batches), run_step(plain, batches))


def test_nothing_streams(device: Device) -> None:
    with streamed(_model(device), device, offload_ratio=0.0) as (model, plain, batches, offload):
        assert_same(run_step(model, batches), run_step(plain, batches))
        stats = offload.stats()

    assert not any((stats.num_streamed, stats.num_fetches, stats.slot_bytes, stats.host_bytes))
    assert not _hooks(model)


@pytest.mark.parametrize("how", ["mmap", "safetensors"])
def test_weights_of_a_file_go_straight_to_the_host(how: str, device: Device, tmp_path: Path) -> None:
    plain = only_lora(Stack(8)).to(device.torch_device)
    state = {name: tensor.cpu() for name, tensor in plain.state_dict().items()}
    if how == "mmap":
        torch.save(state, tmp_path / "weights")
        found = torch.load(tmp_path / "weights", mmap=True)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(state, tmp_path / "weights")
        found = safetensors.load_file(tmp_path / "weights")
    with torch.device("meta"):
        model = only_lora(Stack(8))
    model.load_state_dict(found, assign=True)
    only_lora(model)
    counter = device.memory_counter()
    assert counter is not None
    counter.reset_peak()
    before_bytes = counter.allocated_bytes()

    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device) as offload:
        streamed = {id(item.parameter) for chunk in offload._chunks for item in chunk.parameters}
        resident = [parameter for parameter in model.parameters() if id(parameter) not in streamed]
        resident_bytes = sum(-(-parameter.nbytes // 512) * 512 for parameter in resident)
        assert counter.peak_bytes() - before_bytes <= offload.stats().slot_bytes + resident_bytes
        assert_same(run_step(model, inputs(device)), run_step(plain, inputs(device)))


SHARES: dict[str, Callable[[nn.Module], object]] = {
    "share_memory": lambda model: model.share_memory(),
    "sent to another process": lambda model: ForkingPickler.dumps(model.state_dict()),
}


@pytest.mark.parametrize("train", ["frozen", "host"])
@pytest.mark.parametrize("share", SHARES)
def test_memory_is_shared_with_other_processes(share: str, train: str) -> None:
    device = ReferenceDevice()
    with streamed(stack(train), device, train=train) as (model, plain, batches, _):
        assert_same(run_step(model, batches), run_step(plain, batches))
        SHARES[share](model)
        with torch.no_grad():
            for one in (model, plain):
                for parameter in one.parameters():
                    parameter.add_(1.0)
        with pytest.raises(memkit.errors.LayerOffloadError, match=rf'"layers.0.norm.weight" streams.*share_memory.*{ADVICE}'):
            model(batches[0])

    assert_same(run_step(model, batches), run_step(plain, batches))


def test_gradients_are_shared_with_other_processes() -> None:
    device = ReferenceDevice()
    with streamed(Stack(4), device, train="host") as (model, plain, batches, offload):
        sizes = []
        for _ in range(4):
            assert_same(run_step(model, batches), run_step(plain, batches))
            kept = [parameter.grad.share_memory_() for parameter in model.parameters() if parameter.grad is not None]
            expected = [tensor.clone() for tensor in kept]
            model.zero_grad()
            plain.zero_grad()
            assert_same(run_step(model, batches), run_step(plain, batches))
            assert all(torch.equal(one, other) for one, other in zip(kept, expected, strict=True))
            sizes.append(offload.stats().host_bytes)
        assert sizes == sizes[:1] * 4


def test_stats_are_printed(device: Device) -> None:
    model = _model(device)
    with memkit.LayerOffload(model, offload_ratio=0.5, num_slots=2, device=device) as offload:
        run_step(model, inputs(device))
        stats = offload.stats()

    lines = [re.split(r"  +", line) for line in str(stats).splitlines()]
    assert lines[:2] == [["layers that stream", "3 (15.00 KiB)"], ["layers that stay", "3"]]
    assert ["overflows", "0"] in lines
    assert set(stats.stall_s) == set(offload.plan.streamed)


def _after_a_step(mode: str) -> tuple[Stack, memkit.LayerOffload]:
    torch.manual_seed(0)
    model = Stack().requires_grad_(mode != "frozen")
    offload = memkit.LayerOffload(model, offload_ratio=1.0, device=ReferenceDevice(), **TRAIN[mode])
    model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    return model, offload


def _through_a_file(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("mode", TRAIN)
def test_state_dict_that_was_saved_is_that_of_the_model(mode: str) -> None:
    model, _ = _after_a_step(mode)
    other, x = Stack(), torch.randn(2, WIDTH)
    other.load_state_dict(_through_a_file(model.state_dict()))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in model.state_dict().values())  # written alone

    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("way", [_through_a_file, pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize("mode", TRAIN)
def test_whole_model_is_refused_by_name(mode: str, way: Callable[[nn.Module], Any]) -> None:
    model, _ = _after_a_step(mode)
    for module in (model, model.layers[2]):
        with pytest.raises(
            memkit.errors.LayerOffloadError, match=r"while LayerOffload streams its weights.*use model.state_dict\(\)"
        ):
            way(module)


@pytest.mark.parametrize("mode", TRAIN)
def test_whole_model_can_be_saved_once_the_offload_is_closed(mode: str) -> None:
    model, offload = _after_a_step(mode)
    offload.close()
    x = torch.randn(2, WIDTH)

    assert torch.equal(_through_a_file(model, weights_only=False)(x), model(x))
    assert b"memkit." not in pickle.dumps(model.layers)
