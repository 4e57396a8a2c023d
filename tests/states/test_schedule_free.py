"""Schedule-free optimizers begin in eval mode, do not step there, and have other weights in each mode."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

import memkit
from memkit.device import Device, ReferenceDevice
from tests.states.cases import BeginsInEvalMode, Net, assert_same, assert_same_training, batch, make_net, offload

OPTIONS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"update": "host"},
    "backward": {"when": "backward"},
    "overlap": {"overlap_forward": True},
    "some stay": {"device_budget": "12KiB"},
}


def _made(device: Device) -> tuple[Net, BeginsInEvalMode]:
    model = make_net(device)
    return model, BeginsInEvalMode(model.parameters(), beta=0.9)


def _trained(device: Device, seed: int, options: dict[str, Any] | None) -> tuple[Net, BeginsInEvalMode, list[Any]]:
    """Train, and change between the modes, evaluate, save and load in an order by chance."""
    model, optimizer = _made(device)
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
@pytest.mark.parametrize("name", OPTIONS)
def test_streamed_states_leave_the_bits_of_both_modes(name: str, seed: int, device: Device) -> None:
    if "update" in OPTIONS[name] and device.torch_device.type != "cpu":
        pytest.skip("the plain steps differ from the host's in last bits")
    plain, found = _trained(device, seed, None), _trained(device, seed, OPTIONS[name])

    assert_same_training(plain[0], plain[1], found[0], found[1])
    assert_same(plain[2], found[2])


def test_the_mode_is_the_users() -> None:
    model, optimizer = _made(ReferenceDevice())
    with offload(optimizer, ReferenceDevice()):
        assert optimizer.param_groups[0]["train_mode"] is False
        model(batch(ReferenceDevice(), 0)).sum().backward()
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
