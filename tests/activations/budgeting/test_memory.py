"""Memory of steps under a budget: no more than the budget, as predicted to the byte, and nothing once they are over."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import memkit
from memkit.activations.budgeting.meter import Meter
from memkit.device import Device, ReferenceDevice
from tests.activations.budgeting.plans import planner_of, random_plan
from tests.activations.chains import UNIT_BYTES, leaf_on, step
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.activations.remat.conftest import without_collector as without_collector
from tests.engine import let_go_of_last_backward

UNITS = (3, 1, 2, 5, 1, 1, 4, 2)

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("name", ["late", "seed 0"])
def test_peak_is_within_the_budget_and_as_predicted(name: str, share: float) -> None:
    device = ReferenceDevice(seed=None if name == "late" else 0)
    x, peaks = leaf_on(device.torch_device), []
    for _ in range(8):
        device.synchronize()
        step(x, UNITS, lambda: memkit.MemoryBudget(share, "peak", min_bytes=0, device=device))
        peaks.append(memkit.stats("peak").peak_allocated_bytes)  # reset at the entry of each step that is looked at
    stats = memkit.stats("peak")

    assert stats.follows_plan
    assert stats.step_peak_bytes == stats.predicted_peak_bytes <= stats.budget_bytes
    assert peaks[3:7] == [stats.predicted_peak_bytes] * 4


@pytest.mark.parametrize("units", [8, 14])
def test_steps_without_a_plan_are_held_to_the_budget_too(units: int) -> None:
    """Except the result of one op, and the sine beside it."""
    device = ReferenceDevice()
    x, counter = leaf_on(device.torch_device), device.memory_counter()
    for number in range(4):
        counter.reset_peak()
        step(x, [1] * 20, lambda: memkit.MemoryBudget(f"{units}KiB", "first", min_bytes=0, device=device))
        assert counter.peak_bytes() <= units * UNIT_BYTES, number


@pytest.mark.parametrize("seed", range(8))
def test_any_plan_takes_what_it_says(seed: int) -> None:
    """To the unit: the counter sees storages from their save on."""
    device = ReferenceDevice()
    x, counter = leaf_on(device.torch_device), device.memory_counter()
    for _ in range(3):
        step(x, UNITS, lambda: memkit.MemoryBudget(1.0, "any", min_bytes=0, device=device))
    plan = random_plan(planner_of("any"), seed)
    for _ in range(4):  # steady ones from the second on
        device.synchronize()
        counter.reset_peak()
        step(x, UNITS, lambda: memkit.MemoryBudget(1.0, "any", min_bytes=0, device=device, plan=plan))

        assert memkit.stats("any").follows_plan
        assert counter.peak_bytes() <= plan.predicted_peak_bytes


def test_what_comes_after_the_backward_is_none_of_the_plan() -> None:
    """Such as an evaluation that takes more than the budget."""
    device = ReferenceDevice()
    x = leaf_on(device.torch_device)
    for _ in range(8):
        step(x, UNITS, lambda: memkit.MemoryBudget(0.5, "between", min_bytes=0, device=device))
        step(x, [40], lambda: memkit.Rematerialize("1GiB", "other", min_bytes=0, device=device))
    stats = memkit.stats("between")

    assert stats.num_plans == 1
    assert stats.step_peak_bytes == stats.predicted_peak_bytes <= stats.budget_bytes


# Objects of a step


def _alive(*kinds: type) -> list[str]:
    """Return the names of the kinds of live objects. A failing test keeps its objects, which the next one would see."""
    return [type(thing).__name__ for thing in gc.get_objects() if type(thing) in kinds]


@pytest.mark.usefixtures("without_collector")
def test_what_has_measured_a_step_goes_once_it_is_planned(device: Device) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(4):
        step(x, UNITS, lambda: memkit.MemoryBudget(0.5, "meters", min_bytes=0, device=device))
    let_go_of_last_backward(device.torch_device)

    assert memkit.stats("meters").follows_plan
    assert not _alive(Meter)


def _layers(size: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(size, size), nn.Tanh()) for _ in range(4)))


def _train(model: nn.Module, budget: memkit.MemoryBudget, count: int = 4) -> memkit.SavedTensorStats:
    for _ in range(count):
        with budget:
            loss = model(torch.randn(64, model[0][0].in_features)).square().sum()
        loss.backward()
    return memkit.stats(budget.tag)


@pytest.mark.parametrize(("given", "told", "leaves_room"), [(None, "SGD", False), (None, None, True), ("AdamW", "SGD", True)])
def test_states_of_the_optimizer_that_is_given_or_else_told_are_left_free_for_until_they_are_there(
    given: str | None, told: str | None, leaves_room: bool
) -> None:
    """The plan for the first steps leaves room for them; the later plan has them in its base."""
    device, model = ReferenceDevice(), _layers(32)
    optimizers = {"AdamW": torch.optim.AdamW(model.parameters()), "SGD": torch.optim.SGD(model.parameters()), None: None}
    asked = f"{2 * sum(parameter.nbytes for parameter in model.parameters()) + 26 * 2**10}B"
    budget = memkit.MemoryBudget(asked, "states", optimizer=optimizers[given], min_bytes=0, device=device)
    budget = budget.told(optimizer=optimizers[told])
    before = _train(model, budget, 5)
    assert (before.predicted_peak_bytes <= 26 * 2**10) is leaves_room
    if given is not None:
        optimizers[given].step()
        after = _train(model, budget, 1)

        assert after.num_plans == 2
        assert after.predicted_peak_bytes > before.predicted_peak_bytes  # here the counter does not see the states


class Uncounted(ReferenceDevice):
    """Keeps no counter, so that a budget is for saved tensors alone."""

    def memory_counter(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.filterwarnings("error")
def test_nothing_is_reserved_for_states_where_only_saved_tensors_are_counted() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(6)))
    stats = _train(model, memkit.MemoryBudget(0.5, "uncounted", min_bytes=0, device=Uncounted()))

    assert 0.9 * stats.budget_bytes <= stats.predicted_peak_bytes <= stats.budget_bytes


def test_budget_without_room_says_what_is_reserved_for_states() -> None:
    with pytest.warns(UserWarning, match=r"130.00 KiB are reserved for optimizer states; pass optimizer="):
        _train(_layers(64), memkit.MemoryBudget(0.5, "reserved", min_bytes=0, device=ReferenceDevice()))


def test_first_backward_lets_go_of_more_where_something_else_comes_to_the_device() -> None:
    device = ReferenceDevice()
    counter = device.memory_counter()
    layers, found, budget_bytes = [torch.nn.Linear(64, 64) for _ in range(12)], list[int](), 2**20
    x = torch.randn(512, 64)
    optimizer = torch.optim.SGD([weight for layer in layers for weight in layer.parameters()], lr=0.1)

    with memkit.MemoryBudget(budget_bytes, "first", min_bytes=0, optimizer=optimizer, device=device):
        for place, layer in enumerate(layers):
            x = layer(x).sin()
            if place == 10:
                x.register_hook(lambda _: found.append(counter.allocated_bytes()))
    device.note_written(held := torch.UntypedStorage(budget_bytes // 3), 0)
    x.sum().backward()

    assert held.nbytes() < found[0] <= 0.9 * budget_bytes
