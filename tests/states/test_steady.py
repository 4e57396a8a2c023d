"""A long run takes no more than a short one, and a step calls few functions."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.device import Device, ReferenceDevice
from tests.states.cases import batch, make_net, offload, train
from tests.threads import num_own_threads

ROOT = str(Path(memkit.__file__).parent) + "/"


@pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
@pytest.mark.slow
@pytest.mark.parametrize("update", ["device", "host"])
def test_holds_after_200_steps_what_it_did_after_three(device: Device, update: str) -> None:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=2.0)
    counter = device.memory_counter()
    assert counter is not None

    def held() -> tuple[int, int, int]:
        gc.collect()
        device.synchronize()
        return counter.allocated_bytes(), states.stats().host_bytes, num_own_threads()

    with offload(optimizer, device, update=update) as states:
        found = []
        for step in range(200):
            loss = model(batch(device, step)).square().mean()
            if update == "device":
                scaler.scale(loss * (float("inf") if step == 20 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 5:
                with torch.no_grad():
                    model(batch(device, step))
                optimizer.state_dict()
            del loss
            if step in (3, 19) or step > 197:
                found.append(held())
        pins = states._host.arena.num_pins
        train(model, optimizer, device, range(2))
        assert states._host.arena.num_pins == pins

    assert len(set(found)) == 1


def test_what_was_taken_is_given_back(device: Device) -> None:
    counter = device.memory_counter()
    assert counter is not None
    before = counter.allocated_bytes()
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    states = offload(optimizer, device)
    train(model, optimizer, device, range(3))
    states.close()
    stays = sum(value.nbytes for entries in optimizer.state.values() for value in entries.values())
    del states
    gc.collect()
    device.synchronize()

    if isinstance(device, ReferenceDevice):  # which counts what it was told of alone
        assert counter.allocated_bytes() <= before + stays


def _calls(optimizer: torch.optim.Optimizer) -> int:
    """Return how many functions of memkit a step calls, the device's apart: the reference one stands for the hardware."""
    num_calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT) and not name.startswith(ROOT + "device/"):
            num_calls += 1

    gc.collect()
    gc.disable()  # what died earlier is not of the step
    sys.setprofile(count)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return num_calls


@pytest.mark.slow
@pytest.mark.parametrize("master", [None, torch.float32])
def test_calls_per_parameter(master: torch.dtype | None) -> None:
    """A call is about 0.2 us, so that 40 of them are well within 20 us."""
    device, dtype = ReferenceDevice(), torch.float32 if master is None else torch.bfloat16
    counts = {}
    for depth in (32, 64):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)]).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        with offload(optimizer, device, master=master):
            for _ in range(3):
                model(torch.randn(2, 8, dtype=dtype)).float().sum().backward()
                optimizer.step()
            counts[depth] = _calls(optimizer)

    assert (counts[64] - counts[32]) / 64 <= 40


def test_calls_per_piece() -> None:
    device = ReferenceDevice()
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(16)])
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(optimizer, device) as states:
        for _ in range(3):
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
        num_pieces = len(states.plan.pieces)
        assert num_pieces == 16
        assert _calls(optimizer) / num_pieces <= 120


@pytest.mark.parametrize("depth", [4, 64])
def test_nothing_to_offload_calls_next_to_nothing(depth: int) -> None:
    """It is looked whether parameters have come, by their number."""
    device = ReferenceDevice()
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)])
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(optimizer, device, device_budget="1GiB"):
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
        assert _calls(optimizer) <= 6


def test_states_that_stay_are_there_once(device: Device) -> None:
    model = nn.Sequential(nn.Linear(5, 37, bias=False), nn.Linear(37, 41, bias=False)).to(device.torch_device)
    optimizer, weight = torch.optim.AdamW(model.parameters(), foreach=False), model[1].weight
    with offload(optimizer, device, device_budget=12 * 1024) as states:
        for _ in range(3):
            model(torch.ones(2, 5, device=device.torch_device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert states.stats().num_resident == 1
        gc.collect()
        alike = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.size() == weight.size()]
        own = {one.untyped_storage().data_ptr() for one in alike} - {weight.untyped_storage().data_ptr()}

        assert len(own) == 3  # AdamW's two, and the parameter as it was
