"""Plans for a budget: against all there are, the best single mechanism, smaller budgets and a lower bound."""

import itertools
import json
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memkit
from memkit.errors import BudgetInfeasible, PlanFormatError
from memkit.plan import Action, GrowingLineage, find_gpu
from memkit.plan.budget import planning
from memkit.plan.budget.bound import find_bound, why_no_bound
from memkit.plan.budget.planning import JointPlanner
from memkit.plan.budget.problem import Problem, make_problem
from memkit.plan.budget.search import floor_bytes, without_needless_moves
from memkit.plan.budget.simulate import Simulated, simulate
from memkit.plan.plans import MemoryPlan
from memkit.plan.step import trace_from_plain, trace_to_plain
from tests.plan.budget.steps import MIB, gpu, layers, make_trace, plan_budget_jointly, random_trace
from tests.plan.test_front import resnet50

OFFLOAD, RECOMPUTE, KEEP = Action.OFFLOAD, Action.RECOMPUTE, Action.KEEP
SHARES = (0.9, 0.75, 0.6, 0.45)


def problem_of(seed: int, num_ops: int = 0) -> Problem:
    return make_problem(random_trace(seed, num_ops), gpu((4_000, 40_000, 400_000)[seed % 3]))


def seconds_of(problem: Problem, budget_bytes: int, *actions: Action) -> float:
    try:
        return plan_budget_jointly(problem, budget_bytes, *actions).predicted_s
    except BudgetInfeasible:
        return math.inf


def all_steps(problem: Problem, budget_bytes: int) -> list[Simulated]:
    choices = [sorted(held.choices) for held in problem.values]
    return [simulate(problem, actions, budget_bytes) for actions in itertools.product(*choices)]


def tiny(seed: int) -> Problem:
    for number in itertools.count(1000 * seed):
        problem = problem_of(number, 4 + number % 3)
        if 3 <= len(problem.values) <= 6:
            return problem
    raise AssertionError


@pytest.mark.parametrize("seed", range(12))
def test_plan_is_near_the_best_there_is(seed: int) -> None:
    problem = tiny(seed)
    budget_bytes = round(SHARES[seed % 4] * problem.plain_peak_bytes)
    best = min((step.seconds for step in all_steps(problem, budget_bytes) if not step.over_bytes), default=math.inf)

    found = seconds_of(problem, budget_bytes, OFFLOAD, RECOMPUTE)

    assert found >= best * (1 - 1e-9)
    assert found <= 1.05 * best


@pytest.mark.parametrize("seed", range(8))
def test_least_budget_is_near_the_least_there_is(seed: int) -> None:
    problem = tiny(seed)
    least = min(step.peak_bytes for step in all_steps(problem, floor_bytes(problem)))

    found = JointPlanner(problem).least().peak_bytes

    assert floor_bytes(problem) <= least <= found <= 1.05 * least
    assert plan_budget_jointly(problem, found).predicted_peak_bytes <= found


@pytest.mark.parametrize("seed", range(24))
def test_never_worse_than_one_mechanism(seed: int) -> None:
    problem = problem_of(seed)
    budget_bytes = round(SHARES[seed % 4] * problem.plain_peak_bytes)

    joint = seconds_of(problem, budget_bytes, OFFLOAD, RECOMPUTE)

    assert joint <= min(seconds_of(problem, budget_bytes, OFFLOAD), seconds_of(problem, budget_bytes, RECOMPUTE))


def test_both_mechanisms_beat_each_alone() -> None:
    problem = make_problem(layers(12), gpu(20_000))
    joint, offload, recompute = (
        seconds_of(problem, round(0.5 * problem.plain_peak_bytes), *actions)
        for actions in ((OFFLOAD, RECOMPUTE), (OFFLOAD,), (RECOMPUTE,))
    )

    assert joint < min(0.99 * recompute, 0.8 * offload)


def check_each_larger_budget_is_no_slower(problem: Problem, shares: list[float]) -> None:
    """Each plan is made by itself, as if no other had been asked for."""
    found_s = [seconds_of(problem, int(share * problem.plain_peak_bytes), OFFLOAD, RECOMPUTE) for share in sorted(shares)]

    assert found_s == sorted(found_s, reverse=True)
    assert math.isfinite(found_s[-1])


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))])
def test_larger_budget_is_never_slower(seed: int) -> None:
    pytest.importorskip("scipy")
    chance = random.Random(seed)
    problem = problem_of(seed, chance.randint(4, 30))
    shares = [0.999, *(chance.uniform(0.2, 1) for _ in range(8))]

    check_each_larger_budget_is_no_slower(problem, shares)
    planner, found_s = JointPlanner(problem), list[float]()
    for budget_bytes in sorted(int(share * problem.plain_peak_bytes) for share in shares):
        found = planner.best(budget_bytes) if planner.least().peak_bytes <= budget_bytes else None
        found_s.append(math.inf if found is None else found.seconds)
        assert found is None or found.peak_bytes <= budget_bytes
    assert found_s == sorted(found_s, reverse=True)  # one planner remembers


def _dense(num_layers: int = 10) -> tuple[nn.Module, torch.Tensor]:
    """Each layer reads what all before it have made, as in a DenseNet."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.BatchNorm2d(16 + 8 * n), nn.ReLU(), nn.Conv2d(16 + 8 * n, 8, 3, padding=1))
                for n in range(num_layers)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.cat([x, layer(x)], 1)
            return x.mean()

    return Dense(), torch.empty(64, 16, 56, 56, device="meta")


STEPS = {"dense": _dense, "ResNet-50": resnet50}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_larger_budget_is_never_slower_for_a_model(name: str) -> None:
    pytest.importorskip("scipy")
    with torch.device("meta"):
        model, x = STEPS[name]()
    report = memkit.profile_memory(model, x, device="meta", backward=True, trace=True, print_table=False)
    assert report.trace is not None
    problem = make_problem(report.trace, find_gpu("H200"))

    check_each_larger_budget_is_no_slower(problem, [0.5, 0.6, 0.7] if name == "dense" else [0.6, 0.68, 0.7, 0.8])


def test_without_a_bound_a_few_smaller_budgets_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(28, 20)
    budget_bytes = int(0.7 * problem.plain_peak_bytes)
    with_bound = seconds_of(problem, budget_bytes, OFFLOAD, RECOMPUTE)
    monkeypatch.setattr("memkit.plan.budget.bound.find_spec", lambda name: None)

    planner = JointPlanner(problem)
    found = planner.steady(budget_bytes)

    first = planner._rungs[max(planner._rungs)]
    assert with_bound <= found.seconds < first.seconds  # the search for the budget itself has missed it
    assert 1 < len(planner._rungs) <= 4


@pytest.mark.parametrize("seed", range(10))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    pytest.importorskip("scipy")
    problem = tiny(seed)
    for share in SHARES:
        budget_bytes = round(share * problem.plain_peak_bytes)
        steps = [step.seconds for step in all_steps(problem, budget_bytes) if not step.over_bytes]

        bound = find_bound(problem, budget_bytes)

        assert problem.plain_s <= bound.seconds <= min(steps, default=math.inf)
        for less in SHARES:
            if less < share:
                smaller_bytes = round(less * problem.plain_peak_bytes)
                within = [step.seconds for step in all_steps(problem, smaller_bytes) if not step.over_bytes]
                assert bound.under(smaller_bytes) <= min(within, default=math.inf)


def test_bound_is_near_the_plan() -> None:
    pytest.importorskip("scipy")
    problem = make_problem(layers(12), gpu(40_000))

    plan = plan_budget_jointly(problem, problem.plain_peak_bytes // 2)

    assert plan.bound_s is not None
    assert f"no plan is faster than {1e3 * plan.bound_s:.2f} ms" in plan.explain()
    assert plan.bound_s <= plan.predicted_s <= 1.03 * plan.bound_s


def test_bound_is_none_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkit.plan.budget.bound.find_spec", lambda name: None)
    problem = problem_of(0)

    plan = plan_budget_jointly(problem, problem.plain_peak_bytes)

    assert plan.bound_s is None
    assert 'it needs scipy (pip install "scipy>=1.9")' in plan.explain()


def test_folder_called_scipy_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scipy").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.modules", {name: module for name, module in sys.modules.items() if name != "scipy"})

    assert why_no_bound().startswith("no lower bound")


@pytest.mark.parametrize(("status", "expected"), [(2, math.inf), (4, None)])
def test_bound_is_none_where_the_solver_fails(monkeypatch: pytest.MonkeyPatch, status: int, expected: float | None) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    problem = problem_of(0)
    monkeypatch.setattr(optimize, "linprog", lambda *_, **__: SimpleNamespace(status=status, fun=None))

    found = find_bound(problem, problem.plain_peak_bytes // 2)

    assert (None if found is None else found.seconds) == expected


def test_budget_that_keeps_all_changes_nothing() -> None:
    problem = make_problem(layers(3), gpu())

    plan = plan_budget_jointly(problem, problem.plain_peak_bytes)

    assert plan.is_plain
    assert plan.predicted_s == plan.plain_s
    assert plan.moved_bytes == plan.recompute_bytes == 0


def test_budget_that_is_too_small_names_the_least_and_what_fills_it() -> None:
    problem = make_problem(layers(4), gpu())

    with pytest.raises(BudgetInfeasible) as caught:
        plan_budget_jointly(problem, 20 * MIB)

    assert caught.value.smallest_bytes == JointPlanner(problem).least().peak_bytes
    text = str(caught.value)
    assert text.startswith("a budget of 20.00 MiB cannot be kept to: the smallest that a plan was found for is ")
    assert ", and none takes less than 86.00 MiB. " in text
    assert re.search(r"Most is there in layers\.\d, while op\d+ runs: \d+\.00 MiB of gradients and temporaries, ", text)
    assert text.endswith("10.00 MiB that is there all along")


def test_what_the_user_asked_for_is_done() -> None:
    trace = layers(4)
    trace = replace(trace, step=replace(trace.step, fixed=frozenset({2}), dropped=frozenset({1})))
    problem = make_problem(trace, gpu())

    for share in (0.9, 0.5):
        plan = plan_budget_jointly(problem, round(share * problem.plain_peak_bytes))

        actions = {value.value: value.action for value in plan.values}
        assert actions[1] is RECOMPUTE
        assert actions[2] is KEEP


def test_moments_are_saves_and_requests_and_totals_those_of_the_values() -> None:
    problem = make_problem(layers(8), gpu(20_000))
    step = problem.trace.step

    plan = plan_budget_jointly(problem, round(0.5 * problem.plain_peak_bytes))

    moved = [value for value in plan.values if value.action is OFFLOAD]
    assert moved
    saved = sum(problem.lineage.num_bytes[value] for value in set(step.saves))
    assert plan.kept_bytes + plan.offload_bytes + plan.recompute_bytes == saved
    assert plan.moved_bytes == sum(value.num_bytes for value in moved)
    assert sum(value.cost_s for value in plan.values) == pytest.approx(plan.replayed_s)
    assert plan.predicted_s == pytest.approx(plan.plain_s + plan.replayed_s + plan.stall_s)
    for value in moved:
        assert 0 <= value.copy_at <= value.let_go_at <= len(step.saves)
        assert 0 <= value.fetch_at <= value.needed_at < len(step.uses)
        if not value.is_anchor:
            assert step.saves[value.copy_at] == value.value
            assert value.needed_at <= step.uses.index(value.value)
    assert [step.uses[replay.request] for replay in plan.replays] == [replay.value for replay in plan.replays]
    made = {value for replay in plan.replays for value in (replay.value, *replay.stays)}
    assert made == {value.value for value in plan.values if value.action is RECOMPUTE}


def test_json_gives_the_plan_and_the_step_back() -> None:
    problem = make_problem(layers(6), gpu(20_000))
    plan = plan_budget_jointly(problem, round(0.5 * problem.plain_peak_bytes))

    assert MemoryPlan.from_json(plan.to_json()) == plan
    assert trace_from_plain(json.loads(json.dumps(trace_to_plain(problem.trace)))) == problem.trace


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "this text has schema version 2; this memkit reads versions up to 1. Update memkit"),
        ({"schema": "other"}, 'this text is not a memkit plan: it has no "schema": "memkit.MemoryPlan"'),
        ({"values": [{"value": 1}]}, "this text is not a whole memkit plan: KeyError: 'action'"),
        ({"budget_bytes": "12"}, "budget_bytes must be a whole number; found '12'"),
        ({"predicted_peak_bytes": 1.5}, "predicted_peak_bytes must be a whole number; found 1.5"),
        ({"predicted_s": None}, "predicted_s must be a number; found None"),
    ],
)
def test_json_of_something_else_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    problem = make_problem(layers(2), gpu())
    content = json.loads(plan_budget_jointly(problem, problem.plain_peak_bytes).to_json())
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(PlanFormatError, match=re.escape(message)):
        MemoryPlan.from_json(json.dumps(content | change))
    with pytest.raises(PlanFormatError, match="not JSON"):
        MemoryPlan.from_json("{")
    with pytest.raises(PlanFormatError, match=r"plan\.json' is not a memkit plan: it is not JSON"):
        MemoryPlan.from_json(path)


def test_plan_of_another_step_names_the_first_difference() -> None:
    trace, lineage = layers(2), GrowingLineage()
    problem = make_problem(trace, gpu())
    plan = plan_budget_jointly(problem, problem.plain_peak_bytes)
    for name in ("num_bytes", "maker", "outs"):
        setattr(lineage, name, list(getattr(trace.step.lineage, name)))
    lineage.ins = [(), *trace.step.lineage.ins[1:]]

    plan.check(layers(2))
    with pytest.raises(ValueError, match=r"for another step: it has 8 saves, this one 12\. Plan this step anew"):
        plan.check(layers(3))
    with pytest.raises(ValueError, match="for another step: its ops read or make other values"):
        plan.check(replace(trace, step=replace(trace.step, lineage=lineage)))


def test_budget_that_was_planned_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(layers(4), gpu())
    planner, budget_bytes = JointPlanner(problem), int(0.7 * problem.plain_peak_bytes)
    found = planner.best(budget_bytes)
    monkeypatch.setattr(planning, "search_plan", None)

    assert planner.best(budget_bytes) == found
    assert all(planner.alone[action].best(budget_bytes).seconds >= found.seconds for action in planner.alone)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 20))])
def test_plan_for_a_busy_host_handles_no_more_values_and_keeps_to_the_budget(seed: int) -> None:
    problem = problem_of(seed)
    budget_bytes = round(SHARES[seed % 4] * problem.plain_peak_bytes)
    if JointPlanner(problem).least().peak_bytes > budget_bytes:
        pytest.skip("nothing keeps to that")
    quick = JointPlanner(problem).best(budget_bytes)
    handling_s = 0.01 * problem.plain_s

    planner = JointPlanner(problem)
    planner.handling_s = handling_s
    spared = planner.best(budget_bytes)

    assert spared.peak_bytes <= budget_bytes
    assert spared.seconds - quick.seconds <= handling_s * (quick.num_handled - spared.num_handled)


def test_busy_host_has_fewer_and_larger_values_to_handle() -> None:
    """Each layer saves much in one piece and as much in sixteen: for the device it is the same which of them go."""
    ops: list[tuple[tuple[int, ...], int, float]] = [((0,), 1, 10.0)]
    for _ in range(6):
        ops += [((1,), 4, 44.0)] * 16 + [((1,), 64, 700.0)]
    problem = make_problem(make_trace(ops, list(range(1, len(ops) + 1))), gpu())
    budget_bytes = round(0.6 * problem.plain_peak_bytes)
    planner = JointPlanner(problem)
    quick = planner.best(budget_bytes)

    planner.handling_s = 0.05
    spared = planner.best(budget_bytes)

    assert spared.num_handled <= 0.5 * quick.num_handled
    assert spared.seconds <= 1.02 * quick.seconds


def test_explains_by_module() -> None:
    problem = make_problem(layers(4), gpu(20_000))

    plan = plan_budget_jointly(problem, round(0.5 * problem.plain_peak_bytes))

    table = plan.explain(0).splitlines()
    assert table[0].split() == ["module", "action", "values", "size", "again", "(ms)", "link", "(ms)", "why"]
    assert any(line.startswith("-") and "recompute" in line and "cheap for its bytes" in line for line in table)
    assert "GPU: made up; predictions for it are not measured" in table
    assert "layers.0" in plan.explain(2)
    assert "op0" in plan.explain()


def _all_offloaded(problem: Problem) -> list[Action]:
    pairs = zip(problem.values, problem.plain, strict=True)
    return [OFFLOAD if OFFLOAD in held.choices else action for held, action in pairs]


@pytest.mark.parametrize("share", [1.0, 0.9, 0.7])
@pytest.mark.parametrize("seed", range(8))
def test_step_is_as_fast_and_fits_as_well(seed: int, share: float) -> None:
    problem = make_problem(random_trace(seed), gpu((4_000, 40_000, 400_000)[seed % 3]))
    budget_bytes = round(share * problem.plain_peak_bytes)
    actions = _all_offloaded(problem)
    moving = simulate(problem, actions, budget_bytes)
    found = without_needless_moves(problem, moving, budget_bytes)

    assert found.seconds <= moving.seconds
    assert found.excess_bytes <= moving.excess_bytes
    assert found.moved_bytes <= moving.moved_bytes
    assert {move.index for move in found.moves} <= {move.index for move in moving.moves}
    assert not (share == 1.0 and found.moves)
    assert simulate(problem, found.actions, budget_bytes) == found
