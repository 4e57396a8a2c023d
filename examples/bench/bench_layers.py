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
import sys
import time

import layers_curves
import layers_peers
import layers_training
import torch
from setting import Setting
from shared import about_machine, allow_tf32, run_each, tell

from memkit.device import open_device

BENCHES = {**layers_curves.BENCHES, **layers_peers.BENCHES, **layers_training.BENCHES}


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
        passed = [f"--steps={options.steps}", f"--patience={options.patience}", *(["--tiny"] if options.tiny else [])]
        passed += ["--ratios", *map(str, options.ratios)] if options.ratios else []
        return run_each(__file__, options.only, passed, patience_s=options.patience)
    allow_tf32()
    device = open_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    (name,) = options.only
    setting = Setting(
        device=device,
        steps=options.steps,
        fast=False,
        tiny=options.tiny,
        ends_s=time.perf_counter() + options.patience,
        ratios=tuple(options.ratios),
    )
    return tell(BENCHES[name](setting), {"where": device.name, **about_machine(device, options.steps)})


if __name__ == "__main__":
    sys.exit(main())
