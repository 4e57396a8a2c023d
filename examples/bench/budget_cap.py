"""Steps under a budget with the allocator capped a tenth above it, from the first one on, with an optimizer."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from budget_models import CAPPED, built
from budget_steps import LEAST, MIB, figures_of_stats, in_mib, of_plain
from measuring import Workload
from setting import TAG, Setting, say
from shared import Line

import memkit

SHARES = (0.8, 0.5, 0.3)
ROOM = 1.10
"""What the allocator may take for each byte of the budget."""
NUM_STEPS = 30
NUM_STEADY = 10
"""Of these, the last, of which figures are told."""
NUM_PLAIN = 3


def cap(setting: Setting) -> Iterator[Line]:
    """Each model at each share of its plain peak, in a model and an optimizer of its own."""
    for name, build in setting.few(list(CAPPED.items())):
        found = setting.attempt(partial(_plain, build, setting))
        yield {"bench": "budget_cap_plain", "model": name, **found}
        if "error" in found:
            continue
        plain_bytes, least_bytes = found["plain_bytes"], None
        for share in setting.few(SHARES):
            wanted = of_plain(share, plain_bytes)
            if least_bytes is not None and plain_bytes and LEAST * least_bytes > share * plain_bytes:
                wanted = of_plain(LEAST, least_bytes)
            line = setting.attempt(partial(_capped, build, wanted, setting))
            setting.clean()
            if line.get("min_budget_mib"):
                least_bytes = int(line["min_budget_mib"] * MIB)
            line["ratio"] = line["step_s"] / found["step_s"] if "step_s" in line else None
            yield {
                "bench": "budget_cap",
                "model": name,
                "share": share,
                "asked": str(wanted),
                "is_least": wanted != of_plain(share, plain_bytes),
                "plain_s": found["step_s"],
                **line,
            }


def adamw(workload: Workload, setting: Setting) -> torch.optim.Optimizer:
    """Return an AdamW that needs no temporaries on a GPU: its step comes after what a budget holds for."""
    is_fused = setting.device.torch_device.type == "cuda"
    return torch.optim.AdamW(workload.model.parameters(), lr=1e-5, fused=is_fused)


def _plain(build: Callable[[Setting], Workload], setting: Setting) -> Line:
    """Return what a step takes without a cap and without a budget."""
    workload = built(build, setting)
    optimizer = adamw(workload, setting)
    seconds: list[float] = []
    for _ in range(NUM_PLAIN):
        setting.reset_peak()
        seconds.append(_step(workload, optimizer, setting))
    counter = setting.device.memory_counter()
    peak_bytes = 0 if counter is None else counter.peak_bytes()
    say(f"{workload.name} with AdamW: {1e3 * seconds[-1]:.1f} ms, peak {in_mib(peak_bytes)} MiB")
    return {"name": workload.name, "step_s": seconds[-1], "plain_bytes": peak_bytes, "peak_allocated_mib": in_mib(peak_bytes)}


def _step(workload: Workload, optimizer: torch.optim.Optimizer, setting: Setting) -> float:
    """Run a training step, and return its seconds from an idle device to an idle device, by the host's clock."""
    setting.device.synchronize()
    start_s = time.perf_counter()
    workload.loss(workload.forward()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    setting.device.synchronize()
    return time.perf_counter() - start_s


def _capped(build: Callable[[Setting], Workload], budget: str | float, setting: Setting) -> Line:
    """Return how far training gets within the cap, and what it takes."""
    is_cuda = setting.device.torch_device.type == "cuda"
    if is_cuda and isinstance(budget, str):
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, ROOM * int(budget.removesuffix("B")) / total_bytes))
    seconds: list[float] = []
    error: Exception | None = None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                _train(build, budget, seconds, setting)
            except Exception as found:  # out of memory, most likely: how far it has got is told all the same
                error = found.with_traceback(None)
        line = {"num_steps": len(seconds), "warned": sorted({str(warning.message)[:300] for warning in caught})}
        counter = setting.device.memory_counter()
        allocated_bytes = None if counter is None else counter.peak_bytes() or None
        reserved_bytes = None if counter is None else counter.peak_reserved_bytes()
        if seconds:
            line |= figures_of_stats(allocated_bytes, None)
        if error is not None:
            what = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
            return {**line, "error": f"{what} in step {len(seconds) + 1}: {(str(error).splitlines() or [''])[0][:300]}"}
        return {
            **line,
            "step_s": statistics.median(seconds[-NUM_STEADY:]),
            "slowest_s": max(seconds),
            "peak_reserved_mib": in_mib(reserved_bytes),
            "reserved_to_allocated": reserved_bytes / allocated_bytes if reserved_bytes and allocated_bytes else None,
        }
    finally:
        if is_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)


def _train(build: Callable[[Setting], Workload], budget: str | float, seconds: list[float], setting: Setting) -> None:
    workload = built(build, setting)
    optimizer = adamw(workload, setting)
    context = memkit.MemoryBudget(budget, TAG, optimizer=optimizer, min_bytes=setting.min_bytes, device=setting.device)
    memkit.attach(workload.model, context)
    num_steps, num_steady = (6, 2) if setting.tiny else (NUM_STEPS, NUM_STEADY)
    for index in range(num_steps):
        if index == num_steps - num_steady:  # what a plan takes was looked at by then
            setting.reset_peak()
        seconds.append(_step(workload, optimizer, setting))
    say(f"{workload.name} at {budget}: {1e3 * seconds[-1]:.1f} ms, {len(seconds)} steps within the cap")
