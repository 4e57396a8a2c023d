"""How close is `CPUOffload` to what the link allows, and what do others take? Prints one JSON line per question.

    python examples/bench/bench_offload.py                                  # all on this machine's GPU
    python examples/bench/bench_offload.py --only resnet50 --ratios 0.1 1   # a part
    python examples/bench/bench_offload.py --only ratios_gpt2 ratios_whisper
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python examples/bench/bench_offload.py --only resnet50 llama reserved

All seconds are medians; every line names its plain step of the same run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Engine, Workload, measure, plain, roofline_s, save_on_cpu, synchronous, torch_baselines
from offload_ratios import offload_ratios, offload_reserved
from peers import add_wheels, installed_peers
from setting import MODELS, TAG, Setting, say
from shared import Line, about_machine, allow_tf32, measure_in_turn, run_in_process, tell
from torch import Tensor, nn
from workloads import llama, llama_checkpointed, lstms, resnet50, unet, vit_large

import memkit
from memkit.device import Device, open_device
from memkit.plan import Action, plan_ratio
from memkit.plan.ratio import step_with_copies_s
from memkit.profile import timed_saves
from memkit.transfer import Arena, Lanes, measure_link

MIN_BYTES = 2**20


def _on_gpu(make: Callable[[], Workload]) -> Workload:
    with torch.device("cuda"):
        return make()


def against_roofline(make: Callable[[], Workload], options: argparse.Namespace, device: Device) -> list[dict[str, Any]]:
    """Every ratio, synchronous copies of as many bytes, and the peers."""
    workload, link = _on_gpu(make), measure_link(device)
    steps = {"num_steps": options.steps, "num_warmup": 4}
    alone, rows = measure(workload, plain, device, **steps), []
    for ratio in options.ratios:
        memkit.reset(TAG)
        fast = measure(workload, partial(memkit.CPUOffload, ratio, TAG, min_bytes=MIN_BYTES, device=device), device, **steps)
        stats = memkit.stats(TAG)
        slow = None
        if stats.moved_out_bytes and not options.fast:
            copies = partial(synchronous, stats.moved_out_bytes, min_bytes=MIN_BYTES)
            slow = measure(workload, save_on_cpu if ratio == 1 else copies, device, **steps)
        least_s = roofline_s(
            forward_s=alone.forward_s,
            backward_s=alone.backward_s,
            out_bytes=stats.moved_out_bytes,
            back_bytes=stats.moved_in_bytes,
            link=link,
        )
        rows.append(
            {
                "ratio": ratio,
                "moved_bytes": stats.moved_out_bytes,
                "window_bytes": stats.window_bytes,
                "memkit_s": fast.step_s,
                "peak_allocated_bytes": fast.peak_allocated_bytes,
                "peak_reserved_bytes": fast.peak_reserved_bytes,
                "plain_s": alone.step_s,
                "synchronous_s": None if slow is None else slow.step_s,
                "synchronous_allocated_bytes": None if slow is None else slow.peak_allocated_bytes,
                "roofline_s": least_s,
                "to_roofline": fast.step_s / least_s,
                "speed_up": None if slow is None else slow.step_s / fast.step_s,
            }
        )
        say(f"{workload.name}, ratio {ratio:g}: {fast.step_s / least_s:.3f} of the roofline")
    memkit.reset(TAG)
    peers = {**torch_baselines(workload.model), **installed_peers(workload.model)} if options.peers else {}
    line = {
        "bench": "offload",
        "name": workload.name,
        "plain": asdict(alone),
        "link": asdict(link),
        "saved_bytes": stats.unique_bytes,
        "rows": rows,
        "peers": {name: asdict(measure(workload, engine, device, **steps)) for name, engine in peers.items()},
    }
    return [line, _close_to_plain(workload, options, device)]


def _close_to_plain(workload: Workload, options: argparse.Namespace, device: Device) -> dict[str, Any]:
    """Ratios 0 and 0.1 in turn with no context, since their differences are about as small as the drift."""
    engines: dict[str, Engine] = {"plain": plain}
    engines |= {
        name: partial(memkit.CPUOffload, float(name), "turns", min_bytes=MIN_BYTES, device=device) for name in ("0", "0.1")
    }
    runs = measure_in_turn(workload, engines, device, num_rounds=3, num_steps=options.steps, num_warmup=(3, 3))
    seconds = {name: [run.step_s for run in found] for name, found in runs.items()}
    memkit.reset("turns")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "bench": "offload_close_to_plain",
        "name": workload.name,
        "plain_s": seconds["plain"],
        "ratio_0_to_plain": medians["0"] / medians["plain"],
        "ratio_0.1_to_plain": medians["0.1"] / medians["plain"],
    }


def against_checkpointing(options: argparse.Namespace, device: Device) -> list[dict[str, Any]]:
    """What the offload of a checkpointed Llama's saves adds to checkpointing alone."""
    workload = _on_gpu(llama_checkpointed)
    offloaded = partial(memkit.CPUOffload, 1.0, "checkpointed", min_bytes=MIN_BYTES)
    engines: dict[str, Engine] = {"alone": plain, "offloaded": offloaded}
    runs = measure_in_turn(workload, engines, device, num_rounds=3, num_steps=options.steps, num_warmup=(3, 3))
    stats = memkit.stats("checkpointed")
    memkit.reset("checkpointed")
    slow = measure(workload, save_on_cpu, device, num_steps=options.steps, num_warmup=3)
    seconds = {name: statistics.median(run.step_s for run in found) for name, found in runs.items()}
    return [
        {
            "bench": "offload_over_checkpointing",
            "name": workload.name,
            "alone_s": seconds["alone"],
            "offloaded_s": seconds["offloaded"],
            "ratio": seconds["offloaded"] / seconds["alone"],
            "alone_peak_bytes": runs["alone"][-1].peak_allocated_bytes,
            "offloaded_peak_bytes": runs["offloaded"][-1].peak_allocated_bytes,
            "save_on_cpu_peak_bytes": slow.peak_allocated_bytes,
            "save_on_cpu_s": slow.step_s,
            "window_bytes": stats.window_bytes,
            "moved_bytes": stats.moved_out_bytes,
            "unique_bytes": stats.unique_bytes,
        }
    ]


def beside_copies(workload: Workload, device: Device) -> float:
    """Return the seconds of the plain backward while a lane copies to the device all along."""
    lanes, arena, num_bytes = Lanes(device), Arena(device), 256 * 2**20
    span, storage = arena.take(num_bytes), device.allocate(num_bytes)
    count = int(1.5 * 0.3 / (num_bytes / 50e9))  # copies for longer than any forward or backward here

    def loss(result: Any) -> Tensor:
        found, ready = workload.loss(result), device.record_event()
        for _ in range(count):
            lanes.copy_back(span, storage, after=(ready,))
        return found

    loaded = Workload(name=workload.name, model=workload.model, forward=workload.forward, loss=loss)
    found = measure(loaded, plain, device, num_steps=3, num_warmup=1)
    arena.give(span)
    return found.backward_s


class _Around(nn.Module):
    """A workload's forward as a module, for the profile."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model
        self._forward = workload.forward

    def forward(self) -> Any:
        """Run the forward."""
        return self._forward()


def against_simulation(make: Callable[[], Workload], options: argparse.Namespace, device: Device) -> list[dict[str, Any]]:
    """Half of the bytes, against a simulation of the two lanes from a profile's times."""
    workload = _on_gpu(make)
    report = memkit.profile_memory(_Around(workload), loss_fn=workload.loss, backward=True, print_table=False, tag="simulated")
    link = measure_link(device)
    alone = measure(workload, plain, device, num_steps=options.steps, num_warmup=4)
    saves = timed_saves(report, MIN_BYTES)
    # The profile's run is slower than the plain one, by what looking costs: its times are shrunk to the plain run's.
    forward_scale = alone.forward_s / max(report.forward_s or 0, max(save.saved_at_s for save in saves))
    backward_scale = alone.backward_s / (report.backward_s or 1)
    saves = [
        type(save)(
            num_bytes=save.num_bytes,
            saved_at_s=save.saved_at_s * forward_scale,
            needed_at_s=save.needed_at_s * backward_scale,
            is_held=save.is_held,
        )
        for save in saves
    ]
    sizes, held = [save.num_bytes for save in saves], frozenset(i for i, save in enumerate(saves) if save.is_held)
    window = 2 * max(size for index, size in enumerate(sizes) if index not in held)
    plan = plan_ratio(sizes, 0.5, window_bytes=window, held=held)
    chosen = {index for index, action in enumerate(plan.actions) if action is Action.OFFLOAD}
    simulated_s = step_with_copies_s(
        saves, chosen, forward_s=alone.forward_s, backward_s=alone.backward_s, link=link, limit_bytes=plan.limit_bytes
    )
    engine = partial(memkit.CPUOffload, 0.5, "half", min_bytes=MIN_BYTES)
    fast = measure(workload, engine, device, num_steps=options.steps, num_warmup=4)
    stats = memkit.stats("half")
    memkit.reset("half")
    return [
        {
            "bench": "offload_against_simulation",
            "name": workload.name,
            "plain_s": alone.step_s,
            "plain_forward_s": alone.forward_s,
            "plain_backward_s": alone.backward_s,
            "plain_peak_bytes": alone.peak_allocated_bytes,
            "plain_backward_beside_copies_s": beside_copies(workload, device),
            "memkit_s": fast.step_s,
            "memkit_forward_s": fast.forward_s,
            "memkit_backward_s": fast.backward_s,
            "memkit_peak_bytes": fast.peak_allocated_bytes,
            "simulated_s": simulated_s,
            "to_simulation": fast.step_s / simulated_s,
            "link": str(link),
            "num_saves": len(saves),
            "planned_bytes": plan.offload_bytes,
            "moved_out_bytes": stats.moved_out_bytes,
            "moved_in_bytes": stats.moved_in_bytes,
            "unique_bytes": stats.unique_bytes,
            "wasted_bytes": stats.wasted_bytes,
        }
    ]


def first_step(options: argparse.Namespace, device: Device) -> list[dict[str, Any]]:
    """The first step with everything offloaded and a report under the tag, after a plain step."""
    workload = _on_gpu(resnet50)

    def step(engine: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with engine():
            result = workload.forward()
        workload.loss(result).backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    plain_s = [step(nullcontext) for _ in range(2)]
    workload.model.zero_grad(set_to_none=True)
    report = memkit.profile_memory(_Around(workload), loss_fn=workload.loss, backward=True, print_table=False, tag="first")
    steps_s = [step(lambda: memkit.CPUOffload(1.0, "first")) for _ in range(4)]
    stats = memkit.stats("first")
    return [
        {
            "bench": "offload_first_step",
            "name": workload.name,
            "plain_s": plain_s,
            "steps_s": steps_s,
            "saved_bytes": report.activation_bytes,
            "host_held_bytes": stats.host_held_bytes,
            "num_pins": stats.num_pins,
        }
    ]


def two_hundred_steps(options: argparse.Namespace, device: Device) -> list[dict[str, Any]]:
    """Peaks, host bytes and records after 3 steps and after 200."""
    workload, figures = _on_gpu(resnet50), {}
    torch.cuda.reset_peak_memory_stats()
    for step in range(1, 201):
        workload.model.zero_grad(set_to_none=True)
        with memkit.CPUOffload(0.3, "many", min_bytes=MIN_BYTES):
            result = workload.forward()
        workload.loss(result).backward()
        del result
        if step in (3, 200):
            torch.cuda.synchronize()
            gc.collect()
            stats = memkit.stats("many")
            figures[f"after_{step}"] = {
                "peak_allocated_bytes": stats.peak_allocated_bytes,
                "peak_reserved_bytes": stats.peak_reserved_bytes,
                "allocated_bytes": torch.cuda.memory_allocated(),
                "host_held_bytes": stats.host_held_bytes,
                "num_pins": stats.num_pins,
                "live_records": stats.live_records,
            }
            torch.cuda.reset_peak_memory_stats()
    memkit.reset("many")
    return [{"bench": "offload_200_steps", "name": workload.name, **figures}]


def by_turns(part: Callable[[Setting], Iterator[Line]], options: argparse.Namespace, device: Device) -> Iterator[Line]:
    """A part of `offload_ratios.py`."""
    setting = Setting(device=device, steps=options.steps, fast=options.fast, tiny=False, ends_s=float("inf"))
    return part(setting)


BENCHES: dict[str, Callable[[argparse.Namespace, Device], Iterable[Line]]] = {
    "first_step": first_step,
    "resnet50": partial(against_roofline, resnet50),
    "llama": partial(against_roofline, llama),
    "llama_checkpointed": against_checkpointing,
    "vit_large": partial(against_simulation, vit_large),
    "lstms": partial(against_simulation, lstms),
    "narrow_lstms": partial(against_simulation, partial(lstms, 1024, 128, 512)),
    "unet": partial(against_simulation, unet),
    "two_hundred_steps": two_hundred_steps,
    **{f"ratios_{model}": partial(by_turns, partial(offload_ratios, model)) for model in MODELS},
    "reserved": partial(by_turns, offload_reserved),
}


def main() -> None:
    """Run each bench in a process of its own, so that none finds what another has left reserved or pinned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(BENCHES), choices=list(BENCHES))
    parser.add_argument("--ratios", nargs="*", type=float, default=[0.1, 0.3, 0.5, 1.0])
    parser.add_argument("--steps", type=int, default=12, help="steps that count, for each median")
    parser.add_argument("--peers", action="store_true", help="time torch's own means and others' packages as well")
    parser.add_argument("--fast", action="store_true", help="without synchronous copies")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of TRL and torchtune (see peers.py)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.here:
        for name in options.only:
            arguments = [argument for argument in sys.argv[1:] if argument not in BENCHES and argument != "--only"]
            run_in_process(__file__, name, arguments)
        return
    allow_tf32()
    if options.wheels is not None:
        add_wheels(options.wheels)
    device = open_device(torch.device("cuda"))
    for name in options.only:
        tell(BENCHES[name](options, device), about_machine(device, options.steps))


if __name__ == "__main__":
    main()
