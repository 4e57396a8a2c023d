"""A step with streamed states is bit for bit the optimizer's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memkit
from memkit.device import Device
from tests.states.cases import (
    OPTIMIZERS,
    WAYS,
    Case,
    EightBit,
    assert_same,
    assert_same_training,
    cut,
    groups_of,
    in_all_ways,
    make_net,
    offload,
    skip_host_steps,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")


@pytest.mark.covering(2)
@pytest.mark.parametrize(("case", "way", "is_cut"), in_all_ways([*OPTIMIZERS, Case("eight bits", EightBit)]))
def test_steps_as_the_plain_optimizer(
    case: Case, way: str, is_cut: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_host_steps(device, way)
    if is_cut:
        cut(monkeypatch)
    plain, model = make_net(device, case), make_net(device, case)
    plain_optimizer, optimizer = case.make(groups_of(plain)), case.make(groups_of(model))
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, 2, 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    options: dict[str, Any] = {"clip": None if "backward" in way else 0.1, "accumulate": 2}

    with offload(optimizer, device, **WAYS[way]) as states:
        for steps in (range(3), range(3, 6)):
            train(plain, plain_optimizer, device, steps, scheduler=plain_scheduler, **options)
            train(model, optimizer, device, steps, scheduler=scheduler, states=states, **options)
            states.wait()
            assert_same_training(plain, plain_optimizer, model, optimizer)
        assert states.plan.is_empty or states.stats().h2d_bytes > 0
        assert (states.plan.host_bytes == 0 < states.stats().disk_written_bytes) == ("disk" in way)
    assert_same_training(plain, plain_optimizer, model, optimizer)

    train(plain, plain_optimizer, device, range(6, 8), scheduler=plain_scheduler)
    train(model, optimizer, device, range(6, 8), scheduler=scheduler)
    assert_same_training(plain, plain_optimizer, model, optimizer)
    device.synchronize()
    assert not getattr(device, "races", None)


def test_states_are_in_host_memory_between_steps(device: Device) -> None:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())

    with offload(optimizer, device) as states:
        train(model, optimizer, device, range(2))
        moved = states.stats()
        assert moved.d2h_bytes == 2 * moved.h2d_bytes > 0
        for entries in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                assert entries[name].device.type == "cpu"
                assert entries[name].untyped_storage().nbytes() == entries[name].nbytes


def test_nothing_to_offload_moves_nothing(device: Device) -> None:
    model = make_net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def hooks() -> set[str]:
        return {name for name, value in vars(optimizer).items() if name.endswith("_hooks") and value}

    with offload(optimizer, device) as states:
        assert states.plan.is_empty
        assert hooks() == {"_optimizer_step_post_hooks"}  # which does nothing
        assert states.stats().host_bytes == 0
        train(model, optimizer, device, range(2))
    assert not hooks()


def test_schedulers_made_after(device: Device) -> None:
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (plain, model))

    with offload(optimizer, device):
        for net, own in ((plain, plain_optimizer), (model, optimizer)):
            scheduler = torch.optim.lr_scheduler.OneCycleLR(own, 1e-2, total_steps=10)
            train(net, own, device, range(5), scheduler=scheduler)
        assert_same_training(plain, plain_optimizer, model, optimizer)


def test_closure_is_run_once(device: Device) -> None:
    results, models = [], [make_net(device), make_net(device)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in models]
    states = offload(optimizers[1], device)
    for net, own in zip(models, optimizers, strict=True):
        calls = []

        def closure(net=net, own=own, calls=calls) -> torch.Tensor:
            calls.append(1)
            own.zero_grad()
            loss = net(torch.ones(2, 24, device=device.torch_device)).square().mean()
            loss.backward()
            return loss

        results.append([own.step(closure) for _ in range(3)])
        assert len(calls) == 3

    assert_same(results[0], results[1])
    assert_same_training(models[0], optimizers[0], models[1], optimizers[1])
    states.close()


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_and_steps(device: Device, fused: bool, way: str) -> None:
    skip_host_steps(device, way)
    nets = [make_net(device), make_net(device)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused) for net in nets]
    with offload(optimizers[1], device, **WAYS[way]):
        for net, own in zip(nets, optimizers, strict=True):
            scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=4.0)
            for step in range(5):
                loss = net(torch.full((2, 24), 0.1 * step, device=device.torch_device)).square().mean()
                scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
                scaler.step(own)
                scaler.update()
                own.zero_grad()
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])


def test_hooks_set_later_come_first(device: Device) -> None:
    nets = [make_net(device), make_net(device)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    with offload(optimizers[1], device):
        for net, own in zip(nets, optimizers, strict=True):

            def clip(own: torch.optim.Optimizer, *_: object, net=net) -> None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)

            own.register_step_pre_hook(clip)
            train(net, own, device, range(3))
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])


@pytest.mark.parametrize("way", ["device", "host", "disk"])
def test_states_that_lie_elsewhere_are_adopted(device: Device, way: str) -> None:
    skip_host_steps(device, way)
    nets = [make_net(device), make_net(device)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    for net, own in zip(nets, optimizers, strict=True):
        train(net, own, device, range(2))
    with offload(optimizers[1], device, **WAYS[way]):
        for net, own in zip(nets, optimizers, strict=True):
            train(net, own, device, range(2, 4))
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])
        saved = optimizers[1].state_dict()["state"]
        for number, parameter in enumerate(nets[1].parameters()):
            if number in saved:
                optimizers[1].state[parameter]["exp_avg"] = saved[number]["exp_avg"].to(device.torch_device, copy=True)
        train(nets[0], optimizers[0], device, range(4, 6))
        with pytest.warns(UserWarning, match="were put elsewhere"):
            train(nets[1], optimizers[1], device, range(4, 6))
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])


def test_repr_and_stats(device: Device) -> None:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    states = memkit.StateOffload(optimizer, device=device)
    train(model, optimizer, device, range(2))

    assert "StateOffload of AdamW" in repr(states)
    assert "moved to the device" in str(states.stats())
    assert states.stats().num_steps == 2
    states.close()
    states.close()
    assert repr(states) == "<StateOffload of AdamW: closed>"
    with pytest.raises(ValueError, match="is closed"):
        states.__enter__()
