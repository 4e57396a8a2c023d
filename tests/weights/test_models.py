"""Models of many kinds compute the same with streamed layers as without_modes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.core.owners import owner_of
from memkit.device import Device, ReferenceDevice
from tests.weights.cases import (
    WIDTH,
    Block,
    Result,
    Stack,
    assert_same,
    compare,
    in_order,
    inputs,
    only_lora,
    results,
    reused,
    run_step,
)

pytestmark = pytest.mark.slow


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
        return x + functional.silu(self.norm(self.conv(image))).flatten(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(0)
        return x + self.attention(tokens, tokens, tokens, need_weights=False)[0].squeeze(0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x.unsqueeze(1))[0].squeeze(1)


class Experts(nn.Module):
    """Only one of the experts is used in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[int(x.detach().abs().sum()) % 3](x).tanh()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu_()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.linear(x), 0.5, self.training)


class Odd(nn.Module):
    """Parameters that are no plain ranges of bytes."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(WIDTH * WIDTH + WIDTH + 3)
        self.weight = nn.Parameter(flat[3 : 3 + WIDTH * WIDTH].view(WIDTH, WIDTH))
        self.same = nn.Parameter(self.weight.data[:, ::2])
        self.bias = nn.Parameter(flat[3 + WIDTH * WIDTH :])
        self.transposed = nn.Parameter(torch.randn(WIDTH, 8).t())
        self.expanded = nn.Parameter(torch.randn(1).expand(WIDTH))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight, self.bias) + (x @ self.transposed.t()) @ self.same.t()
        return torch.cat([x + (y * self.expanded).tanh() * self.scalar, self.empty])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat).conj())
        self.row = nn.Parameter(torch.randn(WIDTH, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.to(torch.cfloat) @ self.weight.mH * self.row).imag.tanh()


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table(x.detach().abs().sum(1).long() % 7)


class KeepsWeight(torch.autograd.Function):
    """Keeps the weight where saved-tensor hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.weight.t(), None


class KeepsParameter(torch.autograd.Function):
    """Keeps the parameter itself."""

    places: ClassVar[list[object]] = []
    """Who owned its storage in each backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        KeepsParameter.places.append(owner_of(ctx.weight.untyped_storage()))
        return grad @ ctx.weight.t(), None


class HiddenParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return KeepsParameter.apply(x, self.weight)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return KeepsWeight.apply(x, self.weight.t())


def _parametrized(norm: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: norm(nn.Linear(WIDTH, WIDTH))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "conv": Conv,
    "attention": Attention,
    "lstm": Recurrent,
    "experts": Experts,
    "batch norm": Normed,
    "dropout": Dropped,
    "odd": Odd,
    "complex": Complex,
    "embedding": Embedded,
    "weight kept by a function": Hidden,
    "parameter kept by a function": HiddenParameter,
    "weight norm": _parametrized(parametrizations.weight_norm),
    "spectral norm": _parametrized(parametrizations.spectral_norm),
    "old spectral norm": _parametrized(nn.utils.spectral_norm),
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(inplace=True), nn.Linear(24, WIDTH)),
}


def train_and_sample(model: nn.Module, batches: list[Tensor]) -> Result:
    """Accumulate two gradients, with samples drawn in between."""
    torch.manual_seed(0)
    outputs = []
    for batch in batches:
        model.train()
        outputs.append(model(batch))
        outputs[-1].square().mean().backward()
        model.eval()
        with torch.no_grad():
            outputs.append(model(batch))
        with torch.inference_mode():
            outputs.append(model(batch).clone())
    return {**results(model, outputs), "rng": torch.get_rng_state()}


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk of memory")  # of cuDNN
@pytest.mark.parametrize("block", BLOCKS)
def test_layers_of_many_kinds(block: str, device: Device) -> None:
    model = only_lora(Stack(4, block=BLOCKS[block]))

    stats = compare(model, device, step=train_and_sample, offload_ratio=1.0, num_slots=2)

    assert stats.num_streamed == 4


@pytest.mark.parametrize("slots", [1, 3])
def test_parameters_are_in_the_slot_while_their_layer_runs_backward(slots: int, device: Device) -> None:
    KeepsParameter.places.clear()

    stats = compare(only_lora(Stack(4, block=HiddenParameter)), device, offload_ratio=1.0, num_slots=slots)

    assert len(KeepsParameter.places) == 2 * 2 * 2 * 4
    assert sum(owner is not None for owner in KeepsParameter.places) == 2 * 2 * 4
    assert stats.num_overflows == 0


class DiT(nn.Module):
    """Blocks of two kinds, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.doubles = nn.ModuleList(Block(inner=64) for _ in range(3))
        self.singles = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return in_order(self.singles, in_order(self.doubles, x))


def test_lists_of_two_kinds_stream_both_through_slots_of_two_sizes(device: Device) -> None:
    model = DiT().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)

    stats = compare(model, device, offload_ratio=1.0, num_slots=2)

    assert stats.num_streamed == 7
    assert stats.num_overflows == 0


def test_tied_parameters_stay_and_warn(device: Device) -> None:
    model = Stack(4)
    model.layers[0].up.weight = model.layers[3].up.weight

    with pytest.warns(UserWarning, match=r"layers.0.up.weight, layers.3.up.weight share their bytes"):
        compare(only_lora(model), device, offload_ratio=1.0)


class _WithPart(nn.Linear):
    """Has a part of its weight as a buffer as well."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("part", self.weight.detach()[: WIDTH // 2], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.part.t()
        return torch.tanh(super().forward(x) + torch.cat([y, y], dim=-1))


@pytest.mark.filterwarnings("ignore:.*share their bytes")
@pytest.mark.parametrize("train", ["frozen", "host"])
def test_weight_that_a_buffer_is_a_part_of_stays_and_warns(train: str, device: Device) -> None:
    plain = Stack(3, block=_WithPart)
    for layer in plain.layers:
        layer.bias.requires_grad_(train == "host")
        layer.weight.requires_grad_(train == "host")
    model = Stack(3, block=_WithPart)
    for one in (plain, model):
        one.to(device.torch_device)
        for layer in one.layers:  # what moves or copies a model breaks this up
            layer.part = layer.weight.detach()[: WIDTH // 2]
    model.load_state_dict(plain.state_dict())
    model.layers.requires_grad_(train == "host")
    with pytest.warns(UserWarning, match=r"layers.0.weight, layers.0.part share their bytes"):
        offload = memkit.LayerOffload(model, offload_ratio=1.0, train=train, device=device)

    with offload:
        for _ in range(2):
            for one in (plain, model):
                one.zero_grad()
            assert_same(run_step(model, inputs(device)), run_step(plain, inputs(device)))
            with torch.no_grad():
                for one in (plain, model):
                    for parameter in one.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad.to(parameter.device), alpha=0.1)
                    one.layers[1].weight.mul_(0.5)


def test_layer_under_two_names_streams_once(device: Device) -> None:
    model = Stack(3)
    model.layers.append(model.layers[0])

    stats = compare(only_lora(model), device, offload_ratio=1.0, num_slots=2)

    assert stats.num_streamed == 3


class Returning(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weight.t()


def test_view_of_a_weight_that_the_model_uses_outside_of_the_layer(device: Device) -> None:
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        views = []
        for layer in layers:
            x, view = layer(x)
            views.append(view)
        for view in views:
            x = x @ view
        return x

    model = only_lora(Stack(4, run=run, block=lambda: Returning(WIDTH, WIDTH)))

    stats = compare(model, device, offload_ratio=1.0, num_slots=2)

    assert stats.num_overflows > 0


def test_view_of_a_weight_that_is_kept_keeps_its_bytes(device: Device) -> None:
    model = Stack(4, block=lambda: Returning(WIDTH, WIDTH)).requires_grad_(False)
    weights = [layer.weight.detach().clone() for layer in model.layers]
    x = torch.randn(3, WIDTH, device=device.torch_device)

    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=1, device=device):
        views = [layer(x)[1] for layer in model.layers]
        for _ in range(2):
            for layer in model.layers:
                layer(x)

        for view, weight in zip(views, weights, strict=True):
            assert torch.equal(view.cpu(), weight.t())


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_autocast_with_layers_reused(cache_enabled: bool, device: Device) -> None:
    def step(model: nn.Module, batches: list[Tensor]) -> Result:
        outputs = []
        for batch in batches:
            with torch.autocast(device.torch_device.type, torch.bfloat16, cache_enabled=cache_enabled):
                outputs.append(model(batch))
            outputs[-1].float().square().mean().backward()
        return results(model, outputs)

    compare(only_lora(Stack(4, run=reused)), device, step=step, offload_ratio=1.0, num_slots=2)


class Careful(nn.Module):
    """Calls itself until that fails, and notes whether its weights are in a slot when it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.found: list[bool] = []

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if not depth:
            raise ValueError("too deep")
        try:
            x = self(x, depth - 1)
        except ValueError:
            x = x.sin()
        self.found.append(owner_of(self.linear.weight.untyped_storage()) is not None)
        return self.linear(x)


def test_layer_goes_on_in_its_slot_after_an_error_that_it_has_caught(device: Device) -> None:
    model = only_lora(Stack(4, block=Careful))

    compare(model, device, offload_ratio=1.0, num_slots=2)

    assert all(found for layer in model.layers for found in layer.found)


def test_gradients_taken_inside_of_a_layer_without_grad(device: Device) -> None:
    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                energy = self.linear(self.norm(y)).square().sum()
                return x - 0.1 * torch.autograd.grad(energy, y)[0]

    def step(model: nn.Module, batches: list[Tensor]) -> Result:
        with torch.no_grad():
            return results(model, [model(batch) for batch in batches])

    stats = compare(only_lora(Stack(4, block=Guided)), device, step=step, offload_ratio=1.0, num_slots=2)

    assert stats.num_overflows == 0


def test_hooks_of_the_user_on_streamed_layers(device: Device) -> None:
    def step(model: nn.Module, batches: list[Tensor]) -> Result:
        found = []
        handles = [
            handle
            for layer in model.layers
            for handle in (
                layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
                layer.register_forward_hook(lambda layer, _, output: output + layer.norm.bias.sum()),
                layer.up.register_full_backward_hook(lambda _, grads, __: found.append(grads[0].clone())),
            )
        ]
        outputs = [model(batch) for batch in batches]
        sum(output.square().mean() for output in outputs).backward()
        for handle in handles:
            handle.remove()
        return results(model, [*outputs, *found])

    if device.torch_device.type == "cpu":  # a hook that was added later reads the weights when the layer's forward is over
        compare(only_lora(Stack(4)), device, step=step, offload_ratio=1.0, num_slots=2)


# A pass: the layers in order, how they are called, how many times the order is run through.
passes = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=7),
    st.sampled_from(["plain", "checkpoint", "reentrant", "segment", "no grad", "inference", "outside"]),
    st.booleans(),
)


def _run_order(order: list[int], kind: str, layers: nn.ModuleList, x: Tensor) -> Tensor:
    if kind == "segment":
        return checkpoint(_run_order, order, "plain", layers, x, use_reentrant=False)
    for number in order:
        if kind in ("checkpoint", "reentrant"):
            x = checkpoint(layers[number], x, use_reentrant=kind == "reentrant")
        else:
            x = layers[number](x)
    return x


def _run_program(program: list[Any], backwards: list[int], model: nn.Module, batches: list[Tensor]) -> Result:
    outputs = []
    for order, kind, is_kept in program:
        model._run = partial(_run_order, order, kind)
        with torch.inference_mode(kind == "inference"), torch.set_grad_enabled(kind not in ("no grad", "inference")):
            output = model._run(model.layers, model.stem(batches[0])) if kind == "outside" else model(batches[0])
        outputs.append(output)
        if not is_kept and output.requires_grad:
            output.square().mean().backward()
    graphs = [output for output, step in zip(outputs, program, strict=True) if step[2] and output.requires_grad]
    for number in backwards:
        if graphs:
            graphs[number % len(graphs)].square().mean().backward(retain_graph=True)
    return results(model, outputs)


@settings(max_examples=40)
@given(
    program=st.lists(passes, min_size=1, max_size=4),
    backwards=st.lists(st.integers(0, 9), max_size=4),
    slots=st.integers(1, 3),
    ratio=st.sampled_from([0.4, 1.0]),
    seed=st.sampled_from([None, 0, 1]),
)
def test_random_programs(program: list[Any], backwards: list[int], slots: int, ratio: float, seed: int | None) -> None:
    device = ReferenceDevice(seed=seed)
    step = partial(_run_program, program, backwards)

    compare(only_lora(Stack(5)), device, step=step, offload_ratio=ratio, num_slots=slots)

    device.synchronize()
