"""`offload_ratio="auto"`: a step is timed, layers come to stay on the device, and not a bit changes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.plan import LayerCosts, ResidencyPlan, plan_streamed_ratio
from memkit.weights import selection as choice_module
from memkit.weights.host_copies import DevicePlacement
from memkit.weights.selection import StepTimes
from tests.clock import Clock, set_clock
from tests.weights.cases import (
    WIDTH,
    FailsBackward,
    Stack,
    assert_same,
    checkpointed,
    inputs,
    only_lora,
    run_step,
    stack,
    streamed,
)

pytestmark = pytest.mark.slow

MIB = 2**20


@dataclass
class Choice:
    """What is measured, and the share of the layers that goes on streaming, whatever that is."""

    ratio: float = 0.5
    times: list[StepTimes] = field(default_factory=list)
    capacities_bytes: list[int | None] = field(default_factory=list)

    def __call__(
        self, _: Any, times: StepTimes, plan: ResidencyPlan, *, num_slots: int, capacity_bytes: int | None, **__: Any
    ) -> ResidencyPlan:
        self.times.append(times)
        self.capacities_bytes.append(capacity_bytes)
        costs = [LayerCosts(name=layer.name, num_bytes=layer.num_bytes) for layer in plan.layers]
        return plan_streamed_ratio(costs, self.ratio, num_slots=num_slots)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Choice:
    choice = Choice()
    monkeypatch.setattr(choice_module, "plan_measured", choice)
    return choice


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("run", [None, checkpointed(False), checkpointed(True)], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("train", ["frozen", "host"])
def test_layers_that_come_to_stay_change_nothing(
    train: str, run: Callable[[nn.ModuleList, Tensor], Tensor] | None, device: Device
) -> None:
    given = streamed(stack(train, 8, run=run), device, offload_ratio="auto", train=train)
    with given as (model, plain, batches, offload):
        optimizers = [_sgd(model), _sgd(plain)]
        for step in range(4):
            assert len(offload.plan.streamed) == (8 if step < 2 else 4)
            for batch in batches[step % 2 :]:  # the first step, of two passes, is not yet the one that is timed
                assert_same(run_step(model, [batch]), run_step(plain, [batch]))
            if device.torch_device.type == "cpu" or train == "frozen":  # else the two optimizers round otherwise
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for name, tensor in plain.state_dict().items():
                assert torch.equal(model.state_dict()[name].to(tensor.device), tensor), name
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.usefixtures("half")
def test_optimizer_state_goes_where_its_parameter_goes(device: Device) -> None:
    model, batches = Stack(4).to(device.torch_device), inputs(device)
    with memkit.LayerOffload(model, offload_ratio="auto", train="host", device=device) as offload:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(4):
            run_step(model, batches)
            optimizer.step()
            optimizer.zero_grad()
        assert len(offload.plan.streamed) == 2
        for parameter in model.parameters():
            assert optimizer.state[parameter]["exp_avg"].device == parameter.device
        assert {parameter.device for parameter in model.layers[0].parameters()} == {device.torch_device}


@pytest.mark.usefixtures("half")
def test_model_that_is_dropped_once_layers_have_come_to_stay_takes_them_with_it(device: Device) -> None:
    model, batches = Stack(4).to(device.torch_device), inputs(device)
    gc.collect()
    hooks_before = list(torch_optimizer._global_optimizer_pre_hooks)
    offload = memkit.LayerOffload(model, offload_ratio="auto", train="host", device=device)
    for _ in range(4):
        run_step(model, batches)
    assert len(offload.plan.streamed) == 2
    weight = model.layers[0].up.weight
    weight.used_in = model  # as libraries do
    dropped = [weakref.ref(model), weakref.ref(offload), weakref.ref(weight)]

    del model, offload, weight
    gc.collect()

    assert [ref() for ref in dropped] == [None, None, None]
    assert list(torch_optimizer._global_optimizer_pre_hooks) == hooks_before


@pytest.mark.usefixtures("half")
def test_graph_that_is_alive_puts_it_off(device: Device) -> None:
    with streamed(only_lora(Stack(8)), device, offload_ratio="auto") as (model, plain, batches, offload):
        alive = [one(batches[0]).sum() for one in (model, plain)]
        for _ in range(2):
            for one in (model, plain):
                one(batches[1]).sum().backward()
        assert len(offload.plan.streamed) == 8
        for loss in alive:
            loss.backward()
        del alive, loss
        assert_same(run_step(model, batches), run_step(plain, batches))
        assert len(offload.plan.streamed) == 4


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("holds", [False, True])
def test_host_memory_of_gradients_is_given_back_if_nobody_holds_them(holds: bool, device: Device) -> None:
    model, batches = Stack(8).to(device.torch_device), inputs(device)
    with memkit.LayerOffload(model, offload_ratio="auto", train="host", device=device) as offload:
        before = offload.stats()
        run_step(model, batches)
        held = [parameter.grad for parameter in model.parameters() if holds]
        expected = [None if grad is None else grad.cpu().clone() for grad in held]
        model.zero_grad()
        run_step(model, batches[:1])
        after = offload.stats()
        assert after.num_streamed == 4
        assert holds or after.host_bytes * 2 == before.host_bytes
    for grad, wanted in zip(held, expected, strict=True):
        assert grad is not None
        assert wanted is not None
        assert torch.equal(grad.cpu(), wanted)


@pytest.mark.usefixtures("half")
def test_sampling_alone_is_timed_as_well(device: Device) -> None:
    model, batches = only_lora(Stack(8)).requires_grad_(False).to(device.torch_device), inputs(device)
    plain = copy.deepcopy(model)
    with torch.no_grad(), memkit.LayerOffload(model, offload_ratio="auto", device=device) as offload:
        for _ in range(4):
            assert torch.equal(model(batches[0]), plain(batches[0]))
        assert len(offload.plan.streamed) == 4


def test_samples_ahead_of_training_do_not_decide(half: Choice, device: Device) -> None:
    with streamed(only_lora(Stack(8)), device, offload_ratio="auto") as (model, _, batches, offload):
        for _ in range(7):
            with torch.no_grad():
                model(batches[0])
        for _ in range(2):
            run_step(model, batches[:1])
            with torch.no_grad():
                model(batches[0])
        assert len(offload.plan.streamed) == 4
    assert [len(times.backward_s) for times in half.times] == [8]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        clock.sleep(0.004)
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clock.sleep(0.008)
        return grad, None


class _Slow(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear, self.clock = nn.Linear(WIDTH, WIDTH).requires_grad_(False), clock

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(_Sleep.apply(x, self.clock))


@pytest.mark.parametrize("resident", [0, 2])
def test_layers_are_timed(resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, device = set_clock(monkeypatch, tick_s=1e-9), ReferenceDevice()
    model = nn.Sequential(nn.ModuleList(_Slow(clock) for _ in range(4)))
    model.forward = lambda x: model[0][3](model[0][2](model[0][1](model[0][0](x))))  # type: ignore[method-assign]
    x = torch.randn(2, WIDTH, requires_grad=True)
    with memkit.LayerOffload(model, num_resident=resident, device=device) as offload:
        assert offload.stats().actual_s is None
        for _ in range(3):
            model(x).sum().backward()
        plan, stats = offload.plan, offload.stats()
    for layer in plan.layers:
        assert layer.forward_s == pytest.approx(0.004, rel=1e-3)
        assert layer.backward_s == pytest.approx(0.008, rel=1e-3)
        assert layer.stall_s is not None
    assert "ms" in plan.explain()
    assert plan.predicted_s is not None
    assert stats.predicted_s == plan.predicted_s
    assert stats.actual_s == pytest.approx(0.048, rel=1e-3)
    assert stats.actual_peak_bytes is not None


def test_capacity_is_that_of_the_device(half: Choice) -> None:
    half.ratio = 1.0
    device = ReferenceDevice()
    device.capacity_bytes = 12345
    model = only_lora(Stack(4))
    with memkit.LayerOffload(model, offload_ratio="auto", device=device) as offload:
        for _ in range(3):
            run_step(model, inputs(device))
        stats = offload.stats()
    assert half.capacities_bytes == [12345]
    assert stats.predicted_peak_bytes == stats.actual_peak_bytes


@pytest.mark.usefixtures("half")
def test_counts_go_on_and_the_second_step_with_the_share_is_timed(device: Device) -> None:
    model, batches = only_lora(Stack(8)).to(device.torch_device), inputs(device, 1)
    seen = []
    with memkit.LayerOffload(model, offload_ratio="auto", device=device) as offload:
        for _ in range(5):
            run_step(model, batches)
            seen.append(offload.stats())
        assert set(offload.plan.streamed) == set(seen[-1].stall_s)
    assert [stats.num_streamed for stats in seen] == [8, 8, 4, 4, 4]
    assert [stats.actual_s is None for stats in seen] == [True, True, True, True, False]
    assert [stats.num_fetches for stats in seen] == [13, 26, 31, 36, 41]
    assert seen[1].h2d_bytes < seen[2].h2d_bytes


@pytest.mark.parametrize("by_themselves", [False, True])
def test_all_come_to_stay(by_themselves: bool, half: Choice, device: Device) -> None:
    half.ratio = 0.0
    with streamed(only_lora(Stack(4)), device, offload_ratio="auto") as (model, plain, _, offload):
        for _ in range(6):
            batch = inputs(device, 1)[0]
            outputs = [_layers_of(one, batch, by_themselves) for one in (model, plain)]
            assert torch.equal(*outputs)
            outputs[0].sum().backward()
            held = [weakref.ref(tensor) for tensor in (batch, *outputs)]
            del batch, outputs
            assert not any(tensor() is not None for tensor in held)
        assert not offload.plan.streamed
        assert by_themselves or offload.stats().actual_s is not None


def _layers_of(model: nn.Module, x: Tensor, by_themselves: bool) -> Tensor:
    if not by_themselves:
        return model(x)  # type: ignore[no-any-return]
    for layer in model.get_submodule("layers"):  # type: ignore[attr-defined]
        x = layer(x)
    return x


@pytest.mark.usefixtures("half")
def test_parameters_that_were_put_in_the_place_of_others_come_to_stay(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = []

    def place(self: DevicePlacement, tensors: Any, torch_device: torch.device, place: Any = DevicePlacement.place) -> None:
        placed.extend(tensors := list(tensors))
        place(self, tensors, torch_device)

    monkeypatch.setattr(DevicePlacement, "place", place)
    with streamed(only_lora(Stack(4)), device, offload_ratio="auto") as (model, plain, batches, offload):
        run_step(model, batches)
        other = {name: tensor.clone() * 2 for name, tensor in model.state_dict().items()}
        for one in (model, plain):
            one.load_state_dict({name: tensor.clone() for name, tensor in other.items()}, assign=one is model)
            only_lora(one)
            one.zero_grad()
        assert_same(run_step(model, batches[:1]), run_step(plain, batches[:1]))
        assert len(offload.plan.streamed) == 2
        assert any(tensor is model.layers[0].up.weight for tensor in placed)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("train", ["frozen", "host", "fused"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), KeyboardInterrupt()], ids=["memory", "interrupt"])
def test_all_go_on_streaming_where_the_device_has_no_room(
    error: BaseException, train: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.0) if train == "fused" else None
    given = streamed(stack(train, 8), device, offload_ratio="auto", train=train, optimizer=optimizer)
    with given as (model, plain, (*batches, _), offload):
        for one in (model, plain, model, plain):
            run_step(one, batches)
        place, times = offload._placement.place, iter(range(3))

        def fails(tensors: Any, torch_device: torch.device) -> None:
            if next(times) == 2:
                raise error
            place(tensors, torch_device)

        with monkeypatch.context() as patch:
            patch.setattr(offload._placement, "place", fails)
            with pytest.raises(type(error)):
                model(batches[0])
        assert offload.stats().num_streamed == len(offload.plan.streamed) == 8
        found, expected = (run_step(one, batches) for one in (model, plain))
        assert_same(found, {name: expected[name] for name in found})
        assert train == "fused" or len(found) == len(expected)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("where", ["forward", "sampling", "backward"])
def test_step_that_fails_is_not_the_one_that_counts(where: str, device: Device) -> None:
    model, batches = only_lora(Stack(4)).to(device.torch_device), inputs(device, 1)

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
            if layer is layers[1]:
                x = FailsBackward.apply(x, RuntimeError("body")) if where == "backward" else layers[2](x[:, :1])
        return x

    with memkit.LayerOffload(model, offload_ratio="auto", device=device) as offload:
        run_step(model, batches)
        in_order, model._run = model._run, run
        with torch.set_grad_enabled(where != "sampling"), pytest.raises(RuntimeError):
            run_step(model, batches)
        model._run = in_order
        run_step(model, batches)
        assert len(offload.plan.streamed) == 4
        run_step(model, batches)
        assert len(offload.plan.streamed) == 2


def test_profile_without_data_is_not_timed() -> None:
    device = ReferenceDevice()
    model, batches = only_lora(Stack(4)), inputs(device, 1)
    with memkit.LayerOffload(model, num_resident=2, device=device) as offload:
        for _ in range(2):
            run_step(model, batches)
        assert offload._timing is not None
        before = len(offload._timing._points)
        memkit.profile_memory(model, batches[0], device="meta", print_table=False)
        assert len(offload._timing._points) == before > 0
