"""States that wrap other tensors move as these do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from memkit.core.tensors import parts_of
from memkit.device import Device
from memkit.states.packing import copy_each
from tests.states.cases import Case, EightBit, assert_same_training, batch, make_net, offload, train
from tests.weights.wrapped import Int8

CASE = Case("Muon", EightBit)  # for matrices


@pytest.mark.parametrize(
    "options",
    [{}, {"device_budget": 1024}, {"update": "host"}, {"when": "backward"}, {"overlap_forward": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_steps_as_the_plain_optimizer(device: Device, options: dict[str, Any]) -> None:
    if "update" in options and device.torch_device.type != "cpu":
        pytest.skip("the plain steps differ from the host's in last bits")
    nets = [make_net(device, CASE), make_net(device, CASE)]
    optimizers = [EightBit(net.parameters()) for net in nets]
    with offload(optimizers[1], device, **options) as states:
        for net, own in zip(nets, optimizers, strict=True):
            for step in range(4):
                net(batch(device, step)).square().mean().backward()
                own.step()
                own.zero_grad()
        states.wait()
        assert states.stats().d2h_bytes > 0
        moved = [entries["mean"] for entries in optimizers[1].state.values()]
        assert all(isinstance(mean, Int8) for mean in moved)
        assert any(mean.values.device.type == "cpu" for mean in moved)
        if "device_budget" not in options:
            assert all(mean.values.device.type == "cpu" for mean in moved)
            assert all(mean.values.untyped_storage().nbytes() == mean.values.nbytes for mean in moved)
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])
        saved = copy.deepcopy(optimizers[1].state_dict())
        optimizers[1].load_state_dict(saved)
        optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        if "when" not in options:
            for net, own in zip(nets, optimizers, strict=True):
                train(net, own, device, range(4, 6))
            states.wait()
            assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])

    for net, own in zip(nets, optimizers, strict=True):
        train(net, own, device, range(6, 8))
    assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])


def test_tensors_are_copied_whatever_they_are_made_of() -> None:
    sources = [torch.randn(4, 3), nn.Parameter(torch.randn(5)), torch.randn(3, 4).t(), torch.tensor(2.0)]
    wrapped = [Int8.quantized(torch.randn(4, 4)), Int8.quantized(torch.randn(2, 2))]
    for each in (sources, sources[:1], [], [*sources, *wrapped]):
        targets = [
            Int8.quantized(torch.ones(source.size())) if isinstance(source, Int8) else torch.empty_like(source)
            for source in each
        ]
        with torch.no_grad():
            copy_each(targets, each)

        for target, source in zip(targets, each, strict=True):
            assert all(map(torch.equal, parts_of(target), parts_of(source)))
