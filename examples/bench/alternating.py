"""Steps of several engines by turns: first each by itself, until it has learned what it learns, then one step of each after the
other. What drifts meets all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from measuring import Engine, Workload
from shared import Line

from memkit.device import Device

NUM_WARMUP = 10
"""Steps of an engine by itself, ahead of one by turns that does not count: in the first eight, memkit learns and tries."""
CLOSE = 2
"""So many times the steps are counted where a difference of a hundredth matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step took, or the medians of several and their largest peak."""

    step_s: float
    """From an idle device to an idle device."""
    forward_s: float
    """To the start of the backward, so the loss is in it."""
    backward_s: float
    host_s: float
    """Until the host had issued all of it."""
    forward_host_s: float
    """Until the host had issued the forward, without the loss: with the context's entry and exit."""
    peak_allocated_bytes: int | None
    """None where the allocator does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """What an engine needs by itself, once it has learned."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    """Includes what the steps before have left reserved."""
    step_s: float


def step_of(workload: Workload, engine: Engine, device: Device, *, resets_peak: bool = True) -> Step:
    """Run a step, with the device idle ahead of it and after it. Gradients are dropped ahead of it.

    Args:
        resets_peak: count peaks from its start on; else go on counting, for what looks at the peak of the step before.
    """
    workload.model.zero_grad(set_to_none=True)
    counter = device.memory_counter()
    device.synchronize()
    if counter is not None and resets_peak:
        counter.reset_peak()
    start_s, start = time.perf_counter(), device.record_event()
    with engine():
        result = workload.forward()
    issued_s = time.perf_counter()
    loss = workload.loss(result)
    del result
    turn = device.record_event()
    loss.backward()
    end, end_s = device.record_event(), time.perf_counter()
    device.synchronize()
    return Step(
        step_s=start.elapsed_s(end),
        forward_s=start.elapsed_s(turn),
        backward_s=turn.elapsed_s(end),
        host_s=end_s - start_s,
        forward_host_s=issued_s - start_s,
        peak_allocated_bytes=None if counter is None else counter.peak_bytes(),
    )


def warm_up(workload: Workload, engine: Engine, device: Device, *, num_steps: int = NUM_WARMUP) -> Warm:
    """Run an engine's first steps, with nothing reserved ahead of them; the last two are what is told."""
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    device.empty_cache()
    last = [step_of(workload, engine, device) for _ in range(max(2, num_steps))][-2:]
    counter = device.memory_counter()
    return Warm(
        peak_allocated_bytes=largest([step.peak_allocated_bytes for step in last]),
        peak_reserved_bytes=None if counter is None else counter.peak_reserved_bytes(),
        step_s=min(step.step_s for step in last),
    )


def alternate(workload: Workload, engines: Mapping[str, Engine], device: Device, *, num_steps: int) -> dict[str, Step]:
    """Return what a step takes in each engine's context, by turns. Ahead of the steps that count each has one that does not."""
    found: dict[str, list[Step]] = {name: [] for name in engines}
    for _ in range(1 + num_steps):
        for name, engine in engines.items():
            found[name].append(step_of(workload, engine, device))
    workload.model.zero_grad(set_to_none=True)
    return {name: median_of(steps[1:]) for name, steps in found.items()}


def median_of(steps: list[Step]) -> Step:
    """Return the medians, and the largest peak."""
    return Step(
        step_s=statistics.median(step.step_s for step in steps),
        forward_s=statistics.median(step.forward_s for step in steps),
        backward_s=statistics.median(step.backward_s for step in steps),
        host_s=statistics.median(step.host_s for step in steps),
        forward_host_s=statistics.median(step.forward_host_s for step in steps),
        peak_allocated_bytes=largest([step.peak_allocated_bytes for step in steps]),
    )


def largest(peaks: list[int | None]) -> int | None:
    """Return the largest peak; None where nobody counted."""
    return max((peak for peak in peaks if peak is not None), default=None)


def figures(prefix: str, step: Step) -> Line:
    """Return what is told of a step."""
    return {
        f"{prefix}_s": step.step_s,
        f"{prefix}_forward_s": step.forward_s,
        f"{prefix}_backward_s": step.backward_s,
        f"{prefix}_host_s": step.host_s,
        f"{prefix}_forward_host_s": step.forward_host_s,
        f"{prefix}_peak_bytes": step.peak_allocated_bytes,
    }
