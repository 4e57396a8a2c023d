"""What memkit adds to blocks that are compiled, beside checkpointing them by hand. Prints a line of JSON per question.

    python examples/bench/bench_compiled.py                        # both ways to compile a block, about 2 minutes
    python examples/bench/bench_compiled.py --only forward

The model is the Llama of 0.95 billion parameters. "forward" compiles each block's forward, "call" each block by
`block.compile()`. Recompiles and graph breaks are those that each line's steps have made after the second. What memkit refuses
is a line that says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from alternating import NUM_WARMUP, alternate, figures, step_of, warm_up
from measuring import Engine, Workload, blocks_of, plain
from remat_spaced import evenly_spaced, spaced
from setting import TAG, Setting, remat_figures
from shared import NO_GPU, Line, about_machine, allow_tf32, tell
from torch import nn

import memkit
from memkit.device import ReferenceDevice, cuda_is_available, open_device

NUM_CHECKPOINTED = (4, 8, 16)
WAYS = ("forward", "call")
NUM_TRIES = 4
CLOSE = 0.01
"""How far a peak may be below the one that it is to reach, as a share of that."""


def compiled(way: str, setting: Setting) -> Iterator[Line]:
    """A share offloaded, over plain; and budgets at the peaks of checkpointed blocks. All of it compiled block by block."""
    setting.clean()  # of the way before
    workload = setting.llama()
    layers = blocks_of(workload.model)
    compile_each(layers, way, "aot_eager" if setting.tiny else "inductor")
    about = {"name": workload.name, "way": way}
    start_s = time.perf_counter()
    plainly = Watched(workload, plain, setting)
    warm = plainly.warm_up()
    about_compiling = {"compiling_s": time.perf_counter() - start_s, **dynamo_counts(), **plainly.counts()}
    yield {"bench": "compiled_plain", **about, "step_s": warm[0], "peak_allocated_bytes": warm[1], **about_compiling}
    yield {"bench": "compiled_offload", **about, "ratio": 0.1, **unless_refused(partial(_offload, workload, setting), setting)}
    if way == "call":  # a checkpoint around a block that is compiled so is not to be had without changing the model
        line = unless_refused(partial(_remat, workload, setting.remat(0.5), setting), setting)
        yield {"bench": "compiled_remat", **about, "budget": 0.5, **line}
        return
    for count in dict.fromkeys(min(count, len(layers)) for count in NUM_CHECKPOINTED):
        by_hand = Watched(workload, spaced(layers, count), setting)
        hand_s, target_bytes = by_hand.warm_up()
        at_peak = partial(_at_peak, workload, by_hand.engine, target_bytes, warm[1], setting)
        line = unless_refused(at_peak, setting)
        yield {
            "bench": "compiled_remat",
            **about,
            "checkpointed": evenly_spaced(len(layers), count),
            "by_hand_s": hand_s,
            "by_hand_peak_bytes": target_bytes,
            "by_hand_counts": by_hand.counts(),
            **line,
        }


def compile_each(layers: Sequence[nn.Module], way: str, backend: str) -> None:
    """Compile each block, in one of the ways of `WAYS`."""
    for layer in layers:
        if way == "call":
            layer.compile(backend=backend)
        else:
            layer.forward = torch.compile(layer.forward, backend=backend)


class Watched:
    """The steps of one engine, and what dynamo compiles in them after the second."""

    def __init__(self, workload: Workload, engine: Engine, setting: Setting) -> None:
        self.workload, self.engine, self.setting = workload, engine, setting
        self._before = dynamo_counts()

    def warm_up(self) -> tuple[float, int | None]:
        """Return seconds and peak once the engine has learned."""
        for _ in range(2):
            step_of(self.workload, self.engine, self.setting.device)
        self._before = dynamo_counts()
        warm = warm_up(self.workload, self.engine, self.setting.device, num_steps=NUM_WARMUP - 2)
        return warm.step_s, warm.peak_allocated_bytes

    def counts(self) -> Line:
        """Return what was compiled since the second step: graphs, frames, graph breaks."""
        return {f"new_{name}": number - self._before[name] for name, number in dynamo_counts().items()}


def dynamo_counts() -> dict[str, int]:
    """Return how much dynamo has compiled so far, and how often it had to stop within a function."""
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "frames": counters["frames"]["total"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }


def _offload(workload: Workload, setting: Setting) -> Line:
    watched = Watched(workload, setting.offload(0.1), setting)
    watched.warm_up()
    found = alternate(workload, {"plain": plain, "memkit": watched.engine}, setting.device, num_steps=setting.steps)
    return {
        **figures("plain", found["plain"]),
        **figures("step", found["memkit"]),
        "to_plain": found["memkit"].step_s / found["plain"].step_s,
        "moved_out_bytes": memkit.stats(TAG).moved_out_bytes,
        **watched.counts(),
    }


def _remat(workload: Workload, engine: Engine, setting: Setting) -> Line:
    watched = Watched(workload, engine, setting)
    watched.warm_up()
    found = alternate(workload, {"plain": plain, "memkit": engine}, setting.device, num_steps=setting.steps)
    return {
        **figures("plain", found["plain"]),
        **figures("step", found["memkit"]),
        "to_plain": found["memkit"].step_s / found["plain"].step_s,
        **watched.counts(),
        **remat_figures(),
    }


def _at_peak(workload: Workload, by_hand: Engine, target: int | None, plain_peak: int | None, setting: Setting) -> Line:
    """Find the largest budget whose peak is at most that of a step by hand, and time both by turns."""

    def peak_at(budget: int) -> int | None:
        setting.clean()
        return Watched(workload, setting.remat(in_bytes(budget)), setting).warm_up()[1]

    Watched(workload, setting.remat(1.0), setting).warm_up()
    saved_bytes = memkit.stats(TAG).saved_bytes
    budget, tries = largest_within(peak_at, target, first=saved_bytes - ((plain_peak or 0) - (target or 0)), most=saved_bytes)
    line: Line = {"saved_bytes": saved_bytes, "tries": tries}
    if budget is None:
        return line | {"error": "no budget that was tried has a peak as low"}
    setting.clean()
    watched = Watched(workload, setting.remat(in_bytes(budget)), setting)
    watched.warm_up()
    found = alternate(workload, {"memkit": watched.engine, "by_hand": by_hand}, setting.device, num_steps=setting.steps)
    return line | {
        "budget": budget,
        **figures("step", found["memkit"]),
        **figures("by_hand_in_turns", found["by_hand"]),
        "to_by_hand": found["memkit"].step_s / found["by_hand"].step_s,
        **watched.counts(),
        **remat_figures(),
    }


def in_bytes(number: int) -> str:
    """Return a budget as text: few bytes as a number could be meant as GiB."""
    return f"{number}B"


def largest_within(
    peak_at: Callable[[int], int | None], target: int | None, *, first: int, most: int, num_tries: int = NUM_TRIES
) -> tuple[int | None, list[tuple[int, int | None]]]:
    """Return about the largest budget whose peak is at most a target, None if none was found; and all that was tried.

    Args:
        peak_at: the peak at a budget; None where nobody counts, and then the first is taken.
        first: the budget to begin with.
        most: no larger one makes a difference.
    """
    fits, exceeds, budget = None, most, max(1, min(first, most))
    tries: list[tuple[int, int | None]] = []
    for _ in range(num_tries):
        peak = peak_at(budget)
        tries.append((budget, peak))
        if peak is None or target is None:
            return budget, tries
        if peak <= target:
            fits = max(budget, fits or 0)
            if target - peak <= CLOSE * target:
                break
        else:
            exceeds = min(exceeds, budget)
        wanted = budget + target - peak
        if not (fits or 0) < wanted < exceeds:
            wanted = ((fits or 0) + exceeds) // 2
        if wanted in (budget, fits, exceeds) or wanted < 1:
            break
        budget = wanted
    return fits, tries


def unless_refused(part: Callable[[], Line], setting: Setting) -> Line:
    """Return what a part has found, or what memkit says that it refuses."""
    line = setting.attempt(part)
    text = str(line.get("error", ""))
    return {"refused": text} if "compile" in text else line


def compiled_both(setting: Setting, ways: Iterable[str] = WAYS) -> Iterator[Line]:
    """Both ways to compile a block."""
    for way in ways:
        torch.compiler.reset()
        yield from compiled(way, setting)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--steps", type=int, default=10, help="steps that count, for each median; default: 10")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    has_gpu = cuda_is_available() and not options.tiny
    if not has_gpu and not options.tiny:
        return tell([{"bench": "compiled", "skipped": NO_GPU}])
    allow_tf32()
    device = open_device("cuda") if has_gpu else ReferenceDevice()
    setting = Setting(device=device, steps=options.steps, fast=False, tiny=options.tiny, ends_s=time.perf_counter() + 600)
    return tell(compiled_both(setting, options.only), about_machine(device, options.steps))


if __name__ == "__main__":
    sys.exit(main())
