"""Models of many kinds, in any order of forwards and backwards and trained in each way, compute with streamed layers what they
compute plainly, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
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
from memkit.core.sizes import HOST_PAGE_BYTES
from memkit.device import Device, ReferenceDevice
from memkit.transfer import ReferenceDisk, host_memory
from tests.refusing import PinLimit
from tests.weights.cases import (
    RUNS,
    TRAIN,
    WIDTH,
    Block,
    Result,
    Stack,
    assert_same,
    compare,
    in_order,
    inputs,
    new_nodes,
    only_lora,
    results,
    reused,
    run_step,
    stack,
)
from tests.weights.wrapped import BLOCKS as WRAPPED

slow = pytest.mark.slow


def train_and_sample(model: nn.Module, batches: list[Tensor], *, samples: bool = True) -> Result:
    """Accumulate two gradients, with samples drawn in between."""
    torch.manual_seed(0)
    outputs = []
    for batch in batches:
        model.train()
        outputs.append(model(batch))
        outputs[-1].square().mean().backward()
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode) if samples else ():
            with mode():
                outputs.append(model(batch).clone())
    return {**results(model, outputs), "rng": torch.get_rng_state()}


def _step_of(train: str) -> Callable[..., Result]:
    return partial(train_and_sample, samples=train != "fused")  # a model that is stepped by now has other samples


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "frozen": dict,
    "host": dict,
    "fused": lambda: {"optimizer": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.01)},
    "fused, AdamW": lambda: {"optimizer": partial(torch.optim.AdamW, lr=0.01)},
    "fused, AdamW of one kernel": lambda: {"optimizer": partial(torch.optim.AdamW, lr=0.01, fused=True)},
    "disk": lambda: {"disk": ReferenceDisk()},
    "disk, late or not": lambda: {"disk": ReferenceDisk(seed=3)},
    **dict.fromkeys(WRAPPED, dict),
}
"""How layers stream, or what their weights are made of."""
PINNED = {"all": 2**40, "some": 4 * HOST_PAGE_BYTES, "none": 0}
"""How many bytes the system pins: all, four buffers of a page, which are fewer than the layers, or nothing."""


@pytest.mark.core(1)
@pytest.mark.covering(2)
@pytest.mark.filterwarnings("ignore:LayerOffload. the system did not pin", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("slots", [1, 2, 3, 6])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("way", WAYS)
def test_orders(way: str, run: str, slots: int, pinned: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 1024)  # a layer has five of them
    limit, train = PinLimit(device, monkeypatch, PINNED[pinned]), way.split(",")[0]
    train = train if train in TRAIN else "frozen"
    model = stack(train, 6, run=RUNS[run], **({"block": WRAPPED[way]} if way in WRAPPED else {}))

    stats = compare(model, device, step=_step_of(train), num_steps=3, num_slots=slots, **WAYS[way]())

    assert stats.num_streamed == 6
    assert stats.num_fetches > 0
    assert (stats.d2h_bytes > 0) == (train != "frozen")
    assert (stats.disk_read_bytes > 0) == (stats.disk_bytes > 0) == ("disk" in way)
    assert not limit.pinned


# Several graphs

Step = Callable[[nn.Module, list[Tensor]], Result]


def _backwards_in_order(model: nn.Module, batches: list[Tensor]) -> Result:
    outputs = [model(batch) for batch in batches]
    for output in outputs:
        output.square().mean().backward()
    return results(model, outputs)


def _backwards_in_reverse(model: nn.Module, batches: list[Tensor]) -> Result:
    outputs = [model(batch) for batch in batches]
    for output in reversed(outputs):
        output.square().mean().backward()
    return results(model, outputs)


def _one_backward_of_two(model: nn.Module, batches: list[Tensor]) -> Result:
    outputs = [model(batch) for batch in batches]
    (outputs[0] * outputs[1]).mean().backward()
    return results(model, outputs)


def _part_of_the_outputs(model: nn.Module, batches: list[Tensor]) -> Result:
    output = model(batches[0])
    output[:2, 1].sum().backward()
    return results(model, [output])


def _part_of_the_layers(model: nn.Module, batches: list[Tensor]) -> Result:
    """The graph ends in the middle: what comes after has no backward."""
    hidden = in_order(model.layers[:3], model.stem(batches[0]))
    output = model.head(in_order(model.layers[3:], hidden.detach()))
    hidden.sum().backward()
    return results(model, [output])


def _retained(model: nn.Module, batches: list[Tensor]) -> Result:
    output = model(batches[0])
    for is_last in (False, False, True):
        output.square().mean().backward(retain_graph=not is_last)
    return results(model, [output])


def _retained_between_others(model: nn.Module, batches: list[Tensor]) -> Result:
    output = model(batches[0])
    output.square().mean().backward(retain_graph=True)
    other = model(batches[1])
    other.mean().backward()
    output.mean().backward()
    return results(model, [output, other])


def _grad_of_inputs(model: nn.Module, batches: list[Tensor]) -> Result:
    x = batches[0].clone().requires_grad_()
    output = model(x)
    return results(model, [output, *torch.autograd.grad(output.sum(), [x, model.stem.weight])])


def _double_backward(model: nn.Module, batches: list[Tensor]) -> Result:
    x = batches[0].clone().requires_grad_()
    output = model(x)
    grad = torch.autograd.grad(output.square().sum(), x, create_graph=True)[0]
    (grad.square().mean() + output.mean()).backward()
    return results(model, [output, grad, x.grad])


def _samples_in_between(model: nn.Module, batches: list[Tensor]) -> Result:
    outputs = []
    for batch in batches:
        outputs.append(model(batch))
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                outputs.append(model(batch * 2).clone())
        model.train()
        outputs[-3].square().mean().backward()
    return results(model, outputs)


def _dropped(model: nn.Module, batches: list[Tensor]) -> Result:
    model(batches[1])
    output = model(batches[0])
    dropped = model(batches[1])
    dropped.sum().backward(retain_graph=True)
    del dropped
    output.sum().backward()
    return results(model, [output])


def _zeroed_in_between(model: nn.Module, batches: list[Tensor]) -> Result:
    for set_to_none in (True, False, True):
        for batch in batches:
            loss = model(batch).square().sum()
            model.zero_grad(set_to_none=set_to_none)
            loss.backward()
    return results(model, [])


def _in_a_thread(model: nn.Module, batches: list[Tensor]) -> Result:
    """The backward runs in another thread than the forward."""
    output = model(batches[0])
    thread = threading.Thread(target=lambda: output.square().mean().backward())
    thread.start()
    thread.join()
    return results(model, [output])


def _anomalies(model: nn.Module, batches: list[Tensor]) -> Result:
    with torch.autograd.detect_anomaly(check_nan=True):
        return run_step(model, batches)


def _grad_of_inputs_only(model: nn.Module, batches: list[Tensor]) -> Result:
    x = batches[0].clone().requires_grad_()
    output = model(x)
    output.sum().backward()
    return results(model, [output, x.grad])


STEPS: dict[str, Step] = {
    "backwards in order": _backwards_in_order,
    "backwards in reverse": _backwards_in_reverse,
    "one backward of two": _one_backward_of_two,
    "part of the outputs": _part_of_the_outputs,
    "part of the layers": _part_of_the_layers,
    "retained": _retained,
    "retained between others": _retained_between_others,
    "grad of inputs": _grad_of_inputs,
    "grad of inputs alone": _grad_of_inputs_only,
    "samples in between": _samples_in_between,
    "dropped": _dropped,
    "zeroed in between": _zeroed_in_between,
    "in a thread": _in_a_thread,
    "anomalies": _anomalies,
    "double backward": _double_backward,
}
LAST = "double backward"
"""Is refused where gradients go to host memory."""


@pytest.mark.core(1)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("has_new_nodes", [False, True])
@pytest.mark.parametrize("slots", [1, 2, pytest.param(3, marks=slow)])
@pytest.mark.parametrize(
    ("train", "step"), [(train, step) for train in ("frozen", "host") for step in STEPS if (train, step) != ("host", LAST)]
)
def test_several_graphs(train: str, step: str, slots: int, has_new_nodes: bool, device: Device) -> None:
    with new_nodes() if has_new_nodes else nullcontext():
        stats = compare(stack(train, 6), device, step=STEPS[step], num_slots=slots, **TRAIN[train])

    assert stats.slot_bytes == slots * stats.streamed_bytes // stats.num_streamed


def test_gradients_of_inputs_through_frozen_layers(device: Device) -> None:
    compare(Stack(6).requires_grad_(False), device, step=STEPS["grad of inputs alone"], num_slots=2)


# Layers of many kinds


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


class Keeps(torch.autograd.Function):
    """Keeps the weight where saved-tensor hooks do not see it."""

    places: ClassVar[list[object]] = []
    """Who owned its storage in each backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Keeps.places.append(owner_of(ctx.weight.untyped_storage()))
        return grad @ ctx.weight.t(), None


class Hidden(nn.Module):
    def __init__(self, is_view: bool = False) -> None:
        super().__init__()
        self.weight, self.is_view = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), is_view

    def forward(self, x: Tensor) -> Tensor:
        return Keeps.apply(x, self.weight.t() if self.is_view else self.weight)


class Adjoint(nn.Module):
    """Uses its complex weights as adjoints, so that autograd makes gradients that are conjugated, or negated, lazily."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.complex64) @ self.weight.mH
        return x + (z * self.scale.conj()).real + z.conj().imag


class Sparse(nn.Module):
    """Has an embedding with gradients of few rows, in the first forward alone or in all others."""

    def __init__(self, *ways: bool) -> None:
        super().__init__()
        self.rows, self.linear, self.ways, self.num_calls = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH), ways, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.rows.sparse = self.ways[self.num_calls % len(self.ways)]
            self.num_calls += 1
        return x + self.linear(self.rows(x[:, 0].abs().long()))


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
    "weight kept by a function": lambda: Hidden(is_view=True),
    "parameter kept by a function": Hidden,
    "adjoint": Adjoint,
    "sparse": lambda: Sparse(True),
    "sparse first": lambda: Sparse(True, False),
    "sparse second": lambda: Sparse(False, True),
    "weight norm": _parametrized(parametrizations.weight_norm),
    "spectral norm": _parametrized(parametrizations.spectral_norm),
    "old spectral norm": _parametrized(nn.utils.spectral_norm),
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(inplace=True), nn.Linear(24, WIDTH)),
}


_OFTEN = ("adjoint", "host"), ("sparse first", "host")


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk of memory")  # of cuDNN
@pytest.mark.parametrize(
    ("block", "train"),
    [
        pytest.param(block, train, marks=() if (block, train) in _OFTEN else slow)
        for block in BLOCKS
        for train in TRAIN
        if block != "odd" or train == "frozen"
    ],  # its copies are less odd
)
def test_layers_of_many_kinds(block: str, train: str, device: Device) -> None:
    stats = compare(stack(train, block=BLOCKS[block]), device, step=_step_of(train), num_slots=2, **TRAIN[train])

    assert stats.num_streamed == 4


@slow
@pytest.mark.parametrize("slots", [1, 3])
def test_parameters_are_in_the_slot_while_their_layer_runs_backward(slots: int, device: Device) -> None:
    Keeps.places.clear()

    stats = compare(only_lora(Stack(4, block=Hidden)), device, offload_ratio=1.0, num_slots=slots)

    assert len(Keeps.places) == 2 * 2 * 2 * 4
    assert sum(owner is not None for owner in Keeps.places) == 2 * 2 * 4
    assert stats.num_overflows == 0


class DiT(nn.Module):
    """Blocks of two kinds, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.doubles = nn.ModuleList(Block(inner=64) for _ in range(3))
        self.singles = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return in_order(self.singles, in_order(self.doubles, x))


@slow
def test_lists_of_two_kinds_stream_both_through_slots_of_two_sizes(device: Device) -> None:
    model = DiT().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)

    stats = compare(model, device, offload_ratio=1.0, num_slots=2)

    assert stats.num_streamed == 7
    assert stats.num_overflows == 0


@slow
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


@slow
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


@slow
def test_layer_under_two_names_streams_once(device: Device) -> None:
    model = Stack(3)
    model.layers.append(model.layers[0])

    stats = compare(only_lora(model), device, offload_ratio=1.0, num_slots=2)

    assert stats.num_streamed == 3


class Returning(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weight.t()


@slow
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


@slow
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


@slow
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


@slow
def test_layer_goes_on_in_its_slot_after_an_error_that_it_has_caught(device: Device) -> None:
    model = only_lora(Stack(4, block=Careful))

    compare(model, device, offload_ratio=1.0, num_slots=2)

    assert all(found for layer in model.layers for found in layer.found)


@slow
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


@slow
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


@slow
@settings(max_examples=60)
@given(
    program=st.lists(passes, min_size=1, max_size=4),
    backwards=st.lists(st.integers(0, 9), max_size=4),
    slots=st.integers(1, 3),
    ratio=st.sampled_from([0.4, 1.0]),
    seed=st.sampled_from([None, 0, 1]),
    train=st.sampled_from(["frozen", "host"]),
    has_new_nodes=st.booleans(),
)
def test_random_programs(
    program: list[Any], backwards: list[int], slots: int, ratio: float, seed: int | None, train: str, has_new_nodes: bool
) -> None:
    device, step = ReferenceDevice(seed=seed), partial(_run_program, program, backwards)

    with new_nodes() if has_new_nodes else nullcontext():
        compare(stack(train, 5), device, step=step, offload_ratio=ratio, num_slots=slots, **TRAIN[train])

    device.synchronize()
    assert not device.races
