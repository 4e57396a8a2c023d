"""A long run takes no more than a short one, and a step calls few functions."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from memkit.device import Device, ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.plan import states as state_pieces
from memkit.states.pieces import ConsumedGradient
from tests.calls import DEVICE, is_counted, num_calls
from tests.states.cases import WAYS, EightBit, assert_same, assert_same_training, batch, make_net, make_training, offload, train
from tests.threads import num_own_threads


@pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
@pytest.mark.slow
@pytest.mark.parametrize("way", ["device", "host", "disk", "backward, disk"])
def test_holds_after_100_steps_what_it_did_after_three(device: Device, way: str) -> None:
    model, optimizer = make_training(device)
    scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=2.0)
    counter = device.memory_counter()
    assert counter is not None

    def held() -> tuple[int, ...]:
        gc.collect()
        device.synchronize()
        store = states._disk.opened
        on_disk = () if store is None else (store.file.num_bytes, len(store.sizes))
        return counter.allocated_bytes(), states.stats().host_bytes, num_own_threads(), *on_disk

    with offload(optimizer, device, **WAYS[way]) as states:
        found = []
        for step in range(100):
            loss = model(batch(device, step)).square().mean()
            if way == "device":
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
            if step in (3, 19) or step > 97:
                found.append(held())
        pins = states._host.arena.num_pins
        train(model, optimizer, device, range(2))
        assert states._host.arena.num_pins == pins

    assert len(set(found)) == 1


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


@pytest.mark.parametrize(
    ("make", "master", "way", "is_cut", "most", "in_thread"),
    [
        (_fused, None, "device", False, 99.5, 0),
        (_fused, None, "beside", False, 112, 0),
        (_fused, torch.float32, "device", False, 104.5, 0),
        (_fused, torch.float32, "beside", False, 117, 0),
        (EightBit, None, "device", False, 101, 0),
        (_fused, None, "host", False, 115, 32),
        (_fused, torch.float32, "host", False, 115, 32),
        (_fused, None, "host", True, 115, 42),
        (_fused, torch.float32, "host", True, 115, 42),
    ],
)
def test_a_steady_step_takes_few_calls(make, master, way, is_cut, most, in_thread, monkeypatch) -> None:
    """For each piece, in this thread and in that of steps on the host; and it asks little of the device."""
    if is_cut:
        for name, value in (("PIECE_BYTES", 2**12), ("_LARGEST_PIECE_BYTES", 2**12), ("WINDOW_NUMEL", 64)):
            monkeypatch.setattr(state_pieces, name, value)
    dtype, sizes = torch.float32 if master is None else torch.bfloat16, [(512, 16)] if is_cut else [(64, 32)] * 16
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]
    optimizer, found, asked, is_steady = make(parameters), Counter[bool](), Counter[str](), False

    def profile(frame: FrameType, event: str, _: object) -> None:
        if not is_steady or event != "call":
            return
        if is_counted(frame):
            found[threading.current_thread() is threading.main_thread()] += 1
        elif frame.f_code.co_filename.startswith(DEVICE) and frame.f_back is not None and is_counted(frame.f_back):
            asked[frame.f_code.co_name] += 1

    threading.setprofile(profile)  # for threads to come
    try:
        with offload(optimizer, ReferenceDevice(), master=master, **WAYS[way]) as states:
            for step in range(5):
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, 0.5)
                is_steady = step == 4
                sys.setprofile(profile if is_steady else None)
                optimizer.step()
                sys.setprofile(None)
                states.wait()
            num_parts = sum(len(piece.parts) for piece in states._members.pieces)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # of which its annotation does not know

    assert num_parts >= 16
    assert found[True] <= most * num_parts
    assert found[False] <= in_thread * num_parts
    if way in ("device", "beside"):
        assert asked["copy"] == 2 * num_parts
        assert asked["record_event"] <= (3 + (way == "beside")) * num_parts + 4
        assert asked["wait_event"] <= 4 * num_parts + 2
        assert asked["current_stream"] <= num_parts + 1


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
        assert num_calls(optimizer.step) <= 6


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


@pytest.mark.parametrize("options", [{"overlap_forward": True}, {"when": "backward"}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_gradients_are_let_go_also_where_all_states_fit(device: Device, kind: Any, options: Any) -> None:
    nets = [make_net(device) for _ in range(3)]
    optimizers = [kind(net.parameters(), lr=1e-2) for net in nets]
    train(nets[0], optimizers[0], device, range(3))
    for net, optimizer, budget in zip(nets[1:], optimizers[1:], [0, "1GiB"], strict=True):
        with offload(optimizer, device, device_budget=budget, **options) as states:
            for step in range(3):
                net(batch(device, 10 * step)).square().mean().backward()
                optimizer.step()
                grad = net.head.weight.grad
                assert grad is None if "overlap_forward" in options else type(grad) is ConsumedGradient
            states.wait()
        assert_same_training(nets[0], optimizers[0], net, optimizer)


@pytest.mark.parametrize("ends", ["step", "backward"])
@pytest.mark.parametrize("options", [{}, {"when": "backward"}, {"overlap_forward": True}, {"device_budget": "1GiB"}], ids=str)
def test_one_that_is_dropped_is_let_go(options: Any, ends: str) -> None:
    device = ReferenceDevice()
    gc.collect()
    hooks_before = list(torch_optimizer._global_optimizer_pre_hooks)

    def dropped() -> list[weakref.ref[Any]]:
        net = make_net(device)
        optimizer = torch.optim.AdamW(net.parameters())
        states = offload(optimizer, device, **options)
        train(net, optimizer, device, range(2))
        if ends == "backward":
            net(batch(device, 2)).square().mean().backward()
        return [weakref.ref(optimizer), weakref.ref(net.head.weight), weakref.ref(states)]

    refs = dropped()
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert not device.races
    torch.nn.Identity()(torch.ones(1))  # the hook of all forwards goes
    assert list(torch_optimizer._global_optimizer_pre_hooks) == hooks_before


def test_model_whose_optimizer_is_dropped_beside_the_step_is_stepped(device: Device) -> None:
    def trained(streams: bool) -> torch.nn.Module:
        net = make_net(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        states = offload(optimizer, device, overlap_forward=True) if streams else None
        train(net, optimizer, device, range(2))
        assert states is None or states.stats().num_steps == 2
        return net

    plain, net = trained(False), trained(True)
    gc.collect()

    assert_same(net(batch(device, 2)), plain(batch(device, 2)))
    assert_same(net.state_dict(), plain.state_dict())


def test_the_optimizer_keeps_it(device: Device) -> None:
    net = make_net(device)
    optimizer = torch.optim.AdamW(net.parameters())
    ref = weakref.ref(offload(optimizer, device))
    gc.collect()
    train(net, optimizer, device, range(2))
    states = ref()
    assert states is not None
    assert states.stats().d2h_bytes > 0
    states.close()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps, lambda states: copy.deepcopy({"attribute": states})])
def test_copies_are_refused(how: Callable[[Any], Any], device: Device) -> None:
    net = make_net(device)
    optimizer = torch.optim.AdamW(net.parameters())
    with offload(optimizer, device) as states:
        train(net, optimizer, device, range(2))

        with pytest.raises(StateOffloadError, match=r"copied, or pickled, .* save optimizer.state_dict"):
            how(states)

        assert_same(copy.deepcopy(optimizer).state_dict(), optimizer.state_dict())
