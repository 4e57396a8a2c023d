"""State dicts are torch's own, into and from plain torch, and through its distributed checkpoints."""

from __future__ import annotations

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp

from memkit.device import Device, ReferenceDevice
from memkit.errors import StateOffloadError
from tests.interrupts import count_lines, interrupt, spread
from tests.states.cases import (
    OPTIMIZERS,
    WAYS,
    Case,
    Pair,
    PerParameter,
    assert_resumes,
    assert_same,
    in_all_ways,
    make_training,
    offload,
    skip_host_steps,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
RESUMING = [case for case in OPTIMIZERS if case.name != "rebinding"]  # which counts outside


@pytest.mark.covering(2)
@pytest.mark.parametrize(("case", "way", "is_cut"), in_all_ways(RESUMING), indirect=["is_cut"])
def test_resumes_into_and_from_plain_torch(case: Case, way: str, is_cut: bool, device: Device, tmp_path: Path) -> None:
    skip_host_steps(device, way)
    assert_resumes(case, device, tmp_path, num_steps_before=(0, 1), **WAYS[way])


def test_a_saved_state_has_no_more_than_its_own_bytes(device: Device) -> None:
    sizes = []
    for is_offloaded in (False, True):
        model, optimizer = make_training(device)
        states = offload(optimizer, device) if is_offloaded else None
        train(model, optimizer, device, range(2))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        sizes.append(file.tell())
        if states is not None:
            states.close()

    assert sizes[1] <= 1.02 * sizes[0]


def test_loading_does_not_share_with_what_was_loaded(device: Device) -> None:
    model, optimizer = make_training(device)
    train(model, optimizer, device, range(2))
    loaded = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(loaded)
    with offload(optimizer, device):
        optimizer.load_state_dict(loaded)
        train(model, optimizer, device, range(2, 4))
        held = optimizer.state_dict()  # it outlives what it is of
        copied = copy.deepcopy(held)

    assert_same((kept, copied), (loaded, held))


def test_a_failed_load_changes_nothing(device: Device) -> None:
    pair = Pair(device)
    with offload(pair.optimizer, device):
        pair.train(range(2))
        with pytest.raises(ValueError, match="different number of parameter groups"):
            pair.optimizer.load_state_dict({"state": {}, "param_groups": []})
        pair.train(range(2, 4))
        pair.assert_same()


@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("full", [False, True])
def test_distributed_checkpoint(device: Device, full: bool, update: str) -> None:
    fused = update == "host"
    options: Any = dcp.StateDictOptions(full_state_dict=full)
    pair = Pair(device, fused=fused)
    for net in pair.nets:  # of which torch would miss the states
        net.empty.requires_grad_(False)
        net.unused.requires_grad_(False)
    with offload(pair.optimizer, device, device_budget=8192, update=update):
        pair.train_plain(range(2))
        found = copy.deepcopy(dcp.get_optimizer_state_dict(pair.plain, pair.plain_optimizer, options=options))
        pair.model.load_state_dict(pair.plain.state_dict())
        before = {name: value.clone() for name, value in pair.model.state_dict().items()}
        dcp.set_optimizer_state_dict(pair.model, pair.optimizer, found, options=options)
        assert_same(before, pair.model.state_dict())
        own = dcp.get_optimizer_state_dict(pair.model, pair.optimizer, options=options)
        assert_same(found, own)
        pair.train(range(2, 4))
        if device.torch_device.type == "cpu" or update == "device":
            pair.assert_same()


@pytest.mark.parametrize("budget", [0, 4096])
def test_loading_keeps_the_precision_that_the_optimizer_keeps(device: Device, budget: int) -> None:
    class Precise(PerParameter):
        """Keeps float32 states of parameters of any precision."""

        def step_one(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
            mean = state.setdefault("mean", torch.zeros_like(parameter, dtype=torch.float32))
            mean.lerp_(parameter.grad.float(), 0.1)
            parameter.sub_((group["lr"] * mean).to(parameter.dtype))

    pair = Pair(device, Precise, dtype=torch.bfloat16)
    pair.train_plain(range(3))
    pair.model.load_state_dict(pair.plain.state_dict())
    with offload(pair.optimizer, device, device_budget=budget):
        pair.optimizer.load_state_dict(copy.deepcopy(pair.plain_optimizer.state_dict()))
        pair.train(range(3, 5))
        pair.assert_same()


# Loading that is broken off: states are the old or the loaded ones, or an error says that they are neither


LOADED_WAYS = "device", "some stay", "host", "backward", "disk"


class Broken(dict[Any, Any]):
    """States of a parameter; a read of them is interrupted."""

    def items(self) -> Any:
        raise KeyboardInterrupt


def test_states_that_are_half_loaded_are_used_by_nobody() -> None:
    model, optimizer = make_training(device := ReferenceDevice())
    states = offload(optimizer, device)
    train(model, optimizer, device, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        optimizer.load_state_dict(saved)
        assert_same(optimizer.state_dict(), saved)
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict({**saved, "state": {**saved["state"], 5: Broken()}})
        for use in (optimizer.step, optimizer.state_dict, optimizer.step):
            with pytest.raises(
                StateOffloadError, match=r"load_state_dict\(\) was interrupted.* Load the optimizer and the model"
            ):
                use()
    with pytest.warns(UserWarning, match=r"some parameters have loaded states, others none"):
        states.close()


IN_DEFAULT = "device", "backward"


@pytest.mark.parametrize(
    ("way", "num_lines"),
    [
        *((way, 3) for way in IN_DEFAULT),
        *(pytest.param(way, 12, marks=pytest.mark.slow) for way in LOADED_WAYS if way not in IN_DEFAULT),
        *(pytest.param(way, 120, marks=pytest.mark.slow) for way in LOADED_WAYS),
    ],
)
def test_interrupts_at_any_line(way: str, num_lines: int) -> None:
    pair = Pair(device := ReferenceDevice())
    saved, num_readable = [], 0
    for number in range(3):
        saved.append(copy.deepcopy((pair.plain.state_dict(), pair.plain_optimizer.state_dict())))
        pair.train_plain(range(number, number + 1))
    with offload(pair.optimizer, device, **WAYS[way]) as states:

        def load(number: int) -> None:
            pair.model.load_state_dict(saved[number][0])
            pair.optimizer.load_state_dict(saved[number][1])

        load(1)
        num_all = count_lines(lambda: load(1), None)
        lines = [0, *spread(num_all, num_lines - 2), num_all - 1]  # the first comes before anything is loaded
        for line in lines:
            load(2)
            place = interrupt(lambda: load(1), line, None)
            with contextlib.suppress(StateOffloadError):
                found = copy.deepcopy(pair.optimizer.state_dict())
                num_readable += 1
                assert found["state"].keys() == saved[1][1]["state"].keys(), place
                num_steps = int(next(iter(found["state"].values()))["step"])
                assert_same(found, saved[num_steps][1], str(place))
            load(2)
            assert_same(pair.optimizer.state_dict(), saved[2][1], str(place))
        train(pair.model, pair.optimizer, device, range(2, 3), states=states)
        pair.assert_same()
    assert 0 < num_readable < len(lines)
    assert not device.races
