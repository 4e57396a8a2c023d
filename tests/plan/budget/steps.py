"""Steps to plan: drawn at random, and layers in a row. One unit of bytes is a MiB, FLOPs are microseconds."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from memkit.plan import Action, GrowingLineage, JointPlanner, MemoryPlan, Step
from memkit.plan.budget.problem import Problem
from memkit.plan.gpu import GpuSpec
from memkit.plan.step import Lifetime, ModuleOps, OpKind, OpWork, StepTrace

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Microseconds(GpuSpec):
    """A GPU on which an op takes as many microseconds as it has FLOPs."""

    def seconds(self, op: OpWork, *, is_backward: bool) -> float:
        return op.flops * 1e-6


def plan_budget_jointly(problem: Problem, budget_bytes: int, *actions: Action) -> MemoryPlan:
    return JointPlanner(problem, actions or (*Action,)).plan(budget_bytes, with_bound=True, is_steady=True)


def gpu(mib_per_s: float = 20_000.0, latency_s: float = 1e-6) -> Microseconds:
    speed = mib_per_s * MIB
    return Microseconds(
        name="made up",
        memory_bytes=2**40,
        bytes_per_s=1e12,
        flops_per_s={},
        d2h_bytes_per_s=speed,
        h2d_bytes_per_s=speed,
        both_bytes_per_s=speed,
        copy_latency_s=latency_s,
        source="made up",
    )


def make_trace(
    ops: list[tuple[tuple[int, ...], int, float]],
    saved: list[int],
    *,
    extra: list[int] | None = None,
    held: dict[int, int] | None = None,
    fixed: frozenset[int] = frozenset(),
    base_mib: int = 10,
    names: dict[int, tuple[str, str]] | None = None,
) -> StepTrace:
    """Return a step: each op reads values and makes one; the backward goes through them in reverse, each asks for what the op
    made, if that is saved, and takes twice as long.

    Args:
        ops: for each the values that it reads, MiB of what it makes, and microseconds. Value 0 is the input, value i + 1 is
            what op i makes.
        saved: the values that are saved, each just after it was made.
        extra: MiB that each op takes beside values, forward and backward.
        held: until so many ops have run the caller holds a value; by default until its last reader has.
    """
    lineage, num_ops = GrowingLineage(), len(ops)
    lineage.add_root(0)
    last_read = {index + 1: index + 1 for index in range(num_ops)}
    for index, (ins, mib, micros) in enumerate(ops):
        lineage.add_op(ins, [mib * MIB], micros * 1e-6)
        for value in ins:
            last_read[value] = index + 1
    released = {value: min(max(place, (held or {}).get(value, 0)), num_ops) for value, place in last_read.items()}
    uses = [value for value in range(num_ops, 0, -1) if value in saved]
    use_places = [2 * num_ops - value for value in uses]
    lifetimes, levels = {}, [(extra or [0] * (2 * num_ops))[place] * MIB for place in range(2 * num_ops)]
    for value in range(1, num_ops + 1):
        freed = 2 * num_ops - value + 1 if value in saved else released[value]
        lifetimes[value] = Lifetime(made_at=value - 1, released_at=released[value], freed_at=freed)
        for place in range(value - 1, freed):
            levels[place] += ops[value - 1][1] * MIB
    works = [micros for _, _, micros in ops]
    works += [2 * micros for micros in reversed(works)]
    return StepTrace(
        model="Made",
        inputs="1",
        target="cuda",
        min_bytes=1,
        ops=tuple(
            OpWork(name=f"op{i}", kind=OpKind.MATMUL, flops=w, num_bytes=0, dtype="float32") for i, w in enumerate(works)
        ),
        num_forward_ops=num_ops,
        step=Step(lineage=lineage, saves=tuple(sorted(saved)), uses=tuple(uses), fixed=fixed),
        op_places=tuple(range(num_ops)),
        save_places=tuple(sorted(saved)),
        use_places=tuple(use_places),
        lifetimes=lifetimes,
        live_bytes=tuple(levels),
        base_bytes=base_mib * MIB,
        trainable_numel=0,
        trainable_bytes=0,
        names=names or {value: (f"op{value - 1}", f"layers.{value // 4}") for value in range(1, num_ops + 1)},
    )


def random_trace(seed: int, num_ops: int = 0, share_saved: float = 0.7) -> StepTrace:
    """Return a step that branches, joins, holds values beyond their readers and takes gradients."""
    draw = random.Random(seed)
    num_ops = num_ops or draw.randint(3, 14)
    ops = []
    for index in range(num_ops):
        ins = {index, *(draw.randint(max(0, index - 5), index) for _ in range(draw.choice((0, 0, 1, 2))))}
        ops.append((tuple(sorted(ins)), draw.randint(1, 40), float(draw.randint(1, 300))))
    saved = [value for value in range(1, num_ops + 1) if draw.random() < share_saved] or [num_ops]
    held = {value: value + draw.randint(0, 6) for value in range(1, num_ops + 1) if draw.random() < 0.2}
    extra = [draw.randint(0, 10) for _ in range(2 * num_ops)]
    fixed = frozenset(value for value in saved if draw.random() < 0.1)
    return make_trace(ops, saved, extra=extra, held=held, fixed=fixed)


def layers(num_layers: int) -> StepTrace:
    """Return a step of layers alike with a residual: four values are saved in each, what the layer ends with is not."""
    ops: list[tuple[tuple[int, ...], int, float]] = []
    saved: list[int] = []
    residual = 0
    for _ in range(num_layers):
        first = len(ops) + 1
        ops += [
            ((residual,), 16, 10.0),
            ((first,), 32, 400.0),
            ((first + 1,), 32, 15.0),
            ((first + 2,), 8, 400.0),
            ((residual, first + 3), 8, 8.0),
        ]
        saved += [first, first + 1, first + 2, first + 3]
        residual = first + 4
    trace = make_trace(ops, saved, extra=[4] * (2 * len(ops)))
    calls = [
        ModuleOps(module=f"layers.{layer}", kind="Layer", begin=5 * layer, end=5 * layer + 5) for layer in range(num_layers)
    ]
    return replace(trace, modules=tuple(calls))
