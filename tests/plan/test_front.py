"""Step time against peak: batches, checkpointed blocks, the table, and steps measured on a GPU."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.plan.asked import problem_of, trace_of
from memkit.plan.budget.problem import Problem, make_problem
from memkit.plan.front import (
    CheckpointedBlocks,
    Front,
    FrontRow,
    LargestBatch,
    blocks_of,
    checkpoint_curve,
    draw,
    fewest_that_fit,
    largest,
    to_text,
    with_checkpoints,
)
from memkit.plan.gpu import GPUS
from memkit.plan.plans import Action
from memkit.plan.step import ModuleOps, StepTrace
from tests.plan.budget.steps import MIB, gpu, layers


def test_any_start_leads_to_the_largest_batch_and_a_search_that_stops_says_so() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        first, rise, block = draw.choice([0, draw.randrange(10**9)]), draw.randint(1, 10**7), draw.choice([1, 8])

        def num_bytes(batch: int, first: int = first, rise: int = rise, block: int = block) -> int:
            return first + rise * batch + batch // block * block * rise // 50

        answer = draw.choice([0, 1, draw.randint(1, 5000)])
        budget_bytes = draw.randrange(num_bytes(answer), num_bytes(answer + 1))
        for begin in (1, 8, 64, 4096, 10**6):
            assert largest(num_bytes, budget_bytes, begin=begin, most=7) == (answer, True)
        kinked = functools.partial(lambda batch, num_bytes: num_bytes(batch) + (batch > 40) * 77 * 10**6, num_bytes=num_bytes)
        found, is_found = largest(kinked, budget_bytes, begin=draw.randint(1, 100), most=60)
        assert is_found
        assert kinked(found) <= budget_bytes < kinked(found + 1)
    found, is_found = largest(lambda batch: 1, 100, begin=4, most=3)
    assert (found >= 4, is_found) == (True, False)


NUM_LAYERS = 6
OF_A_LAYER = 5
"""Ops; the last adds the residual, which is not saved."""


def call(module: str, kind: str, begin: int, end: int) -> ModuleOps:
    return ModuleOps(module=module, kind=kind, begin=begin, end=end)


def trace_of_blocks() -> StepTrace:
    calls = [call(name, kind, 0, NUM_LAYERS * OF_A_LAYER) for name, kind in (("", "Model"), ("layers", "Sequential"))]
    for layer in range(NUM_LAYERS):
        begin = layer * OF_A_LAYER
        calls.append(call(f"layers.{layer}", "Layer", begin, begin + OF_A_LAYER))
        calls.append(call(f"layers.{layer}.fc", "Linear", begin, begin + 2))
    return replace(layers(NUM_LAYERS), modules=tuple(calls))


def problem_of_blocks() -> Problem:
    return make_problem(trace_of_blocks(), gpu())


@pytest.mark.parametrize(
    ("calls", "blocks"),
    [
        ([("0", "Linear", 0, 1), ("1", "Linear", 1, 2)], []),  # leaves
        ([("0", "A", 0, 2), ("0.x", "Linear", 0, 1), ("1", "B", 2, 4), ("1.x", "Linear", 2, 3)], []),  # of two classes
        ([], []),
        (
            [
                *(("outer.0", "Block", 0, 2), ("outer.0.inner.0", "Block", 0, 2), ("outer.0.inner.0.x", "Block", 0, 2)),
                *(("outer.1", "Block", 2, 4), ("outer.1.x", "Block", 2, 4)),
            ],
            ["outer.0", "outer.1"],  # those inside of others are none
        ),
    ],
)
def test_blocks_are_members_of_lists(calls: list[tuple[str, str, int, int]], blocks: list[str]) -> None:
    found = blocks_of(replace(layers(2), modules=tuple(call(*each) for each in calls)))

    assert [block.module for block in found] == blocks


def test_what_comes_in_is_held_and_all_else_made_again() -> None:
    problem = problem_of_blocks()
    actions = with_checkpoints(problem, blocks_of(problem.trace)[1:2])
    changed = {held.value: action for held, action in zip(problem.values, actions, strict=True)}
    saves = {*problem.trace.step.saves}

    assert [value for value, action in changed.items() if action is Action.RECOMPUTE and value in saves] == [6, 7, 8, 9]
    assert [value for value, action in changed.items() if action is Action.KEEP and value not in saves] == [5]


def test_the_curve_is_as_by_hand() -> None:
    problem = problem_of_blocks()

    curve = checkpoint_curve(problem)

    assert [found.num_blocks for found in curve] == [1, 2, 3, 4, 5, 6]
    assert [found.num_blocks for found in checkpoint_curve(problem, most=3)] == [2, 4, 6]  # of many some numbers
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


def test_the_fewest_that_fit_are_taken() -> None:
    plain, one, two = (CheckpointedBlocks(num_blocks=n, peak_bytes=100 - 30 * n, step_s=1.0 + n) for n in range(3))

    assert fewest_that_fit([one, two], 100, plain) is plain
    assert fewest_that_fit([one, two], 69, plain) is two
    assert fewest_that_fit([one, two], 39, plain) is None
    assert fewest_that_fit([], 100, plain) is None


FRONT = Front(
    model="ResNet",
    inputs="float32[256, 3, 224, 224]",
    gpu="H200",
    is_measured=True,
    optimizer=None,
    plain_s=0.1149,
    plain_peak_bytes=21274 * MIB,
    least_bytes=3980 * MIB,
    least_module="layer1.0.conv3",
    least_op="aten.convolution_backward.default",
    rows=(
        FrontRow(
            budget_bytes=21274 * MIB,
            peak_bytes=21274 * MIB,
            step_s=0.1149,
            bound_s=0.1149,
            num_kept=105,
            offload_s=0.1149,
            recompute_s=0.1149,
            checkpoint=CheckpointedBlocks(num_blocks=0, peak_bytes=21274 * MIB, step_s=0.1149),
        ),
        FrontRow(
            budget_bytes=10509 * MIB,
            peak_bytes=10480 * MIB,
            step_s=0.1219,
            bound_s=0.1213,
            replayed_s=7.0e-3,
            moved_bytes=1862 * MIB,
            num_kept=40,
            num_moved=15,
            num_again=50,
            offload_s=0.4263,
            recompute_s=0.1253,
            checkpoint=CheckpointedBlocks(num_blocks=12, peak_bytes=10400 * MIB, step_s=0.1402),
        ),
        FrontRow(budget_bytes=3980 * MIB, peak_bytes=3980 * MIB, step_s=0.7, replayed_s=0.01, moved_bytes=9 * 2**30),
        FrontRow(budget_bytes=2**30),
    ),
)

TEXT = """\
ResNet, float32[256, 3, 224, 224], on H200 (predicted)

budget  peak  step     / bound again moved kept/moved/  off- recom- check-
   GiB   GiB    ms plain    >=    ms   GiB       again  load   pute  point
------ ----- ----- ----- ----- ----- ----- ----------- ----- ------ ------
 20.78 20.78 114.9 1.000 1.000   0.0  0.00     105/0/0 1.000  1.000  1.000
 10.26 10.23 121.9 1.061 1.056   7.0  1.82    40/15/50 3.710  1.091  1.220
  3.89  3.89 700.0 6.092     -  10.0  9.00       0/0/0     -      -      -
  1.00     -     -     -     -     -     -           -     -      -      -

plain peak: 20.78 GiB, step 114.9 ms
least budget: 3.89 GiB (set by layer1.0.conv3, convolution_backward)"""


def test_the_whole_table() -> None:
    assert to_text(FRONT) == TEXT


def test_the_largest_batch_is_below() -> None:
    found = LargestBatch(budget_bytes=12 * 2**30, num_plain=140, num_planned=777)

    for batch, more in ((found, ""), (replace(found, is_planned_found=False), " or more")):
        line = to_text(replace(FRONT, batch=batch)).splitlines()[-1]
        assert line == f"the largest batch that fits in 12.00 GiB: plain 140, planned 777{more}"


def test_small_models_are_in_mib_and_lines_fit_80_columns() -> None:
    rows = tuple(
        replace(row, budget_bytes=row.budget_bytes // 400, num_kept=1234, num_moved=1234, num_again=1234) for row in FRONT.rows
    )
    less = {"plain_peak_bytes": FRONT.plain_peak_bytes // 400, "rows": rows, "inputs": "a" * 70}
    small = to_text(replace(FRONT, is_measured=False, optimizer="adamw", **less))

    assert any("MiB" in line for line in small.splitlines()[4:6])
    assert "with the states of adamw" in small
    assert "(predicted; not measured)" in small
    assert max(map(len, to_text(FRONT).splitlines())) <= 80
    assert max(map(len, small.splitlines()[:2])) <= 80


@pytest.mark.parametrize("width", [80, 72, 60, 40])
def test_narrow_terminals_have_fewer_columns_and_every_budget(width: int) -> None:
    long = replace(FRONT, plain_peak_bytes=2**20 * 2**30, plain_s=4.0, notes=("only the backend knows " * 5,))

    for front in (FRONT, replace(long, batch=LargestBatch(budget_bytes=2**40, num_plain=10**6, num_planned=10**7))):
        text = to_text(front, width=width)

        assert max(map(len, text.splitlines())) <= width
        assert {line.split()[0] for line in text.splitlines() if line.split()} >= {"20.78", "10.26", "3.89", "1.00"}
    assert ("moved" in to_text(FRONT, width=width)) == (width > 40)


def test_json_has_all_figures_and_the_plans() -> None:
    content = json.loads(FRONT.to_json({7: {"schema": "a plan"}}))

    assert content["schema"] == "memkit.Front"
    assert content["rows"][1]["checkpoint"] == {"num_blocks": 12, "peak_bytes": 10400 * MIB, "step_s": 0.1402}
    assert content["plans"] == {"7": {"schema": "a plan"}}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"front.{suffix}"

    draw(FRONT, path)

    assert path.stat().st_size > 1000


class Measured(NamedTuple):
    forward_s: float
    backward_s: float
    peak_mib: int
    checkpointed_share: float
    checkpointed_peak_mib: int


def resnet50() -> tuple[nn.Module, Tensor]:
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        return models.resnet50(), torch.empty(256, 3, 224, 224)


class LlamaWithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
        config = transformers.LlamaConfig(vocab_size=32000, use_cache=False, **shape)
        self.inner = transformers.LlamaForCausalLM(config).bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.inner.model(input_ids=tokens)[0]
        return nn.functional.cross_entropy(self.inner.lm_head(hidden).flatten(0, 1), tokens.flatten())


def llama() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return LlamaWithLoss(), torch.zeros(8, 2048, dtype=torch.long)


MODELS = {
    "ResNet-50, batch 256": (resnet50, Measured(39.3e-3, 76.2e-3, 21347, 1.292, 9043)),
    "Llama 0.95B, 8 x 2048": (llama, Measured(81.1e-3, 159.6e-3, 28710, 1.27, 6164)),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[Problem, Measured]:
    make, measured = MODELS[request.param]
    model, inputs = make()
    report = memkit.profile_memory(model.train(), inputs, device="meta", backward=True, trace=True, print_table=False)
    return problem_of(trace_of(report), GPUS["H200"], None), measured


@pytest.mark.slow
def test_predictions_are_what_was_measured(case: tuple[Problem, Measured]) -> None:
    problem, measured = case
    trace, gpu = problem.trace, problem.gpu
    forward_s = sum(gpu.seconds(op, is_backward=False) for op in trace.ops[: trace.num_forward_ops])

    assert forward_s == pytest.approx(measured.forward_s, rel=0.04)
    assert problem.plain_s - forward_s == pytest.approx(measured.backward_s, rel=0.03)
    assert problem.plain_s == pytest.approx(measured.forward_s + measured.backward_s, rel=0.02)
    assert problem.plain_peak_bytes == pytest.approx(measured.peak_mib * MIB, rel=0.005)
    found = checkpoint_curve(problem)[-1]  # all blocks checkpointed
    assert found.num_blocks == 16
    assert found.step_s / problem.plain_s == pytest.approx(measured.checkpointed_share, rel=0.01)
    assert found.peak_bytes == pytest.approx(measured.checkpointed_peak_mib * MIB, rel=0.015)
