"""Checkpointed blocks: which modules are blocks, and what the step then takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memkit.fronts.checkpoints import blocks_of, checkpoint_curve, evenly, fewest_that_fit, with_checkpoints
from memkit.fronts.front import CheckpointedBlocks
from memkit.plan.actions import Action
from memkit.plan.budget.problem import Problem, make_problem
from memkit.plan.step_trace import ModuleOps, StepTrace
from tests.plan.budget.steps import MIB, gpu, layers

NUM_LAYERS = 6
OF_A_LAYER = 5
"""Ops; the last adds the residual, which is not saved."""


def call(module: str, kind: str, begin: int, end: int) -> ModuleOps:
    return ModuleOps(module=module, kind=kind, begin=begin, end=end)


def trace_of_blocks() -> StepTrace:
    calls = [call("", "Model", 0, NUM_LAYERS * OF_A_LAYER), call("layers", "Sequential", 0, NUM_LAYERS * OF_A_LAYER)]
    for layer in range(NUM_LAYERS):
        begin = layer * OF_A_LAYER
        calls += [
            call(f"layers.{layer}", "Layer", begin, begin + OF_A_LAYER),
            call(f"layers.{layer}.fc", "Linear", begin, begin + 2),
        ]
    return replace(layers(NUM_LAYERS), modules=tuple(calls))


def problem_of_blocks() -> Problem:
    return make_problem(trace_of_blocks(), gpu())


def test_blocks_are_members_of_lists_alike() -> None:
    assert [block.module for block in blocks_of(trace_of_blocks())] == [f"layers.{layer}" for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize(
    "calls",
    [
        [call("0", "Linear", 0, 1), call("1", "Linear", 1, 2)],  # leaves
        [
            call("0", "A", 0, 2),
            call("0.x", "Linear", 0, 1),
            call("1", "B", 2, 4),
            call("1.x", "Linear", 2, 3),
        ],  # of two classes
        [],
    ],
)
def test_others_have_none(calls: list[ModuleOps]) -> None:
    assert blocks_of(replace(layers(2), modules=tuple(calls))) == []


def test_blocks_inside_of_blocks_are_none() -> None:
    calls = [
        call(name, "Block", begin, begin + 2)
        for begin, name in ((0, "outer.0"), (0, "outer.0.inner.0"), (0, "outer.0.inner.0.x"), (2, "outer.1"), (2, "outer.1.x"))
    ]

    assert [block.module for block in blocks_of(replace(layers(2), modules=tuple(calls)))] == ["outer.0", "outer.1"]


@pytest.mark.parametrize(("num_chosen", "places"), [(0, []), (1, [5]), (2, [2, 5]), (3, [1, 3, 5]), (6, [0, 1, 2, 3, 4, 5])])
def test_blocks_are_chosen_at_even_distances(num_chosen: int, places: list[int]) -> None:
    assert evenly(num_chosen, 6) == places


def test_what_comes_in_is_held_and_all_else_made_again() -> None:
    problem = problem_of_blocks()
    actions = with_checkpoints(problem, blocks_of(problem.trace)[1:2])
    changed = {held.value: action for held, action in zip(problem.values, actions, strict=True)}

    made_again = [
        value for value, action in changed.items() if action is Action.RECOMPUTE and value in problem.trace.step.saves
    ]
    held = [value for value, action in changed.items() if action is Action.KEEP and value not in problem.trace.step.saves]

    assert made_again == [6, 7, 8, 9]
    assert held == [5]


def test_the_curve_is_as_by_hand() -> None:
    problem = problem_of_blocks()

    curve = checkpoint_curve(problem)

    assert [found.num_blocks for found in curve] == [1, 2, 3, 4, 5, 6]
    for found in curve:
        assert found.step_s == pytest.approx(problem.plain_s + found.num_blocks * (10 + 400 + 15 + 400) * 1e-6)
    # the base; what came into five of the layers; all that is saved in the last one; 4 more to work with
    assert curve[-1].peak_bytes == (10 + 5 * 8 + (16 + 32 + 32 + 8) + 4) * MIB
    assert [found.peak_bytes for found in curve] == sorted((found.peak_bytes for found in curve), reverse=True)


def test_a_result_that_is_saved_and_read_behind_the_block_is_made_again_as_well() -> None:
    """As in a block that ends with a ReLU."""
    trace = trace_of_blocks()
    ends = {layer * OF_A_LAYER + 4 for layer in range(NUM_LAYERS)}
    ops = tuple(replace(op, name="aten.relu_.default") if op_of in ends else op for op_of, op in enumerate(trace.ops))
    saves = tuple(sorted({*trace.step.saves, *(end + 1 for end in ends)}))
    uses = tuple(reversed(saves))
    num_ops = trace.num_forward_ops
    lifetimes = {
        value: replace(life, freed_at=2 * num_ops - value + 1) if value - 1 in ends else life
        for value, life in trace.lifetimes.items()
    }
    trace = replace(
        trace,
        ops=ops,
        step=replace(trace.step, saves=saves, uses=uses, use_ends=()),
        save_places=saves,
        use_places=tuple(2 * num_ops - value for value in uses),
        lifetimes=lifetimes,
    )
    problem = make_problem(trace, gpu())

    found = checkpoint_curve(problem)[-1]

    assert found.step_s == pytest.approx(problem.plain_s + NUM_LAYERS * (10 + 400 + 15 + 400 + 8) * 1e-6)


def test_of_many_blocks_some_numbers_are_tried() -> None:
    assert [found.num_blocks for found in checkpoint_curve(problem_of_blocks(), most=3)] == [2, 4, 6]


def test_the_fewest_that_fit_are_taken() -> None:
    plain, one, two = (CheckpointedBlocks(num_blocks=n, peak_bytes=100 - 30 * n, step_s=1.0 + n) for n in range(3))

    assert fewest_that_fit([one, two], 100, plain) is plain
    assert fewest_that_fit([one, two], 69, plain) is two
    assert fewest_that_fit([one, two], 39, plain) is None
    assert fewest_that_fit([], 100, plain) is None
