"""Compiled blocks inside a budget: bits are those of the same blocks run plain, whatever the plan."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.budgeting.learning import Learning
from memkit.activations.budgeting.planned_forward import PlannedForward
from memkit.device import ReferenceDevice
from tests.activations.budgeting.plans import planner_of, random_plan
from tests.activations.cases import assert_same_bits
from tests.activations.compiled_blocks import OF_DYNAMO
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.clock import set_clock
from tests.contracts.test_interrupts import Blocks

pytestmark = [
    pytest.mark.filterwarnings(NO_PLAN_FITS, *OF_DYNAMO),
    pytest.mark.usefixtures("no_compiled_code_is_left"),
]


def _step(model: nn.Module, context: AbstractContextManager[object]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    with context:
        loss = model(torch.linspace(-1, 1, 128).view(8, 16)).square().sum()
    loss.backward()
    return [loss.detach(), *[parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]]


@pytest.mark.slow
def test_nothing_is_recorded_where_what_compiled_blocks_save_only_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learning, "note_link", lambda *_: None)  # how fast copies are here differs from step to step
    device, model = ReferenceDevice(), Blocks(is_compiled=True)
    plain, recorded = _step(model, nullcontext()), []
    for _ in range(8):
        assert_same_bits(_step(model, memkit.MemoryBudget(0.9, "moves", min_bytes=0, device=device)), plain)
        stats = memkit.stats("moves")
        recorded.append(stats.is_recorded)

    assert stats.num_copies_out
    assert recorded == [True] * 3 + [False] * 5
    device.synchronize()
    assert stats.live_records == 0


@pytest.mark.slow
def test_waiting_for_room_is_no_part_of_what_a_block_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is measured, what it saves leaves and is waited for, so that the step keeps to the budget."""
    make_room, calls, waits = PlannedForward.make_room, itertools.count(), list[float]()

    def wait_and_make_room(forward: PlannedForward) -> bool:
        if next(calls) % 4 == 0:  # each block waits more often than that
            waits.append(0.05)
            clock.sleep(0.05)
        return make_room(forward)

    monkeypatch.setattr(PlannedForward, "make_room", wait_and_make_room)
    clock = set_clock(monkeypatch, tick_s=1e-5)
    device, model = ReferenceDevice(), Blocks(is_compiled=True)
    _step(model, nullcontext())  # it compiles
    for _ in range(3):
        _step(model, memkit.MemoryBudget("2KiB", "waits", min_bytes=0, device=device))

    assert len(waits) >= 4
    assert planner_of("waits").problem.plain_s < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
def test_compiled_blocks_are_exact_under_budgets_and_any_plan(seed: int | None) -> None:
    device = ReferenceDevice(seed=seed)
    torch.manual_seed(0)
    model = Blocks(is_compiled=True)
    plain = _step(model, nullcontext())
    for budget in (0.7, 0.4, "2KiB"):
        for _ in range(4):
            assert_same_bits(_step(model, memkit.MemoryBudget(budget, f"{budget}", min_bytes=0, device=device)), plain)
        assert memkit.stats(f"{budget}").follows_plan
    for number in range(10):
        plan = random_plan(planner_of("0.7"), number)
        assert_same_bits(_step(model, memkit.MemoryBudget(0.7, "0.7", min_bytes=0, device=device, plan=plan)), plain)
        assert memkit.stats("0.7").follows_plan
    device.synchronize()
    assert memkit.stats("0.7").host_in_use_bytes == 0


def test_model_that_is_compiled_is_told_of_the_budget() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    model.compile(backend="aot_eager")

    with (
        memkit.MemoryBudget("1MiB", "whole", min_bytes=0, device=ReferenceDevice()),
        pytest.raises(RuntimeError, match=r'^MemoryBudget \(tag "whole"\) needs a model that is not compiled itself'),
    ):
        model(torch.randn(4, 8))
