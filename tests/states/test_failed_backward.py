"""A loop goes on after a backward that has failed within steps: stepped parameters are as after `optimizer.step()`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.transfer import ReferenceDisk
from tests.states.cases import ScheduleFree, assert_same_training, offload
from tests.weights.cases import Stack, inputs

pytestmark = [
    pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel"),
    pytest.mark.filterwarnings("ignore:LayerOffload frees no memory"),
]

WAYS: dict[str, dict[str, Any]] = {update: {"update": update} for update in ("device", "host")}
WAYS |= {"disk": {"disk": ReferenceDisk()}, "layered": {"streams": True}, "layered without states": {"streams": True}}
LOOPS = ["zeroed ahead", "filled with zeros ahead", "zeroed behind", "never zeroed"]


class Failing(Stack):
    """Its backward fails behind the second layer, if told so."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.stem(x)))
        if self.fails:
            x.register_hook(_fail)
        return self.head(self.layers[2](x))


def _fail(_: Tensor) -> None:
    raise ArithmeticError("of the backward")


def _train(model: Failing, optimizer: Any, device: Device, loop: str, *, is_plain: bool) -> None:
    (batch,) = inputs(device, 1)
    for step in range(5):
        if loop == "zeroed ahead" or is_plain:
            optimizer.zero_grad()
        elif loop == "filled with zeros ahead":
            optimizer.zero_grad(set_to_none=False)
        model.fails = step == 2
        with contextlib.suppress(ArithmeticError):
            model(batch + step / 10).square().mean().backward()
            optimizer.step()
            if loop == "zeroed behind":
                optimizer.zero_grad()
        if is_plain and model.fails:
            optimizer.step()


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, lr=1e-2), ScheduleFree], ids=["adamw", "schedule free"])
@pytest.mark.parametrize("loop", [LOOPS[0], *(pytest.param(loop, marks=pytest.mark.slow) for loop in LOOPS[1:])])
@pytest.mark.parametrize("way", WAYS)
def test_loop_goes_on(
    way: str, loop: str, make: Callable[[Any], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, options = ReferenceDevice(), dict(WAYS[way])
    torch.manual_seed(0)
    model = Failing(3)
    plain = copy.deepcopy(model)
    plain_optimizer = make(plain.parameters())
    _train(plain, plain_optimizer, device, loop, is_plain=True)
    with contextlib.ExitStack() as stack:
        optimizer: Any = None
        if options.pop("streams", False):
            if way == "layered without states" and make is ScheduleFree:
                pytest.skip("it keeps state in its groups, which LayerOffload refuses")
            layers = memkit.LayerOffload(model, train="fused", optimizer=make, device=device, offload_ratio=0.5, num_slots=2)
            optimizer = stack.enter_context(layers).optimizer
        else:
            optimizer = make(model.parameters())
        if way != "layered without states":
            stack.enter_context(offload(optimizer, device, when="backward", **options))
        _train(model, optimizer, device, loop, is_plain=False)
    assert_same_training(plain, plain_optimizer, model, optimizer)
    assert not device.races


@pytest.mark.parametrize("update", ["device", "host"])
def test_gradients_that_are_zeroed_are_of_another_step_where_no_forward_of_a_module_runs(update: str) -> None:
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.5, momentum=0.9)

    def loss(fails: bool = False) -> Tensor:
        found = weights[0] * 2
        if fails:
            found.register_hook(_fail)
        return (found.square() * weights[1]).sum()

    with offload(optimizer, ReferenceDevice(), when="backward", update=update):
        with pytest.raises(ArithmeticError):
            loss(fails=True).backward()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    assert weights[1].tolist() == pytest.approx([-4.8] * 4)


def test_another_backward_of_gradients_that_are_not_zeroed_is_refused() -> None:
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    with offload(torch.optim.SGD(weights), ReferenceDevice(), when="backward"):
        found = weights[0] * 2
        found.register_hook(_fail)
        with pytest.raises(ArithmeticError):
            (found + weights[1]).sum().backward()
        with pytest.raises(StateOffloadError, match="was stepped within an earlier backward of this step"):
            weights[1].sum().backward()
