"""`memkit plan`: step time against peak memory for several budgets, for a GPU that need not be there."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memkit._version import __version__
from memkit.core.extras import library
from memkit.core.sizes import format_gib
from memkit.errors import BudgetInfeasible
from memkit.plan.budget.planning import JointPlanner, unsure
from memkit.plan.budget.problem import Problem
from memkit.plan.budget.simulate import simulate
from memkit.plan.plans import Action, MemoryPlan
from memkit.plan.residency import spread
from memkit.plan.shards import ShardPlan
from memkit.plan.step import NO_OP, ModuleOps, StepTrace, short_name

SCHEMA = "memkit.Front"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedBlocks:
    num_blocks: int
    peak_bytes: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRow:
    """One budget; a field is None if its plan does not fit, and without `step_s` no plan fits."""

    budget_bytes: int
    peak_bytes: int | None = None
    step_s: float | None = None
    bound_s: float | None = None  # no plan of the budget takes less; None without scipy as well
    replayed_s: float = 0.0  # seconds of ops that run again, part of `step_s`
    moved_bytes: int = 0
    num_kept: int = 0
    num_moved: int = 0
    num_again: int = 0
    offload_s: float | None = None  # the step with the best plan that only offloads
    recompute_s: float | None = None  # the step with the best plan that only recomputes
    checkpoint: CheckpointedBlocks | None = None  # with the fewest blocks that fit, evenly spaced


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    budget_bytes: int
    num_plain: int
    num_planned: int
    is_plain_found: bool = True
    is_planned_found: bool = True  # False if the search stopped early: more may fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    model: str
    inputs: str
    gpu: str
    is_measured: bool
    optimizer: str | None
    plain_s: float
    plain_peak_bytes: int
    least_bytes: int  # the smallest budget with a plan
    least_module: str
    least_op: str
    rows: tuple[FrontRow, ...]
    batch: LargestBatch | None = None
    ranks: ShardPlan | None = None  # of a split model: the bytes of each rank, which all peaks include
    notes: tuple[str, ...] = ()  # reasons why the figures are unsure

    def to_json(self, plans: Mapping[int, Any]) -> str:
        content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "memkit": __version__, **asdict(self)}
        return json.dumps({**content, "plans": {str(budget): plan for budget, plan in plans.items()}}, indent=1)


def largest(num_bytes: Callable[[int], int], budget_bytes: int, *, begin: int, most: int) -> tuple[int, bool]:
    """Return the largest batch that fits, and whether one more was found not to fit, after at most `most` tries."""
    tried = {0: 0}

    def fits(batch: int) -> bool:
        if batch not in tried:
            tried[batch] = num_bytes(batch)
        return tried[batch] <= budget_bytes

    def on_line(first: int, second: int) -> int:
        rise = max((tried[second] - tried[first]) / (second - first), 1e-9)
        return int(min(first + (budget_bytes - tried[first]) / rise, 2**40))

    low, high = (begin, None) if fits(begin) else (0, begin)
    while len(tried) <= most and (high is None or high - low > 1):
        known = sorted(tried)
        if high is None:  # at first only 0 and one more are known
            guess = 2 * low if len(known) == 2 else max(low + 1, min(on_line(known[-2], known[-1]), 16 * low))
        elif low > 0 and len(tried) % 4 == 0:
            guess = (low + high) // 2
        else:  # through the smallest two that don't fit if none fits; in proportion if there is only one
            first, second = (low, high) if low > 0 or len(known) == 2 else (known[1], known[2])
            guess = max(low + 1, min(on_line(first, second), high - 1))
        low, high = (guess, high) if fits(guess) else (low, guess)
    return low, high is not None and high - low <= 1


_SAVES_ITS_RESULT = re.compile(r"aten\.(relu|sigmoid|tanh|_?softmax|exp)_?\.")  # source: PyTorch's derivatives.yaml


def blocks_of(trace: StepTrace) -> list[ModuleOps]:
    """Return the calls of a model's repeated blocks, outermost ones: members of lists of one class, with submodules."""
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


def with_checkpoints(problem: Problem, blocks: Sequence[ModuleOps]) -> tuple[Action, ...]:
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
    blocks = blocks_of(problem.trace)
    if not blocks:
        return []
    counts = sorted({-(-len(blocks) * step // most) for step in range(1, most + 1)})
    return [_checkpointed(problem, [blocks[place] for place in spread(len(blocks), count)]) for count in counts]


def _checkpointed(problem: Problem, blocks: Sequence[ModuleOps]) -> CheckpointedBlocks:
    actions = with_checkpoints(problem, blocks)
    found = simulate(problem, actions, 2**62)
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
    """Return a block's last op whose result is saved in it, and the saved bytes that later ops read: these exist twice."""
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
    return next((found for found in (plain, *curve) if curve and found.peak_bytes <= budget_bytes), None)


def default_budgets(problem: Problem, least_bytes: int, num_budgets: int) -> list[int]:
    """Return budgets at even distances, from the plain step's peak, or the GPU's memory if less, down to the least."""
    gpu = problem.gpu
    if least_bytes > gpu.memory_bytes:
        raise BudgetInfeasible(
            f"the step needs {format_gib(least_bytes)} at the least; the {gpu.name} has {format_gib(gpu.memory_bytes)}. Make "
            "the batch smaller, or name another GPU",
            least_bytes,
        )
    most_bytes = min(problem.plain_peak_bytes, gpu.memory_bytes)
    if num_budgets == 1 or most_bytes == least_bytes:
        return [most_bytes]
    step = (most_bytes - least_bytes) / (num_budgets - 1)
    return [most_bytes - int(place * step) for place in range(num_budgets - 1)] + [least_bytes]


def make_front(
    problem: Problem, limits: Sequence[int] | None, *, num_budgets: int, optimizer: str | None, needs_plan: bool = True
) -> tuple[Front, dict[int, MemoryPlan]]:
    planner = JointPlanner(problem)
    least = planner.least()
    if limits is None and least.peak_bytes > problem.gpu.memory_bytes and not needs_plan:
        limits = [problem.gpu.memory_bytes]
    asked = limits if limits is not None else default_budgets(problem, least.peak_bytes, num_budgets)
    plans, refused = dict[int, MemoryPlan](), list[BudgetInfeasible]()
    for limit in sorted(set(asked)):
        try:
            plans[limit] = planner.plan(limit, with_bound=True, is_steady=len(asked) == 1)
        except BudgetInfeasible as error:
            refused.append(error)
    if refused and not plans and needs_plan:
        raise refused[-1]
    alone_s = {
        only: {limit: one.best(limit).seconds for limit in sorted(plans) if limit >= one.least().peak_bytes}
        for only, one in ((only, planner.alone[only]) for only in (Action.OFFLOAD, Action.RECOMPUTE))
    }
    curve = checkpoint_curve(problem)
    plain = CheckpointedBlocks(num_blocks=0, peak_bytes=problem.plain_peak_bytes, step_s=problem.plain_s)
    module, op = problem.module_at(least.worst_slot)
    trace, gpu = problem.trace, problem.gpu

    def row(limit: int) -> FrontRow:
        if limit not in plans:
            return FrontRow(budget_bytes=limit)
        plan = plans[limit]
        counts = Counter(value.action for value in plan.values if not value.is_anchor)
        return FrontRow(
            budget_bytes=limit,
            peak_bytes=plan.predicted_peak_bytes,
            step_s=plan.predicted_s,
            bound_s=plan.bound_s,
            replayed_s=plan.replayed_s,
            moved_bytes=plan.moved_bytes,
            num_kept=counts[Action.KEEP],
            num_moved=counts[Action.OFFLOAD],
            num_again=counts[Action.RECOMPUTE],
            offload_s=alone_s[Action.OFFLOAD].get(limit),
            recompute_s=alone_s[Action.RECOMPUTE].get(limit),
            checkpoint=fewest_that_fit(curve, limit, plain),
        )

    front = Front(
        model=trace.model,
        inputs=trace.inputs,
        gpu=gpu.name,
        is_measured=gpu.is_measured,
        optimizer=optimizer,
        plain_s=problem.plain_s,
        plain_peak_bytes=problem.plain_peak_bytes,
        least_bytes=least.peak_bytes,
        least_module=module,
        least_op=op,
        notes=tuple(unsure(problem)),
        rows=tuple(map(row, dict.fromkeys(asked))),
    )
    return front, plans


_HEADS = (
    ("budget", "peak", "step", "/", "bound", "again", "moved", "kept/moved/", "off-", "recom-", "check-"),
    ("UNIT", "UNIT", "ms", "plain", ">=", "ms", "UNIT", "again", "load", "pute", "point"),
)


def to_text(front: Front, *, width: int | None = None) -> str:
    columns = 80 if width is None else min(width, 80)
    unit, unit_bytes = ("GiB", 2**30) if front.plain_peak_bytes >= 2**30 else ("MiB", 2**20)
    above = [[head.replace("UNIT", unit) for head in heads] for heads in _HEADS]
    cells = [_cells(row, front.plain_s, unit_bytes) for row in front.rows]
    widths = [max(map(len, column)) for column in zip(*above, *cells, strict=True)]
    places, may_go = list(range(len(widths))), [5, 7, 4, 6, 10, 8, 9]  # the columns that a too wide table leaves out first
    while width is not None and may_go and sum(widths[place] + 1 for place in places) - 1 > width:
        places.remove(may_go.pop(0))

    def line(row: Sequence[str]) -> str:
        return " ".join(row[place].rjust(widths[place]) for place in places).rstrip()

    states = "" if front.optimizer is None else f", with the states of {front.optimizer}"
    title = f"{front.model}, {front.inputs}{states}, on {_predicted_for(front)}"
    lines = [*textwrap.wrap(title, columns), "", *map(line, above), line(["-" * width for width in widths])]
    said = (part for below in _below(front) for part in textwrap.wrap(below, columns))
    return "\n".join([*lines, *map(line, cells), "", *said])


def _predicted_for(front: Front) -> str:
    return f"{front.gpu} ({'predicted' if front.is_measured else 'predicted; not measured'})"


def _cells(row: FrontRow, plain_s: float, unit_bytes: int) -> list[str]:
    def size(num_bytes: int | None) -> str:
        return "-" if num_bytes is None else f"{num_bytes / unit_bytes:.2f}"

    def share(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds / plain_s:.3f}" if plain_s else "1.000"

    fits = row.step_s is not None
    return [
        size(row.budget_bytes),
        size(row.peak_bytes),
        "-" if row.step_s is None else f"{row.step_s * 1e3:.1f}",
        share(row.step_s),
        share(row.bound_s),
        f"{row.replayed_s * 1e3:.1f}" if fits else "-",
        size(row.moved_bytes) if fits else "-",
        f"{row.num_kept}/{row.num_moved}/{row.num_again}" if fits else "-",
        share(row.offload_s),
        share(row.recompute_s),
        share(None if row.checkpoint is None else row.checkpoint.step_s),
    ]


def _below(front: Front) -> Iterator[str]:
    where = ", ".join(part for part in (front.least_module, short_name(front.least_op)) if part)
    yield f"plain peak: {format_gib(front.plain_peak_bytes)}, step {front.plain_s * 1e3:.1f} ms"
    yield f"least budget: {format_gib(front.least_bytes)}" + (f" (set by {where})" if where else "")
    ranks = front.ranks
    if ranks is not None:
        shards = (
            f"parameters {format_gib(ranks.param_bytes)}, gradients {format_gib(ranks.grad_bytes)}, states "
            f"{format_gib(ranks.state_bytes)}"
        )
        gathered = f"gathered at a time {format_gib(ranks.gathered_bytes)}"
        said = f"on each of {ranks.num_ranks} ranks: "
        if ranks.is_offloaded:
            said += f"{gathered}, on the way there {format_gib(ranks.brought_bytes)}; in host memory {shards}"
        else:
            said += f"{shards}, {gathered}"
        yield said
    batch = front.batch
    if batch is not None:
        plain = f"{batch.num_plain}{'' if batch.is_plain_found else ' or more'}"
        planned = f"{batch.num_planned}{'' if batch.is_planned_found else ' or more'}"
        yield f"the largest batch that fits in {format_gib(batch.budget_bytes)}: plain {plain}, planned {planned}"
    yield from (f"note: {note}" for note in front.notes)


def draw(front: Front, path: Path) -> None:
    """Draw step / plain against the peak, one line per mechanism; the file's suffix sets the format."""
    figure = library("matplotlib.figure", "a picture").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    blocks = {row.checkpoint.num_blocks: row.checkpoint for row in front.rows if row.checkpoint is not None}
    drawn: dict[str, tuple[str, list[tuple[int | None, float | None]]]] = {
        "best mix": ("o-", [(row.peak_bytes, row.step_s) for row in front.rows]),
        "lower bound": ("_:", [(row.budget_bytes, row.bound_s) for row in front.rows]),
        "offload alone": ("s--", [(row.budget_bytes, row.offload_s) for row in front.rows]),
        "recompute alone": ("^--", [(row.budget_bytes, row.recompute_s) for row in front.rows]),
        "checkpointed blocks": ("D", [(found.peak_bytes, found.step_s) for _, found in sorted(blocks.items())]),
    }
    for label, (style, points) in drawn.items():
        there = [(peak / 2**30, time_s / front.plain_s) for peak, time_s in points if peak is not None and time_s is not None]
        if there:
            axes.plot(*zip(*there, strict=True), style, label=label)
    axes.set(xlabel="peak allocated (GiB)", ylabel="step / plain", title=f"{front.model} on {_predicted_for(front)}")
    shares = [row.step_s / front.plain_s for row in front.rows if row.step_s is not None]
    # lines above twice the plain step, such as offload alone, would flatten all others
    most = max([share for share in shares if share <= 2] or shares, default=1.0)
    axes.set_ylim(0.98, max(1.3, 1.15 * most))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.savefig(path)
