"""What a step takes, against hand-computed cases and a slow reference."""

import random

import pytest

from memkit.plan import Action
from memkit.plan.budget.problem import Problem, make_problem
from memkit.plan.budget.simulate import ReplayCosts, simulate
from tests.plan.budget import reference
from tests.plan.budget.steps import MIB, gpu, make_trace, random_trace

KEEP, OFFLOAD, RECOMPUTE = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE
EVERYTHING = 2**60


def draw(problem: Problem, seed: int) -> tuple[list[Action], int]:
    """Return legal actions, and a budget."""
    dice = random.Random(seed)
    actions = [dice.choice(sorted(held.choices)) for held in problem.values]
    return actions, dice.choice([EVERYTHING, *(round(share * problem.plain_peak_bytes) for share in (0.4, 0.6, 0.8))])


def chain() -> Problem:
    """Three ops in a row, 10 MiB and 100 us each, all saved; twice as long back."""
    return make_problem(make_trace([((0,), 10, 100.0), ((1,), 10, 100.0), ((2,), 10, 100.0)], [1, 2, 3]), gpu())


def test_plain_step_takes_what_the_trace_says() -> None:
    problem = chain()

    plain = simulate(problem, problem.plain, EVERYTHING)

    assert plain.seconds == pytest.approx(900e-6)
    assert plain.peak_bytes == 40 * MIB == problem.plain_peak_bytes == problem.trace.peak_bytes
    assert not plain.moves
    assert not plain.replays
    assert simulate(problem, problem.plain, EVERYTHING, most_replayed_s=0.0) == plain


def test_dropped_value_is_gone_from_its_last_reader_to_its_request() -> None:
    problem = chain()

    dropped = simulate(problem, [KEEP, RECOMPUTE, KEEP], EVERYTHING)

    assert dropped.replayed_s == pytest.approx(100e-6)
    assert dropped.seconds == pytest.approx(1000e-6)
    assert [(replay.index, replay.ops, replay.stays) for replay in dropped.replays] == [(1, (1,), ())]
    assert dropped.peak_bytes == 40 * MIB, "while its reader runs all three are there"


def test_copy_out_hides_and_the_copy_back_is_waited_for() -> None:
    problem = make_problem(
        make_trace([((0,), 10, 100.0), ((1,), 1, 600.0), ((2,), 1, 10.0)], [1, 2, 3]), gpu(20_000, latency_s=0.0)
    )

    moved = simulate(problem, [OFFLOAD, KEEP, KEEP], 10 * MIB + 11 * MIB)

    assert moved.moved_bytes == 10 * MIB
    (move,) = moved.moves
    assert problem.points[move.let_go] == 2, "its reader has run at the next save, and 500 us of copy were over"
    assert moved.stall_s == 0.0
    assert moved.peak_bytes == 21 * MIB
    late = simulate(problem, [OFFLOAD, KEEP, KEEP], 10 * MIB + 10 * MIB)
    assert late.over_bytes == MIB, "while its reader runs it is there"


def test_what_leaves_and_never_goes_stays() -> None:
    problem = chain()

    assert simulate(problem, [KEEP, OFFLOAD, KEEP], EVERYTHING).actions == (KEEP, KEEP, KEEP)


def test_anchor_is_held_from_its_natural_death_to_the_last_replay_that_reads_it() -> None:
    trace = make_trace([((0,), 4, 100.0), ((1,), 8, 10.0), ((2,), 1, 10.0)], [2, 3])
    problem = make_problem(trace, gpu())
    assert [held.is_anchor for held in problem.values] == [False, False, True]

    held = simulate(problem, [RECOMPUTE, KEEP, KEEP], EVERYTHING)
    alone = simulate(problem, [RECOMPUTE, KEEP, RECOMPUTE], EVERYTHING)

    assert held.replayed_s == pytest.approx(10e-6)
    assert alone.replayed_s == pytest.approx(110e-6)
    assert simulate(problem, [KEEP, KEEP, KEEP], EVERYTHING).actions == (KEEP, KEEP, RECOMPUTE), "nothing reads it"


@pytest.mark.parametrize("seed", range(60))
def test_bytes_and_seconds_are_those_of_the_reference(seed: int) -> None:
    problem = make_problem(random_trace(seed), gpu(random.Random(seed).choice((2_000, 20_000, 200_000))))
    actions, budget_bytes = draw(problem, seed)

    found = simulate(problem, actions, budget_bytes)

    assert found.seconds == pytest.approx(reference.seconds(problem, found), rel=1e-9)
    assert found.peak_bytes == reference.peak_bytes(problem, found)
    assert reference.is_made_from_what_is_there(problem, found)
    moved = [index for index, action in enumerate(found.actions) if action is OFFLOAD]
    assert sorted(move.index for move in found.moves) == moved
    assert all(move.copy <= move.let_go <= problem.num_forward_points <= move.fetch <= move.need for move in found.moves)


@pytest.mark.parametrize("seed", range(10))
def test_price_of_a_value_is_what_its_ops_take_and_changes_no_other(seed: int) -> None:
    problem = make_problem(random_trace(seed), gpu())
    actions, _ = draw(problem, seed)
    costs, before_s = ReplayCosts(problem, actions), ReplayCosts(problem, actions).seconds
    for index, held in enumerate(problem.values):
        is_dropped = actions[index] is RECOMPUTE
        other = [*actions[:index], KEEP if is_dropped else RECOMPUTE, *actions[index + 1 :]]
        more_s = -costs.gain(held.value) if is_dropped else costs.cost(held.value)
        assert more_s == pytest.approx(ReplayCosts(problem, other).seconds - before_s, abs=1e-12)
