"""Parameters that are made of other tensors, such as quantized weights, stream by those."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.core.owners import owner_of
from memkit.core.tensors import parts_of, set_reported_device
from memkit.device import Device, ReferenceDevice
from tests.weights.cases import WIDTH, Stack, assert_same, compare, inputs, run_step, streamed
from tests.weights.wrapped import BLOCKS, Block, Int4, Int8, Quantized, Wrapper, devices_of

pytestmark = pytest.mark.slow


def _model(device: Device, block: Callable[[], nn.Module] = Block, **options: Any) -> nn.Module:
    return Stack(block=block, **options).to(device.torch_device)


def test_bytes_that_stream_are_those_of_the_inner_tensors(device: Device) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(Int8.quantized(torch.randn(64, 1024)), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x.repeat(1, 64), self.weight)[:, :WIDTH]

    stats = compare(Stack(4, block=Wide), device, offload_ratio=1.0, num_slots=2)

    assert 4 * (64 * 1024 + 4 * 64) <= stats.streamed_bytes <= 4 * (64 * 1024 + 4 * 64 + 1024)


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_parameter_and_inner_tensors_are_where_they_say(kind: type[Wrapper], device: Device) -> None:
    found = []

    class Seen(Quantized):
        def forward(self, x: Tensor) -> Tensor:
            owners = [owner_of(part.untyped_storage()) is not None for part in parts_of(self.weight)]
            found.append((id(self.weight), devices_of(self.weight), all(owners)))
            return super().forward(x)

    model = _model(device, lambda: Seen(kind))
    weights = [layer.weight for layer in model.layers]
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device):
        at_rest = [devices_of(weight) for weight in weights]
        model(inputs(device)[0])
        after = [devices_of(weight) for weight in weights]
        parts = [part for weight in weights for part in parts_of(weight)]

        assert found == [(id(weight), {device.torch_device}, True) for weight in weights]
        assert at_rest == after == [{torch.device("cpu")}] * 6
        assert not any(owner_of(part.untyped_storage()) for part in parts)
        assert [layer.weight for layer in model.layers] == weights


def test_wrapper_says_another_device_and_goes_on() -> None:
    weight = nn.Parameter(Int8.quantized(torch.randn(4, 4)), requires_grad=False)
    view = weight.t()
    before = weight.dequantize()

    set_reported_device(weight, torch.device("cuda", 0))  # needs no CUDA: the wrapper has no bytes of its own
    there = (weight.device, weight.is_cuda, type(weight), isinstance(weight, nn.Parameter), weight.size(), weight.stride())
    set_reported_device(weight, torch.device("cpu"))

    assert there == (torch.device("cuda", 0), True, Int8, True, (4, 4), (4, 1))
    assert weight.device == torch.device("cpu")
    assert torch.equal(weight.dequantize(), before)
    assert torch.equal(weight + 0, before)
    weight.copy_(Int8.quantized(torch.ones(4, 4)))
    assert view._version == weight._version == 1


def test_those_that_require_grad_stay_on_the_device(device: Device) -> None:
    model = _model(device)
    model.layers[2].base.weight.requires_grad_()

    with memkit.LayerOffload(model, offload_ratio=1.0, train="host", device=device) as offload:
        run_step(model, inputs(device))
        names = {item.name for chunk in offload._chunks for item in chunk.parameters}
        assert devices_of(model.layers[2].base.weight) == {device.torch_device}

    assert "layers.2.base.weight" not in names
    assert "layers.3.base.weight" in names
    assert "layers.2.base.bias" in names


@pytest.mark.parametrize("train", ["frozen", "host"])
def test_those_that_come_to_require_grad_raise(train: str, device: Device) -> None:
    model = _model(device)
    with memkit.LayerOffload(model, offload_ratio=1.0, train=train, device=device):
        model.layers[1].base.weight.requires_grad_()

        with pytest.raises(memkit.errors.LayerOffloadError, match=r"layers.1.* require"):
            model(inputs(device)[0])


# Writes


def _write_whole(weight: Wrapper) -> None:
    with torch.no_grad():
        weight.copy_(Int8.quantized(torch.ones(WIDTH, WIDTH)).to(weight.device))


def _write_inner(weight: Wrapper) -> None:
    weight.values.add_(1)


@pytest.mark.parametrize(
    ("block", "write"),
    [  # the other pairs leave no trace, as in plain autograd
        ("int8", _write_whole),
        ("int8, kept", _write_whole),
        ("int8, kept", _write_inner),
        ("inner kept", _write_inner),
    ],
)
def test_write_between_forward_and_backward_raises(block: str, write: Callable[[Wrapper], None], device: Device) -> None:
    model = _model(device, BLOCKS[block])
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device):
        loss = model(inputs(device)[0]).sum()
        write(model.layers[3].base.weight)

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("write", [_write_whole, _write_inner])
def test_forward_that_writes_to_its_weights_raises(write: Callable[[Wrapper], None], device: Device) -> None:
    class Writing(Quantized):
        def forward(self, x: Tensor) -> Tensor:
            write(self.weight)
            return super().forward(x)

    model = _model(device, lambda: Writing(Int8))
    with (
        memkit.LayerOffload(model, offload_ratio=1.0, device=device),
        torch.no_grad(),
        pytest.raises(memkit.errors.LayerOffloadError, match="has written to its own weights"),
    ):
        model(inputs(device)[0])


# Everyday life


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("block", ["int8", "int4"])
def test_state_is_loaded(block: str, assign: bool, device: Device) -> None:
    model, other = _model(device, BLOCKS[block]), _model(device, BLOCKS[block])
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device):
        run_step(model, inputs(device))
        model.zero_grad()
        state = {
            name: tensor.detach().to(model.state_dict()[name].device).clone() for name, tensor in other.state_dict().items()
        }
        model.load_state_dict(state, assign=assign)
        del state

        assert_same(run_step(model, inputs(device)), run_step(other, inputs(device)))
    for name, tensor in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_inner_tensor_that_was_replaced_is_taken_over(device: Device) -> None:
    with streamed(_model(device), device, num_slots=2) as (model, plain, batches, _):
        run_step(model, batches)
        run_step(plain, batches)
        old = model.layers[1].base.weight.scale
        for tested in (model, plain):
            weight = tested.layers[1].base.weight
            weight.scale = weight.scale * 2

        assert_same(run_step(model, batches), run_step(plain, batches))
        assert torch.equal(2 * old.cpu(), plain.layers[1].base.weight.scale.cpu())  # who has the old one keeps its bytes


def test_inner_tensor_more_than_before_raises(device: Device) -> None:
    model = _model(device)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device):
        weight = model.layers[1].base.weight
        weight.names, weight.zero_point = ("values", "scale", "zero_point"), torch.zeros(1)

        with pytest.raises(
            memkit.errors.LayerOffloadError, match=r'"layers.1.base.weight" streams as .*Int8.*Call offload.close\(\)'
        ):
            model(inputs(device)[0])


def test_inner_tensors_shared_between_layers_stay_and_warn(device: Device) -> None:
    model = _model(device)
    shared = model.layers[0].base.weight
    other = Int8.of(model.layers[3].base.weight.values, shared.scale)
    model.layers[3].base.weight = nn.Parameter(other, requires_grad=False)

    with pytest.warns(UserWarning, match=r"layers.0.base.weight, layers.3.base.weight share their bytes"):
        stats = compare(model, device, offload_ratio=1.0)

    assert stats.num_streamed == 6


def test_inner_tensors_shared_within_a_layer(device: Device) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = Int8.quantized(torch.randn(WIDTH, WIDTH))
            self.first = nn.Parameter(first, requires_grad=False)
            self.second = nn.Parameter(Int8.of(first.values.neg(), self.first.scale), requires_grad=False)
            self.scale = nn.Parameter(self.first.scale.view(-1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.first) + functional.linear(x, self.second) * self.scale

    stats = compare(Stack(4, block=Shared), device, offload_ratio=1.0, num_slots=2)

    assert stats.num_streamed == 4


def test_inner_tensor_that_is_made_anew_each_time_stays(device: Device) -> None:
    class Computed(Int8):
        names = ("raw", "scale")

        @property
        def values(self) -> Tensor:
            return self.raw.view(torch.int8)

        def __tensor_flatten__(self) -> tuple[list[str], Any]:
            return ["values", "scale"], None

        @classmethod
        def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
            return cls.of(inner["values"], inner["scale"])

    def block() -> nn.Module:
        made = Quantized(Int8)
        made.weight = nn.Parameter(Computed.of(*made.weight.inner), requires_grad=False)
        return made

    if device.torch_device.type == "cpu":
        model = _model(device, block)
        with memkit.LayerOffload(model, offload_ratio=1.0, device=device) as offload:
            names = [item.name for chunk in offload._chunks for item in chunk.parameters]

        assert not any("weight" in name for name in names)


# Quantized storage that is no such subclass


class Params4bit(nn.Parameter):
    """As that of bitsandbytes: a plain tensor of bytes, with the scales in an attribute that `to` moves."""

    absmax: Tensor

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = Params4bit(super().to(*args, **kwargs), requires_grad=False)
        moved.absmax = self.absmax.to(*args, **kwargs)
        return moved


def test_parameter_with_tensors_in_attributes_streams_without_those() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Params4bit(torch.randint(0, 9, (WIDTH, WIDTH), dtype=torch.uint8), requires_grad=False)
            self.weight.absmax = torch.rand(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight.float() * self.weight.absmax)

    device = ReferenceDevice()
    model = Stack(4, block=Packed)
    plain = copy.deepcopy(model)
    for one, other in zip(model.layers, plain.layers, strict=True):
        other.weight.absmax = one.weight.absmax
    addresses = [layer.weight.absmax.data_ptr() for layer in model.layers]
    expected = run_step(plain, inputs(device))
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device) as offload:
        assert_same(run_step(model, inputs(device)), expected)

        assert offload.stats().num_streamed == 4
        assert addresses == [layer.weight.absmax.data_ptr() for layer in model.layers]
        assert all(type(layer.weight) is Params4bit for layer in model.layers)
