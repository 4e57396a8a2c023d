"""All states fit, parameters come later, or nobody calls `close`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from memkit.device import Device, ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.states.pieces import ConsumedGradient
from tests.states.cases import assert_same, assert_same_training, batch, make_net, offload, train


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
