"""`overlap_forward=True`: the next forward runs beside the step, and reads only stepped parameters."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from memkit.device import Device, ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.states import device_steps, host_steps
from tests.states.cases import FailsOnHost, Pair, assert_same, batch, is_same, make_net, make_training, offload, train
from tests.states.test_backward import Slow

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")


class _Net(nn.Module):
    """Has a module that reads parameters of another one without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.attention(x, x, x)[0])


def test_modules_wait_for_their_own_parameters_only() -> None:
    device = ReferenceDevice()
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(optimizer, device, overlap_forward=True) as states:
        assert states._overlap is not None
        for _ in range(2):
            model(batch(device, 0)).sum().backward()
            optimizer.step()
            numbers = []
            handles = [
                layer.register_forward_hook(lambda *_, numbers=numbers: numbers.append(len(states._overlap._stepped)))  # type: ignore[union-attr]
                for layer in model
            ]
            model(batch(device, 0)).sum()
            for handle in handles:
                handle.remove()
            assert numbers == sorted(numbers, reverse=True)
            assert numbers[0] > numbers[5] > numbers[-1] == 0


class Drawing(torch.optim.SGD):
    """Adds noise, in the order in which it steps parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(torch.rand(()).item(), alpha=1e-3)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("update", ["device", "host"])
def test_what_the_forward_comes_to_first_is_stepped_first(monkeypatch: pytest.MonkeyPatch, draws: bool, update: str) -> None:
    """A model waits for its head when it begins, since it might read the head's parameters."""
    device = ReferenceDevice()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(6)])
            self.head = nn.Linear(32, 32, bias=False)

        def forward(self, x):
            return self.head(self.body(x))

    torch.manual_seed(0)
    made, x = Model(), torch.randn(8, 32)
    kind = partial(Drawing, lr=0.1, momentum=0.9) if draws else torch.optim.AdamW
    pair = Pair(device, kind, net=lambda *_, **__: copy.deepcopy(made))
    stepped, side = list[str](), host_steps.HostSteps if update == "host" else device_steps.DeviceSteps
    name = "begin" if update == "host" else "step"
    step_of = getattr(side, name)
    monkeypatch.setattr(side, name, lambda self, piece, *args: (stepped.append(piece.names), step_of(self, piece, *args))[1])
    with offload(pair.optimizer, device, overlap_forward=True, update=update) as states:
        for step in range(4):
            for net, own in pair:
                torch.manual_seed(step)
                net(x).square().mean().backward()
                own.step()
                own.zero_grad()
                if net is pair.model:
                    net(x)
        states.wait()
        in_order = [f"parameter 0.{number}" for number in range(7)]
        assert stepped[:7] == in_order
        assert stepped[-7:] == (in_order if draws else [in_order[-1], *in_order[:-1]])
        pair.assert_same()


def test_a_module_that_reads_those_of_another(device: Device) -> None:
    pair, x = Pair(device, net=lambda *_, **__: _Net().to(device.torch_device)), torch.ones(3, 2, 8, device=device.torch_device)
    with offload(pair.optimizer, device, overlap_forward=True) as states:
        for net, own in pair:
            for _ in range(3):
                net(x).square().mean().backward()
                own.step()
                own.zero_grad()
        pair.model(x)
        assert states._overlap is not None
        assert not states._overlap._stepped
        pair.assert_same()


@pytest.mark.parametrize("update", ["device", "host"])
def test_models_with_an_optimizer_each_wait_for_their_own(update: str) -> None:
    device = ReferenceDevice()
    nets, plain = [[make_net(device) for _ in range(2)] for _ in range(2)]
    own, others = ([torch.optim.AdamW(net.parameters(), fused=True) for net in both] for both in (nets, plain))
    states = [offload(optimizer, device, overlap_forward=True, update=update) for optimizer in own]
    for models, optimizers in ((plain, others), (nets, own)):
        for step in range(3):
            for net in reversed(models):
                net(batch(device, step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for each in states:
        each.close()

    for one, other in zip(nets, plain, strict=True):
        assert_same(one.state_dict(), other.state_dict())


def test_dropped_before_what_was_stepped_on_the_host_came_back() -> None:
    def dropped() -> tuple[nn.Module, weakref.ref[object]]:
        model, optimizer = make_training(device := ReferenceDevice(), fused=True)
        states = offload(optimizer, device, overlap_forward=True, update="host")
        model(batch(device, 0)).square().mean().backward()
        optimizer.step()
        return model, weakref.ref(states)

    def collect() -> None:
        while states() is not None:  # the thread holds it until all is stepped
            gc.collect()

    model, states = dropped()
    with pytest.warns(UserWarning, match=r"dropped without .* parameter 0.* are as before the last step"):
        collect()

    assert_same(model.state_dict(), make_net(ReferenceDevice()).state_dict())
    nn.Identity()(torch.ones(1))  # the hook of all forwards goes


def test_gradients_are_held_until_they_were_read(device: Device) -> None:
    model, optimizer = make_training(device)
    with offload(optimizer, device, overlap_forward=True) as states:
        model(batch(device, 0)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert states._overlap is not None
        held = [id(tensor) for tensors in states._overlap._held.values() for tensor in tensors]
        assert len(gradients) == 9
        assert {*map(id, gradients)} <= {*held}
        states.wait()
        assert not states._overlap._held


def test_a_forward_on_another_stream_takes_no_wait_away() -> None:
    model, optimizer = make_training(device := ReferenceDevice(), fused=True)
    with offload(optimizer, device, overlap_forward=True) as states:
        train(model, optimizer, device, range(2))
        side = device.new_stream("side")
        device.wait_event(side, device.record_event(timed=False))
        with device.on_stream(side), torch.no_grad():
            model(batch(device, 2))
        train(model, optimizer, device, range(2, 4))
        with device.on_stream(side):
            states.wait()
        model(batch(device, 4))
        device.synchronize()
    assert not device.races


def test_what_is_written_behind_the_step_is_not_what_is_stepped_with(device: Device) -> None:
    """A learning rate that is a tensor, and the scale of a scaler, are written in place as soon as `step()` has returned."""
    pair = Pair(device, lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2, device=device.torch_device), fused=True))
    with offload(pair.optimizer, device, overlap_forward=True) as states:
        for net, own in pair:
            scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=8.0, growth_interval=1)
            for step in range(4):
                scaler.scale(net(batch(device, step)).square().mean()).backward()
                scaler.step(own)
                scaler.update()
                own.param_groups[0]["lr"].mul_(0.5)
                own.zero_grad()
        assert states._overlap is not None
        assert states._overlap._run is not None
        assert all(group["lr"] is not pair.optimizer.param_groups[0]["lr"] for group in states._overlap._run._groups)
        states.wait()
        assert states._overlap._run is None
        pair.assert_same()


def test_betas_that_are_tensors_are_those_of_the_step() -> None:
    pair = Pair(device := ReferenceDevice(), Slow)
    for own in pair.optimizers:
        own.param_groups[0].update(fused=False, foreach=False, betas=(torch.tensor(0.5), torch.tensor(0.9)))

    with offload(pair.optimizer, device, overlap_forward=True, update="host") as states:
        for step in range(3):
            pair.optimizer.gate.is_open.clear()
            for net, own in pair:
                net(batch(device, step)).square().mean().backward()
                own.step()
                torch._foreach_mul_(list(own.param_groups[0]["betas"]), 0.5)
                own.zero_grad()
            pair.optimizer.gate.is_open.set()
            states.wait()
        pair.assert_same()


def test_the_step_and_the_forward_of_others_do_not_wait_for_the_host() -> None:
    made = nn.Sequential(*[nn.Linear(24, 24) for _ in range(12)])
    pair = Pair(device := ReferenceDevice(), Slow, net=lambda *_, **__: copy.deepcopy(made))
    with offload(pair.optimizer, device, overlap_forward=True, update="host") as states:
        assert states._overlap is not None
        for step in range(3):
            pair.optimizer.gate.is_open.clear()
            for net, own in pair:
                net(batch(device, step)).sum().backward()
                own.step()
            assert all(parameter.grad is None for parameter in pair.model.parameters())
            assert len(states._overlap._leaving) == len(states.plan.pieces) > 0
            pair.optimizer.gate.is_open.set()
            pair.plain_optimizer.zero_grad()
            assert_same(pair.plain(batch(device, 7)), pair.model(batch(device, 7)))
            assert not states._overlap._leaving
        states.wait()
        pair.assert_same()
    device.synchronize()
    assert not device.races


@pytest.mark.parametrize("ends", ["load", "wait", "forward", "step"])
@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("swaps", [False, True])
def test_parameters_written_to_beside_their_step_are_refused(device: Device, update: str, ends: str, swaps: bool) -> None:
    pair = Pair(device, fused=True)
    with offload(pair.optimizer, device, overlap_forward=True, update=update) as states:
        pair.train(range(2))
        saved = copy.deepcopy((pair.plain.state_dict(), pair.plain_optimizer.state_dict()))
        what = {
            "load": lambda: pair.optimizer.load_state_dict(saved[1]),
            "wait": states.wait,
            "forward": lambda: pair.model(batch(device, 1)),
            "step": pair.optimizer.step,
        }
        if swaps:
            head = pair.model.head.weight
            head.data = head.data.clone()
        else:
            pair.model.load_state_dict(saved[0])
        with pytest.raises(StateOffloadError, match=r"written to beside its step.* Call states\.wait\(\) first"):
            what[ends]()
        pair.model.load_state_dict(saved[0])
        pair.optimizer.load_state_dict(saved[1])
        pair.optimizer.zero_grad()
        if device.torch_device.type == "cpu" or update == "device":
            pair.train(range(2, 4))
            states.wait()
            pair.assert_same()


@pytest.mark.parametrize("ends", ["wait", "forward", "step", "state_dict"])
def test_an_error_on_the_host_is_raised_by_what_waits_for_it(ends: str) -> None:
    model, optimizer = make_training(device := ReferenceDevice(), FailsOnHost)
    optimizer.told["await"] = has_returned = threading.Event()
    with offload(optimizer, device, overlap_forward=True, update="host") as states:
        model(batch(device, 0)).square().mean().backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.told["fails"] = 3
        optimizer.step()
        has_returned.set()
        what = {
            "wait": states.wait,
            "forward": lambda: model(batch(device, 1)),
            "step": optimizer.step,
            "state_dict": optimizer.state_dict,
        }
        with pytest.raises(StateOffloadError, match=r"the step of .* on the host has failed: ArithmeticError: no"):
            what[ends]()
        assert sum(not is_same(*pair) for pair in zip(before, model.parameters(), strict=True)) == 8
        train(model, optimizer, device, range(2))
        states.wait()
    device.synchronize()
    assert not device.races
