"""`when="backward"`: each parameter is stepped when its gradient is complete, bit for bit as by a step behind the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memkit.device import Device
from memkit.errors import StateOffloadError
from tests.states.cases import (
    OPTIMIZERS,
    Case,
    assert_same,
    assert_same_training,
    batch,
    groups_of,
    make_net,
    offload,
    often,
    train,
)


def _train(model: Any, optimizer: Any, states: Any, device: Device, steps: range, *, accumulate: int = 1) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        for part in range(accumulate - 1):
            with states.accumulate():
                model(batch(device, 10 * step + part, dtype)).float().square().mean().backward()
        model(batch(device, 10 * step + accumulate - 1, dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.parametrize("budget", [0, 8192])
@pytest.mark.parametrize("case", often(OPTIMIZERS), ids=str)
def test_steps_as_the_plain_optimizer(device: Device, case: Case, budget: int) -> None:
    plain, model = make_net(device, case), make_net(device, case)
    plain_optimizer, optimizer = case.make(groups_of(plain)), case.make(groups_of(model))
    schedulers = [torch.optim.lr_scheduler.StepLR(own, 2, 0.5) for own in (plain_optimizer, optimizer)]

    with offload(optimizer, device, when="backward", device_budget=budget) as states:
        for step in range(5):
            train(plain, plain_optimizer, device, range(step, step + 1), accumulate=2)
            _train(model, optimizer, states, device, range(step, step + 1), accumulate=2)
            for scheduler in schedulers:
                scheduler.step()
        assert_same_training(plain, plain_optimizer, model, optimizer)


def test_gradients_are_let_go_within_the_backward(device: Device) -> None:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(optimizer, device, when="backward") as states:
        _train(model, optimizer, states, device, range(2))
        model(batch(device, 2)).square().mean().backward()
        sizes = [parameter.grad.untyped_storage().nbytes() for parameter in model.parameters() if parameter.grad is not None]
        assert len(sizes) == 9
        assert max(sizes) == 4
        optimizer.step()


def test_with_float32_copies(device: Device) -> None:
    models = [make_net(device, dtype=torch.bfloat16) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in models]
    with (
        offload(optimizers[0], device, master=torch.float32),
        offload(optimizers[1], device, master=torch.float32, when="backward") as states,
    ):
        train(models[0], optimizers[0], device, range(4), dtype=torch.bfloat16)
        _train(models[1], optimizers[1], states, device, range(4))
        assert_same(models[0].state_dict(), models[1].state_dict())
        assert_same(optimizers[0].state_dict(), optimizers[1].state_dict())


@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_checkpoints(device: Device, reentrant: bool) -> None:
    nets = [make_net(device), make_net(device)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    with offload(optimizers[1], device, when="backward"):
        for net, own in zip(nets, optimizers, strict=True):
            for step in range(3):
                x = batch(device, step).requires_grad_()
                for layer in net.layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                net.head(x).square().mean().backward()
                own.step()
                own.zero_grad()
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model, optimizer: torch.amp.GradScaler("cpu").unscale_(optimizer),
        lambda model, optimizer: model.head.weight.grad + 1,
    ],
)
def test_use_of_a_consumed_gradient_is_refused(device: Device, use: Any) -> None:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(optimizer, device, when="backward"):
        model(batch(device, 0)).square().mean().backward()
        with pytest.raises((StateOffloadError, AssertionError)) as caught:
            use(model, optimizer)
        if isinstance(caught.value, StateOffloadError):
            assert "was consumed by the step within the backward" in str(caught.value)
        optimizer.step()


def test_a_second_backward_without_accumulate_is_refused(device: Device) -> None:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(optimizer, device, when="backward"):
        model(batch(device, 0)).square().mean().backward()
        with pytest.raises(StateOffloadError, match=r"To accumulate, put `with states.accumulate\(\):` around"):
            model(batch(device, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(batch(device, 2)).square().mean().backward()
        optimizer.step()


def test_a_failed_backward(device: Device) -> None:
    nets = [make_net(device), make_net(device)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    with offload(optimizers[1], device, when="backward") as states:
        train(nets[0], optimizers[0], device, range(2))
        _train(nets[1], optimizers[1], states, device, range(2))

        def fail(_: torch.Tensor) -> None:
            raise ArithmeticError("no")

        handle = nets[1].layers[1].weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            nets[1](batch(device, 20)).square().mean().backward()
        handle.remove()
        optimizers[1].step()
        optimizers[1].zero_grad()
        nets[0](batch(device, 20)).square().mean().backward()
        for name in ("layers.0.weight", "layers.0.bias", "layers.1.weight"):
            nets[0].get_parameter(name).grad = None  # these had none
        optimizers[0].step()
        assert_same(nets[0].head.state_dict(), nets[1].head.state_dict())
        assert_same(nets[0].layers[0].state_dict(), nets[1].layers[0].state_dict())


def test_loading_between_a_backward_and_the_next(device: Device) -> None:
    nets = [make_net(device), make_net(device)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    with offload(optimizers[1], device, when="backward") as states:
        train(nets[0], optimizers[0], device, range(3))
        _train(nets[1], optimizers[1], states, device, range(5, 7))
        nets[1].load_state_dict(nets[0].state_dict())
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        train(nets[0], optimizers[0], device, range(3, 5))
        _train(nets[1], optimizers[1], states, device, range(3, 5))
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])


def test_it_steps_on_the_device(device: Device) -> None:
    optimizer = torch.optim.AdamW(make_net(device).parameters(), fused=True)

    with pytest.raises(ValueError, match='when="backward" steps on the device; found update="host"'):
        offload(optimizer, device, when="backward", update="host")
    with pytest.raises(ValueError, match="when is 'step' or 'backward'; found 'forward'"):
        offload(optimizer, device, when="forward")


def test_a_learning_rate_set_behind_the_backward_is_refused(device: Device) -> None:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(optimizer, device, when="backward"):
        model(batch(device, 0)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(StateOffloadError, match=r'"lr" of a group was set between the backward and optimizer\.step\(\)'):
            optimizer.step()
        optimizer.step()
        assert float(optimizer.state[model.head.weight]["step"]) == 1
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.25
        model(batch(device, 1)).square().mean().backward()
        optimizer.step()


def test_a_step_left_out_is_told(device: Device) -> None:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(optimizer, device, when="backward"):
        model(batch(device, 0)).square().mean().backward()
        optimizer.zero_grad()
        with pytest.raises(StateOffloadError, match=r"whose gradients you have zeroed.*call optimizer\.step\(\) first"):
            model(batch(device, 1)).square().mean().backward()
        optimizer.step()


def test_closing_behind_a_backward(device: Device) -> None:
    models = [make_net(device), make_net(device)]
    optimizers = [torch.optim.AdamW(net.parameters()) for net in models]
    train(models[0], optimizers[0], device, range(1))
    states = offload(optimizers[1], device, when="backward")
    models[1](batch(device, 0)).square().mean().backward()
    states.close()
    assert all(parameter.grad is None for parameter in models[1].parameters())
    optimizers[1].step()
    assert_same_training(models[0], optimizers[0], models[1], optimizers[1])
