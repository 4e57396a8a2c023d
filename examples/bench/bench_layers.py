"""What does streaming weights cost, and what does it free? Prints one JSON line per question.

    python examples/bench/bench_layers.py                         # all on this machine's GPU
    python examples/bench/bench_layers.py --only forward lora_checkpoint --steps 10
    python examples/bench/bench_layers.py --only host --ratios 1

A Llama of 3.2 billion parameters, bfloat16, batch 4 x 2048, if nothing else is said. Seconds are medians; every line names the
plain step of the same run, and the *roofline*: in each pass the longer of the plain step's time and of what moving the bytes
takes. Each bench runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback

import layers_curves
import layers_peers
import layers_training
import torch
from setting import Setting, say
from shared import about_run, allow_tf32, run_in_process

from memkit.device import open_device

BENCHES = {**layers_curves.BENCHES, **layers_peers.BENCHES, **layers_training.BENCHES}


def _in_processes(options: argparse.Namespace) -> int:
    """Run each bench in a process of its own."""
    passed = [f"--steps={options.steps}", f"--patience={options.patience}", *(["--tiny"] if options.tiny else [])]
    passed += ["--ratios", *map(str, options.ratios)] if options.ratios else []
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
    parser.add_argument(
        "--ratios", nargs="*", type=float, default=[], help="shares of the layers to stream, where a bench tries several"
    )
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
            tiny=options.tiny,
            ends_s=time.perf_counter() + options.patience,
            ratios=tuple(options.ratios),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
