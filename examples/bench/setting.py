"""Where the benches of `bench_remat.py` and `bench_layers.py` run, and how what they find is told."""

from __future__ import annotations

import gc
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Engine, Measurement, Workload
from shared import Line
from workloads import gpt2, llama, resnet50, whisper

import memkit
from memkit.device import Device

GIB = 2**30
TAG = "bench"
MODELS = ("gpt2", "whisper", "llama", "resnet50")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how long the benches run."""

    device: Device
    steps: int
    fast: bool
    tiny: bool
    """Small models and small images: shows that all of it runs, and nothing else."""
    ends_s: float
    """When the process of the bench is ended, by `time.perf_counter`."""
    ratios: tuple[float, ...] = ()
    """Shares of the layers to stream, where they were given; else those of the bench."""

    @property
    def min_bytes(self) -> int:
        """Smaller storages stay."""
        return 2**10 if self.tiny else 2**20

    def make(self, build: Callable[[], Any]) -> Any:
        """Build something on the device, the same each time."""
        torch.manual_seed(0)
        with torch.device(self.device.torch_device):
            return build()

    def batch(self, batch: int) -> int:
        """Return a batch size, or a tiny one."""
        return max(2, batch // 64) if self.tiny else batch

    def few(self, every: Sequence[Any]) -> Sequence[Any]:
        """Return what is to be measured, or the one in the middle of it in tiny runs."""
        return every[len(every) // 2 :][:1] if self.tiny else every

    @property
    def size(self) -> int:
        """Height and width of images."""
        return 32 if self.tiny else 224

    def time_left_s(self) -> float:
        """Return how long the bench may still take."""
        return self.ends_s - time.perf_counter()

    def resnet50(self, batch: int = 256) -> Workload:
        """Return ResNet-50."""
        return self.make(partial(resnet50, self.batch(batch), self.size))

    def llama(self, build: Callable[..., Workload] = llama) -> Workload:
        """Return a Llama of some kind."""
        small = partial(build, 2, 32, num_layers=3, width=64, inner=128, num_heads=4)
        return self.make(small if self.tiny else build)

    def gpt2(self) -> Workload:
        """Return a GPT-2."""
        small = partial(gpt2, 2, 16, num_layers=4, width=32, num_heads=2)
        return self.make(small if self.tiny else gpt2)

    def whisper(self) -> Workload:
        """Return a Whisper."""
        small = partial(whisper, 2, 32, 8, num_layers=2, width=32, num_heads=2)
        return self.make(small if self.tiny else whisper)

    def workload(self, model: str) -> Workload:
        """Return the step of a model, by its name in `MODELS`."""
        return getattr(self, model)()

    def offload(self, ratio: float, tag: str = TAG, **options: Any) -> Engine:
        """Return what makes a `CPUOffload`."""
        return partial(memkit.CPUOffload, ratio, tag, **{"min_bytes": self.min_bytes, "device": self.device, **options})

    def remat(self, budget: float | str, tag: str = TAG, **options: Any) -> Engine:
        """Return what makes a `Rematerialize`."""
        return partial(memkit.Rematerialize, budget, tag, min_bytes=self.min_bytes, device=self.device, **options)

    def clean(self) -> None:
        """Leave nothing behind."""
        for tag in (TAG, f"{TAG} (regions of MemoryBudget)"):
            memkit.reset(tag)
        gc.collect()
        self.device.empty_cache()

    def reset_peak(self) -> None:
        """Count peaks from now on."""
        counter = self.device.memory_counter()
        if counter is not None:
            counter.reset_peak()

    def memory(self) -> Line:
        """Return what is allocated and reserved now, and the peaks since `reset_peak`."""
        found: Line = {"host_rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        pages = Path("/proc/self/statm")
        if pages.exists():  # on Linux
            found["host_rss_bytes"] = int(pages.read_text().split()[1]) * resource.getpagesize()
        if self.device.torch_device.type == "cuda":
            found["allocated_bytes"] = torch.cuda.memory_allocated()
            found["reserved_bytes"] = torch.cuda.memory_reserved()
            found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        return found

    def attempt(self, part: Callable[[], Line]) -> Line:
        """Return what a part has found, or what went wrong in it."""
        try:
            found = part()
        except Exception as error:  # whatever it is, the other parts are measured
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
            traceback.clear_frames(error.__traceback__)
        self.clean()
        return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def figures_of(found: Measurement, plain: Measurement | None = None) -> Line:
    """Return what is told of a step, and how it compares with the plain one."""
    figures: Line = {
        "step_s": found.step_s,
        "forward_s": found.forward_s,
        "backward_s": found.backward_s,
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
    }
    if found.in_a_row_s is not None:
        figures["in_a_row_s"] = found.in_a_row_s
    if plain is not None:
        figures["to_plain"] = found.step_s / plain.step_s
        if found.in_a_row_s is not None and plain.in_a_row_s is not None:
            figures["in_a_row_to_plain"] = found.in_a_row_s / plain.in_a_row_s
    return figures


def remat_figures(tag: str = TAG) -> Line:
    stats = memkit.stats(tag)
    return {
        "budget_bytes": stats.budget_bytes,
        "follows_plan": stats.follows_plan,
        "num_deviations": stats.num_deviations,
        "saved_bytes": stats.saved_bytes,
        "ledger_peak_bytes": stats.ledger_peak_bytes,
        "num_kept": stats.num_kept,
        "num_dropped": stats.num_dropped,
        "num_ops": stats.num_ops,
        "num_replayed_ops": stats.num_replayed_ops,
        "estimated_replay_s": stats.estimated_replay_s,
        "measured_replay_s": stats.measured_replay_s,
        "recorder_s": stats.recorder_s,
    }
