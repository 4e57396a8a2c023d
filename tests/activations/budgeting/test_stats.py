"""A budget's reports: `stats()`, the plan in use, as a table and as JSON, and its repr."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.plan import Action, MemoryPlan
from tests.activations.budgeting.plans import plan_of_one, planner_of
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, leaf_on, step
from tests.activations.conftest import open_test_device
from tests.activations.remat.conftest import NO_PLAN_FITS

UNITS = [1, 2, 1, 3, 1, 1, 2, 1]
ALL_BYTES = sum(UNITS) * UNIT_BYTES


def _budget(tag: str, device: ReferenceDevice, budget: str | float = 0.5, **options: object) -> memkit.MemoryBudget:
    return memkit.MemoryBudget(budget, tag, min_bytes=0, device=device, **options)


def test_figures_of_each_step_until_a_plan_is_followed() -> None:
    device = ReferenceDevice()
    x = leaf_on(device.torch_device)
    found = []
    for _ in range(5):
        step(x, UNITS, lambda: _budget("steps", device))
        found.append(memkit.stats("steps"))

    assert [stats.follows_plan for stats in found] == [False, False, True, True, True]
    assert [stats.num_plans for stats in found] == [0, 0, 1, 1, 1]
    assert [stats.num_iterations for stats in found] == [1, 2, 3, 4, 5]
    assert [stats.budget_bytes is None for stats in found[:2]] == [True, True]
    assert found[2].predicted_peak_bytes is not None
    assert found[2].step_peak_bytes is None
    for stats in found:
        assert stats.contexts == ("MemoryBudget",)
        assert (stats.num_saved, stats.saved_bytes, stats.num_deviations) == (len(UNITS), ALL_BYTES, 0)
        assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)
        assert stats.num_kept + stats.num_dropped + stats.num_copies_out == stats.num_saved
        assert stats.moved_in_bytes <= stats.moved_out_bytes
    last = found[-1]
    assert last.step_peak_bytes == last.predicted_peak_bytes <= last.budget_bytes
    assert last.peak_allocated_bytes == last.predicted_peak_bytes
    assert None not in (last.plain_s, last.predicted_s, last.step_s, last.min_budget_bytes)
    assert str(last).startswith("tag                    steps\n")
    assert "predicted peak" in str(last)


@pytest.mark.parametrize("action", [Action.OFFLOAD, Action.RECOMPUTE])
def test_plan_from_json_is_followed_under_a_new_tag(action: Action) -> None:
    """The first two steps show the step's ops; from the third on the plan is followed unchanged."""
    device = ReferenceDevice()
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), UNITS)
    for _ in range(3):
        step(x, UNITS, lambda: _budget("first", device))
    plan = _budget("first", device).plan
    assert MemoryPlan.from_json(plan.to_json()) == plan
    assert plan.kept_bytes + plan.offload_bytes + plan.recompute_bytes == ALL_BYTES
    plan = MemoryPlan.from_json(plan_of_one(planner_of("first"), action).to_json())
    followed = []
    for _ in range(4):
        assert_same_bits(step(x, UNITS, lambda: _budget("second", device, plan=plan)), plain)
        followed.append(memkit.stats("second").follows_plan)

    assert followed[-1]
    assert followed == sorted(followed)
    assert _budget("second", device).plan == plan
    stats = memkit.stats("second")
    assert stats.num_plans == 0
    assert (stats.moved_out_bytes, stats.dropped_bytes) == (plan.moved_bytes, plan.recompute_bytes)
    assert stats.num_copies_out == sum(value.action is Action.OFFLOAD for value in plan.values)
    assert stats.num_replayed_ops == sum(len(replay.ops) for replay in plan.replays)
    assert plan.offload_bytes == plan.moved_bytes


@pytest.mark.filterwarnings(NO_PLAN_FITS)
def test_another_budget_under_the_tag_is_another_plan() -> None:
    device = ReferenceDevice()
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), UNITS)
    peaks = {}
    for budget in (1.0, 0.6, 0.4, 1.0, 0.6):
        for _ in range(5):
            assert_same_bits(step(x, UNITS, lambda: _budget("several", device, budget)), plain)  # noqa: B023
        stats = memkit.stats("several")
        assert stats.follows_plan
        assert (stats.num_copies_out + stats.num_dropped > 0) == (budget < 1)  # else idle in the end
        assert not stats.is_recorded or stats.num_dropped
        assert peaks.setdefault(budget, stats.predicted_peak_bytes) == stats.predicted_peak_bytes
    assert memkit.stats("several").num_plans == 3
    assert peaks[1.0] > peaks[0.6] > peaks[0.4]


# The user's word, before a save and after it


Word = Callable[[Tensor], Tensor]


def _marked(x: Tensor, context: Callable[[], memkit.MemoryBudget], before: Sequence[Word], after: Sequence[Word]) -> Tensor:
    with context():
        y = x * 2
        for word in before:
            word(y)
        z = y.sin()
        for word in after:
            word(y)
        loss = z.exp().cos().sum()
    del y, z
    loss.backward()
    grad, x.grad = x.grad, None
    return grad


@pytest.mark.parametrize(
    ("before", "after", "out", "back", "again"),
    [
        ((memkit.offload,), (), 1, 1, 0),
        ((memkit.recompute,), (), 0, 0, 1),
        ((memkit.keep,), (), 0, 0, 0),
        ((memkit.offload, memkit.keep), (), 0, 0, 0),
        ((memkit.recompute, memkit.offload), (), 1, 1, 0),
        ((memkit.offload,), (memkit.recompute,), 1, 0, 1),
        ((memkit.offload,), (memkit.offload,), 1, 1, 0),
        ((memkit.offload,), (memkit.keep,), 1, 0, 0),
    ],
)
def test_the_last_word_counts(
    before: Sequence[Word], after: Sequence[Word], out: int, back: int, again: int, device: Device
) -> None:
    x = torch.linspace(0, 1, 64, device=device.torch_device).requires_grad_()
    for _ in range(3):
        _marked(x, lambda: memkit.MemoryBudget("1GiB", "last", min_bytes=0, device=device), before, after)
        stats = memkit.stats("last")

        assert (stats.num_copies_out, stats.num_copies_in, stats.num_replays) == (out, back, again)


def test_of_what_is_asked_to_leave_no_more_than_one_is_on_the_device_when_the_forward_ends() -> None:
    device = open_test_device("late")
    x = leaf_on(device.torch_device)
    for _ in range(4):
        with memkit.MemoryBudget("1GiB", "gone", min_bytes=0, device=device):
            y = x
            for _ in range(6):
                y = memkit.offload(y.clone()).sin()
        assert memkit.stats("gone").live_bytes == UNIT_BYTES
        y.sum().backward()
