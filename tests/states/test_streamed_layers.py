"""`LayerOffload` beside `StateOffload`: each parameter is stepped by one of them."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import Device
from tests.states.cases import WAYS, assert_same, offload


class Net(nn.Module):
    """Layers that stream, between an embedding and a head that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def _made() -> Net:
    torch.manual_seed(0)
    return Net()


def _rest_of(model: Net) -> list[nn.Parameter]:
    return [*model.stem.parameters(), *model.head.parameters()]


@pytest.mark.parametrize("way", ["device", "beside", "backward", "backward, disk"])
def test_weights_gradients_and_states_are_all_in_host_memory(device: Device, way: str) -> None:
    """Layers stream and are stepped on the host; the states of the rest pass through the device."""
    if device.torch_device.type != "cpu":
        pytest.skip("the plain steps of the layers differ from the host's in last bits")
    plain, model = _made(), _made()
    x = torch.randn(5, 8, 16, device=device.torch_device)
    on_layers, on_rest = (
        torch.optim.AdamW(plain.layers.parameters(), fused=True),
        torch.optim.AdamW(_rest_of(plain), fused=True),
    )
    for batch in x:
        plain(batch).square().mean().backward()
        for own in (on_layers, on_rest):
            own.step()
            own.zero_grad()

    with memkit.LayerOffload(model, offload_ratio=1.0, train="host", device=device):
        mine, rest = torch.optim.AdamW(model.layers.parameters(), fused=True), torch.optim.AdamW(_rest_of(model), fused=True)
        with offload(rest, device, **WAYS[way]) as states:
            for batch in x:
                model(batch).square().mean().backward()
                for own in (mine, rest):
                    own.step()
                    own.zero_grad()
            states.wait()
            assert states.stats().host_bytes > 0
            assert (states.plan.host_bytes == 0) == ("disk" in way)
            assert_same(on_rest.state_dict()["state"], rest.state_dict()["state"])
        assert_same(on_layers.state_dict()["state"], mine.state_dict()["state"])
    assert_same([*plain.parameters()], [*model.parameters()])


def test_what_streams_is_refused(device: Device) -> None:
    model = _made()
    with memkit.LayerOffload(model, offload_ratio=1.0, train="host", device=device):
        with pytest.raises(ValueError, match=re.escape("parameter 0.0 streams by LayerOffload, and its states are in host")):
            offload(torch.optim.AdamW(model.layers.parameters(), fused=True), device)
        offload(torch.optim.AdamW(_rest_of(model), fused=True), device).close()
    offload(torch.optim.AdamW(model.to(device.torch_device).parameters(), fused=True), device).close()


@pytest.mark.parametrize("when", ["step", "backward"])
def test_what_is_stepped_within_the_backward_by_others_is_refused(device: Device, when: str) -> None:
    model = _made()

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True)

    with memkit.LayerOffload(model, offload_ratio=1.0, train="fused", optimizer=make, device=device):
        for parameters in (model.layers.parameters(), _rest_of(model)):
            with pytest.raises(ValueError, match=re.escape('within the backward by LayerOffload(train="fused")')) as caught:
                offload(make(parameters), device, when=when)
            assert 'memkit.StateOffload(offload.optimizer, when="backward")' in str(caught.value)
    offload(make(model.to(device.torch_device).parameters()), device, when=when).close()


def test_layers_whose_states_are_offloaded_do_not_stream(device: Device) -> None:
    model = _made().to(device.torch_device)
    before = copy.deepcopy(model.state_dict())
    states = offload(torch.optim.AdamW(model.parameters(), fused=True), device)
    with pytest.raises(ValueError, match=re.escape('"stem.weight" is stepped by an optimizer with a StateOffload')):
        memkit.LayerOffload(model, offload_ratio=1.0, device=device)
    assert_same(before, model.state_dict())
    states.close()
    memkit.LayerOffload(model, offload_ratio=1.0, device=device).close()
