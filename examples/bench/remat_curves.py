"""Time against peak: shares of what is saved, beside checkpointing, and the budget whose peak is that of checkpointing."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from measuring import Engine, Measurement, Workload, checkpointing, measure, plain
from setting import GIB, TAG, Setting, figures_of, remat_figures, say
from shared import Line, measure_in_turn
from workloads import llama_whole

import memkit

RESNET50_TARGET_BYTES = int(7.06 * GIB)  # the peak of checkpointing per block, as it was measured once
SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
LLAMA_SHARES = (1.0, 0.8, 0.5, 0.3, 0.2)
WHOLE_SHARES = (0.3, 0.2, 0.15)
FAST_SHARES = (1.0, 0.5, 0.2)


def resnet50_curve(setting: Setting) -> Iterator[Line]:
    """Shares of the saved bytes, checkpointing, and the largest budget whose peak is at most a target."""
    workload = setting.resnet50()
    curve = _curve(workload, FAST_SHARES if setting.fast else SHARES, setting)
    yield curve
    target = RESNET50_TARGET_BYTES if not setting.tiny else curve["saved_bytes"] // 3
    yield {"bench": "remat_fit", "name": workload.name, **setting.attempt(lambda: _fit(workload, curve, target, setting))}


def llama_curve(setting: Setting) -> Iterator[Line]:
    """Shares, and the largest budget whose peak is at most that of checkpointing per layer, in turn with checkpointing: with
    head and loss in the context, where the budget holds for the logits, too."""
    yield _curve(setting.llama(), FAST_SHARES if setting.fast else LLAMA_SHARES, setting)
    gc.collect()
    workload = setting.llama(llama_whole)
    curve = _curve(workload, WHOLE_SHARES, setting)
    yield curve
    (peer,) = curve["peers"].values()
    target = peer["peak_allocated_bytes"] or curve["saved_bytes"] // 3
    yield {"bench": "remat_fit", "name": workload.name, **setting.attempt(lambda: _fit(workload, curve, target, setting))}


def _curve(workload: Workload, shares: Sequence[float], setting: Setting) -> Line:
    """Measure a step as it is, at each share, and with checkpointing; all in one run."""
    device, steps = setting.device, {"num_steps": setting.steps, "num_warmup": 4}
    alone = measure(workload, plain, device, **steps)
    rows: list[Line] = []
    for share in shares:
        memkit.reset(TAG)
        found = measure(workload, setting.remat(share), device, **steps)
        rows.append({"budget": share, **figures_of(found, alone), "stats": asdict(memkit.stats(TAG))})
        say(f"{workload.name}, {share:g} of what is saved: {rows[-1]['to_plain']:.3f} of plain")
    memkit.reset(TAG)
    peers = {name: measure(workload, engine, device, **steps) for name, engine in checkpointing(workload.model).items()}
    return {
        "bench": "remat",
        "name": workload.name,
        "plain": figures_of(alone),
        "saved_bytes": rows[-1]["stats"]["saved_bytes"],
        "rows": rows,
        "peers": {name: figures_of(peer, alone) for name, peer in peers.items()},
    }


def _peak(found: Measurement) -> int:
    """Return the device's peak; where nobody counts, that of the ledger."""
    peak = found.peak_allocated_bytes
    return memkit.stats(TAG).ledger_peak_bytes if peak is None else peak


def _fit(workload: Workload, curve: Line, target: int, setting: Setting) -> Line:
    """Find the largest budget whose peak is at most the target, and compare it with checkpointing, in turn."""
    kept = [(row["stats"], row["peak_allocated_bytes"]) for row in curve["rows"]]
    rows = [(stats["budget_bytes"] or 0, peak or stats["ledger_peak_bytes"]) for stats, peak in kept]
    fits = max((budget for budget, peak in rows if peak <= target), default=0)
    exceeds = min((budget for budget, peak in rows if peak > target and budget > fits), default=curve["saved_bytes"])
    budget, peak = min(rows, key=lambda row: abs(row[1] - target))
    tries: list[Line] = []
    for _ in range(3 if setting.fast else 5):
        budget += target - peak
        room = (exceeds - fits) // 10
        budget = max(fits + room, min(budget, exceeds - room), 1)
        found = measure(workload, setting.remat(budget), setting.device, num_steps=3, num_warmup=3 if tries else 4)
        peak = _peak(found)
        tries.append({"budget_bytes": budget, "peak_bytes": peak, "step_s": found.step_s})
        say(f"{workload.name}: budget {budget / GIB:.3f} GiB, peak {peak / GIB:.3f} GiB, target {target / GIB:.3f} GiB")
        if peak <= target:
            fits = max(fits, budget)
            if target - peak < target // 100:
                break
        else:
            exceeds = min(exceeds, budget)
        if exceeds - fits < target // 200:
            break
    if not fits:
        return {"target_bytes": target, "error": "no budget that was tried fits", "tries": tries}
    engines: dict[str, Engine] = {"plain": plain, **checkpointing(workload.model), "memkit": setting.remat(fits)}
    runs = measure_in_turn(workload, engines, setting.device, num_rounds=2, num_steps=setting.steps, num_warmup=(4, 2))
    seconds = {name: statistics.median(run.step_s for run in found) for name, found in runs.items()}
    return {
        "target_bytes": target,
        "budget_bytes": fits,
        "tries": tries,
        "runs": {name: [figures_of(run) for run in found] for name, found in runs.items()},
        "to_plain": {name: found / seconds["plain"] for name, found in seconds.items()},
        "memkit_to_checkpointing": next(seconds["memkit"] / found for name, found in seconds.items() if "checkpoint" in name),
        "stats": remat_figures(),
    }
