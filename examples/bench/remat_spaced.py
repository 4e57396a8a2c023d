"""`Rematerialize` against checkpointing by hand: at each budget, the fewest evenly spaced checkpointed layers whose peak is at
least as low."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from alternating import CLOSE, Step, alternate, figures, step_of, warm_up
from measuring import Engine, Workload, blocks_of, checkpointed_each, plain
from setting import Setting, remat_figures, say
from shared import Line
from torch import nn

import memkit

BUDGETS = (0.7, 0.5, 0.3, 0.15)


def remat_spaced(model: str, setting: Setting) -> Iterator[Line]:
    """A budget that drops nothing, over plain; and budgets against the fewest layers, found and timed in the same run."""
    workload, device = setting.workload(model), setting.device
    layers, about = blocks_of(workload.model), {"name": workload.name}
    warm_up(workload, plain, device)
    yield {"bench": "remat_keep_all", **about, **setting.attempt(lambda: _keep_all(workload, setting))}
    peaks = {count: _peak(workload, layers, count, setting) for count in range(len(layers) + 1)}
    yield {"bench": "remat_spaced_peaks", **about, "num_layers": len(layers), "peak_bytes": list(peaks.values())}
    times: list[tuple[float, float]] = []
    for budget in BUDGETS:
        line = setting.attempt(partial(_at, budget, workload, layers, peaks, setting))
        yield {"bench": "remat_spaced", **about, "budget": budget, **line}
        if "step_s" in line:
            times.append((budget, line["step_s"]))
        if line.get("least_bytes") is not None:  # it has followed the plan of the least that is possible
            break
    budgets = [budget for budget, _ in times]
    yield {"bench": "remat_rises", **about, "budgets": budgets, "most_rise": most_rise(times)}


def evenly_spaced(num_layers: int, count: int) -> list[int]:
    """Return so many indices of layers, as evenly as may be. The last is among them only where all are: it would be made again
    at once."""
    return [index * num_layers // count for index in range(count)]


def fewest_within(peaks: Mapping[int, int | None], target_bytes: int | None) -> int | None:
    """Return the fewest checkpointed layers whose peak is at most a target; None where all are too few.

    Where nobody counts, all of them are taken.
    """
    if target_bytes is None:
        return max(peaks)
    return min((count for count, peak in peaks.items() if peak is not None and peak <= target_bytes), default=None)


def most_rise(times: Sequence[tuple[float, float]]) -> float:
    """Return the most by which a step takes longer at a budget than at a lower one, as their ratio: at most 1 if it never does.

    Args:
        times: budgets and seconds.
    """
    return max(
        (high_s / low_s for high, high_s in times for low, low_s in times if high > low),
        default=1.0,
    )


def spaced(layers: Sequence[nn.Module], count: int) -> Engine:
    """Return what checkpoints so many layers."""
    return partial(checkpointed_each, [layers[index] for index in evenly_spaced(len(layers), count)]) if count else plain


def _peak(workload: Workload, layers: Sequence[nn.Module], count: int, setting: Setting) -> int | None:
    """Return the peak of a step. It is the same in each."""
    peak = step_of(workload, spaced(layers, count), setting.device).peak_allocated_bytes
    say(f"{workload.name}: {count} of {len(layers)} layers checkpointed, peak {peak}")
    return peak


def _keep_all(workload: Workload, setting: Setting) -> Line:
    engine = setting.remat(1.0)
    warm_up(workload, engine, setting.device)
    found = alternate(workload, {"plain": plain, "memkit": engine}, setting.device, num_steps=CLOSE * setting.steps)
    return {
        **figures("plain", found["plain"]),
        **figures("step", found["memkit"]),
        "to_plain": found["memkit"].step_s / found["plain"].step_s,
        **remat_figures(),
    }


def _at(
    budget: float, workload: Workload, layers: Sequence[nn.Module], peaks: Mapping[int, int | None], setting: Setting
) -> Line:
    """Time a budget by turns with checkpointing, where that reaches its peak; else with all layers checkpointed."""
    engine = setting.remat(budget)
    warm = warm_up(workload, engine, setting.device)
    count = fewest_within(peaks, warm.peak_allocated_bytes)
    by_hand = spaced(layers, len(layers) if count is None else count)
    found = alternate(workload, {"memkit": engine, "spaced": by_hand}, setting.device, num_steps=setting.steps)
    line = {
        **compared(found["memkit"], found["spaced"], count, len(layers)),
        "peak_reserved_bytes": warm.peak_reserved_bytes,
        **remat_figures(),
    }
    fewest = fewest_within(peaks, found["memkit"].peak_allocated_bytes)
    line["num_checkpointed_for_all_steps"] = fewest  # differs where a later step's peak is higher than the warm ones'
    line["least_bytes"] = _least_bytes(budget, workload, setting)
    say(f"{workload.name}, budget {budget}: {line['to_spaced']:.3f} of {count} of {len(layers)} layers")
    return line


def _least_bytes(budget: float, workload: Workload, setting: Setting) -> int | None:
    """Return the least budget that can be kept to, where the given one cannot and the least is kept to instead; else None."""
    try:
        step_of(workload, setting.remat(budget, strict=True), setting.device)
    except memkit.errors.BudgetInfeasible as error:
        return error.smallest_bytes
    return None


def compared(found: Step, by_hand: Step, count: int | None, num_layers: int) -> Line:
    """Return how a step compares with checkpointing by hand.

    Args:
        count: layers that are checkpointed; None where all of them, which `by_hand` is of, need more than `found`.
    """
    return {
        **figures("step", found),
        **figures("spaced", by_hand),
        "num_layers": num_layers,
        "num_checkpointed": num_layers if count is None else count,
        "spaced_reaches_peak": count is not None,
        "to_spaced": found.step_s / by_hand.step_s,
    }
