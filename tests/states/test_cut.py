"""Large parameters are stepped in windows, bit for bit as whole."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit.core.torch_state import num_users
from memkit.device import Device, ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.plan import states as state_pieces
from memkit.states import trial
from memkit.states.pieces import CutPiece
from tests.states.cases import (
    WAYS,
    EightBit,
    FailsOnHost,
    Pair,
    PerParameter,
    assert_same,
    assert_same_training,
    batch,
    make_training,
    offload,
    train,
)
from tests.states.test_trial import Momentum

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parameters with more than some kilobytes of states large, stepped in windows of 512 elements or more."""
    monkeypatch.setattr(state_pieces, "PIECE_BYTES", 6000)
    for module in (state_pieces, trial):
        monkeypatch.setattr(module, "WINDOW_NUMEL", 512)


class Net(nn.Module):
    """Has two large parameters."""

    def __init__(self, *, only_matrices: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(24, 64, bias=not only_matrices)
        self.second = nn.Linear(64, 63, bias=not only_matrices)
        self.head = nn.Linear(63, 3, bias=not only_matrices)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def make_net(device: Device, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return Net().to(device.torch_device, dtype)


def failing_at(parameter: nn.Parameter, window: int) -> Tensor:
    """Return a gradient with NaN in one window of 512 elements."""
    found = torch.full_like(parameter, 2.0)
    found.view(-1)[512 * window] = math.nan
    return found


def num_cut(states: Any) -> int:
    """Return how many parameters are stepped in windows."""
    return sum(isinstance(piece, CutPiece) and len(piece.parts) > 1 for piece in states._members.pieces)


def test_states_are_those_of_torch(device: Device) -> None:
    model, optimizer = make_training(device, net=make_net)
    with offload(optimizer, device) as states:
        train(model, optimizer, device, range(1))
        entries = dict(optimizer.state[model.second.weight])
        train(model, optimizer, device, range(1, 3))
        assert num_cut(states) == 2
        assert entries.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in optimizer.state[model.second.weight].items():
            assert value is entries[name]
            if value.dim():
                assert value.size() == model.second.weight.size()
                assert value.is_contiguous()
                assert value.untyped_storage().nbytes() == value.nbytes
        assert float(entries["step"]) == 3
        held = optimizer.state_dict()
        copied = copy.deepcopy(held)

    assert_same(copied, held)


@pytest.mark.parametrize("way", ["device", "backward", "host", "beside", "disk", "backward, disk"])
def test_what_lies_otherwise_is_stepped_whole(way: str) -> None:
    """The elements of a parameter or its states are not adjacent."""
    pair = Pair(device := ReferenceDevice(), net=make_net)
    with offload(pair.optimizer, device, **WAYS[way]) as states, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "StateOffload: states of .* were put elsewhere")
        for step in range(10):
            for net, own in pair:
                weight = net.second.weight
                if step == 2:
                    weight.data = weight.data.mT.contiguous().mT
                elif step == 4:
                    weight.data = weight.data.contiguous()
                elif step == 6 and "disk" not in way:
                    for name in ("exp_avg", "exp_avg_sq"):
                        own.state[weight][name] = own.state[weight][name].mT.contiguous().mT
                elif step == 8 and "disk" not in way:
                    own.state[weight] = {name: value.clone().contiguous() for name, value in own.state[weight].items()}
                train(net, own, device, [step])
                states.wait()
            pair.assert_same()
            assert num_cut(states) == (1 if step in ((2, 3) if "disk" in way else (2, 3, 6, 7)) else 2)
    device.synchronize()
    assert not device.races


def test_a_gradient_that_lies_otherwise() -> None:
    pair = Pair(device := ReferenceDevice(), net=make_net)
    with offload(pair.optimizer, device) as states:
        for step in range(3):
            for net, own in pair:
                generator = torch.Generator().manual_seed(step)
                for parameter in net.parameters():
                    parameter.grad = torch.randn(parameter.size()[::-1], generator=generator).permute(
                        *range(parameter.dim())[::-1]
                    )
                own.step()
            pair.assert_same()
        assert num_cut(states) == 2


def test_no_gradient_is_held(device: Device) -> None:
    model, optimizer = make_training(device, net=make_net)
    with offload(optimizer, device):
        model(batch(device, 0)).square().mean().backward()
        optimizer.step()
        held = [weakref.ref(parameter.grad) for parameter in model.parameters()]
        sizes = [parameter.grad.untyped_storage() for parameter in model.parameters()]
        optimizer.zero_grad()
        assert all(ref() is None for ref in held)
        assert all(num_users(storage) == 1 for storage in sizes)


def test_autograd_sees_what_is_written(device: Device) -> None:
    model, optimizer = make_training(device, net=make_net)
    with offload(optimizer, device) as states:
        loss = model(batch(device, 0)).square().mean()
        loss.backward(retain_graph=True)
        model.head.weight.grad = None
        for parameter in (model.first.weight, *model.head.parameters()):
            parameter.grad = None
        optimizer.step()
        assert num_cut(states) == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_room_does_not_grow_with_the_parameter() -> None:
    rooms = []
    for rows in (200, 2000):
        parameter = nn.Parameter(torch.randn(rows, 24))
        optimizer = torch.optim.AdamW([parameter, nn.Parameter(torch.randn(24))])
        device = ReferenceDevice()
        counter = device.memory_counter()
        assert counter is not None
        before = counter.allocated_bytes()
        with offload(optimizer, device) as states:
            for _ in range(3):
                parameter.grad = torch.randn_like(parameter)
                optimizer.step()
            assert num_cut(states) == 1
            rooms.append(states.stats().room_bytes)
            assert counter.peak_bytes() - before <= rooms[-1] + 1024
    assert rooms[0] == rooms[1] <= 5 * 1024 * 8  # the least windows that are no smaller than 6000 bytes


OTHERS = torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)], ids=str)
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_windows_of_true_size_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fused: bool) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(state_pieces, "PIECE_BYTES", 400_000)
    values = torch.randn(1001, 301, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameters = [nn.Parameter(values.clone()) for _ in range(2)]
    optimizers = [torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, fused=fused) for parameter in parameters]
    with offload(optimizers[1], ReferenceDevice()) as states:
        for step in range(3):
            grad = torch.randn(values.size(), generator=torch.Generator().manual_seed(step + 1)).to(dtype)
            for parameter, own in zip(parameters, optimizers, strict=True):
                parameter.grad = grad.clone()
                own.step()
            assert_same(*parameters)
        assert_same(optimizers[0].state_dict(), optimizers[1].state_dict())
        assert num_cut(states) == 1
        assert len(states.plan.pieces[0].windows) >= 3


class PerMatrix(Momentum):
    """Scales each matrix by its own norm, if told so."""

    def scale(self, group: dict[str, Any], index: int) -> float:
        return float(group["params"][index].norm()) if group.get("scaled", True) else 1.0


class DecaysMatrices(Momentum):
    """Treats matrices and vectors differently."""

    def scale(self, group: dict[str, Any], index: int) -> float:
        return 0.5 if group["params"][index].dim() > 1 else 1.0


class Rounding(Momentum):
    """Draws random numbers."""

    def noise(self, parameter: Tensor) -> Any:
        return torch.rand_like(parameter)


class Counts(Momentum):
    """Keeps a sum over all elements, from some step on, without using it."""

    begins_at = 0

    def step_group(self, group: dict[str, Any]) -> None:
        super().step_group(group)
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["number"] = state.get("number", 0) + 1
                if state["number"] > self.begins_at:
                    state["sum"] = float(parameter.grad.sum())


@pytest.mark.parametrize("kind", [PerMatrix, DecaysMatrices, Rounding, Counts, EightBit])
def test_what_is_not_elementwise_is_stepped_whole(kind: Any) -> None:
    device = ReferenceDevice()
    nets = [Net(only_matrices=True), Net(only_matrices=True)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [kind(net.parameters()) for net in nets]
    with offload(optimizers[1], device) as states:
        for step in range(3):
            for net, own in zip(nets, optimizers, strict=True):
                torch.manual_seed(step)
                train(net, own, device, [step])
        assert num_cut(states) == 0
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])


def test_each_group_is_tried_by_itself() -> None:
    """If an optimizer steps whole matrices of some groups, its other groups can be cut."""
    device = ReferenceDevice()
    nets = [make_net(device), make_net(device)]
    optimizers = [
        PerMatrix([{"params": [*net.first.parameters()]}, {"params": [*net.second.parameters()], "scaled": False}])
        for net in nets
    ]
    with offload(optimizers[1], device) as states:
        for net, own in zip(nets, optimizers, strict=True):
            train(net, own, device, range(3))
        assert num_cut(states) == 1
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])


def test_one_that_turns_out_not_to_be_elementwise_is_told() -> None:
    class Late(Counts):
        begins_at = 8

    model = make_net(ReferenceDevice())
    optimizer = Late(model.parameters())
    device = ReferenceDevice()
    with offload(optimizer, device) as states:
        train(model, optimizer, device, range(8))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with pytest.raises(StateOffloadError, match="in windows, and its optimizer keeps other states for one of them"):
            train(model, optimizer, device, range(8, 9))
        with pytest.raises(StateOffloadError, match=r"a part of the parameter.* Load a checkpoint of the model"):
            optimizer.step()
        assert num_cut(states) == 2
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert_same(optimizer.state_dict(), saved[1])


class Averaged(PerParameter):
    """Steps by a mean of gradients; it may write to gradients, keep one more state, and fail."""

    def __init__(self, parameters: Any, *, unscales: bool = False) -> None:
        super().__init__(parameters, lr=0.1, amsgrad=False)
        self.unscales = unscales

    def step_one(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        if self.unscales:
            parameter.grad.mul_(1 / 1024)
        if not parameter.grad.isfinite().all():
            raise ArithmeticError("not finite")
        mean = state.setdefault("mean", torch.zeros_like(parameter))
        if group["amsgrad"]:
            state.setdefault("most", torch.zeros_like(parameter))
        parameter.sub_(mean.lerp_(parameter.grad, 0.1), alpha=group["lr"])


def averaged(**options: Any) -> tuple[nn.Parameter, Averaged]:
    parameter = nn.Parameter(torch.randn(7, 512, generator=torch.Generator().manual_seed(0)))
    return parameter, Averaged([parameter, nn.Parameter(torch.ones(8))], **options)


def test_values_that_the_optimizer_refuses_leave_the_parameter_or_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_pieces, "PIECE_BYTES", 2048)
    parameter, optimizer = averaged()
    with offload(optimizer, ReferenceDevice()) as states:
        parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()
        before = copy.deepcopy((parameter, optimizer.state_dict()))
        assert len(states.plan.pieces[0].windows) == 7

        parameter.grad = failing_at(parameter, 0)
        with pytest.raises(ArithmeticError, match="not finite"):
            optimizer.step()
        assert_same((parameter, optimizer.state_dict()), before)

        parameter.grad = failing_at(parameter, 3)
        told = r"broken off within parameter 0\.0: a part of the parameter, and of its states, is as after the step"
        with pytest.raises(StateOffloadError, match=rf"{told}.*The rest failed: ArithmeticError: not finite"):
            optimizer.step()
        optimizer.zero_grad()
        for use in (optimizer.step, optimizer.state_dict):
            with pytest.raises(StateOffloadError, match=told):
                use()
        with torch.no_grad():
            parameter.copy_(before[0])
        parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.load_state_dict(before[1])
        assert_same((parameter, optimizer.state_dict()), before)
        optimizer.step()


@pytest.mark.parametrize("unscales", [False, True])  # the rest is not stepped with a gradient that the step has written to
def test_closing_half_way_warns(monkeypatch: pytest.MonkeyPatch, unscales: bool) -> None:
    monkeypatch.setattr(state_pieces, "PIECE_BYTES", 2048)
    parameter, optimizer = averaged(unscales=unscales)
    states = offload(optimizer, ReferenceDevice())
    parameter.grad = failing_at(parameter, 3)
    with pytest.raises(StateOffloadError, match="broken off within"):
        optimizer.step()
    with pytest.warns(UserWarning, match="a part of the parameter, and of its states, is as after the step"):
        states.close()
    assert not states._host.arena.held_bytes


@pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
@pytest.mark.parametrize("options", [{"when": "backward"}, {"overlap_forward": True}], ids=str)
@pytest.mark.parametrize("failing", [1, 2, 4, 7])
def test_windows_on_the_host_behind_one_that_fails_are_not_stepped(failing: int, options: Any, monkeypatch: Any) -> None:
    """The host gets several at once. The report of the parameter is true: as before, or stepped in part."""
    monkeypatch.setattr(state_pieces, "PIECE_BYTES", 2048)
    parameter = nn.Parameter(torch.randn(7, 512, generator=torch.Generator().manual_seed(0)))
    optimizer = FailsOnHost([parameter])
    states = offload(optimizer, ReferenceDevice(), update="host", **options)

    def step() -> None:
        (parameter * torch.arange(512.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.wait()

    step()
    assert len(states.plan.pieces[0].windows) == 7
    before = parameter.detach().clone()
    optimizer.told["fails"] = failing
    with pytest.raises((ArithmeticError, StateOffloadError)) as raised:
        step()
    if not torch.equal(parameter, before):
        assert "a part of the parameter, and of its states, is as after the step" in str(raised.value)
        moved = (parameter != before).view(7, 512)[:, 1:].any(1).tolist()
        assert moved == sorted(moved, reverse=True)  # none behind the one that has failed
    with pytest.warns(UserWarning, match="a part of the parameter|they are lost"):
        states.close()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("way", ["device", "host", "backward, host", "beside, host"])
def test_states_that_are_loaded_behind_a_step_that_was_broken_off(way: str, num_before: int, amsgrad: bool) -> None:
    """Nothing of that step is reported again, or used in a step."""
    (parameter, optimizer), (plain, other) = averaged(), averaged()

    def step(each: nn.Parameter, its: torch.optim.Optimizer, *, fails: bool = False) -> None:
        (each * (failing_at(each, 3) if fails else torch.full_like(each, 2.0))).sum().backward()
        its.step()
        its.zero_grad()
        if each is parameter:
            states.wait()

    with offload(optimizer, ReferenceDevice(), **WAYS[way]) as states:
        for _ in range(num_before):
            step(parameter, optimizer)
            step(plain, other)
        saved, before = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
        optimizer.param_groups[0]["amsgrad"] = amsgrad
        with pytest.raises(StateOffloadError, match=r"the step was broken off|are lost|has failed"):
            step(parameter, optimizer, fails=True)
        with torch.no_grad():
            parameter.copy_(before)
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)
        for _ in range(2):
            step(parameter, optimizer)
            step(plain, other)

    assert torch.equal(parameter, plain)
    assert torch.equal(optimizer.state[parameter]["mean"], other.state[plain]["mean"])
