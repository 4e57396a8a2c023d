"""Seconds to plan, on the CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import torch
import torchvision
from measuring import Workload
from setting import TAG, Setting
from shared import Line
from workloads import CifarResNet, on_images

import memkit
from memkit.plan import GrowingLineage, RematPlanner, Step


def planning(setting: Setting) -> Iterator[Line]:
    """Seconds to plan, on the CPU: made-up steps of so many values, and steps of real models that are entered again."""
    counts = (40, 200) if setting.tiny else (200, 1000) if setting.fast else (200, 1000, 5000)
    for num_values in counts:
        step = _residual_step(num_values)
        seconds, outcomes, start = [], [], time.perf_counter()
        planner = RematPlanner(step, memkit.plan.DTRScore())
        prepared_s = time.perf_counter() - start
        for share in (0.5, 0.3, 0.2):
            start = time.perf_counter()
            try:
                plan = planner.plan(int(share * step.saved_bytes))
                outcomes.append({"share": share, "replay_s": plan.predicted_replay_s, "dropped": len(plan.dropped)})
            except memkit.errors.BudgetInfeasible as error:
                outcomes.append({"share": share, "smallest_bytes": error.smallest_bytes})
            seconds.append(time.perf_counter() - start)
        yield {
            "bench": "remat_planning",
            "name": f"a made-up residual network of {num_values} values",
            "num_values": num_values,
            "num_ops": len(step.lineage.ins),
            "first_plan_s": prepared_s + seconds[0],
            "prepared_s": prepared_s,
            "plans_s": seconds,
            "outcomes": outcomes,
        }
    nets: list[tuple[str, Callable[[], Workload], int]] = [
        ("resnet50", lambda: on_images("resnet50", torchvision.models.resnet50(), 2, 32), 2**12)
    ]
    if not setting.tiny and not setting.fast:
        nets.append(("resnet1202", lambda: on_images("resnet1202", CifarResNet(), 4, 16, 10), 2**9))
    for name, build, min_bytes in nets:
        torch.manual_seed(0)
        yield {"bench": "remat_planning", "name": f"{name}, tiny images", **_entry_seconds(build(), min_bytes)}


def _residual_step(num_values: int) -> Step:
    """Return a step as that of a residual network: convolution, batch norm and ReLU, with a sum over every third."""
    source, lineage = random.Random(0), GrowingLineage()
    value = shortcut = lineage.add_root(2**20)
    weight = lineage.add_root(2**16)
    saves: list[int] = []
    while len(saves) < num_values:
        num_bytes = 2**20 * source.choice((1, 2, 4))
        (conv,) = lineage.add_op([value, weight], [num_bytes], num_bytes * 40e-12)
        (norm,) = lineage.add_op([conv], [num_bytes], num_bytes * 1e-12)
        ins = [norm] if len(saves) % 6 else [norm, shortcut]
        (value,) = lineage.add_op(ins, [num_bytes], num_bytes * 1e-12)
        saves += [conv, value]
        if len(ins) == 2:
            shortcut = value
    del saves[num_values:]
    return Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)))


def _entry_seconds(workload: Workload, min_bytes: int) -> Line:
    """Return how long entering takes where a plan is made: at the second step, and at the third, when times are known."""
    entries, budget = [], 0.4
    for _ in range(4):
        workload.model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        with memkit.Rematerialize(budget, TAG, min_bytes=min_bytes):
            entries.append(time.perf_counter() - start)
            result = workload.forward()
        workload.loss(result).backward()
        del result
    stats = memkit.stats(TAG)
    memkit.reset(TAG)
    return {
        "num_values": stats.num_saved,
        "num_ops": stats.num_ops,
        "share": budget,
        "entries_s": entries,
        "plan_s": max(entries),
        "follows_plan": stats.follows_plan,
    }
