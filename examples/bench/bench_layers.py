"""What does streaming weights cost, and what does it free? Prints one JSON line per question.

    python examples/bench/bench_layers.py                         # all on this machine's GPU
    python examples/bench/bench_layers.py --only forward lora_checkpoint --steps 10

A Llama of 3.2 billion parameters, bfloat16, batch 4 x 2048. Seconds are medians; every line names the plain step of the same
run, and the *roofline*: in each pass the longer of the plain step's time and of what moving the bytes takes. Each bench runs in
a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from setting import Setting, figures_of, say
from shared import Line, about_run, allow_tf32, run_in_process
from workloads import llama_3b

import memkit
from memkit.bench import Measurement, Workload, measure, measure_fraction
from memkit.bench.measure import Engine
from memkit.device import open_device
from memkit.transfer.link import Link, measure_link

FRACTIONS = (0.0, 0.5, 1.0)


def _workload(setting: Setting, **options: Any) -> Workload:
    small: dict[str, Any] = {"batch": 2, "length": 32, "num_layers": 4, "width": 64, "inner": 128, "num_heads": 4}
    found: Workload = setting.make(partial(llama_3b, **(small if setting.tiny else {}), **options))
    return found


def forward(setting: Setting) -> Iterator[Line]:
    """Forward only, without grad mode."""
    yield from _curve(setting, _workload(setting), backward=False)


def lora_checkpoint(setting: Setting) -> Iterator[Line]:
    """A frozen base with LoRA, each layer checkpointed."""
    yield from _curve(setting, _workload(setting, rank=16, checkpoint=True))


def lora(setting: Setting) -> Iterator[Line]:
    """A frozen base with LoRA, without checkpointing."""
    yield from _curve(setting, _workload(setting, rank=16))


def lora_checkpoint_offload(setting: Setting) -> Iterator[Line]:
    """A frozen base with LoRA, each layer streamed, checkpointed, and its input offloaded."""
    yield from _curve(setting, _workload(setting, rank=16, checkpoint=True), fractions=(1.0,), offload_ratio=1.0)


def host(setting: Setting) -> Iterator[Line]:
    """All parameters trained, each layer checkpointed; gradients go to the host. No optimizer."""
    yield from _curve(setting, _workload(setting, checkpoint=True), train="host")


BENCHES: dict[str, Callable[[Setting], Iterator[Line]]] = {
    "forward": forward,
    "lora_checkpoint": lora_checkpoint,
    "lora": lora,
    "lora_checkpoint_offload": lora_checkpoint_offload,
    "host": host,
}


def _curve(
    setting: Setting,
    workload: Workload,
    *,
    backward: bool = True,
    fractions: Sequence[float] = FRACTIONS,
    offload_ratio: float | None = None,
    **options: Any,
) -> Iterator[Line]:
    """Measure a workload plainly, and with shares of its layers streamed."""
    link = measure_link(setting.device) if not setting.tiny else measure_link(setting.device, num_bytes=2**20)
    workload = replace(workload, backward=backward)
    engine: Engine = nullcontext
    if offload_ratio is not None:
        engine = partial(memkit.CPUOffload, offload_ratio, "layers", device=setting.device)
    plain = measure(workload, engine, setting.device, num_steps=setting.steps, num_warmup=_NUM_WARMUP)
    say(f"{workload.name}: plain {plain}; {link}")
    line: Line = {
        "bench": "layers",
        "name": workload.name,
        "backward": backward,
        "offload_ratio": offload_ratio,
        "options": options,
        "h2d_bytes_per_s": link.h2d_bytes_per_s,
        "d2h_bytes_per_s": link.d2h_bytes_per_s,
        "plain": figures_of(plain),
    }
    for fraction in fractions:
        yield {
            **line,
            "fraction": fraction,
            **setting.attempt(partial(_streamed, setting, workload, fraction, link, plain, engine=engine, **options)),
        }


def _streamed(
    setting: Setting, workload: Workload, fraction: float, link: Link, plain: Measurement, *, engine: Engine, **options: Any
) -> Line:
    row = measure_fraction(
        workload,
        fraction,
        setting.device,
        plain=plain,
        link=link,
        engine=engine,
        num_steps=setting.steps,
        num_warmup=_NUM_WARMUP,
        **options,
    )
    line = {
        **figures_of(row.memkit),
        "num_streamed": row.num_streamed,
        "streamed_bytes": row.streamed_bytes,
        "slot_bytes": row.slot_bytes,
        "grads_bytes": row.d2h_bytes,
        "roofline_s": row.roofline_s,
        "to_roofline": row.to_roofline,
        "to_plain": row.to_plain,
        "fetches_per_step": row.num_fetches,
        "demand_fetches_per_step": row.num_demand_fetches,
        "overflows": row.num_overflows,
        "stall_s_per_step": row.stall_s,
    }
    if row.peak_over_expected_bytes is not None:
        line["peak_over_expected_bytes"] = row.peak_over_expected_bytes
    say(f"{workload.name}, {fraction}: {line}")
    return line


_NUM_WARMUP = 3


def _in_processes(options: argparse.Namespace) -> int:
    """Run each bench in a process of its own."""
    passed = [f"--steps={options.steps}", f"--patience={options.patience}", *(["--tiny"] if options.tiny else [])]
    status = 0
    for name in options.only:
        try:
            status |= run_in_process(__file__, name, passed, patience_s=options.patience) != 0
        except subprocess.TimeoutExpired:
            print(json.dumps({"bench": name, "error": f"took longer than {options.patience} s"}), flush=True)
            status = 1
    return status


def _here(name: str, setting: Setting) -> int:
    """Run a bench in this process."""
    about = {"where": setting.device.name, "cuda": torch.version.cuda, "python": platform.python_version()}
    try:
        for line in BENCHES[name](setting):
            print(json.dumps({**line, **about, **about_run(setting.steps)}), flush=True)
    except Exception:
        say(traceback.format_exc())
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for each bench")
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU")
    parser.add_argument("--here", action="store_true", help="in this process, one bench")
    options = parser.parse_args()
    if not options.here:
        return _in_processes(options)
    allow_tf32()
    device = open_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    (name,) = options.only
    return _here(
        name,
        Setting(
            device=device,
            steps=options.steps,
            fast=False,
            plots=None,
            tiny=options.tiny,
            ends_s=time.perf_counter() + options.patience,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
