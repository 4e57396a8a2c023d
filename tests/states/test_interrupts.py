"""Ctrl-C at any line of a step: each parameter is as before or as after it, or an error names what is half written."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from memkit.device import ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.transfer import ReferenceDisk
from tests.interrupts import interrupts
from tests.states.cases import Net, assert_same, batch, make_net, offload, train
from tests.states.test_faults import _assert_old_or_new, _cut, _snapshot
from tests.states.test_layered_faults import _Trained
from tests.threads import num_own_threads

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. states of .* were put elsewhere")

MODES: dict[str, dict[str, Any]] = {
    "device": {},
    "some stay": {"device_budget": 16384},
    "host": {"update": "host"},
    "beside": {"overlap_forward": True},
    "beside, host": {"overlap_forward": True, "update": "host"},
    "backward": {"when": "backward"},
    "backward, host": {"when": "backward", "update": "host"},
    "disk": {"disk": ReferenceDisk()},
    "backward, disk": {"when": "backward", "disk": ReferenceDisk(is_late=False)},
}
NUM_LINES = [5, pytest.param(40, marks=pytest.mark.slow)]


@contextmanager
def lost_is_named() -> Iterator[None]:
    """Let an error pass that says which parameter is half written, and what to do."""
    try:
        yield
    except StateOffloadError as error:
        said = str(error)
        assert re.search(r"within parameter \d+\.\d+: a part of the parameter.* Load a checkpoint of the model", said)


@pytest.mark.parametrize("num_lines", NUM_LINES)
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_step(mode: str, is_cut: bool, num_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_cut:
        _cut(monkeypatch)
    device = ReferenceDevice()
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = (torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True) for net in (plain, model))

    def step(net: Net, own: torch.optim.Optimizer) -> None:
        net(batch(device, 50)).square().mean().backward()
        own.step()

    train(plain, plain_optimizer, device, range(2))
    begin = copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict()))
    old = _snapshot(plain, plain_optimizer)
    step(plain, plain_optimizer)
    new = _snapshot(plain, plain_optimizer)
    threads, held = num_own_threads(), set()
    with offload(optimizer, device, **MODES[mode]) as states:

        def begin_anew() -> None:
            model.load_state_dict(begin[0])
            optimizer.load_state_dict(begin[1])
            model.zero_grad()

        def step_and_wait() -> None:
            step(model, optimizer)
            if "overlap_forward" in MODES[mode]:
                states.wait()  # by which the step ends

        for place in interrupts(step_and_wait, num_lines, prepare=begin_anew):
            with lost_is_named():
                states.wait()
                _assert_old_or_new(_snapshot(model, optimizer), old, new, place)
                optimizer.step()  # which ends the step
                states.wait()
                _assert_old_or_new(_snapshot(model, optimizer), old, new, place)
                plain.load_state_dict(model.state_dict())
                plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                for net, own in ((plain, plain_optimizer), (model, optimizer)):
                    net.zero_grad()
                    step(net, own)
                assert_same(optimizer.state_dict(), plain_optimizer.state_dict(), place)  # which waits
                assert_same(model.state_dict(), plain.state_dict(), place)
            held.add(states.stats().host_bytes)
        begin_anew()
        step_and_wait()
        assert_same(_snapshot(model, optimizer), new)
        assert len(held) == 1
    device.synchronize()
    assert not device.races
    assert num_own_threads() == threads


@pytest.mark.parametrize("num_lines", [2, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", [{}, {"has_master": True}, {"disk": ReferenceDisk(is_late=False)}], ids=["", "master", "disk"]
)
def test_backward_of_streamed_layers(options: dict[str, Any], num_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _cut(monkeypatch)
    trained = _Trained(ReferenceDevice(), torch.optim.AdamW, torch.optim.AdamW, **options)
    for _ in interrupts(trained.step, num_lines, prepare=trained.begin_anew):
        with lost_is_named():
            trained.assert_whole()
            trained.assert_goes_on()
    trained.begin_anew()
    trained.assert_goes_on()
    assert trained.layers.stats().num_overflows == 0
    trained.close()
