"""`load_state_dict` that is broken off: states are the old or the loaded ones, or an error says that they are neither."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

from memkit.device import ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.transfer import ReferenceDisk
from tests.interrupts import count_lines, interrupt, spread
from tests.states.cases import assert_same, assert_same_training, make_net, offload, train

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")

WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "some stay": {"device_budget": 8192},
    "host": {"update": "host"},
    "backward": {"when": "backward"},
    "disk": {"disk": ReferenceDisk()},
}


class Broken(dict[Any, Any]):
    """States of a parameter; a read of them is interrupted."""

    def items(self) -> Any:
        raise KeyboardInterrupt


def test_states_that_are_half_loaded_are_used_by_nobody() -> None:
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload(optimizer, device):
        train(model, optimizer, device, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        broken = {**saved, "state": {**saved["state"], 5: Broken()}}
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(broken)
        for use in (optimizer.step, optimizer.state_dict, optimizer.step):
            with pytest.raises(
                StateOffloadError, match=r"load_state_dict\(\) was interrupted.* Load the optimizer and the model again"
            ):
                use()
        optimizer.load_state_dict(saved)

        assert_same(optimizer.state_dict(), saved)


def test_closing_behind_it_warns() -> None:
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    states = offload(optimizer, device)
    train(model, optimizer, device, range(2))
    saved = optimizer.state_dict()
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict({**saved, "state": {**saved["state"], 5: Broken()}})

    with pytest.warns(UserWarning, match=r"some parameters have loaded states, others none"):
        states.close()


IN_DEFAULT = "device", "backward"


@pytest.mark.parametrize(
    ("way", "num_lines"),
    [
        *((way, 3) for way in IN_DEFAULT),
        *(pytest.param(way, 12, marks=pytest.mark.slow) for way in WAYS if way not in IN_DEFAULT),
        *(pytest.param(way, 120, marks=pytest.mark.slow) for way in WAYS),
    ],
)
def test_interrupts_at_any_line(way: str, num_lines: int) -> None:
    device = ReferenceDevice()
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (plain, model))
    saved, num_readable = [], 0
    for number in range(3):
        saved.append(copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict())))
        train(plain, plain_optimizer, device, range(number, number + 1))
    with offload(optimizer, device, **WAYS[way]) as states:

        def load(number: int) -> None:
            model.load_state_dict(saved[number][0])
            optimizer.load_state_dict(saved[number][1])

        load(1)
        num_all = count_lines(lambda: load(1), None)
        lines = [0, *spread(num_all, num_lines - 2), num_all - 1]  # the first comes before anything is loaded
        for line in lines:
            load(2)
            place = interrupt(lambda: load(1), line, None)
            with contextlib.suppress(StateOffloadError):
                found = copy.deepcopy(optimizer.state_dict())
                num_readable += 1
                assert found["state"].keys() == saved[1][1]["state"].keys(), place
                num_steps = int(next(iter(found["state"].values()))["step"])
                assert_same(found, saved[num_steps][1], str(place))
            load(2)
            assert_same(optimizer.state_dict(), saved[2][1], str(place))
        train(model, optimizer, device, range(2, 3), states=states)
        assert_same_training(plain, plain_optimizer, model, optimizer)
    assert 0 < num_readable < len(lines)
    assert not device.races
