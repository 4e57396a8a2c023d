"""`train="fused"`: the optimizer steps within the backward, and the result is that of a plain model on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.device import Device
from tests.weights.cases import RUNS, Block, Stack, inputs

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


def _fused(model: nn.Module, device: Device, make: str = "adamw", **options: object) -> memkit.LayerOffload:
    given: dict[str, object] = {"offload_ratio": 1.0, "optimizer": OPTIMIZERS[make], "device": device, **options}
    return memkit.LayerOffload(model, **given)  # type: ignore[arg-type]


def _compare(model: nn.Module, device: Device, make: str, num_steps: int, **options: object) -> None:
    """See that a model is the same after each step as a plain one on the device."""
    plain = model.to(device.torch_device)
    model = copy.deepcopy(plain)
    optimizer = OPTIMIZERS[make](plain.parameters())
    with _fused(model, device, make, **options):
        for step in range(num_steps):
            (batch,) = inputs(device, 1)
            for one in (plain, model):
                one(batch + step / 100).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, tensor in plain.state_dict().items():
                assert torch.equal(model.state_dict()[name].cpu(), tensor.cpu()), (step, name)
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("run", RUNS)
def test_orders(run: str, slots: int, device: Device) -> None:
    _compare(Stack(4, run=RUNS[run]), device, "adamw", 3, num_slots=slots)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_twenty_steps(make: str, device: Device) -> None:
    _compare(Stack(4), device, make, 20, num_slots=2)


def test_scheduler_and_state_dict_work_on_the_optimizer(device: Device) -> None:
    plain = Stack(4).to(device.torch_device)
    model = copy.deepcopy(plain)
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    with _fused(model, device) as offload:
        assert offload.optimizer is not None
        schedulers = [torch.optim.lr_scheduler.StepLR(item, 1, gamma=0.5) for item in (optimizer, offload.optimizer)]
        for step in range(4):
            (batch,) = inputs(device, 1)
            for one in (plain, model):
                one(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            if step == 1:
                offload.optimizer.load_state_dict(copy.deepcopy(offload.optimizer.state_dict()))
        found, expected = offload.optimizer.state_dict(), optimizer.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            for name, value in state.items():
                assert torch.equal(found["state"][number][name].cpu(), value.cpu()), (number, name)
        for name, tensor in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name].cpu(), tensor.cpu()), name


def test_state_stays_on_the_device_and_counts_in_the_budget(device: Device) -> None:
    model = Stack(8).to(device.torch_device)
    layer_bytes = memkit.LayerOffload(model, offload_ratio=0.0, train="frozen", device=device)
    layer_bytes.close()
    with _fused(copy.deepcopy(model), device) as offload:
        one = offload.plan.layers[0].num_bytes
    trained = sum(parameter.nbytes for parameter in model.get_submodule("layers").parameters())

    with _fused(copy.deepcopy(model), device, offload_ratio=None, budget=2 * trained + 5 * one) as offload:
        assert len(offload.plan.streamed) == 6
    found = rf"{trained * 2 / 1024:.2f} KiB for the optimizer's state\); found 1000 bytes. Raise budget by \d+ bytes"
    with pytest.raises(ValueError, match=found):
        _fused(copy.deepcopy(model), device, offload_ratio=None, budget="1000B")
    with pytest.raises(ValueError, match="budget"):
        _fused(copy.deepcopy(model), device, offload_ratio=None, budget=2 * trained)


@pytest.mark.parametrize("streams", [True, False])
def test_layer_that_is_reused_in_backwards_of_their_own_is_refused(streams: bool, device: Device) -> None:
    model = Stack(4, run=_reused_in_checkpoints(use_reentrant=True)).to(device.torch_device)
    (batch,) = inputs(device, 1)
    with _fused(model, device, "sgd", offload_ratio=float(streams)):
        with pytest.raises(
            memkit.errors.LayerOffloadError, match=r'"layers\.0\..*stepped already.*use_reentrant=False.*train="host"'
        ):
            model(batch).square().mean().backward()

        with pytest.raises(memkit.errors.LayerOffloadError, match="stepped already"):
            model(batch).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("streams", [True, False])
def test_layer_that_is_reused_in_checkpoints_of_one_backward(streams: bool, device: Device) -> None:
    run = _reused_in_checkpoints(use_reentrant=False)
    _compare(Stack(4, run=run), device, "sgd", 2, offload_ratio=float(streams))


def _reused_in_checkpoints(use_reentrant: bool) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in (*layers, layers[0]):
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    return run


def test_own_step_after_each_backward_does_nothing(device: Device) -> None:
    model = Stack(4).to(device.torch_device)
    with _fused(model, device) as offload:
        assert offload.optimizer is not None
        (batch,) = inputs(device, 1)
        model(batch).square().mean().backward()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        offload.optimizer.step()
        offload.optimizer.zero_grad()

        for name, tensor in before.items():
            assert torch.equal(model.state_dict()[name], tensor)


def test_parameter_that_the_optimizer_does_not_know_is_refused(device: Device) -> None:
    model = Stack(4).to(device.torch_device)
    with _fused(model, device):
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)

        with pytest.raises(memkit.errors.LayerOffloadError, match=r'"layers\.3\..*assign=True.*make a new LayerOffload'):
            model(inputs(device)[0]).square().mean().backward()


@pytest.mark.covering(2)
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, "auto"])
@pytest.mark.parametrize("is_known_first", [False, True])
@pytest.mark.parametrize("has_own_group", [True, False])
def test_parameters_that_are_to_be_trained_later(
    has_own_group: bool, is_known_first: bool, ratio: float | str, device: Device
) -> None:
    """The head does not stream, of the layers some do."""
    plain = Stack(4).to(device.torch_device)
    plain.head.requires_grad_(False)
    plain.layers[2:].requires_grad_(False)
    model, (batch,) = copy.deepcopy(plain), inputs(device, 1)
    optimizer = OPTIMIZERS["adamw"](parameter for parameter in plain.parameters() if parameter.requires_grad)
    with _fused(model, device, offload_ratio=ratio) as offload:
        assert offload.optimizer is not None
        for step in range(6):
            for one, stepped in ((plain, optimizer), (model, offload.optimizer)):
                later = [*one.head.parameters(), *one.layers[2:].parameters()]
                if step == (0 if is_known_first else 3):
                    if has_own_group:
                        stepped.add_param_group({"params": later, "lr": 0.1})
                    else:
                        stepped.param_groups[0]["params"] += later
                if step == 3:
                    for parameter in later:
                        parameter.requires_grad_()
                one(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, tensor in plain.state_dict().items():
                assert torch.equal(model.state_dict()[name].cpu(), tensor.cpu()), (step, name)


def test_graph_from_before_a_step_raises_as_autograd_does(device: Device) -> None:
    model = Stack(4).to(device.torch_device)
    with _fused(model, device):
        losses = [model(batch).square().mean() for batch in inputs(device)]
        losses[0].backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[1].backward()


def test_accumulation_is_refused(device: Device) -> None:
    model = Stack(4).to(device.torch_device)
    with _fused(model, device) as offload:
        assert offload.optimizer is not None
        for batch in inputs(device):
            model(batch).square().mean().backward()
        with pytest.raises(memkit.errors.LayerOffloadError, match=r"after 2 backwards.*train=.host"):
            offload.optimizer.step()
        model.get_submodule("layers.0.up").weight.grad = torch.zeros(24, 16)
        with pytest.raises(memkit.errors.LayerOffloadError, match=r"layers\.0\.up\.weight.*has a gradient already"):
            model(batch).square().mean().backward()


class _Counting(torch.optim.SGD):
    """Keeps the number of its steps in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)


class _CountingInPlace(torch.optim.SGD):
    """Keeps the number of its steps in a tensor of its groups."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.param_groups[0]["k"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["k"].add_(1)
        super().step(closure)


@pytest.mark.parametrize("kind", [_Counting, _CountingInPlace])
def test_optimizer_with_state_in_its_groups_is_refused(kind: type[torch.optim.Optimizer], device: Device) -> None:
    model = Stack(4).to(device.torch_device)
    message = r'Counting.* keeps state in its groups.*"k".*train="host"'
    with _fused(model, device, optimizer=partial(kind, lr=0.1)), pytest.raises(memkit.errors.LayerOffloadError, match=message):
        model(inputs(device)[0]).square().mean().backward()


def test_own_step_after_a_backward_that_failed(device: Device) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, *grads: Tensor) -> Tensor:
            raise ValueError("once")

    model = Stack(4).to(device.torch_device)
    (batch,) = inputs(device, 1)
    with _fused(model, device) as offload:
        assert offload.optimizer is not None
        handle = model.get_submodule("stem").register_forward_hook(lambda *given: Failing.apply(given[-1]))
        with pytest.raises(ValueError, match="once"):
            model(batch).square().mean().backward()
        handle.remove()
        model(batch).square().mean().backward()

        offload.optimizer.step()


def _norm(model: nn.Module, _: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _value(model: nn.Module, _: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def _unscale(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)


def _data(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.norm()


@pytest.mark.parametrize("use", [_norm, _value, _unscale, _data])
def test_use_of_gradients_after_the_step_is_refused(
    use: Callable[[nn.Module, torch.optim.Optimizer], None], device: Device
) -> None:
    model = Stack(4).to(device.torch_device)
    with _fused(model, device, offload_ratio=0.5) as offload:
        assert offload.optimizer is not None
        model(inputs(device)[0]).square().mean().backward()

        with pytest.raises(memkit.errors.LayerOffloadError, match=r'consumed by the step within the backward.*train="host"'):
            use(model, offload.optimizer)


def test_optimizer_of_other_parameters_is_refused_before_it_steps(device: Device) -> None:
    model = Stack(2).to(device.torch_device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(inputs(device)[0]).square().mean().backward()

    with pytest.raises(
        ValueError, match="makes an optimizer of the parameters that it is given; what it returned holds others"
    ):
        _fused(model, device, optimizer=lambda _: own)
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor), name


def _fail(_: object) -> torch.optim.Optimizer:
    raise KeyError("lr")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": None, "train": "fused"}, "needs an optimizer"),
        ({"train": "host"}, 'with train="host"'),
        ({"optimizer": "adam"}, "makes the optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "on the meta device.* LBFGS needs a closure"),
        ({"optimizer": _fail}, "on the meta device.*This failed: KeyError: 'lr'"),
    ],
)
def test_bad_input(options: dict[str, object], message: str, device: Device) -> None:
    with pytest.raises(ValueError, match=message):
        _fused(Stack(2).to(device.torch_device), device, **options)


def test_parts_of_a_layer_are_stepped_in_backwards_of_their_own(device: Device) -> None:
    class Parts(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.up, self.norm(x), use_reentrant=True)
            return x + checkpoint(self.down, y.tanh(), use_reentrant=True) + self.lora_b(self.lora_a(x))

    _compare(Stack(3, block=Parts), device, "sgd", 3, num_slots=2)


def test_layer_that_was_stepped_is_used_within_the_same_backward(device: Device) -> None:
    plain, (batch,) = Stack(6).to(device.torch_device), inputs(device, 1)
    model, found = copy.deepcopy(plain), []

    def use_last(_: torch.Tensor) -> None:
        with torch.no_grad():
            found.append(model.layers[5](batch))

    with _fused(model, device, "sgd", num_slots=2):
        model.stem.register_forward_hook(lambda _, __, output: output.register_hook(use_last) and None)
        model(batch).square().mean().backward()
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    plain(batch).square().mean().backward()
    optimizer.step()

    assert torch.equal(found[0], plain.layers[5](batch))
