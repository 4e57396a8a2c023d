"""States that somebody moves, exchanges, or gives other data: no step uses the old ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memkit.core.tensors import parts_of
from memkit.device import Device
from memkit.plan import states as state_pieces
from memkit.states.packing import copy_each
from tests.states.cases import EightBit, assert_same, offload, skip_host_steps
from tests.states.test_trial import Momentum
from tests.weights.wrapped import Int8

Act = Callable[[torch.optim.Optimizer, list[nn.Parameter]], None]


def _set_data(optimizer: torch.optim.Optimizer, row: list[nn.Parameter]) -> None:
    """Set the data of states to other values."""
    for parameter in row[::2]:
        for value in optimizer.state[parameter].values():
            value.data = value * 0.5


def _move_data(optimizer: torch.optim.Optimizer, row: list[nn.Parameter]) -> None:
    """Move the data, as moving an optimizer to a device does."""
    for entries in optimizer.state.values():
        for value in entries.values():
            value.data = value.data.clone()


def _exchange(optimizer: torch.optim.Optimizer, row: list[nn.Parameter]) -> None:
    """Let parameters go on with each other's states, as experts that change places."""
    state = optimizer.state
    state[row[0]], state[row[-1]] = state[row[-1]], state[row[0]]
    state[row[1]]["exp_avg"], state[row[2]]["exp_avg"] = state[row[2]]["exp_avg"], state[row[1]]["exp_avg"]


def _exchange_data(optimizer: torch.optim.Optimizer, row: list[nn.Parameter]) -> None:
    one, other = (optimizer.state[parameter]["exp_avg"] for parameter in (row[0], row[-1]))
    one.data, other.data = other.data, one.data


def _exchange_within(optimizer: torch.optim.Optimizer, row: list[nn.Parameter]) -> None:
    for parameter in row:
        entries = optimizer.state[parameter]
        entries.update(exp_avg=entries["exp_inf"], exp_inf=entries["exp_avg"])


def _load_exchanged(optimizer: torch.optim.Optimizer, row: list[nn.Parameter]) -> None:
    saved = optimizer.state_dict()
    saved["state"][0], saved["state"][3] = saved["state"][3], saved["state"][0]
    optimizer.load_state_dict(saved)


def _assert_same_steps(make: Any, act: Act | None, device: Device, patch: pytest.MonkeyPatch, **options: Any) -> None:
    """Assert that steps are bit for bit plain ones, with an act behind the second."""
    patch.setattr(state_pieces, "PIECE_BYTES", 2048)
    rows = [[nn.Parameter(torch.ones(16, 16, device=device.torch_device)) for _ in range(6)] for _ in range(2)]
    optimizers = [make(row) for row in rows]
    with offload(optimizers[1], device, **options) as states, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "StateOffload: states of .* were put elsewhere")
        for number in range(4):
            for row, optimizer in zip(rows, optimizers, strict=True):
                generator = torch.Generator().manual_seed(number)
                for parameter in row:
                    parameter.grad = torch.randn(parameter.size(), generator=generator).to(parameter.device)
                optimizer.step()
                if number == 1 and act is not None:
                    states.wait()
                    act(optimizer, row)
        assert len(states.plan.pieces) == len(rows[0])
        states.wait()
        assert_same(rows[0], rows[1])
        assert_same(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"])
    assert_same(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"])


class _SetsData(Momentum):
    """Sets the data of its states in each step."""

    def step_group(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.data = mean * 0.9 + parameter.grad
                parameter.sub_(mean, alpha=0.1)


class _SetsInner(EightBit):
    """Replaces the inner tensors of its states in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for entries in self.state.values():
            mean = entries["mean"]
            before = mean.values, mean.scale
            mean.values, mean.scale = map(torch.clone, before)
            for part in before:
                part.zero_()
        return None


ACTS = [_set_data, _move_data, _exchange, _exchange_data, _exchange_within, _load_exchanged]


@pytest.mark.covering(2)
@pytest.mark.core(1)
@pytest.mark.parametrize("options", [{}, {"update": "host"}, {"overlap_forward": True}], ids=str)
@pytest.mark.parametrize(("kind", "act"), [*((torch.optim.Adamax, act) for act in ACTS), (_SetsData, None), (_SetsInner, None)])
def test_what_somebody_or_a_step_has_put_there_is_stepped(kind: Any, act: Any, options: Any, device: Device) -> None:
    skip_host_steps(device, str(options))
    with pytest.MonkeyPatch.context() as patch:
        _assert_same_steps(kind, act, device, patch, **options)


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
