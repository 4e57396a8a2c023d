"""Predicts what checkpointing some of a model's blocks takes, by the same simulation as a plan.

As with `torch.utils.checkpoint`, the inputs of a checkpointed block are held, and everything else saved in it is recomputed
when the backward reaches it: the ops of the block run again, up to the last one whose result is saved.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from memkit.fronts.front import CheckpointedBlocks
from memkit.plan.actions import Action
from memkit.plan.budget.problem import Problem
from memkit.plan.budget.simulate import simulate
from memkit.plan.lineage import NO_OP
from memkit.plan.step_trace import ModuleOps, StepTrace

_NO_LIMIT = 2**62
_SAVES_ITS_RESULT = re.compile(r"aten\.(relu|sigmoid|tanh|_?softmax|exp)_?\.")
"""Ops that autograd saves the result of. Source: PyTorch's derivatives.yaml."""


def blocks_of(trace: StepTrace) -> list[ModuleOps]:
    """Return the calls of a model's repeated blocks: members of lists whose members are all of one class and have modules in
    them. Blocks inside of blocks are none."""
    members, parents = defaultdict[str, list[ModuleOps]](list), set[str]()
    for call in trace.modules:
        parts = call.module.split(".")
        parents.update(".".join(parts[:end]) for end in range(1, len(parts)))
        if parts[-1].isdecimal():
            members[".".join(parts[:-1])].append(call)
    blocks: list[ModuleOps] = []
    for calls in members.values():
        is_list = len({call.kind for call in calls}) == 1 and all(call.module in parents for call in calls)
        if is_list:
            blocks += calls
    names = {block.module for block in blocks}
    outer = [block for block in blocks if not any(block.module.startswith(f"{name}.") for name in names)]
    return sorted((block for block in outer if block.end > block.begin), key=lambda block: block.begin)


def evenly(num_chosen: int, num_all: int) -> list[int]:
    """Return so many places of all, at even distances.

    Example:
        >>> evenly(2, 6)
        [2, 5]
    """
    return [place for place in range(num_all) if (place + 1) * num_chosen // num_all != place * num_chosen // num_all]


def with_checkpoints(problem: Problem, blocks: Sequence[ModuleOps]) -> tuple[Action, ...]:
    """Return for each value of a problem what is done with it if some blocks are checkpointed and the rest is plain."""
    lineage, actions = problem.lineage, list(problem.plain)
    block_of = dict[int, int]()
    for number, block in enumerate(blocks):
        block_of.update(dict.fromkeys(range(block.begin, block.end), number))
    readers = defaultdict[int, set[int]](set)
    for op, ins in enumerate(lineage.ins):
        for value in ins:
            readers[value].add(block_of.get(op, -1))
    for place, held in enumerate(problem.values):
        maker = lineage.maker[held.value]
        made_in = block_of.get(maker, -1) if maker != NO_OP else -1
        goes_in = any(block != made_in and block >= 0 for block in readers[held.value])
        stays_in = made_in >= 0 and readers[held.value] <= {made_in}
        if held.is_anchor:
            actions[place] = Action.KEEP if goes_in else Action.RECOMPUTE
        elif stays_in and Action.RECOMPUTE in held.choices:
            actions[place] = Action.RECOMPUTE
    return tuple(actions)


def checkpoint_curve(problem: Problem, *, most: int = 12) -> list[CheckpointedBlocks]:
    """Return what the step takes with blocks at even distances checkpointed: few of them first, all of them last.

    Args:
        most: for how many numbers of blocks at most. Of more blocks some numbers are left out.
    """
    blocks = blocks_of(problem.trace)
    if not blocks:
        return []
    counts = sorted({-(-len(blocks) * step // most) for step in range(1, most + 1)})
    return [_checkpointed(problem, [blocks[place] for place in evenly(count, len(blocks))]) for count in counts]


def _checkpointed(problem: Problem, blocks: Sequence[ModuleOps]) -> CheckpointedBlocks:
    actions = with_checkpoints(problem, blocks)
    found = simulate(problem, actions, _NO_LIMIT)
    run_again = {op for replay in found.replays for op in replay.ops}
    more_s, twice_bytes = 0.0, 0
    for block in blocks:
        last, num_bytes = _saved_last(problem, actions, block)
        more_s += sum(problem.op_s[op] for op in range(block.begin, last + 1) if op not in run_again)
        twice_bytes = max(twice_bytes, num_bytes)
    turn = problem.num_forward_points
    forward_bytes, backward_bytes = (max(part, default=0) for part in (found.levels[:turn], found.levels[turn:]))
    return CheckpointedBlocks(
        num_blocks=len(blocks),
        peak_bytes=problem.base_bytes + max(forward_bytes, backward_bytes + twice_bytes),
        step_s=found.seconds + more_s,
    )


def _saved_last(problem: Problem, actions: Sequence[Action], block: ModuleOps) -> tuple[int, int]:
    """Return the last op of a block whose result is saved in it, and the bytes of values saved in it that stay because they are
    read after the block: there are two copies of these while the block runs again."""
    lineage, trace = problem.lineage, problem.trace
    last, num_bytes = block.begin - 1, 0
    for held, action in zip(problem.values, actions, strict=True):
        maker = lineage.maker[held.value]
        if held.is_anchor or maker == NO_OP or not block.begin <= maker < block.end:
            continue
        if action is Action.RECOMPUTE:
            last = max(last, maker)
        elif _SAVES_ITS_RESULT.search(trace.ops[trace.op_places[maker]].name):
            last = max(last, maker)
            num_bytes += held.num_bytes
    return last, num_bytes


def fewest_that_fit(
    curve: Sequence[CheckpointedBlocks], budget_bytes: int, plain: CheckpointedBlocks
) -> CheckpointedBlocks | None:
    """Return the step with the fewest blocks checkpointed that keeps to a budget, none at all (`plain`) where that does; None
    where it never does, or there are no blocks."""
    if not curve:
        return None
    return next((found for found in (plain, *curve) if found.peak_bytes <= budget_bytes), None)
