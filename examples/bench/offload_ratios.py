"""`CPUOffload` at several ratios, over plain and over what the link allows; and how much the allocator reserves for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from alternating import CLOSE, NUM_WARMUP, Step, Warm, alternate, figures, largest, warm_up
from measuring import Engine, plain, roofline_s
from setting import TAG, Setting, say
from shared import Line

import memkit
from memkit.activations import SavedTensorStats
from memkit.transfer import Link, measure_link

RATIOS = (0.0, 0.1, 0.2, 0.5, 1.0)
BY_TURNS = 0.2
"""Up to this ratio a step is timed by turns with a plain one; above it takes far longer than that by copying alone."""


def offload_ratios(model: str, setting: Setting) -> Iterator[Line]:
    """Each ratio over plain, and over `max(forward, bytes out / link) + max(backward, bytes back / link)`."""
    workload, device = setting.workload(model), setting.device
    link = measure_link(device, num_bytes=2**20 if setting.tiny else 2**28)
    warm_up(workload, plain, device)
    alone: Step | None = None
    for ratio in RATIOS:
        setting.clean()
        by_turns = {"plain": plain} if alone is None or ratio <= BY_TURNS else {}
        num_steps = setting.steps if ratio else CLOSE * setting.steps

        def at_ratio(ratio: float = ratio, by_turns: Mapping[str, Engine] = by_turns, num_steps: int = num_steps) -> Line:
            nonlocal alone
            engine = setting.offload(ratio)
            warm = warm_up(workload, engine, device)
            found = alternate(workload, {"memkit": engine, **by_turns}, device, num_steps=num_steps)
            alone = found.get("plain", alone)
            assert alone is not None
            line = row(alone, found["memkit"], warm, memkit.stats(TAG), link)
            say(f"{workload.name}, ratio {ratio}: {line['to_plain']:.3f} of plain, {line['to_roofline']:.3f} of the roofline")
            return line

        about = {"bench": "offload_ratios", "name": workload.name, "ratio": ratio, "plain_in_turns": bool(by_turns)}
        yield {**about, **setting.attempt(at_ratio)}
    setting.clean()


def row(alone: Step, found: Step, warm: Warm, stats: SavedTensorStats, link: Link) -> Line:
    """Return what is told of a ratio."""
    least_s = roofline_s(
        forward_s=alone.forward_s,
        backward_s=alone.backward_s,
        out_bytes=stats.moved_out_bytes,
        back_bytes=stats.moved_in_bytes,
        link=link,
    )
    return {
        **figures("plain", alone),
        **figures("step", found),
        "to_plain": found.step_s / alone.step_s,
        "roofline_s": least_s,
        "to_roofline": found.step_s / least_s,
        **{f"link_{name}": value for name, value in asdict(link).items()},
        "moved_out_bytes": stats.moved_out_bytes,
        "moved_in_bytes": stats.moved_in_bytes,
        "unique_bytes": stats.unique_bytes,
        "window_bytes": stats.window_bytes,
        "num_copies_out": stats.num_copies_out,
        "num_copies_in": stats.num_copies_in,
        "d2h_bytes_per_s": stats.d2h_bytes_per_s,
        "h2d_bytes_per_s": stats.h2d_bytes_per_s,
        "stall_out_s": stats.stall_out_s,
        "stall_in_s": stats.stall_in_s,
        **reserved_figures(largest([found.peak_allocated_bytes, warm.peak_allocated_bytes]), warm.peak_reserved_bytes),
    }


def reserved_figures(allocated_bytes: int | None, reserved_bytes: int | None) -> Line:
    """Return how much the allocator has reserved for what was allocated."""
    return {
        "peak_allocated_bytes": allocated_bytes,
        "peak_reserved_bytes": reserved_bytes,
        "reserved_to_allocated": reserved_bytes / allocated_bytes if reserved_bytes and allocated_bytes else None,
    }


def offload_reserved(setting: Setting) -> Iterator[Line]:
    """ResNet-50 and everything: reserved over allocated. Run it with expandable segments.

    The plain step comes behind: the few blocks that it leaves, far apart, are in the way of what is allocated later.
    """
    workload = setting.resnet50()
    for name, engine in (("ratio 1", setting.offload(1.0)), ("plain", plain)):
        setting.clean()
        warm = warm_up(workload, engine, setting.device, num_steps=NUM_WARMUP + 3)
        yield {
            "bench": "offload_reserved",
            "name": workload.name,
            "engine": name,
            "step_s": warm.step_s,
            **reserved_figures(warm.peak_allocated_bytes, warm.peak_reserved_bytes),
        }
    setting.clean()
