"""A step with streamed states is bit for bit the optimizer's own."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

import memkit
from memkit.device import Device, ReferenceDevice
from tests.states.cases import (
    OPTIMIZERS,
    WAYS,
    BeginsInEvalMode,
    Case,
    EightBit,
    Net,
    Pair,
    Rebinding,
    assert_same,
    assert_same_training,
    batch,
    groups_of,
    in_all_ways,
    make_net,
    make_training,
    offload,
    skip_host_steps,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("case", "way", "is_cut"), in_all_ways([*OPTIMIZERS, Case("eight bits", EightBit)]), indirect=["is_cut"]
)
def test_steps_as_the_plain_optimizer(case: Case, way: str, is_cut: bool, device: Device) -> None:
    skip_host_steps(device, way)
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


@pytest.mark.parametrize("budget", [0, 16384])
def test_states_are_in_host_memory_between_steps(device: Device, budget: int) -> None:
    model, optimizer = make_training(device)
    with offload(optimizer, device, device_budget=budget) as states:
        train(model, optimizer, device, range(2))
        moved = states.stats()
        assert moved.d2h_bytes == 2 * moved.h2d_bytes > 0
        assert (states.plan.resident_bytes > 0) == (budget > 0)
        found = optimizer.state_dict()["state"] if budget else optimizer.state  # all of a state dict is there
        for entries in found.values():
            for name in ("exp_avg", "exp_avg_sq"):
                assert entries[name].device.type == "cpu"
                assert budget or entries[name].untyped_storage().nbytes() == entries[name].nbytes


def test_nothing_to_offload_moves_nothing(device: Device) -> None:
    model, optimizer = make_training(device, torch.optim.SGD, lr=1e-2)

    def hooks() -> set[str]:
        return {name for name, value in vars(optimizer).items() if name.endswith("_hooks") and value}

    with offload(optimizer, device) as states:
        assert states.plan.is_empty
        assert hooks() == {"_optimizer_step_post_hooks"}  # which does nothing
        assert states.stats().host_bytes == 0
        train(model, optimizer, device, range(2))
    assert not hooks()


def test_step_without_a_gradient_counts_as_the_plain_one(device: Device) -> None:
    pair = Pair(device, Rebinding)
    with offload(pair.optimizer, device):
        for number in range(3):
            for _, optimizer in pair:
                optimizer.step()
            pair.train([number])
        assert pair.optimizer.num_steps == pair.plain_optimizer.num_steps == 6
        pair.assert_same()


def test_closure_is_run_once(device: Device) -> None:
    results, pair = [], Pair(device)
    states = offload(pair.optimizer, device)
    for net, own in pair:
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
    pair.assert_same()
    states.close()


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_and_steps(device: Device, fused: bool, way: str) -> None:
    skip_host_steps(device, way)
    pair = Pair(device, fused=fused)
    with offload(pair.optimizer, device, **WAYS[way]):
        for net, own in pair:
            scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=4.0)
            for step in range(5):
                loss = net(torch.full((2, 24), 0.1 * step, device=device.torch_device)).square().mean()
                scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
                scaler.step(own)
                scaler.update()
                own.zero_grad()
        pair.assert_same()


def test_schedulers_and_hooks_of_later_come_first(device: Device) -> None:
    pair = Pair(device)
    with offload(pair.optimizer, device):
        for net, own in pair:

            def clip(*_: object, net=net) -> None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)

            own.register_step_pre_hook(clip)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(own, 1e-2, total_steps=10)
            train(net, own, device, range(5), scheduler=scheduler)
        pair.assert_same()


@pytest.mark.parametrize("way", ["device", "host", "disk"])
def test_states_that_lie_elsewhere_are_adopted(device: Device, way: str) -> None:
    skip_host_steps(device, way)
    pair = Pair(device)
    pair.train(range(2))
    with offload(pair.optimizer, device, **WAYS[way]):
        pair.train(range(2, 4))
        pair.assert_same()
        saved = pair.optimizer.state_dict()["state"]
        for number, parameter in enumerate(pair.model.parameters()):
            if number in saved:
                pair.optimizer.state[parameter]["exp_avg"] = saved[number]["exp_avg"].to(device.torch_device, copy=True)
        pair.train_plain(range(4, 6))
        with pytest.warns(UserWarning, match="were put elsewhere"):
            train(pair.model, pair.optimizer, device, range(4, 6))
        pair.assert_same()


def test_repr_and_stats(device: Device) -> None:
    model, optimizer = make_training(device)
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


# Schedule-free optimizers begin in eval mode, do not step there, and have other weights in each mode


def _trained(device: Device, seed: int, options: dict[str, Any] | None) -> tuple[Net, BeginsInEvalMode, list[Any]]:
    """Train, and change between the modes, evaluate, save and load in an order by chance."""
    model, optimizer = make_training(device, BeginsInEvalMode, beta=0.9)
    chance, seen = random.Random(seed), list[Any]()
    states = None if options is None else offload(optimizer, device, **options)
    for number in range(8):
        optimizer.train()
        model(batch(device, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if states is not None and "overlap_forward" in (options or {}):
            states.wait()
        for act in chance.sample(("eval", "train", "save", "load"), chance.randint(0, 4)):
            if act in ("eval", "train"):
                getattr(optimizer, act)()
                seen.append(model(batch(device, number)).detach().clone())
            elif act == "save":
                seen.append(copy.deepcopy(optimizer.state_dict()))
            else:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if states is not None:
        states.close()
    return model, optimizer, seen


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("way", ["device", "host", "backward", "beside", "some stay"])
def test_streamed_states_leave_the_bits_of_both_modes(way: str, seed: int, device: Device) -> None:
    skip_host_steps(device, way)
    plain, found = _trained(device, seed, None), _trained(device, seed, WAYS[way])

    assert_same_training(*plain[:2], *found[:2])
    assert_same(plain[2], found[2])


def test_the_mode_is_the_users() -> None:
    model, optimizer = make_training(device := ReferenceDevice(), BeginsInEvalMode, beta=0.9)
    with offload(optimizer, device):
        assert optimizer.param_groups[0]["train_mode"] is False
        model(batch(device, 0)).sum().backward()
        with pytest.raises(Exception, match="not in train mode"):
            optimizer.step()


@pytest.mark.integrations
@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeReference"])
def test_those_of_the_library(name: str) -> None:
    schedulefree, device = pytest.importorskip("schedulefree"), ReferenceDevice()

    def trained(streams: bool) -> tuple[Net, Any, Any]:
        model = make_net(device)
        optimizer = getattr(schedulefree, name)([parameter for parameter in model.parameters() if parameter.numel()])
        states = offload(optimizer, device) if streams else None
        told = memkit.profile_memory(model, torch.ones(5, 24), optimizer=optimizer, print_table=False, warmup=0).optimizer
        for number in range(4):
            optimizer.train()
            model(batch(device, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.eval()
        if states is not None:
            states.close()
        return model, optimizer, told

    plain, found = trained(False), trained(True)
    assert_same_training(plain[0], plain[1], found[0], found[1])
    assert found[2] == plain[2]
