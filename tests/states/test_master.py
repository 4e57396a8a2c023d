"""`master=torch.float32`: float32 copies are stepped, and the parameters are these, rounded."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from memkit.device import Device
from memkit.errors import StateOffloadError
from memkit.states.packing import follow
from tests.states.cases import (
    OPTIMIZERS,
    WAYS,
    Case,
    Net,
    Pair,
    assert_same,
    batch,
    cut,
    make_net,
    make_training,
    offload,
    often,
    skip_host_steps,
    train,
)

CASES = [case for case in OPTIMIZERS if case.name != "rebinding"]


class Reference:
    """A bfloat16 model whose optimizer is the plain one over float32 copies of its parameters."""

    def __init__(self, model: Net, case: Case) -> None:
        self.model = model
        self.copies = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
        self.optimizer = case.make(self.copies)

    def train(self, device: Device, steps: Iterable[int]) -> None:
        for step in steps:
            for part in range(2):
                self.model(batch(device, 10 * step + part, torch.bfloat16)).float().square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            for parameter, copied in zip(self.model.parameters(), self.copies, strict=True):
                copied.grad = None if parameter.grad is None else parameter.grad.float()
            self.optimizer.step()
            with torch.no_grad():
                for parameter, copied in zip(self.model.parameters(), self.copies, strict=True):
                    parameter.copy_(copied)
                    parameter.grad = None

    def state_dict(self) -> dict:
        found = self.optimizer.state_dict()
        state = {key: {**entries, "master": self.copies[key].detach()} for key, entries in found["state"].items() if entries}
        return {**found, "state": state}


@pytest.mark.covering(2)
@pytest.mark.core(1)
@pytest.mark.parametrize("budget", [0, 12288])
@pytest.mark.parametrize("case", often(CASES), ids=str)
def test_steps_as_the_plain_optimizer_over_copies(device: Device, case: Case, budget: int) -> None:
    reference = Reference(make_net(device, case, torch.bfloat16), case)
    model = make_net(device, case, torch.bfloat16)
    optimizer = case.make(model.parameters())

    with offload(optimizer, device, master=torch.float32, device_budget=budget):
        reference.train(device, range(4))
        train(model, optimizer, device, range(4), clip=0.1, accumulate=2)

        assert_same(reference.model.state_dict(), model.state_dict(), "parameters")
        state = optimizer.state_dict()
        state["state"] = {key: entries for key, entries in state["state"].items() if "master" in entries}
        assert_same(reference.state_dict(), state, "states")


@pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
@pytest.mark.covering(1)
@pytest.mark.parametrize(("way", "is_cut"), [(way, number % 2 == 0) for number, way in enumerate(WAYS)])
def test_ways_of_stepping_copies(way: str, is_cut: bool, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_host_steps(device, way)
    pair = Pair(device, dtype=torch.bfloat16)
    with offload(pair.plain_optimizer, device, master=torch.float32, device_budget="1GiB"):
        if is_cut:
            cut(monkeypatch)
        with offload(pair.optimizer, device, master=torch.float32, **WAYS[way]) as states:
            for step in range(6):
                pair.train([step])
                states.wait()
                for net in pair.nets:
                    if step == 2:
                        with torch.no_grad():
                            net.head.weight.mul_(0.5)
                    elif step == 3:
                        net.layers[0].weight.data[5:20].fill_(0.25)
            pair.assert_same()
        pair.assert_same()


def test_write_back_is_seen_by_autograd(device: Device) -> None:
    model, optimizer = make_training(device, dtype=torch.bfloat16)

    with offload(optimizer, device, master=torch.float32):
        loss = model(batch(device, 0, torch.bfloat16)).float().square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_checkpoint_without_copies_is_taken_up(device: Device) -> None:
    plain = make_net(device, dtype=torch.bfloat16)
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    train(plain, plain_optimizer, device, range(2))
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters())

    with offload(optimizer, device, master=torch.float32):
        optimizer.load_state_dict(plain_optimizer.state_dict())
        entries = optimizer.state[model.head.weight]
        assert_same(entries["master"], model.head.weight.detach().float())
        assert_same(entries["exp_avg"], plain_optimizer.state[plain.head.weight]["exp_avg"].float())
        train(model, optimizer, device, range(2, 4))


def test_copies_keep_their_precision_through_a_checkpoint(device: Device) -> None:
    pair = Pair(device, dtype=torch.bfloat16)
    with offload(pair.plain_optimizer, device, master=torch.float32), offload(pair.optimizer, device, master=torch.float32):
        pair.train_plain(range(3))
        pair.model.load_state_dict(pair.plain.state_dict())
        pair.optimizer.load_state_dict(copy.deepcopy(pair.plain_optimizer.state_dict()))
        pair.train(range(3, 6))
        pair.assert_same()
        assert pair.optimizer.state[pair.model.head.weight]["exp_avg"].dtype is torch.float32


def test_master_of_float32_is_refused(device: Device) -> None:
    optimizer = torch.optim.AdamW(make_net(device).parameters())

    with pytest.raises(ValueError, match=r"is for parameters of lower precision; found torch\.float32"):
        offload(optimizer, device, master=torch.float32)


def test_a_written_zero_of_the_other_sign_counts() -> None:
    master = torch.tensor([-0.0, 1.0 + 2.0**-20, float("nan")])
    parameter = torch.tensor([0.0, 1.0, float("nan")], dtype=torch.bfloat16)

    follow(master, parameter)

    assert_same(master[:2], torch.tensor([0.0, 1.0 + 2.0**-20]))
    assert bool(master[2].isnan())


@pytest.mark.parametrize("options", [{}, {"device_budget": "1GiB"}, {"when": "backward"}])
@pytest.mark.parametrize("size", [(), (0, 3), (4, 4)])
def test_parameters_that_were_stepped_without_copies(device: Device, size: tuple[int, ...], options: Any) -> None:
    parameters = [nn.Parameter(torch.ones(s, dtype=torch.bfloat16, device=device.torch_device)) for s in (size, (8, 8))]
    copies = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    optimizer_of_copies = torch.optim.AdamW(copies, lr=1e-2, foreach=False)

    def backward() -> None:
        sum((parameter.float() * 3).square().sum() for parameter in parameters).backward()

    backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer_of_copies.load_state_dict(saved)
    for parameter, copied in zip(parameters, copies, strict=True):
        copied.data.copy_(parameter)
    optimizer.zero_grad()
    with offload(optimizer, device, master=torch.float32, **options):
        for step in range(3):
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for parameter, copied in zip(parameters, copies, strict=True):
                own = parameter.detach().clone().requires_grad_()
                (own.float() * 3).square().sum().backward()
                copied.grad = own.grad.float()
            backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer_of_copies.step()
            for parameter, copied in zip(parameters, copies, strict=True):
                assert_same(parameter, copied.bfloat16())
                assert_same(optimizer.state[parameter]["master"], copied)


@pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
@pytest.mark.parametrize("update", ["device", "host"])
def test_a_parameter_that_is_cast_to_the_precision_of_its_copy(device: Device, update: str) -> None:
    parameter = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16, device=device.torch_device))
    optimizer = torch.optim.AdamW([parameter])
    with offload(optimizer, device, update=update, master=torch.float32):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        parameter.grad = None
        parameter.data = parameter.data.float()
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(StateOffloadError, match=r"float32 copy of parameter 0\.0, which was cast to torch\.float32 since"):
            optimizer.step()
