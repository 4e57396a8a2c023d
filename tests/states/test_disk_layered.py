"""States on a disk beside streamed layers: weights, gradients and states all pass through, and host memory has no states."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.errors import DiskError, LayerOffloadError, StateOffloadError
from memkit.transfer import ReferenceDisk
from tests.states.cases import assert_same
from tests.states.test_layered import OPTIMIZERS, Both, _cut, in_groups
from tests.states.test_layered_faults import _Trained
from tests.states.test_on_disk import _Faults, _real_disk
from tests.weights.cases import RUNS, WIDTH, Stack, inputs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("has_own", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name != "AdamW"] + ["AdamW"]
)
def test_steps_are_the_plain_ones(name: str, has_own: bool) -> None:
    device = ReferenceDevice()
    both = Both(device, in_groups(OPTIMIZERS[name]), disk=ReferenceDisk())
    for _ in range(6):
        both.step(has_own=has_own)

    assert both.states.plan.host_bytes == 0 < both.states.plan.disk_bytes
    assert both.states.stats().num_steps == 6
    both.assert_same_training()
    both.close()
    both.assert_same_training()
    device.synchronize()
    assert not device.races


@pytest.mark.parametrize("is_late", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="float32"),
        pytest.param({"master": torch.float32, "dtype": torch.bfloat16}, id="master", marks=pytest.mark.slow),
    ],
)
def test_windows_of_large_parameters(options: dict[str, Any], is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _cut(monkeypatch)
    device = ReferenceDevice()
    both = Both(device, num_slots=2, disk=ReferenceDisk(seed=1, is_late=is_late), **options)
    assert any(len(piece.windows) > 1 for piece in both.states.plan.pieces)
    for _ in range(4):
        both.step()

    assert both.layers.stats().num_overflows == 0
    both.assert_same_training()
    both.close()
    device.synchronize()
    assert not device.races


def test_on_a_real_disk(device: Device, tmp_path: Path) -> None:
    both = Both(device, device_budget="8KiB", disk=_real_disk(tmp_path))
    for _ in range(4):
        both.step()

    both.assert_same_training()
    both.close()


@pytest.mark.parametrize("run", ["reused", *(pytest.param(run, marks=pytest.mark.slow) for run in RUNS if run != "reused")])
def test_orders(run: str) -> None:
    both = Both(ReferenceDevice(), model=Stack(4, run=RUNS[run]), num_slots=1, disk=ReferenceDisk(is_late=False))
    for _ in range(3):
        both.step()

    both.close()


class _Rest(nn.Module):
    """Layers that stream, between what doesn't."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(4)
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(4, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stack(self.embedding(x)))


@pytest.mark.parametrize("is_late", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_beside_layers_that_are_stepped_on_the_host(is_late: bool) -> None:
    """What doesn't stream is stepped within the backward, in which layers stream."""
    device = ReferenceDevice()
    torch.manual_seed(0)
    plain = _Rest()
    model = copy.deepcopy(plain)
    (x,) = inputs(device, 1)
    with memkit.LayerOffload(
        model, layers=list(model.stack.layers), offload_ratio=1.0, num_slots=2, train="host", device=device
    ):
        optimizers = [
            [
                torch.optim.AdamW(net.stack.layers.parameters(), lr=1e-2),
                torch.optim.AdamW(
                    [
                        *net.embedding.parameters(),
                        *net.stack.stem.parameters(),
                        *net.stack.head.parameters(),
                        *net.head.parameters(),
                    ]
                ),
            ]
            for net in (plain, model)
        ]
        disk = ReferenceDisk(is_late=is_late)
        with memkit.StateOffload(optimizers[1][1], when="backward", disk=disk, device=device) as states:
            for step in range(5):
                for net, own in zip((plain, model), optimizers, strict=True):
                    if net is model and step % 2:
                        with states.accumulate():
                            net(x).square().mean().backward()
                    elif step % 2:
                        net(x).square().mean().backward()
                    net(x + step).square().mean().backward()
                    for one in own:
                        one.step()
                        one.zero_grad()
                assert_same(plain.state_dict(), model.state_dict())
                assert_same(optimizers[0][1].state_dict(), optimizers[1][1].state_dict())
            assert states.plan.host_bytes == 0 < states.plan.disk_bytes
    device.synchronize()
    assert not device.races


@pytest.mark.slow
@settings(max_examples=20)
@given(
    what=st.sampled_from(["read", "write"]),
    at=st.integers(0, 24),
    number=st.sampled_from([errno.EIO, errno.ENOSPC]),
    lasts=st.booleans(),
    has_states=st.booleans(),
    is_cut=st.booleans(),
    is_late=st.booleans(),
)
def test_a_disk_that_fails(what: str, at: int, number: int, lasts: bool, has_states: bool, is_cut: bool, is_late: bool) -> None:
    """Each weight is as before the step or as after it, with its states, and the next backward goes on."""
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            _cut(patch)
        faults = _Faults()
        disk = ReferenceDisk(fault=faults, is_late=is_late)
        trained = _Trained(ReferenceDevice(), torch.optim.AdamW, torch.optim.AdamW, has_states=has_states, disk=disk)
        faults.arm(what, at, number, lasts=lasts)
        try:
            trained.step()
        except (DiskError, StateOffloadError, LayerOffloadError):
            faults.disarm()
            try:
                trained.assert_whole()
            except StateOffloadError as error:
                assert is_cut
                assert lasts
                assert "a part of the parameter" in str(error)  # noqa: PT017
                trained.begin_anew()  # its layer has left the slot: a checkpoint is loaded, as the error says
        faults.disarm()
        trained.assert_goes_on()
        trained.close()
