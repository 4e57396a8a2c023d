"""How many calls of Python functions of memkit a streamed layer takes in a steady step: each is time of the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.core import torch_private
from memkit.device import ReferenceDevice
from memkit.plan import LayerCosts, ResidencyPlan, plan_streamed_ratio
from memkit.weights import selection
from memkit.weights.gradients import HostGradients
from tests.calls import CallsOfDevice, num_calls
from tests.weights.cases import WIDTH, Result, assert_same, results

NUM_LAYERS = 12


class _Layer(nn.Module):
    """Six parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def _model(train: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*[_Layer() for _ in range(NUM_LAYERS)])
    if train == "frozen":
        layers.requires_grad_(False)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layers, nn.Linear(WIDTH, 4))


def _step(model: nn.Module, *, deviate: Callable[[nn.Module], object] | None = None) -> Result:
    if deviate is not None:
        deviate(model)
    output = model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
    output.square().mean().backward()
    found = results(model, [output])
    model.zero_grad()
    return found


def test_forward_without_grad_mode_costs_the_host_few_calls() -> None:
    model, device = _model("frozen"), CallsOfDevice()

    @torch.no_grad()
    def step() -> None:
        model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))

    with memkit.LayerOffload(model, num_resident=0, train="frozen", device=device):
        for _ in range(40):  # with parameters that require grad, so many are timed
            step()
        device.counts.clear()
        found = num_calls(step)
        counts = {what: number / NUM_LAYERS for what, number in device.counts.items()}

    assert found <= 27 * NUM_LAYERS
    assert counts.get("timed", 0) <= 2, counts  # around a wait, as this device's copies are late
    assert counts["untimed"] <= 2, counts
    assert counts["waits"] <= 2, counts


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_layer_costs_as_few_once_the_share_was_found(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all go on streaming. Until then, graphs that are alive are known by what they hold."""
    model, device = _model("frozen"), ReferenceDevice()

    def choose(candidates: Any, times: Any, plan: ResidencyPlan, **options: Any) -> ResidencyPlan:
        costs = [LayerCosts(name=layer.name, num_bytes=layer.num_bytes) for layer in plan.layers]
        return plan_streamed_ratio(costs, ratio, num_slots=options["num_slots"])

    monkeypatch.setattr(selection, "plan_measured", choose)
    with memkit.LayerOffload(model, offload_ratio="auto", train="frozen", device=device) as offload:
        for _ in range(6):
            _step(model)
        found, num_streamed = num_calls(lambda: _step(model)), len(offload.plan.streamed)

        assert num_streamed == ratio * NUM_LAYERS
    assert found <= 65 * num_streamed


@pytest.mark.parametrize(("train", "most"), [("frozen", 95), ("host", 143)])
def test_checkpointed_layer_costs_the_host_few_calls(train: str, most: int) -> None:
    """Its forward runs twice, and what it saves goes through the hooks of the checkpoint."""
    model, device = _model(train), ReferenceDevice()
    model[1] = _Checkpointed(*model[1])  # type: ignore[misc]
    with memkit.LayerOffload(model, list(model[1]), num_resident=0, train=train, device=device):
        for _ in range(4):
            _step(model)
        found = num_calls(lambda: _step(model))

    assert found <= most * NUM_LAYERS


def _reversed(model: nn.Module) -> None:
    model[1] = nn.Sequential(*reversed(model[1]))  # type: ignore[index,arg-type]


def _hooked(model: nn.Module) -> None:
    model[1][5].up.register_forward_hook(lambda *given: given[-1].tanh())  # type: ignore[index,union-attr]


def _scaled(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def _replaced(model: nn.Module) -> None:
    state = {name: tensor.detach().clone() * 0.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _saving_more(model: nn.Module) -> None:
    model[1][3].norm.weight.requires_grad_(False)  # type: ignore[index,union-attr]


def _leaving_out(model: nn.Module) -> None:
    """Some gradients do not come."""
    layer = model[1][4]  # type: ignore[index]
    layer.forward = lambda x: x + layer.down(layer.norm(x).repeat(1, 24 // WIDTH + 1)[:, :24])  # type: ignore[union-attr]


def _having_gradients(model: nn.Module) -> None:
    """Some gradients are added to others."""
    for parameter in model[1][7].parameters():  # type: ignore[index,union-attr]
        parameter.grad = torch.full_like(parameter, 0.25) if parameter.requires_grad else None


@pytest.mark.core(1)
@pytest.mark.parametrize("deviate", [_reversed, _hooked, _scaled, _replaced, _saving_more, _leaving_out, _having_gradients])
@pytest.mark.parametrize("train", ["frozen", "host"])
def test_step_unlike_those_before_is_exact(train: str, deviate: Callable[[nn.Module], object]) -> None:
    model, device = _model(train), ReferenceDevice()
    plain = copy.deepcopy(model)
    with memkit.LayerOffload(model, num_resident=0, train=train, device=device):
        for number in range(6):
            changed = deviate if number == 3 else None
            assert_same(_step(model, deviate=changed), _step(plain, deviate=changed))
    device.synchronize()
    assert not device.races


@pytest.mark.parametrize("has_guards", [False, True])
def test_gradients_that_come_as_before_are_looked_at_together(has_guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a name of torch's that need not be there. Under autocast, say, they are looked at once more."""
    model, device, looked_at = _model("host"), ReferenceDevice(), list[int]()
    plain, known = copy.deepcopy(model), torch_private.known
    take, seen = HostGradients._take, list[int]()
    monkeypatch.setattr(HostGradients, "_take", lambda self, made: (seen.append(len(made)), take(self, made))[1])
    if not has_guards:
        monkeypatch.setattr(torch_private, "known", lambda *names: () if names == ("TensorGuards",) else known(*names))
    with memkit.LayerOffload(model, num_resident=0, train="host", device=device):
        for number in range(6):
            with torch.autocast("cpu", enabled=number == 4):
                assert_same(_step(model), _step(plain))
            looked_at.append(len(seen))
            seen.clear()

    always = [NUM_LAYERS] * 6
    assert looked_at == ([NUM_LAYERS, 0, 0, 0, NUM_LAYERS, NUM_LAYERS] if has_guards else always)
    assert not device.races


def test_weights_that_the_caller_keeps_of_a_graph_stay_as_they_were() -> None:
    """What autograd is given of a slot is an alias, so that whoever holds it holds the slot."""
    model, device = _model("frozen"), ReferenceDevice()
    plain = copy.deepcopy(model)
    kept: list[Tensor] = []

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x + weight.sum()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            kept.extend(ctx.saved_tensors)  # type: ignore[attr-defined]
            return grad, None

    for one in (model, plain):
        for layer in one[1]:  # type: ignore[union-attr]
            layer.register_forward_hook(lambda module, _, output: Keeping.apply(output, module.up.weight))
    with memkit.LayerOffload(model, num_resident=0, train="frozen", device=device):
        for _ in range(3):
            assert_same(_step(model), _step(plain))
        expected = [layer.up.weight for layer in reversed(plain[1])]  # type: ignore[union-attr,call-overload]
        of_model = [tensor for number, tensor in enumerate(kept) if number // NUM_LAYERS % 2 == 0]
        for number, tensor in enumerate(of_model):
            assert torch.equal(tensor, expected[number % NUM_LAYERS])
