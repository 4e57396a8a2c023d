"""What steps under a budget hold: no more than the budget, as predicted to the byte, and nothing once they are over."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.budgeting.meter import Meter
from memkit.activations.budgeting.planned_forward import MeteredUnpacker, PlannedForward
from memkit.activations.budgeting.state import budget_states
from memkit.device import Device, ReferenceDevice
from memkit.recording.recording import Recording
from tests.activations.budgeting.plans import planner_of, random_plan
from tests.activations.cases import inputs_on
from tests.activations.chains import UNIT_BYTES, leaf_on, step
from tests.activations.remat.cases import COMPUTATIONS
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.activations.remat.conftest import without_collector as without_collector
from tests.engine import let_go_of_last_backward

UNITS = (3, 1, 2, 5, 1, 1, 4, 2)
ALL_BYTES = sum(UNITS) * UNIT_BYTES

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
    """But for what one op makes, and the sine beside it."""
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


def _held(tag: str, device: Device) -> dict[str, object]:
    """What may not grow with the number of steps."""
    let_go_of_last_backward(device.torch_device)
    gc.collect()
    stats = memkit.stats(tag)
    (window,) = budget_states[tag].windows()
    return {
        "host": (stats.host_held_bytes, stats.host_in_use_bytes, stats.num_pins),
        "records": (stats.live_records, stats.live_bytes),
        "forwards": len(window.forwards.references),
        "traces": len(budget_states[tag].traces),
        "plans": stats.num_plans,
        "tensors": sum(type(thing) is Tensor for thing in gc.get_objects()),
        "objects": sum(str(type(thing).__module__).startswith("memkit.activations") for thing in gc.get_objects()),
    }


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_a_hundred_steps_hold_what_a_few_did(share: float, device: Device) -> None:
    x = leaf_on(device.torch_device)
    for count in range(121):
        step(x, UNITS, lambda: memkit.MemoryBudget(share, "100", min_bytes=0, device=device))
        device.synchronize()
        if count == 20:  # by then it is known which copies take turns, and there are copies for each place in host memory
            before = _held("100", device)

    assert _held("100", device) == before
    (window,) = budget_states["100"].windows()
    window.settle()
    ledger = window.ledger
    assert (len(ledger.deaths), len(ledger.orphans), len(ledger.backlog), len(ledger.records)) == (0, 0, 0, 0)
    assert memkit.stats("100").host_in_use_bytes == 0


# Objects of a step


OF_A_STEP = (PlannedForward, MeteredUnpacker)


def _alive(*kinds: type) -> list[str]:
    """Return the names of the kinds of what is alive. A test that fails keeps them: the objects would be there in the next."""
    return [type(thing).__name__ for thing in gc.get_objects() if type(thing) in kinds]


def plain(x: Tensor, make: Callable[[], Any]) -> None:
    step(x, UNITS, make)


def retained(x: Tensor, make: Callable[[], Any]) -> None:
    with make():
        y = x.sin().exp().cos()
    y.sum().backward(retain_graph=True)
    y.sum().backward()


def dropped(x: Tensor, make: Callable[[], Any]) -> None:
    with make():
        x.sin().exp().cos()


def doubly(x: Tensor, make: Callable[[], Any]) -> None:
    with make():
        y = x.sin().exp().cos().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    grad.sum().backward()


def of_a_part(x: Tensor, make: Callable[[], Any]) -> None:
    with make():
        y = x.sin().exp()
        first, second = y.cos().sum(), y.tanh().sum()
    first.backward()
    del second


def failing(x: Tensor, make: Callable[[], Any]) -> None:
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("injected")

    try:
        with make():
            y = x.sin().exp()
            y.register_hook(fail)
            z = y.cos().exp().sum()
        z.backward()
    except ArithmeticError:
        pass


@pytest.mark.filterwarnings("ignore:.*saved tensors for a backward, and none came")  # dropped
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("run", [plain, retained, dropped, doubly, of_a_part, failing], ids=lambda run: run.__name__)
@pytest.mark.parametrize("budget", [1.0, 0.5, "2KiB"])
def test_no_object_of_a_step_lives_on_without_the_collector(
    budget: float | str, run: Callable[[Tensor, Callable[[], Any]], None], device: Device
) -> None:
    x = leaf_on(device.torch_device)
    for number in range(6):
        run(x, lambda: memkit.MemoryBudget(budget, "alive", min_bytes=0, device=device))
        let_go_of_last_backward(device.torch_device)
        x.grad = None
        stats = memkit.stats("alive")  # which sweeps
        assert not _alive(*OF_A_STEP), number
        assert (stats.live_records, stats.live_bytes) == (0, 0), number
        if number == 3:  # by then host memory is pinned
            before = len(_alive(Tensor))
    device.synchronize()
    assert memkit.stats("alive").host_in_use_bytes == 0
    assert len(_alive(Recording)) <= 1  # that of one whose times are read at the next entry
    assert len(_alive(Tensor)) <= before


@pytest.mark.usefixtures("without_collector")
def test_what_has_measured_a_step_goes_once_it_is_planned(device: Device) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(4):
        step(x, UNITS, lambda: memkit.MemoryBudget(0.5, "meters", min_bytes=0, device=device))
    let_go_of_last_backward(device.torch_device)

    assert memkit.stats("meters").follows_plan
    assert not _alive(Meter)


@pytest.mark.parametrize("name", ["mlp", "in_place", "views_of_one_storage", "dropout", "batch_norm"])
def test_graph_that_is_alive_holds_its_records_until_it_goes(name: str, device: Device) -> None:
    inputs = inputs_on(device.torch_device)
    for _ in range(4):
        with memkit.MemoryBudget(0.5, "graph", min_bytes=0, device=device):
            loss = COMPUTATIONS[name](*inputs).square().mean()
        loss.backward(retain_graph=True)
        assert memkit.stats("graph").live_records > 0
        del loss
        assert memkit.stats("graph").live_records == 0
    device.synchronize()
    memkit.reset("graph")
    assert "graph" not in budget_states


def test_states_of_the_optimizer_are_left_free_for_until_they_are_there() -> None:
    """The plan for the first steps leaves room for them; that for the later ones has them in its base."""
    device = ReferenceDevice()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    coming_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    x = torch.randn(64, 32)
    budget = f"{coming_bytes + 26 * 2**10}B"
    for number in range(6):
        with memkit.MemoryBudget(budget, "states", optimizer=optimizer, min_bytes=0, device=device):
            loss = model(x).square().sum()
        loss.backward()
        if number == 4:
            before = memkit.stats("states")
            optimizer.step()
    after = memkit.stats("states")

    assert before.predicted_peak_bytes <= 26 * 2**10
    assert after.num_plans == 2
    assert after.predicted_peak_bytes > before.predicted_peak_bytes  # here the counter does not see the states


@pytest.mark.parametrize(("given", "told", "leaves_room"), [(None, "SGD", False), (None, None, True), ("AdamW", "SGD", True)])
def test_budget_is_told_of_an_optimizer_where_it_was_given_none(given: str | None, told: str | None, leaves_room: bool) -> None:
    device = ReferenceDevice()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    optimizers = {"AdamW": torch.optim.AdamW(model.parameters()), "SGD": torch.optim.SGD(model.parameters())}
    room_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    tag = f"{given} {told}"
    budget = memkit.MemoryBudget(
        f"{room_bytes + 26 * 2**10}B", tag, optimizer=optimizers.get(given or ""), min_bytes=0, device=device
    ).told(optimizer=optimizers.get(told or ""))
    for _ in range(4):
        with budget:
            loss = model(torch.randn(64, 32)).square().sum()
        loss.backward()

    assert (memkit.stats(tag).predicted_peak_bytes <= 26 * 2**10) is leaves_room


class Uncounted(ReferenceDevice):
    """Keeps no counter, so that a budget is for saved tensors alone."""

    def memory_counter(self) -> None:  # type: ignore[override]
        return None


def _train_without_optimizer(device: Device, tag: str) -> memkit.SavedTensorStats:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(6)))
    for _ in range(4):
        with memkit.MemoryBudget(0.5, tag, min_bytes=0, device=device):
            loss = model(torch.randn(64, 64)).square().sum()
        loss.backward()
    return memkit.stats(tag)


@pytest.mark.filterwarnings("error")
def test_nothing_is_reserved_for_states_where_only_saved_tensors_are_counted() -> None:
    stats = _train_without_optimizer(Uncounted(), "uncounted")

    assert stats.budget_bytes is not None
    assert 0.9 * stats.budget_bytes <= stats.predicted_peak_bytes <= stats.budget_bytes


def test_budget_without_room_says_what_is_reserved_for_states() -> None:
    with pytest.warns(UserWarning, match=r"195.00 KiB are reserved for optimizer states; pass optimizer="):
        _train_without_optimizer(ReferenceDevice(), "reserved")


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
