"""`train="host"`: gradients go to host memory, and an optimizer steps the host copies there. What goes beyond `test_bits`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.core import torch_private
from memkit.device import Device, ReferenceDevice
from tests.weights.cases import WIDTH, FailsBackward, Stack, assert_same, in_order, inputs, results, run_step, stack, streamed

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw one by one": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


class Oracle:
    """The plain model on the device; what streams in the other is stepped as copies on the host."""

    def __init__(self, model: nn.Module, streamed: set[str], make: MakeOptimizer) -> None:
        self.model = copy.deepcopy(model)
        self._copies = {
            name: nn.Parameter(parameter.detach().cpu().clone())
            for name, parameter in self.model.named_parameters()
            if name in streamed
        }
        self.parameters = [self._copies.get(name, parameter) for name, parameter in self.model.named_parameters()]
        self.optimizer = make(iter(self.parameters))

    def take_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name in self._copies and parameter.grad is not None:
                self._copies[name].grad = parameter.grad.cpu()

    def step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self._copies:
                    parameter.copy_(self._copies[name])
        self.optimizer.zero_grad()
        self.model.zero_grad()


def _streamed_names(model: nn.Module, offload: memkit.LayerOffload) -> set[str]:
    return {f"{layer}.{name}" for layer in offload.plan.streamed for name, _ in model.get_submodule(layer).named_parameters()}


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_twenty_steps(make: str, num_batches: int, max_norm: float | None, device: Device) -> None:
    model = Stack(4).to(device.torch_device)
    start = copy.deepcopy(model)
    with memkit.LayerOffload(model, device=device, offload_ratio=0.5, train="host") as offload:
        oracle = Oracle(start, _streamed_names(model, offload), OPTIMIZERS[make])
        optimizer = OPTIMIZERS[make](model.parameters())
        for _ in range(20):
            batches = inputs(device, num_batches)
            for batch in batches:
                oracle.model(batch).square().mean().backward()
                model(batch).square().mean().backward()
            oracle.take_gradients()
            if max_norm is not None:
                expected = nn.utils.clip_grad_norm_(oracle.parameters, max_norm)
                assert torch.equal(nn.utils.clip_grad_norm_(model.parameters(), max_norm), expected)
            oracle.step()
            optimizer.step()
            optimizer.zero_grad()
            for name, tensor in oracle.model.state_dict().items():
                assert torch.equal(model.state_dict()[name].cpu(), tensor.cpu()), name


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.cpu(), other.cpu())


def test_grad_returns_gradients_and_leaves_grad_alone(device: Device) -> None:
    with streamed(Stack(4), device, train="host") as (model, plain, (first, second), _):
        found = []
        for one in (plain, model):
            one(first).square().sum().backward()
            # What streams is on the host by now, and for torch no longer what the graph has used.
            asked = one.parameters() if device.torch_device.type == "cpu" else one.get_submodule("stem").parameters()
            found.append(torch.autograd.grad(one(second).square().sum(), list(asked)))
        assert all(_same(one, other) for one, other in zip(*found, strict=True))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert _same(one.grad, other.grad)


def test_backward_that_fails_leaves_gradients_with_all_or_nothing_of_it(device: Device) -> None:
    fails, left = False, []

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        x = in_order(layers[:2], x)  # type: ignore[arg-type]
        return in_order(layers[2:], FailsBackward.apply(x, ArithmeticError("of the test")) if fails else x)  # type: ignore[arg-type]

    plain = Stack(4, run=run).to(device.torch_device)
    model = copy.deepcopy(plain)
    model._run = run
    first, second = inputs(device)
    with memkit.LayerOffload(model, device=device, offload_ratio=1.0, train="host"):
        for one in (plain, model):
            fails = False
            one(first).square().sum().backward()
            before = results(one, [])
            fails = True
            loss = one(second).square().sum()
            with pytest.raises(ArithmeticError):
                loss.backward()
            left.append(results(one, []))
            one.zero_grad()
            fails = False
            one(second).square().sum().backward()
        assert all(torch.equal(grad, before[name]) or torch.equal(grad, left[0][name]) for name, grad in left[1].items())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert _same(one.grad, other.grad)


def test_gradients_with_a_graph_of_their_own_are_refused(device: Device) -> None:
    refused = pytest.raises(memkit.errors.LayerOffloadError, match=r"layers\.3\..*create_graph")
    with streamed(Stack(4), device, train="host") as (model, _, (batch, _), _), refused:
        model(batch).square().sum().backward(create_graph=True)


def test_gradients_that_are_held_keep_their_bytes_after_close(device: Device) -> None:
    with streamed(Stack(4), device, train="host") as (model, plain, (batch, _), _):
        for one in (plain, model):
            one(batch).square().sum().backward()
        held = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
    for one, other in zip(held, plain.parameters(), strict=True):
        assert _same(one, other.grad)


_SCALED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("optimizer", _SCALED)
@pytest.mark.parametrize("train", ["frozen", "host"])
def test_grad_scaler(train: str, optimizer: str, unscales: bool, device: Device) -> None:
    plain, scales = stack(train).to(device.torch_device), list[bool]()
    model = copy.deepcopy(plain)
    batches = [*inputs(device, 3), torch.full_like(inputs(device)[0], float("inf")), *inputs(device, 1)]
    with memkit.LayerOffload(model, device=device, offload_ratio=0.5, train=train):
        for one in (plain, model):
            scaler = memkit.GradScaler(device.torch_device.type, init_scale=2.0**10)
            made = _SCALED[optimizer]([p for p in one.parameters() if p.requires_grad])
            made.register_step_pre_hook(lambda made, *_: scales.append(hasattr(made, "grad_scale")))
            for batch in batches:
                scaler.scale(one(batch).square().mean()).backward()
                if unscales:
                    scaler.unscale_(made)
                    nn.utils.clip_grad_value_([p for p in one.parameters() if p.grad is not None], 0.1)
                scaler.step(made)
                scaler.update()
                made.zero_grad()
            assert scaler.get_scale() == 2.0**9  # the one step with infinities was left out
        assert scales == [False] * 8  # it would come to the host unwaited for
        # The host's optimizer may round otherwise than the device's.
        is_exact = train == "frozen" or device.torch_device.type == "cpu"
        for name, tensor in plain.state_dict().items():
            found, expected = model.state_dict()[name].cpu(), tensor.cpu()
            assert torch.equal(found, expected) if is_exact else torch.allclose(found, expected, atol=1e-5), name


class _FarScaler(torch.amp.GradScaler):
    """Has its scale on another device than the gradients, as torch's has on CUDA, and finds nothing infinite in these."""

    def _unscale_grads_(self, *_: Any) -> dict[torch.device, Tensor]:
        self._scale = self._scale.to("meta" if self._scale.is_cpu else self._scale.device)
        return {torch.device("cpu"): torch.zeros(())}


def test_scaler_of_torch_is_refused_where_gradients_are_on_the_host(device: Device) -> None:
    scaler = _FarScaler(device.torch_device.type)
    with streamed(Stack(4), device, offload_ratio=0.5, train="host") as (model, plain, _, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(inputs(device)[0]).square().mean()).backward()

        with pytest.raises(memkit.errors.LayerOffloadError, match=r"use memkit\.GradScaler"):
            scaler.step(optimizer)
        optimizer.step()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = _FarScaler(device.torch_device.type)
    scaler.scale(plain(inputs(device)[0]).square().mean()).backward()
    scaler.step(optimizer)


def test_gradient_to_be_added_that_cannot_be_sent(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room to pack it")

    with streamed(Stack(4), device, train="host") as (model, plain, batches, offload):
        model(batches[0]).square().sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(offload._gradients, "_packed", fail)
            with pytest.raises(torch.OutOfMemoryError, match="no room to pack it"):
                model(batches[1]).square().sum().backward()
        model.zero_grad()

        assert_same(run_step(model, batches), run_step(plain, batches))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch sees to the gradient's dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_another_dtype_are_refused(dtype: torch.dtype, device: Device) -> None:
    with streamed(Stack(4), device, train="host") as (model, _, _, _):
        weight = model.get_parameter("layers.2.up.weight")
        weight.grad_dtype = dtype
        with pytest.raises(memkit.errors.LayerOffloadError, match=rf"layers\.2\.up\.weight.*torch\.float32.*{dtype}"):
            model(inputs(device)[0]).square().sum().backward()
        weight.grad_dtype = torch.float32
        model.zero_grad()
        model(inputs(device)[0]).square().sum().backward()


class _Elsewhere(torch.autograd.Function):
    """Makes the gradient on another stream than the one before, and leaves that the current one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, turn: Callable[[Tensor], None]) -> Tensor:
        ctx.turn = turn
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        ctx.turn(grad)
        return grad, None


def test_gradients_of_a_layer_that_are_made_on_several_streams_are_sent_behind_all_of_them() -> None:
    device, made = ReferenceDevice(), list[int]()
    streams = [device.current_stream(), *[device.new_stream(name) for name in ("one", "other")]]

    def turn(grad: Tensor) -> None:
        stream = streams[len(made) % 3]
        device.wait_event(stream, begun)
        contexts.enter_context(device.on_stream(stream))
        made.append(len(made))
        device.note_written(grad.untyped_storage(), torch_private.version_of(grad))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = x * _Elsewhere.apply(weight, turn)  # type: ignore[no-untyped-call]
            return x

    with streamed(Stack(4, block=Layer), device, train="host") as (model, plain, _, _):
        for _ in range(2):
            for batch in inputs(device):
                for one in (plain, model):
                    loss = one(batch).square().mean()
                    begun = device.record_event()
                    with ExitStack() as contexts:
                        loss.backward()
            assert_same(results(model, []), results(plain, []))
            for one in (plain, model):
                one.zero_grad()
    device.synchronize()

    assert len(made) == 2 * 2 * 2 * 16
    assert not device.races


def test_memory_that_a_gradient_is_on_its_way_to_is_not_given_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(4).to(device.torch_device)
    offload = memkit.LayerOffload(model, device=device, offload_ratio=1.0, train="host")
    batches, sent, added = inputs(device), [], []
    with offload:
        model(batches[0]).square().sum().backward()
        gradients = offload._gradients
        assert gradients is not None
        copy_out, give = type(gradients._lanes).copy_out, type(offload._arena).give

        def send(lanes: Any, source: Any, span: Any, **options: Any) -> Any:
            sent.append(span)
            return copy_out(lanes, source, span, **options)

        def check(arena: Any, span: Any, *rest: Any) -> None:
            assert all(span is not other for other in sent)
            give(arena, span, *rest)

        def fail() -> None:
            raise RuntimeError("no wait")

        with monkeypatch.context() as patch:
            patch.setattr(gradients, "_window_bytes", 0)
            patch.setattr(gradients, "_await_oldest", fail)
            patch.setattr(gradients, "_add", lambda *_: added.append(True))
            patch.setattr(type(gradients._lanes), "copy_out", send)
            patch.setattr(type(offload._arena), "give", check)
            gradients._in_flight.append((torch.UntypedStorage(0), device.record_event(device.current_stream())))
            with pytest.raises(RuntimeError, match="no wait"):
                model(batches[1]).square().sum().backward()

    assert not added
