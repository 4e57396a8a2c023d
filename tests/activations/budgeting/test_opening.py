"""Known steps: nothing is done where all fits, and modules are recomputed where that is faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.budgeting import learning
from memkit.activations.budgeting.state import budget_states
from memkit.activations.recomputing.unrecorded import IdleStage
from memkit.activations.saved.entry import entries_around
from memkit.activations.saved.settled import Way
from memkit.device import Device, ReferenceDevice
from memkit.plan import JointPlanner
from tests.activations.budgeting.conftest import fit_copies_of
from tests.activations.budgeting.plans import planner_of
from tests.activations.cases import assert_same_bits
from tests.activations.chains import leaf_on, step
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.activations.remat.conftest import dear_ops as dear_ops
from tests.activations.remat.test_steady import blocks, train

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)


# Where all fits


class Stages(nn.Module):
    """Tells the stage of the entry that it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.idle: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.idle += [isinstance(entry.recording, IdleStage) for entry in entries_around()]
        return self.layer(x).exp().cos()


def _stateless(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without states, so that nothing is left free for them."""
    return torch.optim.SGD(model.parameters())


def test_states_that_are_to_come_keep_steps_from_being_idle() -> None:
    device, model, x = ReferenceDevice(), Stages(), torch.randn(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    recorded = []
    for number in range(8):
        train(model, x, partial(memkit.MemoryBudget, "1GiB", "coming", optimizer=optimizer, min_bytes=0, device=device))
        recorded.append(memkit.stats("coming").is_recorded)
        if number == 4:
            optimizer.step()

    assert recorded == [True] * 6 + [False] * 2


def test_steps_are_idle_from_the_fourth_on_where_all_fits(device: Device) -> None:
    model = Stages().to(device.torch_device)
    x = torch.randn(8, 16, device=device.torch_device)
    plain = train(model, x, nullcontext)
    make = partial(memkit.MemoryBudget, "1GiB", "idle", optimizer=_stateless(model), min_bytes=0, device=device)
    recorded = []
    for _ in range(7):
        assert_same_bits(train(model, x, make), plain)
        recorded.append(memkit.stats("idle").is_recorded)
    stats = memkit.stats("idle")

    assert recorded == [True] * 3 + [False] * 4
    assert model.idle == [not is_recorded for is_recorded in recorded]
    assert stats.num_iterations == 7
    assert stats.follows_plan
    assert (stats.num_dropped, stats.num_copies_out, stats.live_records) == (0, 0, 0)


# Calls of modules


@pytest.mark.usefixtures("any_times", "dear_ops", "moving", "quick_link")
@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.slow) for way in (Way.OPS, Way.REGIONS)), Way.REGIONS_AND_COPIES]
)
def test_ways_are_tried_and_the_fastest_is_chosen(way: Way, device: Device, fastest: Callable[[Way], None]) -> None:
    fastest(way)
    model, x = blocks()[:12].to(device.torch_device), torch.randn(8, 32, device=device.torch_device)
    plain = train(model, x, nullcontext)
    make = partial(memkit.MemoryBudget, 0.6, "ways", optimizer=_stateless(model), min_bytes=1, device=device)
    went, found = [], []
    for _ in range(40):
        assert_same_bits(train(model, x, make), plain)
        went.append(budget_states["ways"].way)
        found.append(memkit.stats("ways"))
    device.synchronize()
    state, last = budget_states["ways"], found[-1]
    ways = state.ways

    assert ways.is_decided
    assert went[:6] == [Way.OPS] * 6
    assert not any(stats.is_recorded for gone, stats in zip(went, found, strict=True) if gone is not Way.OPS)
    assert set(went) == set(Way)
    assert went[-1] is way
    assert last.follows_plan
    assert (last.live_records, last.live_bytes, last.num_deviations, last.host_in_use_bytes) == (0, 0, 0, 0)
    assert last.num_iterations == 40
    assert last.num_kept + last.num_dropped + last.num_copies_out == last.num_saved
    assert (last.num_copies_out > 0) == (last.host_held_bytes > 0) == (way is not Way.REGIONS)
    assert bool(state.of_copies.windows()) == (way is Way.REGIONS_AND_COPIES)
    assert (state.of_regions.settled is None) == (way is Way.OPS)
    if way is not Way.OPS:
        assert last.dropped_bytes > 0
        assert last.num_replays > 0
        assert last.step_peak_bytes == last.predicted_peak_bytes
        assert last.predicted_s == pytest.approx(last.plain_s + last.estimated_replay_s)
        assert last.step_s == state.learning.last_step_s() > 0
        context = make()
        assert context.regions.dropped
        assert context.plan is budget_states["ways"].learning.last
        assert last.ledger_peak_bytes <= ways.limit_bytes
    else:
        assert make().regions is None

    memkit.reset("ways")
    assert "ways" not in budget_states


@pytest.mark.slow
@pytest.mark.usefixtures("any_times", "dear_ops")
def test_copies_beside_regions_follow_a_schedule_and_drop_less(
    fastest: Callable[[Way], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest(Way.REGIONS_AND_COPIES)
    monkeypatch.setattr("memkit.activations.budgeting.learning.fit_copies", fit_copies_of(16384))
    device, model, x = ReferenceDevice(), blocks()[:12], torch.randn(8, 32)
    make = partial(memkit.MemoryBudget, 0.6, "beside", optimizer=_stateless(model), min_bytes=1, device=device)
    dropped: dict[Way, int] = {}
    for _ in range(40):
        train(model, x, make)
        ways, stats = budget_states["beside"].ways, memkit.stats("beside")
        if ways is not None and not stats.is_recorded:
            dropped[ways.way] = stats.dropped_bytes
    stats = memkit.stats("beside")

    assert dropped[Way.REGIONS_AND_COPIES] < dropped[Way.REGIONS]
    assert 0 < stats.moved_out_bytes <= 2 * 16384
    assert stats.moved_in_bytes == stats.moved_out_bytes
    (window,) = budget_states["beside"].of_copies.windows()
    assert window.has_schedule
    train(model, x, make)
    assert window.traces.latest is not None
    assert not memkit.stats("beside").is_recorded


@pytest.mark.parametrize(
    ("budget", "has_own_clock", "has_room", "are_tried"),
    [(0.6, True, True, True), (0.6, False, True, False), (0.01, True, True, False), (0.6, True, False, False)],
)
def test_ways_are_tried_where_the_device_has_a_clock_of_its_own_and_they_may_fit(
    budget: float, has_own_clock: bool, has_room: bool, are_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are as fast as predicted, which says nothing if the host was slow when they were measured."""
    monkeypatch.setattr(learning, "_has_own_clock", lambda _: has_own_clock)
    for name in () if has_room else ("fit_regions", "fit_copies"):
        monkeypatch.setattr(f"memkit.activations.budgeting.learning.{name}", lambda *_: None)
    device, model, x = ReferenceDevice(), blocks()[:6], torch.randn(8, 32)
    plain = train(model, x, nullcontext)
    make = partial(memkit.MemoryBudget, budget, "clock", optimizer=_stateless(model), min_bytes=1, device=device)
    for _ in range(8):
        assert_same_bits(train(model, x, make), plain)

    assert (budget_states["clock"].ways is not None) == are_tried


@pytest.mark.parametrize(("has_own_clock", "is_busy"), [(True, True), (True, False), (False, True)])
def test_steps_that_wait_for_the_host_are_planned_with_fewer_values(
    has_own_clock: bool, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "_has_own_clock", lambda _: has_own_clock)
    monkeypatch.setattr(learning, "_AS_PREDICTED", 1.03)
    monkeypatch.setattr(learning.Learning, "ways_of", lambda *_: None)
    device, model, x = ReferenceDevice(), blocks()[:6], torch.randn(8, 32)
    make = partial(memkit.MemoryBudget, 0.6, "busy", optimizer=_stateless(model), min_bytes=1, device=device)
    plain = train(model, x, nullcontext)
    found = list[float]()
    for _ in range(12):
        learned = None if not (state := budget_states.get("busy")) or not state.traces.latest else state.traces.latest.learned
        if learned is not None and learned.planner is not None and state.learning.last is not None:
            step_s = (1.2 if is_busy else 1.0) * state.learning.last.predicted_s
            monkeypatch.setattr(learning.Learning, "fastest_step_s", lambda _, step_s=step_s: step_s)
            found.append(learned.planner.handling_s)
        assert_same_bits(train(model, x, make), plain)

    assert found[0] == 0
    assert (found[-1] > 0) == (has_own_clock and is_busy)


@pytest.mark.parametrize(("budget", "over_bytes"), [(0.6, 1000), (0.01, 0)])
def test_plan_is_made_anew_where_a_step_takes_more_unless_it_is_the_least_one(budget: float, over_bytes: int) -> None:
    device, model, x = ReferenceDevice(), blocks()[:6], torch.randn(8, 32)
    make = partial(memkit.MemoryBudget, budget, "over", optimizer=_stateless(model), min_bytes=1, device=device)
    for _ in range(4):
        train(model, x, make)
    state = budget_states["over"]
    trace, limits, budget_bytes = state.traces.latest, state.limits, state.budget_bytes
    learned = state.learning.of(trace)
    (planned,) = learned.plans.values()
    most_bytes = max(planned.plan.predicted_peak_bytes, budget_bytes)
    state.learning.judge(trace, planned, most_bytes + 1000, limits)

    assert learned.over_bytes == over_bytes


def test_peak_of_a_step_is_held_against_the_plan_that_it_follows() -> None:
    """Where two lengths alternate, each step begins with the plan for the other one."""
    device, model = ReferenceDevice(), blocks()[:6]
    make = partial(memkit.MemoryBudget, 0.6, "alternate", optimizer=_stateless(model), min_bytes=1, device=device)
    for rows in (8, 32) * 6:
        train(model, torch.randn(rows, 32), make)
    state = budget_states["alternate"]
    learned = [state.learning.of(trace) for trace in state.traces]

    assert memkit.stats("alternate").follows_plan
    assert [found.over_bytes for found in learned] == [0, 0]
    assert all(found.num_judged for found in learned)


# Copies that take longer than was measured


class Linked:
    """Steps that are noted to copy at given rates: with differences that count in one step, and in the median of three."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, in_one: float, in_three: float) -> None:
        self.device = ReferenceDevice()
        self.run(3)
        monkeypatch.setattr(learning, "_QUITE_OTHER_LINK", in_one)
        monkeypatch.setattr(learning, "_OTHER_LINK", in_three)
        self.gpu = planner_of("link").problem.gpu

    def run(self, count: int) -> None:
        x = leaf_on(self.device.torch_device)
        for _ in range(count):
            step(x, [1, 2, 1, 3, 1, 1, 2, 1], lambda: memkit.MemoryBudget(0.5, "link", min_bytes=0, device=self.device))

    def note(self, out: float | None, back: float | None, *, are_shares: bool = True) -> JointPlanner:
        """Note a step's rates, as shares of the plan's first ones or in GB/s; return the planner then."""
        known = (self.gpu.d2h_bytes_per_s / 0.98, self.gpu.h2d_bytes_per_s / 0.98) if are_shares else (1e9, 1e9)
        rates = [None if rate is None else rate * unit for rate, unit in zip((out, back), known, strict=True)]
        state = budget_states["link"]
        state.learning.note_link(state.traces.latest, *rates)
        return planner_of("link")


def test_plans_are_made_anew_for_the_speed_that_steps_copy_with(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = Linked(monkeypatch, 0.2, 0.05)
    gpu, known = linked.gpu, budget_states["link"].traces.latest.learned
    small = [(1.1, 0.9), (1.04, 0.96), (0.98, 1.1), (1.1, 1.0), (0.9, 1.0)]
    for rates in [(None, None), (1.0, None), (None, 1.0), *small]:
        assert linked.note(*rates).problem.gpu is gpu
        assert known.plans

    made = linked.note(1.0, 0.5).problem.gpu
    assert made.h2d_bytes_per_s == pytest.approx(gpu.h2d_bytes_per_s / 2)
    assert made.d2h_bytes_per_s == pytest.approx(gpu.d2h_bytes_per_s)
    assert made.both_bytes_per_s == min(made.h2d_bytes_per_s, made.d2h_bytes_per_s)
    assert not known.plans
    monkeypatch.setattr(learning, "_QUITE_OTHER_LINK", math.inf)
    before = memkit.stats("link").num_plans
    linked.run(2)
    assert memkit.stats("link").num_plans == before + 1


def test_small_differences_of_the_link_count_once_three_steps_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = Linked(monkeypatch, math.inf, 0.05)
    found = [linked.note(1.0, share).problem.gpu.h2d_bytes_per_s for share in (1.1, 0.99, 1.15)]

    assert [rate / linked.gpu.h2d_bytes_per_s for rate in found] == [1.0, 1.0, pytest.approx(1.1)]


def test_link_that_others_take_in_bursts_is_set_anew_only_once_or_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates as seen on an H200 while another process copied both ways."""
    linked = Linked(monkeypatch, 0.2, 0.05)
    seen = [(26.1, 24.1), (29.7, 24.8), (25.6, 23.9), (26.1, 25.4), (27.3, 33.3), (26.0, 22.4), (31.6, 24.3), (24.3, 25.5)]
    rates = [(53.3, 54.7), *seen, (30.6, 23.7), (26.4, 24.7), (25.6, 22.6)]
    planners = [linked.note(*rate, are_shares=False) for rate in rates]

    assert planners[0] is not planners[1]
    assert len({id(planner) for planner in planners[1:]}) <= 2


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_link_is_set_anew_eight_times_at_most(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = Linked(monkeypatch, 0.01, math.inf)
    planners = [linked.note(factor**number, factor**number, are_shares=False) for number in range(1, 13)]

    assert len({id(planner) for planner in planners}) == 8


# Other shapes


def _attach(model: nn.Module, budget: str, tag: str, device: Device, optimizer: torch.optim.Optimizer) -> None:
    memkit.attach(model, memkit.MemoryBudget(budget, tag, optimizer=optimizer, min_bytes=1, device=device))


def test_larger_step_is_not_idle_where_the_shapes_are_known_and_smaller_ones_are() -> None:
    device, model = ReferenceDevice(), Stages()
    optimizer, recorded = _stateless(model), []
    _attach(model, "1GiB", "sizes", device, optimizer)
    for rows in [8] * 5 + [4, 8] + [16] * 4 + [8, 16, 12]:
        train(model, torch.randn(rows, 16), nullcontext)
        recorded.append(memkit.stats("sizes").is_recorded)

    assert recorded[3:7] == [False] * 4
    assert recorded[7]
    assert recorded[-3:] == [False] * 3


@pytest.mark.parametrize("kind", ["attached", "a with block", "without a counter"])
def test_given_plan_that_only_keeps_needs_no_recorder(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, model, x = ReferenceDevice(), Stages(), torch.randn(8, 16)
    if kind == "without a counter":
        monkeypatch.setattr(device, "memory_counter", lambda: None)
    budget = memkit.MemoryBudget("1GiB", "given", min_bytes=1, device=device)
    for _ in range(3):
        train(model, x, lambda: budget)
    plan = budget.plan
    assert plan.is_plain
    given = memkit.MemoryBudget("1GiB", "given", min_bytes=1, device=device, plan=plan)
    if kind == "attached":
        memkit.attach(model, given)
    context, recorded = nullcontext if kind == "attached" else lambda: given, []
    for rows in [8] * 4 + [16, 8, 8, 8]:
        y = torch.linspace(-1, 1, rows * 16).view(rows, 16)
        train(model, y, context)
        recorded.append(memkit.stats("given").is_recorded)

    assert recorded[:4] == [True] + [False] * 3
    assert recorded[4] == (kind == "attached")
    assert not recorded[-1]


def test_how_much_may_be_given_is_forgotten_with_the_budget() -> None:
    device, model, x = ReferenceDevice(), Stages(), torch.randn(256, 16)
    optimizer = _stateless(model)
    _attach(model, "1GiB", "less", device, optimizer)
    for _ in range(5):
        train(model, x, nullcontext)
    assert not memkit.stats("less").is_recorded
    memkit.detach(model)
    _attach(model, "4KiB", "less", device, optimizer)
    for _ in range(5):
        train(model, x[:8], nullcontext)
    assert not memkit.stats("less").is_recorded
    train(model, x, nullcontext)
    assert memkit.stats("less").is_recorded


@pytest.mark.usefixtures("any_times", "dear_ops", "moving")
@pytest.mark.slow
def test_step_of_other_shapes_keeps_to_the_budget_and_leaves_the_chosen_way(fastest: Callable[[Way], None]) -> None:
    fastest(Way.REGIONS)
    device, model = ReferenceDevice(), blocks()[:12]
    counter, x, larger = device.memory_counter(), torch.randn(8, 32), torch.randn(16, 32)
    plain = {len(given): train(model, given, nullcontext) for given in (x, larger)}
    train(model, x, partial(memkit.MemoryBudget, "1GiB", "size", optimizer=_stateless(model), min_bytes=1, device=device))
    budget_bytes = int(0.6 * memkit.stats("size").saved_bytes)
    optimizer = _stateless(model)
    _attach(model, f"{budget_bytes}B", "shapes", device, optimizer)
    for _ in range(30):
        assert_same_bits(train(model, x, nullcontext), plain[8])
    state = budget_states["shapes"]
    assert state.ways.is_decided
    assert state.way is Way.REGIONS
    for _ in range(6):
        device.synchronize()
        counter.reset_peak()
        assert_same_bits(train(model, larger, nullcontext), plain[16])
        assert counter.peak_bytes() <= budget_bytes
        assert state.way is Way.OPS
    assert memkit.stats("shapes").follows_plan
    for _ in range(2):
        assert_same_bits(train(model, x, nullcontext), plain[8])

    assert state.way is Way.REGIONS
