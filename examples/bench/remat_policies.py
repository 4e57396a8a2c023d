"""A plan against the score alone: what the allocator holds, and what is replayed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from measuring import Engine, Workload, measure, plain
from setting import TAG, Setting, figures_of, remat_figures, say
from shared import Line

import memkit

REPLAYED_SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


def reserved(setting: Setting) -> Iterator[Line]:
    """ResNet-50, batch 400, 30 % of the saved bytes: what the allocator holds with a plan, and with the score alone."""
    workload = setting.resnet50(400)
    saved_bytes = _saved_bytes(workload, setting)
    budget, found = int(0.3 * saved_bytes), {}
    for policy in ("plan", "dtr"):

        def part(policy: str = policy) -> Line:
            engine = setting.remat(budget, policy=policy)
            first = measure(workload, engine, setting.device, num_steps=2, num_warmup=4)
            again = measure(workload, engine, setting.device, num_steps=setting.steps, num_warmup=1)
            return {**figures_of(again), "reserved_with_first_steps_bytes": first.peak_reserved_bytes, "stats": remat_figures()}

        found[policy] = setting.attempt(part)
    alone = setting.attempt(lambda: figures_of(measure(workload, plain, setting.device, num_steps=setting.steps, num_warmup=2)))
    line = {"bench": "remat_reserved", "name": workload.name, "budget_bytes": budget, "saved_bytes": saved_bytes}
    yield {
        **line,
        "plain": alone,
        **found,
        "reserved_plan_to_dtr": _ratio(found, "peak_reserved_bytes"),
        "reserved_with_first_steps_plan_to_dtr": _ratio(found, "reserved_with_first_steps_bytes"),
    }


def _ratio(found: dict[str, Line], what: str) -> float | None:
    one, other = found["plan"].get(what), found["dtr"].get(what)
    return one / other if one and other else None


def _saved_bytes(workload: Workload, setting: Setting) -> int:
    measure(workload, setting.remat(1.0), setting.device, num_steps=1, num_warmup=0)
    saved_bytes = memkit.stats(TAG).saved_bytes
    setting.clean()
    return saved_bytes


def replayed(setting: Setting) -> Iterator[Line]:
    """ResNet-50: seconds that are replayed with a plan, and with the score alone, at the same budgets in bytes."""
    workload = setting.resnet50()
    saved_bytes = _saved_bytes(workload, setting)
    alone = measure(workload, plain, setting.device, num_steps=setting.steps, num_warmup=3)
    policies: dict[str, dict[str, Any]] = {
        "plan": {"policy": "plan"},
        "dtr": {"policy": "dtr"},
        "dtr_staleness": {"policy": "dtr", "score": memkit.plan.DTRScore(distance="staleness")},
    }
    for share in (0.8, 0.5, 0.2, 0.1) if setting.fast else REPLAYED_SHARES:
        row: Line = {}
        for name, options in policies.items():
            engine = setting.remat(int(share * saved_bytes), **options)
            warmup = 4 if name == "plan" else 1
            row[name] = setting.attempt(lambda engine=engine, warmup=warmup: _replays(workload, engine, setting, warmup))
            say(f"share {share}, {name}: {row[name]}")
        yield {
            "bench": "remat_replayed",
            "name": workload.name,
            "share": share,
            "saved_bytes": saved_bytes,
            "plain_s": alone.step_s,
            **row,
            "replayed_plan_to_dtr": _ratio(row, "measured_replay_s"),
        }


def _replays(workload: Workload, engine: Engine, setting: Setting, num_warmup: int) -> Line:
    """Return medians over a few steps of what was replayed. A step that takes long is not repeated often."""
    found: list[Line] = []
    start = time.perf_counter()
    for step in range(num_warmup + min(setting.steps, 4)):
        workload.model.zero_grad(set_to_none=True)
        setting.device.synchronize()
        before = time.perf_counter()
        with engine():
            result = workload.forward()
        loss = workload.loss(result)
        del result
        loss.backward()
        del loss
        setting.device.synchronize()
        stats = memkit.stats(TAG)
        if step >= num_warmup:
            found.append(
                {
                    "measured_replay_s": stats.measured_replay_s,
                    "estimated_replay_s": stats.estimated_replay_s,
                    "num_replayed_ops": stats.num_replayed_ops,
                    "num_replays": stats.num_replays,
                    "ledger_peak_bytes": stats.ledger_peak_bytes,
                    "step_s": time.perf_counter() - before,
                }
            )
            if time.perf_counter() - start > 10:
                break
    workload.model.zero_grad(set_to_none=True)
    return {name: statistics.median(line[name] for line in found) for name in found[0]} | {"steps": len(found)}
