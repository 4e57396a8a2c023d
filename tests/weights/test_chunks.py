"""Where the bytes of a layer that streams are, in each part of a step."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import memkit
from memkit.device import ReferenceDevice
from memkit.plan.chunks import Residency
from tests.weights.cases import Stack, assert_same, inputs, only_lora, run_step

HOST, IN_FLIGHT, DEVICE, DIRTY = Residency.HOST, Residency.IN_FLIGHT, Residency.DEVICE, Residency.DIRTY


def _residencies(offload: memkit.LayerOffload) -> list[Residency]:
    return [chunk.residency for chunk in offload._chunks]


def test_layers_go_to_the_device_and_are_evicted_in_the_order_of_the_forward() -> None:
    device, model, seen = ReferenceDevice(), only_lora(Stack(4)), list[list[Residency]]()
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device) as offload:
        seen.append(_residencies(offload))
        for layer in model.layers:
            layer.norm.register_forward_hook(lambda *_: seen.append(_residencies(offload)))
        with torch.no_grad():
            model(inputs(device)[0])
        assert all((chunk.slot is None) == (chunk.residency is HOST) for chunk in offload._chunks)

    assert seen == [
        [HOST, HOST, HOST, HOST],
        [DEVICE, IN_FLIGHT, HOST, HOST],
        [HOST, DEVICE, IN_FLIGHT, HOST],
        [HOST, HOST, DEVICE, IN_FLIGHT],
        [HOST, HOST, DEVICE, DEVICE],
    ]
    assert _residencies(offload) == [HOST] * 4
    assert all(chunk.slot is None for chunk in offload._chunks)


def test_layer_that_is_stepped_is_dirty_until_it_is_written_back() -> None:
    device, seen = ReferenceDevice(), list[Residency]()
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

    class Noting(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            seen.extend(residency for residency in _residencies(offload) if residency is DIRTY)
            super().step()

    make = functools.partial(Noting, lr=0.1)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("memkit.weights.layer_offload.state_bytes_of", lambda *_: 0)
        offload = memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, optimizer=make, device=device)
    with offload:
        model(torch.ones(2, 16)).sum().backward()

        assert len(seen) == 8  # a weight and a bias of each of four layers: one at a time
        assert DIRTY not in _residencies(offload)


def test_what_is_dirty_is_not_evicted() -> None:
    device, model = ReferenceDevice(), Stack(4)
    with memkit.LayerOffload(model, offload_ratio=1.0, train="host", device=device) as offload:
        chunk = offload._chunks[0]
        chunk.become(IN_FLIGHT)
        chunk.become(DEVICE)
        chunk.become(DIRTY)
        with pytest.raises(AssertionError, match=r"layers\.0: from .*DIRTY to .*HOST"):
            chunk.evict()
        chunk.become(DEVICE)
        chunk.evict()


def test_host_copy_that_was_written_to_is_fetched_again() -> None:
    device, model = ReferenceDevice(), only_lora(Stack(3))
    plain, batches = copy.deepcopy(model), inputs(device)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device) as offload:
        for _ in range(2):
            assert_same(run_step(model, batches), run_step(plain, batches))
        before = offload.stats().num_fetches
        for one in (model, plain):
            with torch.no_grad():
                one.layers[1].up.weight.mul_(2)
        assert_same(run_step(model, batches), run_step(plain, batches))

        assert offload.stats().num_fetches > before


class _Overlapping(nn.Module):
    """One of its parameters is a part of another, and its counter says nothing of writes to that. A backward writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.linspace(-1, 1, 256).view(16, 16), requires_grad=False)
        self.part = nn.Parameter(self.whole.data[:1].view(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return [batch, 16]."""
        y = x @ self.whole
        y.register_hook(self._write)
        return y * 2.0

    def _write(self, _: object) -> None:
        with torch.no_grad():
            self.part.mul_(1.5)


def test_weight_that_is_written_to_through_another_parameter_in_the_backward_is_that_of_the_plain_run() -> None:
    device, model = ReferenceDevice(), nn.Sequential(*[_Overlapping() for _ in range(4)])
    plain = nn.Sequential(*[_Overlapping() for _ in range(4)])
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device):
        for _ in range(3):
            found, expected = (torch.linspace(-1, 1, 64).view(4, 16).requires_grad_() for _ in range(2))
            model(found).sum().backward()
            plain(expected).sum().backward()
            assert found.grad is not None
            assert expected.grad is not None
            assert torch.equal(found.grad, expected.grad)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    device.synchronize()
    assert not device.races
