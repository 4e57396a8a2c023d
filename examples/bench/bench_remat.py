"""What does `Rematerialize` cost, and what does it make fit? Prints one JSON line per question.

    python examples/bench/bench_remat.py                                # all on this machine's GPU, about 8 minutes
    python examples/bench/bench_remat.py --only resnet50 llama --plots plots
    python examples/bench/bench_remat.py --only recorder_host planning  # what needs no GPU

All seconds are medians; every line names its plain step of the same run. Each bench runs in a process of its own. Those that
are held to a cap run under `set_per_process_memory_fraction`, with expandable segments.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import CifarResNet, Supernet, llama, llama_whole, on_images, resnet50, supernet

import memkit
from memkit.bench import Measurement, RematBench, Workload, bench_remat, measure
from memkit.bench.engines import checkpointing, plain
from memkit.device import CpuDevice, Device, open_device
from memkit.plan import Lineage, RematPlanner, Step

Line = dict[str, Any]
Engine = Callable[[], AbstractContextManager[Any]]

GIB = 2**30
CAP_BYTES = 11 * GIB
RESNET50_TARGET_BYTES = int(7.06 * GIB)  # the peak of checkpointing per block, as it was measured once
SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
LLAMA_SHARES = (1.0, 0.8, 0.5, 0.3, 0.2)
WHOLE_SHARES = (0.3, 0.2, 0.15)
REPLAYED_SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
FAST_SHARES = (1.0, 0.5, 0.2)
BUDGET_SCALES = (1.0, 0.88, 0.76, 0.62)
HIGHER_SCALES = (1.4, 1.25, 1.12)
"""What is tried one after the other, as parts of the budget that was worked out, until a batch fits."""
TAG = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how long the benches run."""

    device: Device
    steps: int
    fast: bool
    plots: Path | None
    tiny: bool
    """Small models and small images: shows that all of it runs, and nothing else."""

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

    @property
    def size(self) -> int:
        """Height and width of images."""
        return 32 if self.tiny else 224

    def remat(self, budget: float | str, tag: str = TAG, **options: Any) -> Engine:
        """Return what makes a `Rematerialize`."""
        return partial(memkit.Rematerialize, budget, tag, min_bytes=self.min_bytes, device=self.device, **options)

    def clean(self) -> None:
        """Leave nothing behind."""
        memkit.reset(TAG)
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
        except (RuntimeError, memkit.MemkitError) as error:
            found = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
            traceback.clear_frames(error.__traceback__)
        self.clean()
        return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _figures(found: Measurement, plain_s: float | None = None) -> Line:
    figures = {
        "step_s": found.step_s,
        "forward_s": found.forward_s,
        "backward_s": found.backward_s,
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
    }
    return figures if plain_s is None else {**figures, "to_plain": found.step_s / plain_s}


def _stats(tag: str = TAG) -> Line:
    stats = memkit.remat_stats(tag)
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


def _in_turns(workload: Workload, engines: dict[str, Engine], setting: Setting, rounds: int) -> dict[str, list[float]]:
    """Return each engine's seconds in several rounds, since small differences are about as small as the drift."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name, engine in engines.items():
            warmup = 4 if turn == 0 else 2
            seconds[name].append(measure(workload, engine, setting.device, num_steps=setting.steps, num_warmup=warmup).step_s)
    return seconds


# What recording costs


def recorder(setting: Setting) -> Iterator[Line]:
    """Budget 1.0, with nothing to drop, and no context, in turn."""
    for name, make in (("resnet50", _resnet50), ("llama", _llama)):

        def part(make: Callable[[Setting], Workload] = make) -> Line:
            workload = make(setting)
            seconds = _in_turns(workload, {"plain": plain, "recorder": setting.remat(1.0)}, setting, 2 if setting.fast else 3)
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            stats = _stats()
            return {
                "name": workload.name,
                "plain_s": seconds["plain"],
                "recorder_s": seconds["recorder"],
                "to_plain": medians["recorder"] / medians["plain"],
                "recorder_host_s": stats["recorder_s"],
                "num_ops": stats["num_ops"],
            }

        yield {"bench": "remat_recorder", "model": name, **setting.attempt(part)}


def _resnet50(setting: Setting, batch: int = 256) -> Workload:
    found: Workload = setting.make(partial(resnet50, setting.batch(batch), setting.size))
    return found


def _llama(setting: Setting, build: Callable[..., Workload] = llama) -> Workload:
    small = partial(build, 2, 32, num_layers=3, width=64, inner=128, num_heads=4)
    found: Workload = setting.make(small if setting.tiny else build)
    return found


class EmptyMode(TorchDispatchMode):
    """A dispatch mode that only calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the op."""
        return func(*args, **(kwargs or {}))


def recorder_host(setting: Setting) -> Iterator[Line]:
    """What recording costs the host, on the CPU: over plain, and beside a dispatch mode that does nothing."""
    torch.set_num_threads(1)
    num_ops = 200
    leaf = torch.randn(64, requires_grad=True)

    def sines() -> Tensor:
        out = leaf
        for _ in range(num_ops):
            out = out.sin()
        return out

    def sums() -> Tensor:
        out = leaf
        for _ in range(num_ops):
            out = out + 1.0
        return out

    rounds = 60 if setting.fast or setting.tiny else 300
    for name, chain in (("sin, each saves", sines), ("add, none saves", sums)):
        times = _host_seconds(chain, rounds)
        per_op = {
            f"{engine}_over_{base}_us_per_op": 1e6 * _difference(times, engine, base) / num_ops
            for engine, base in (("empty", "plain"), ("recorder", "plain"), ("recorder", "empty"), ("recorder_all", "plain"))
        }
        whole = {
            f"{engine}_with_entry_and_exit_over_plain_us_per_op": 1e6
            * _difference(times, engine, "plain", whole=True)
            / num_ops
            for engine in ("empty", "recorder", "recorder_all")
        }
        yield {
            "bench": "remat_recorder_host",
            "name": f"chain of {num_ops} ops on 64 elements: {name}",
            "plain_us_per_op": 1e6 * _median(times["plain"]) / num_ops,
            **per_op,
            **whole,
            "rounds": rounds,
        }
    model = torchvision.models.resnet50()
    images = torch.randn(2, 3, 32, 32)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    transformer, tokens = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(2, 16, 64)
    rounds = 5 if setting.tiny else 20 if setting.fast else 50
    for name, forward in (("resnet50", lambda: model(images)), ("transformer", lambda: transformer(tokens))):
        times = _host_seconds(forward, rounds)
        over_empty, over_recorder = _difference(times, "empty", "plain"), _difference(times, "recorder", "plain")
        yield {
            "bench": "remat_recorder_host",
            "name": f"{name} on the CPU, tiny inputs, forward",
            **{f"{engine}_s": _median(found) for engine, found in times.items()},
            "empty_over_plain_s": over_empty,
            "recorder_over_plain_s": over_recorder,
            "recorder_all_over_plain_s": _difference(times, "recorder_all", "plain"),
            "recorder_to_empty": over_recorder / over_empty,
            "recorder_to_empty_with_entry_and_exit": _difference(times, "recorder", "plain", whole=True)
            / _difference(times, "empty", "plain", whole=True),
            "num_ops": memkit.remat_stats("host").num_ops,
            "rounds": rounds,
        }
    memkit.reset("host")
    memkit.reset("host all")


def _host_seconds(forward: Callable[[], Tensor], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return each engine's seconds inside of the context, and with entry and exit, in rounds."""
    memkit.reset("host")
    memkit.reset("host all")
    engines: dict[str, Engine] = {
        "plain": plain,
        "empty": EmptyMode,
        "recorder": partial(memkit.Rematerialize, 1.0, "host"),
        "recorder_all": partial(memkit.Rematerialize, 1.0, "host all", min_bytes=0),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for turn in range(-5, rounds):
        for name, engine in engines.items():
            start = time.perf_counter()
            with engine():
                entered = time.perf_counter()
                result = forward()
                done = time.perf_counter()
            end = time.perf_counter()
            if turn < 0:
                result.sum().backward()
            else:
                times[name].append((done - entered, end - start))
            del result
    return times


def _median(times: Sequence[tuple[float, float]]) -> float:
    return statistics.median(inside for inside, _ in times)


def _difference(times: dict[str, list[tuple[float, float]]], engine: str, base: str, *, whole: bool = False) -> float:
    """Return the median of the differences of each round; with `whole`, entry and exit are in it."""
    pairs = zip(times[engine], times[base], strict=True)
    return statistics.median(one[whole] - other[whole] for one, other in pairs)


# Time against peak


def resnet50_curve(setting: Setting) -> Iterator[Line]:
    """Shares of the saved bytes, checkpointing, and the largest budget whose peak is at most a target."""
    workload = _resnet50(setting)
    curve = _curve(workload, FAST_SHARES if setting.fast else SHARES, setting)
    yield _line_of(curve)
    target = RESNET50_TARGET_BYTES if not setting.tiny else curve.saved_bytes // 3
    yield {"bench": "remat_fit", "name": curve.name, **setting.attempt(lambda: _fit(workload, curve, target, setting))}


def llama_curve(setting: Setting) -> Iterator[Line]:
    """Shares, and the largest budget whose peak is at most that of checkpointing per layer, in turn with checkpointing: with
    head and loss in the context, where the budget holds for the logits, too."""
    yield _line_of(_curve(_llama(setting), FAST_SHARES if setting.fast else LLAMA_SHARES, setting))
    gc.collect()
    workload = _llama(setting, llama_whole)
    curve = _curve(workload, WHOLE_SHARES, setting)
    yield _line_of(curve)
    (peer,) = curve.peers.values()
    target = peer.peak_allocated_bytes or curve.saved_bytes // 3
    yield {"bench": "remat_fit", "name": curve.name, **setting.attempt(lambda: _fit(workload, curve, target, setting))}


def _curve(workload: Workload, shares: Sequence[float], setting: Setting) -> RematBench:
    found = bench_remat(workload, shares, setting.device, num_steps=setting.steps, with_peers=True, min_bytes=setting.min_bytes)
    _say(found.to_text())
    if setting.plots is not None:
        setting.plots.mkdir(parents=True, exist_ok=True)
        try:
            found.plot(setting.plots / f"remat_{found.name}.svg")
        except ModuleNotFoundError as error:
            _say(f"no picture: {error}")
    return found


def _line_of(curve: RematBench) -> Line:
    line: Line = json.loads(curve.to_json())
    return line


def _peak(found: Measurement) -> int:
    """Return the device's peak; where nobody counts, that of the ledger."""
    peak = found.peak_allocated_bytes
    return memkit.remat_stats(TAG).ledger_peak_bytes if peak is None else peak


def _fit(workload: Workload, curve: RematBench, target: int, setting: Setting) -> Line:
    """Find the largest budget whose peak is at most the target, and compare it with checkpointing, in turn."""
    rows = [(row.stats.budget_bytes or 0, row.memkit.peak_allocated_bytes or row.stats.ledger_peak_bytes) for row in curve.rows]
    fits = max((budget for budget, peak in rows if peak <= target), default=0)
    exceeds = min((budget for budget, peak in rows if peak > target and budget > fits), default=curve.saved_bytes)
    budget, peak = min(rows, key=lambda row: abs(row[1] - target))
    tries: list[Line] = []
    for _ in range(3 if setting.fast else 5):
        budget += target - peak
        room = (exceeds - fits) // 10
        budget = max(fits + room, min(budget, exceeds - room), 1)
        found = measure(workload, setting.remat(budget), setting.device, num_steps=3, num_warmup=3 if tries else 4)
        peak = _peak(found)
        tries.append({"budget_bytes": budget, "peak_bytes": peak, "step_s": found.step_s})
        _say(f"{workload.name}: budget {budget / GIB:.3f} GiB, peak {peak / GIB:.3f} GiB, target {target / GIB:.3f} GiB")
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
    runs = {name: [] for name in engines}
    for turn in range(2):
        for name, engine in engines.items():
            found = measure(workload, engine, setting.device, num_steps=setting.steps, num_warmup=4 if turn == 0 else 2)
            runs[name].append(_figures(found))
    seconds = {name: statistics.median(run["step_s"] for run in found) for name, found in runs.items()}
    return {
        "target_bytes": target,
        "budget_bytes": fits,
        "tries": tries,
        "runs": runs,
        "to_plain": {name: found / seconds["plain"] for name, found in seconds.items()},
        "memkit_to_checkpointing": next(seconds["memkit"] / found for name, found in seconds.items() if "checkpoint" in name),
        "stats": _stats(),
    }


# Under a cap


def _set_cap(setting: Setting) -> None:
    if setting.device.torch_device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(CAP_BYTES / torch.cuda.mem_get_info()[1])


def _check_cap(setting: Setting, batch: int, *, is_plain: bool) -> None:
    """Where nothing is capped, pretend."""
    if setting.tiny and batch > (6 if is_plain else 20):
        raise torch.OutOfMemoryError("there is no room in a tiny run")


def _largest(fits: Callable[[int], bool], start: int, *, growth: float, unit: int, bisections: int) -> int:
    """Return the largest size found that fits, 0 if none does: grows until one does not, and then looks between."""
    good, bad, size = 0, None, start
    while bad is None or (good == 0 and size >= unit):
        if fits(size):
            good, size = size, max(size + 1, int(size * growth))
        else:
            bad = size
            if good == 0:
                size //= 2
            if size < 1:
                break
        if good and bad is not None:
            break
    for _ in range(bisections):
        middle = (good + (bad or good)) // 2 // unit * unit
        if not good or middle <= good:
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


@dataclass(slots=True)
class Capped:
    """The search for the largest batch of one model under the cap."""

    setting: Setting
    make: Callable[[int], Workload]
    model: nn.Module
    num_copies: int = 2
    """How often parameters are there: themselves, gradients, and the buckets of DDP."""
    steps: int = 2
    warmup: int = 4
    beside_bytes: float = 0.0
    """What a step takes for each sample beside the ledger."""
    best_budget: int = 0

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, their copies, and buffers."""
        of_params = sum(param.nbytes for param in self.model.parameters())
        return self.num_copies * of_params + sum(buffer.nbytes for buffer in self.model.buffers())

    def plain_fits(self, batch: int) -> bool:
        """Tell whether plain steps of a batch run."""

        def part() -> Line:
            _check_cap(self.setting, batch, is_plain=True)
            return _figures(self._measure(batch, plain, warmup=2))

        found = self.setting.attempt(part)
        _say(f"plain, batch {batch}: {found}")
        return "error" not in found

    def _measure(self, batch: int, engine: Engine, *, warmup: int, steps: int | None = None) -> Measurement:
        workload = self.setting.make(lambda: self.make(batch))
        return measure(workload, engine, self.setting.device, num_steps=steps or self.steps, num_warmup=warmup)

    def learn(self, batch: int) -> None:
        """Find out what a step takes beside the ledger."""
        if batch == 0:
            return

        def part() -> Line:
            found = self._measure(batch, self.setting.remat(0.2), warmup=self.warmup)
            beside = (found.peak_allocated_bytes or 0) - memkit.remat_stats(TAG).ledger_peak_bytes
            return {"beside_bytes": max(0, beside - self.static_bytes) / batch}

        found = self.setting.attempt(part)
        self.beside_bytes = found.get("beside_bytes", self.beside_bytes)
        _say(f"batch {batch}: {found}")

    def budgets(self, batch: int) -> list[int]:
        """Return the budgets to try for a batch."""
        room = 0.96 * CAP_BYTES - self.static_bytes - self.beside_bytes * batch
        if self.setting.tiny:
            room = 2**20
        return [int(room * scale) for scale in BUDGET_SCALES] if room > 2**24 or self.setting.tiny else []

    def run(self, batch: int, budgets: Sequence[int], steps: int) -> Line:
        """Return what a batch takes at the first of some budgets with which it runs."""
        tries = []
        for budget in budgets:

            def part(budget: int = budget) -> Line:
                _check_cap(self.setting, batch, is_plain=False)
                found = self._measure(batch, self.setting.remat(budget), warmup=self.warmup, steps=steps)
                return {**_figures(found), "stats": _stats()}

            found = self.setting.attempt(part)
            _say(f"memkit, batch {batch}, budget {budget / GIB:.2f} GiB: {found.get('error', found.get('step_s'))}")
            tries.append({"budget_bytes": budget, "error": found.get("error")})
            if "error" not in found:
                return {"batch": batch, "per_image_s": found["step_s"] / batch, **found, "tries": tries}
        return {"batch": batch, "error": "no budget that was tried fits", "tries": tries}

    def fits(self, batch: int) -> bool:
        """Tell whether a batch runs with some budget."""
        found = self.run(batch, self.budgets(batch), self.steps)
        if "error" in found:
            return False
        self.best_budget = found["tries"][-1]["budget_bytes"]
        return True

    def compare(self, *, unit: int, multiples: Sequence[float]) -> Line:
        """Find the largest batches, and measure the plain one and some multiples of it."""
        setting = self.setting
        start = time.perf_counter()
        alone = _largest(self.plain_fits, setting.batch(64), growth=1.6, unit=unit, bisections=5)
        if alone == 0:
            return {"error": "no plain batch fits"}
        plain_run = setting.attempt(lambda: _figures(self._measure(alone, plain, warmup=3, steps=setting.steps)))
        self.learn(alone)
        most = _largest(self.fits, 2 * alone, growth=1.5, unit=2 * unit, bisections=1 if setting.fast else 2)
        runs = []
        for batch in sorted({most, *(int(alone * multiple) for multiple in multiples if alone * multiple < most)}):
            if batch > 0:
                budgets = self.budgets(batch)
                higher = [int(scale * budgets[0]) for scale in HIGHER_SCALES] if budgets else []
                runs.append(self.run(batch, [*higher, *budgets], setting.steps))
        per_image_s = plain_run["step_s"] / alone if "step_s" in plain_run else None
        for run in runs:
            if per_image_s and "per_image_s" in run:
                run["per_image_to_plain"] = run["per_image_s"] / per_image_s
        return {
            "cap_bytes": CAP_BYTES,
            "plain_batch": alone,
            "plain": plain_run,
            "plain_per_image_s": per_image_s,
            "memkit_batch": most,
            "batch_to_plain": most / alone,
            "beside_bytes_per_image": self.beside_bytes,
            "runs": runs,
            "search_s": time.perf_counter() - start,
        }


def cap(setting: Setting) -> Iterator[Line]:
    """The largest batch under a cap, plain and with memkit, and the time for each image."""
    _set_cap(setting)
    for name, build in (
        ("resnet50", torchvision.models.resnet50),
        ("shufflenet_v2_x1_0", torchvision.models.shufflenet_v2_x1_0),
    ):
        model = setting.make(build)
        search = Capped(setting, partial(on_images, name, model, size=setting.size), model)
        found = search.compare(unit=1 if setting.tiny else 8, multiples=(4,))
        yield {"bench": "remat_cap", "name": name, **found}
        del model, search
        setting.clean()


def resnet1202(setting: Setting) -> Iterator[Line]:
    """ResNet-1202 on 32 x 32, batch 200, and the largest plain batch."""
    _set_cap(setting)
    model = setting.make(partial(CifarResNet, 3 if setting.tiny else 200))
    make = partial(on_images, "resnet1202", model, size=16 if setting.tiny else 32, num_classes=10)
    search = Capped(setting, make, model, steps=2, warmup=3)
    found: Line = {}
    if not setting.fast:
        found["plain_batch"] = _largest(search.plain_fits, setting.batch(64), growth=1.5, unit=4, bisections=3)
    search.beside_bytes = 4 * 2**20  # some storages of 16 channels; a plan for so many values is made only once
    batch = setting.batch(200)
    run = search.run(batch, search.budgets(batch), min(setting.steps, 5))
    yield {"bench": "remat_resnet1202", "name": "resnet1202", "cap_bytes": CAP_BYTES, **found, **run}


def supernet_alone(setting: Setting) -> Iterator[Line]:
    """A supernet with a random path each step: the largest batches, and 200 steps without growth."""
    _set_cap(setting)
    yield from _supernet(setting, lambda model: model, num_copies=2)


def supernet_ddp(setting: Setting) -> Iterator[Line]:
    """The same under DDP, one process."""
    import torch.distributed as dist

    _set_cap(setting)
    is_cuda = setting.device.torch_device.type == "cuda"
    where = {"device_id": setting.device.torch_device} if is_cuda else {}
    dist.init_process_group("nccl" if is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1, **where)
    try:
        yield from _supernet(
            setting, lambda model: nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), num_copies=3
        )
    finally:
        dist.destroy_process_group()


def _supernet(setting: Setting, wrap: Callable[[nn.Module], nn.Module], *, num_copies: int) -> Iterator[Line]:
    num_blocks = (1, 1, 2, 1) if setting.tiny else (4, 4, 8, 4)
    model = setting.make(partial(Supernet, num_blocks=num_blocks))

    def make(batch: int) -> Workload:  # wrapped anew, since DDP does not work on after a step that has failed
        return supernet(wrap(model), sum(num_blocks), batch, setting.size)

    search = Capped(setting, make, model, num_copies=num_copies, steps=4 if setting.tiny else 12, warmup=2)
    name = f"supernet of {sum(num_blocks)} blocks{'' if num_copies == 2 else ', DDP'}"
    found = search.compare(unit=1 if setting.tiny else 8, multiples=(2.5,))
    yield {"bench": "remat_supernet", "name": name, **found}
    runs = [run for run in found.get("runs", ()) if "error" not in run]
    if runs:
        num_steps = 30 if setting.tiny else 60 if setting.fast else 200
        yield {
            "bench": "remat_supernet_steps",
            "name": name,
            "plain_batch": found["plain_batch"],
            **_many_steps(search, runs[0]["batch"], int(0.93 * runs[0]["tries"][-1]["budget_bytes"]), num_steps),
        }


def _many_steps(search: Capped, batch: int, budget: int, num_steps: int) -> Line:
    """Train with another path each step; say what is held after 20 steps and at the end."""
    setting, figures = search.setting, {}
    workload: Workload = setting.make(lambda: search.make(batch))
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3)
    step, start, done, deviations = 0, 0.0, 0, 0

    def train() -> Line:
        nonlocal step, start, done, deviations
        for step in range(1, num_steps + 1):  # told if one fails
            optimizer.zero_grad(set_to_none=True)
            with setting.remat(budget)():
                result = workload.forward()
            loss = workload.loss(result)
            del result
            loss.backward()
            optimizer.step()
            done = step
            if step in (20, num_steps):
                setting.device.synchronize()
                now = time.perf_counter()
                stats = memkit.remat_stats(TAG)
                figures[f"after_{step}"] = {
                    **setting.memory(),
                    "live_records": stats.live_records,
                    "live_bytes": stats.live_bytes,
                    "num_deviations": stats.num_deviations,
                    "num_dropped": stats.num_dropped,
                    "loss": loss.item(),
                }
                if step == 20:
                    start = now
                    setting.reset_peak()
                else:
                    figures["step_s"] = (now - start) / (num_steps - 20)
            del loss
        return {}

    setting.reset_peak()
    error = setting.attempt(train)
    workload.model.zero_grad(set_to_none=True)
    first, last = figures.get("after_20", {}), figures.get(f"after_{num_steps}", {})
    growth = {
        name: last[name] - first[name]
        for name in ("reserved_bytes", "allocated_bytes", "host_rss_peak_bytes")
        if name in first and name in last
    }
    return {"batch": batch, "budget_bytes": budget, "steps_done": done, "growth": growth, **figures, **error}


# Plan against score


def reserved(setting: Setting) -> Iterator[Line]:
    """ResNet-50, batch 400, 30 % of the saved bytes: what the allocator holds with a plan, and with the score alone."""
    workload = _resnet50(setting, 400)
    saved_bytes = _saved_bytes(workload, setting)
    budget, found = int(0.3 * saved_bytes), {}
    for policy in ("plan", "dtr"):

        def part(policy: str = policy) -> Line:
            engine = setting.remat(budget, policy=policy)
            first = measure(workload, engine, setting.device, num_steps=2, num_warmup=4)
            again = measure(workload, engine, setting.device, num_steps=setting.steps, num_warmup=1)
            return {**_figures(again), "reserved_with_first_steps_bytes": first.peak_reserved_bytes, "stats": _stats()}

        found[policy] = setting.attempt(part)
    alone = setting.attempt(lambda: _figures(measure(workload, plain, setting.device, num_steps=setting.steps, num_warmup=2)))
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
    saved_bytes = memkit.remat_stats(TAG).saved_bytes
    setting.clean()
    return saved_bytes


def replayed(setting: Setting) -> Iterator[Line]:
    """ResNet-50: seconds that are replayed with a plan, and with the score alone, at the same budgets in bytes."""
    workload = _resnet50(setting)
    saved_bytes = _saved_bytes(workload, setting)
    alone = measure(workload, plain, setting.device, num_steps=setting.steps, num_warmup=3)
    policies: dict[str, dict[str, Any]] = {
        "plan": {"policy": "plan"},
        "dtr": {"policy": "dtr"},
        "dtr_staleness": {"policy": "dtr", "score": memkit.DTRScore(distance="staleness")},
    }
    for share in (0.8, 0.5, 0.2, 0.1) if setting.fast else REPLAYED_SHARES:
        row: Line = {}
        for name, options in policies.items():
            engine = setting.remat(int(share * saved_bytes), **options)
            warmup = 4 if name == "plan" else 1
            row[name] = setting.attempt(lambda engine=engine, warmup=warmup: _replays(workload, engine, setting, warmup))
            _say(f"share {share}, {name}: {row[name]}")
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
        stats = memkit.remat_stats(TAG)
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


# Planning


def planning(setting: Setting) -> Iterator[Line]:
    """Seconds to plan, on the CPU: made-up steps of so many values, and steps of real models that are entered again."""
    counts = (40, 200) if setting.tiny else (200, 1000) if setting.fast else (200, 1000, 5000)
    for num_values in counts:
        step = _residual_step(num_values)
        seconds, outcomes, start = [], [], time.perf_counter()
        planner = RematPlanner(step, memkit.DTRScore())
        prepared_s = time.perf_counter() - start
        for share in (0.5, 0.3, 0.2):
            start = time.perf_counter()
            try:
                plan = planner.plan(int(share * step.saved_bytes))
                outcomes.append({"share": share, "replay_s": plan.predicted_replay_s, "dropped": len(plan.dropped)})
            except memkit.BudgetInfeasible as error:
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
    source, lineage = random.Random(0), Lineage()
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
    stats = memkit.remat_stats(TAG)
    memkit.reset(TAG)
    return {
        "num_values": stats.num_saved,
        "num_ops": stats.num_ops,
        "share": budget,
        "entries_s": entries,
        "plan_s": max(entries),
        "follows_plan": stats.follows_plan,
    }


BENCHES: dict[str, Callable[[Setting], Iterator[Line]]] = {
    "recorder": recorder,
    "recorder_host": recorder_host,
    "resnet50": resnet50_curve,
    "llama": llama_curve,
    "cap": cap,
    "resnet1202": resnet1202,
    "supernet": supernet_alone,
    "ddp": supernet_ddp,
    "reserved": reserved,
    "replayed": replayed,
    "planning": planning,
}
NEED_NO_GPU = ("recorder_host", "planning")
CAPPED = ("cap", "resnet1202", "supernet", "ddp")


def _in_processes(options: argparse.Namespace) -> int:
    """Run each bench in a process of its own, so that none finds what another has left reserved."""
    passed = [f"--steps={options.steps}", *(f"--{name}" for name in ("fast", "tiny") if getattr(options, name))]
    if options.plots is not None:
        passed.append(f"--plots={options.plots}")
    status = 0
    for name in options.only:
        environment = dict(os.environ)
        if name in CAPPED:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        start = time.perf_counter()
        command = [sys.executable, __file__, *passed, "--here", "--only", name]
        try:
            done = subprocess.run(command, check=False, env=environment, timeout=options.patience)
            status |= done.returncode != 0
        except subprocess.TimeoutExpired:
            print(json.dumps({"bench": name, "error": f"took longer than {options.patience} s"}), flush=True)
            status = 1
        _say(f"{name}: {time.perf_counter() - start:.0f} s in all")
    return status


def _here(name: str, setting: Setting) -> int:
    """Run a bench in this process."""
    about = {
        "where": setting.device.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "memkit": memkit.__version__,
        "python": platform.python_version(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
        "steps": setting.steps,
    }
    try:
        for line in BENCHES[name](setting):
            print(json.dumps(line | about), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"bench": name, "error": f"{type(error).__name__}: {error}"[:500], **about}), flush=True)
        return 1
    return 0


def main() -> int:
    """Run the benches that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=list(BENCHES), choices=list(BENCHES), metavar="NAME", help=", ".join(BENCHES)
    )
    parser.add_argument("--steps", type=int, default=10, help="steps that count, for each median; default: 10")
    parser.add_argument("--fast", action="store_true", help="fewer budgets, tries and rounds")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to draw the curves")
    parser.add_argument("--patience", type=float, default=240, metavar="S", help="seconds for each bench; default: 240")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.here:
        return _in_processes(options)
    warnings.simplefilter("ignore" if not sys.warnoptions else "default")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    has_gpu, status = torch.cuda.is_available(), 0
    if options.tiny:
        torch.set_num_threads(1)
    device = open_device(torch.device("cuda")) if has_gpu and not options.tiny else CpuDevice()
    setting = Setting(device=device, steps=options.steps, fast=options.fast, plots=options.plots, tiny=options.tiny)
    for name in options.only:
        if has_gpu or options.tiny or name in NEED_NO_GPU:
            status |= _here(name, setting)
        else:
            print(json.dumps({"bench": name, "skipped": "nothing was measured: there is no CUDA device here"}), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
