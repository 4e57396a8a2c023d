"""`update="host"` steps as the class steps CPU copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memkit.device import Device
from memkit.plan import Update
from tests.states.cases import (
    OPTIMIZERS,
    Case,
    assert_same,
    assert_same_training,
    make_net,
    offload,
    often,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
# the plain optimizer on a GPU differs from the CPU's in last bits: there the CPU's is the reference
IS_HOST_THE_DEVICE = "cpu"


@pytest.mark.covering(2)
@pytest.mark.core(1)
@pytest.mark.parametrize("update", ["host"])
@pytest.mark.parametrize("case", often(OPTIMIZERS), ids=str)
def test_steps_as_the_class_on_cpu_copies(device: Device, case: Case, update: str) -> None:
    if device.torch_device.type != IS_HOST_THE_DEVICE:
        pytest.skip("the next test compares with CPU copies")
    plain, model = make_net(device, case), make_net(device, case)
    plain_optimizer, optimizer = case.make(plain.parameters()), case.make(model.parameters())

    with offload(optimizer, device, update=update) as states:
        train(plain, plain_optimizer, device, range(5), clip=0.1, accumulate=2)
        train(model, optimizer, device, range(5), clip=0.1, accumulate=2)
        assert_same_training(plain, plain_optimizer, model, optimizer)
        sides = {piece.update for piece in states.plan.pieces if not piece.is_resident}
        assert sides == ({Update.HOST} if update == "host" else set(Update))

    train(plain, plain_optimizer, device, range(5, 7))
    train(model, optimizer, device, range(5, 7))
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_host_follows_cpu_copies(device: Device) -> None:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    copies = [torch.nn.Parameter(parameter.detach().cpu().clone()) for parameter in model.parameters()]
    reference = torch.optim.AdamW(copies, lr=1e-2, fused=True)
    with offload(optimizer, device, update="host"):
        for step in range(4):
            model(torch.full((2, 24), 0.1 * step, device=device.torch_device)).square().mean().backward()
            for parameter, copied in zip(model.parameters(), copies, strict=True):
                copied.grad = None if parameter.grad is None else parameter.grad.cpu().clone()
            reference.step()
            optimizer.step()
            optimizer.zero_grad()
        for parameter, copied in zip(model.parameters(), copies, strict=True):
            assert_same(parameter.detach().cpu(), copied.detach())
        assert_same(reference.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("update", ["host"])
def test_with_float32_copies(device: Device, update: str) -> None:
    models = [make_net(device, dtype=torch.bfloat16) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=device.torch_device.type == "cpu") for net in models]
    if device.torch_device.type != "cpu":
        pytest.skip("the device steps differ from the host's in last bits")
    with (
        offload(optimizers[0], device, master=torch.float32),
        offload(optimizers[1], device, master=torch.float32, update=update),
    ):
        for net, own in zip(models, optimizers, strict=True):
            train(net, own, device, range(4), clip=0.1, dtype=torch.bfloat16)
        assert_same(models[0].state_dict(), models[1].state_dict())
        assert_same(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_an_error_of_the_class_on_the_host_says_what_is_lost(device: Device) -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if Failing.fails:
                raise ArithmeticError("no")
            return result

    model = make_net(device)
    optimizer = Failing(model.parameters(), lr=1e-2, momentum=0.9)
    with offload(optimizer, device, update="host"):
        train(model, optimizer, device, range(2))
        saved = {key: {**entries} for key, entries in optimizer.state_dict()["state"].items()}
        groups = optimizer.state_dict()["param_groups"]
        saved = {
            key: {name: value.clone() for name, value in entries.items() if value is not None} for key, entries in saved.items()
        }
        before = {name: value.clone() for name, value in model.state_dict().items()}
        Failing.fails = True
        with pytest.raises(ArithmeticError, match="no"):
            train(model, optimizer, device, range(2, 3))
        Failing.fails = False
        assert_same(before, model.state_dict())
        with pytest.raises(Exception, match=r"they are lost. Load a checkpoint"):
            optimizer.step()
        optimizer.load_state_dict({"state": saved, "param_groups": groups})
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(device: Device, fused: bool) -> None:
    if device.torch_device.type != "cpu":
        pytest.skip("the plain steps differ from the host's in last bits")
    nets = [make_net(device), make_net(device)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused) for net in nets]
    with offload(optimizers[1], device, update="host"):
        for net, own in zip(nets, optimizers, strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for step in range(5):
                loss = net(torch.full((2, 24), 0.1 * step)).square().mean()
                scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
                scaler.step(own)
                scaler.update()
                own.zero_grad()
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])
