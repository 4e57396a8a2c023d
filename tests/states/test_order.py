"""In which order pieces are given out, by a clock: the link and the thread that steps are busy until the end."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from memkit.device import ReferenceDevice
from memkit.plan import ParameterCosts, StateRates, Update, plan_states
from memkit.states import device_steps
from tests.states.cases import offload
from tests.states.clocked import bound_s, clocked
from tests.states.test_overlap import Drawing
from tests.states.test_trial import Momentum


def _costs(numels: list[int]) -> list[ParameterCosts]:
    """Return what bfloat16 parameters with float32 copies take, stepped by AdamW."""
    return [
        ParameterCosts(
            name=str(number), numel=n, parameter_bytes=2 * n, state_bytes=12 * n, has_master=True, is_elementwise=True
        )
        for number, n in enumerate(numels)
    ]


WIDTH = 3072
LAYER = [WIDTH * WIDTH] * 2 + [WIDTH * 8192] * 3 + [WIDTH * 1024] * 2 + [WIDTH] * 2
MODELS = {
    "a Llama": [128256 * WIDTH, *LAYER * 28],
    "alike": [14 * 2**20] * 240,
    "an embedding": [256 * 2**20, *[2**20] * 400],
}
RATES = [(48e9, 3.7e9), (48e9, 2.8e9), (40e9, 2.4e9), (48e9, 1e9), (24e9, 4e9), (12e9, 1e9)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("link", "host"), RATES)
def test_both_sides_are_busy_until_the_end(model: str, link: float, host: float) -> None:
    rates = StateRates(link_bytes_per_s=link, host_numel_per_s=host)
    plan = plan_states(_costs(MODELS[model]), update="both", rates=rates)
    clock, (link_s, host_s) = clocked(plan, rates), bound_s(plan, rates)

    assert {piece.update for piece in plan.pieces} == set(Update)
    assert clock.end_s <= 1.06 * max(link_s, host_s)
    assert clock.end_s < 0.98 * bound_s(plan_states(_costs(MODELS[model])), rates)[0]
    assert clock.idle_s <= 0.06 * clock.thread_s


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("times", [0.5, 0.8, 1.25, 2.0])
def test_neither_side_waits_where_the_other_takes_longer_than_planned(model: str, times: float) -> None:
    planned = StateRates(link_bytes_per_s=48e9, host_numel_per_s=3e9)
    plan = plan_states(_costs(MODELS[model]), update="both", rates=planned)
    rates = replace(planned, host_numel_per_s=times * planned.host_numel_per_s)

    assert clocked(plan, rates).end_s <= 1.02 * max(bound_s(plan, rates))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("update", ["device", "host"])
def test_one_side_alone_is_busy(model: str, update: str) -> None:
    rates = StateRates(link_bytes_per_s=48e9, host_numel_per_s=3.7e9)
    plan = plan_states(_costs(MODELS[model]), update=update)
    clock = clocked(plan, rates)

    assert clock.end_s <= 1.01 * max(bound_s(plan, rates))
    assert not clock.idle_s


UNTIED = [128256 * WIDTH, *LAYER * 28, 128256 * WIDTH]
DEVICE_NUMEL_PER_S = 28e9
"""About what 90 bytes of each parameter take on an H100: casts, the step, and what a failing one needs."""


@pytest.mark.parametrize(("share", "most"), [(0.25, 1.02), (0.5, 1.04), (0.75, 1.07)])
@pytest.mark.parametrize("model", [*MODELS.values(), UNTIED], ids=[*MODELS, "a Llama with a head"])
def test_what_stays_is_stepped_while_others_move(model: list[int], share: float, most: float) -> None:
    rates = StateRates(link_bytes_per_s=48e9, host_numel_per_s=3.7e9)
    plan = plan_states(_costs(model), device_budget_bytes=int(share * 12 * sum(model)))
    clock = clocked(plan, rates, device_numel_per_s=DEVICE_NUMEL_PER_S, in_order=False)

    assert clock.end_s <= most * max(bound_s(plan, rates))


@pytest.mark.parametrize("draws", [False, True])
def test_what_stays_comes_between_what_moves_unless_steps_draw(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, sizes = ReferenceDevice(), [8, 8, 8, 8, 64]
    rows = [[nn.Parameter(torch.ones(size, 32)) for size in sizes] for _ in range(2)]
    optimizers = [Drawing(row, lr=0.1, momentum=0.9) if draws else torch.optim.AdamW(row) for row in rows]
    stepped, step = list[str](), device_steps.DeviceSteps.step
    monkeypatch.setattr(
        device_steps.DeviceSteps, "step", lambda self, piece, run: (stepped.append(piece.names), step(self, piece, run))[1]
    )
    with offload(optimizers[1], device, device_budget=64 * 32 * (4 if draws else 8)) as states:
        assert [piece.is_resident for piece in states.plan.pieces] == [False, False, False, False, True]
        for number in range(3):
            for row, optimizer in zip(rows, optimizers, strict=True):
                torch.manual_seed(number)
                for parameter in row:
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()

        order = (0, 1, 2, 3, 4) if draws else (0, 1, 4, 2, 3)
        assert stepped[-5:] == [f"parameter 0.{index}" for index in order]
        assert all(map(torch.equal, *rows))


class _DrawsForLarge(Momentum):
    """Draws random numbers for what is large alone, as where that is kept in 8 bits."""

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
    """Draws from one of NumPy's."""

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
