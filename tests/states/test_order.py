"""The order of pieces in a step: pieces on the device between those that move, unless steps draw random numbers."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from memkit.device import ReferenceDevice
from memkit.states.device_steps import DeviceSteps
from tests.states.cases import offload
from tests.states.test_overlap import Drawing
from tests.states.test_trial import Momentum


class _DrawsForLarge(Momentum):
    """Draws random numbers only for large parameters, as optimizers do that keep those in 8 bits."""

    def noise(self, parameter: Tensor) -> Any:
        return torch.rand(()).item() if parameter.numel() > 2**10 else 0.0


class _HasGenerator(Momentum):
    """Draws from a generator of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(0)

    def noise(self, parameter: Tensor) -> Any:
        return torch.rand((), generator=self.generator).item()


class _HasNumpys(_HasGenerator):
    """Draws from a NumPy generator."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = numpy.random.default_rng(0)

    def noise(self, parameter: Tensor) -> Any:
        return self.generator.random()


class _DrawsLate(Momentum):
    """Draws once it is told to."""

    draws = False

    def noise(self, parameter: Tensor) -> Any:
        return torch.rand(()).item() if self.draws else 0.0


def _rows_and_optimizers(kind: Any) -> tuple[list[list[nn.Parameter]], list[Any]]:
    rows = [[nn.Parameter(torch.ones(size, 32)) for size in (64, 64, 64, 64, 512)] for _ in range(2)]
    return rows, [kind(row) for row in rows]


def _step_alike(rows: list[list[nn.Parameter]], optimizers: list[Any], number: int) -> None:
    for row, optimizer in zip(rows, optimizers, strict=True):
        torch.manual_seed(number)
        for parameter in row:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("draws", [False, True])
def test_what_stays_comes_between_what_moves_unless_steps_draw(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, optimizers = _rows_and_optimizers(partial(Drawing, lr=0.1, momentum=0.9) if draws else torch.optim.AdamW)
    stepped, step = list[str](), DeviceSteps.step
    monkeypatch.setattr(DeviceSteps, "step", lambda self, piece, run: (stepped.append(piece.names), step(self, piece, run))[1])
    with offload(optimizers[1], ReferenceDevice(), device_budget=512 * 32 * (4 if draws else 8)) as states:
        assert [piece.is_resident for piece in states.plan.pieces] == [False] * 4 + [True]
        for number in range(3):
            _step_alike(rows, optimizers, number)

        order = (0, 1, 2, 3, 4) if draws else (0, 1, 4, 2, 3)
        assert stepped[-5:] == [f"parameter 0.{index}" for index in order]
        assert all(map(torch.equal, *rows))


@pytest.mark.parametrize("kind", [_DrawsForLarge, _HasGenerator, _HasNumpys])
def test_random_numbers_are_drawn_in_the_order_of_the_groups(kind: Any) -> None:
    rows, optimizers = _rows_and_optimizers(kind)
    with offload(optimizers[1], ReferenceDevice(), device_budget=512 * 32 * 4) as states:
        assert [piece.is_resident for piece in states.plan.pieces] == [False] * 4 + [True]
        for number in range(3):
            _step_alike(rows, optimizers, number)

        assert all(map(torch.equal, *rows))


def test_steps_that_draw_later_are_told_of_and_keep_the_order_from_then_on() -> None:
    rows, optimizers = _rows_and_optimizers(_DrawsLate)
    with offload(optimizers[1], ReferenceDevice(), device_budget=512 * 32 * 4):
        _step_alike(rows, optimizers, 0)
        for optimizer in optimizers:
            optimizer.draws = True
        with pytest.warns(UserWarning, match="drawn during a step of _DrawsLate.*keep to the order of the groups"):
            _step_alike(rows, optimizers, 1)
        with torch.no_grad():
            for mine, others in zip(*rows, strict=True):
                others.copy_(mine)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(2, 4):
                _step_alike(rows, optimizers, number)

        assert all(map(torch.equal, *rows))
