"""What does `Rematerialize` cost, and what does it make fit? Prints one JSON line per question.

    python examples/bench/bench_remat.py                                # all on this machine's GPU, about 12 minutes
    python examples/bench/bench_remat.py --only spaced_gpt2             # against evenly spaced checkpointed layers
    python examples/bench/bench_remat.py --only resnet50 llama
    python examples/bench/bench_remat.py --only recorder_host planning  # what needs no GPU

All seconds are medians; every line names its plain step of the same run. Each bench runs in a process of its own. Those that
are held to a cap run under `set_per_process_memory_fraction`, with expandable segments.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from remat_cap import cap, resnet1202
from remat_curves import llama_curve, resnet50_curve
from remat_planning import planning
from remat_policies import replayed, reserved
from remat_recorder import recorder, recorder_host
from remat_spaced import remat_spaced
from remat_supernet import supernet_alone, supernet_ddp
from setting import MODELS, Setting
from shared import NO_GPU, Line, about_machine, allow_tf32, run_each, tell

from memkit.device import CpuDevice, open_device

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
    **{f"spaced_{model}": partial(remat_spaced, model) for model in MODELS},
}
NEED_NO_GPU = ("recorder_host", "planning")
CAPPED = ("cap", "resnet1202", "supernet", "ddp")


def main() -> int:
    """Run the benches that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=list(BENCHES), choices=list(BENCHES), metavar="NAME", help=", ".join(BENCHES)
    )
    parser.add_argument("--steps", type=int, default=10, help="steps that count, for each median; default: 10")
    parser.add_argument("--fast", action="store_true", help="fewer budgets, tries and rounds")
    parser.add_argument("--patience", type=float, default=240, metavar="S", help="seconds for each bench; default: 240")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    ends_s = time.perf_counter() + options.patience
    if not options.here:
        flags = [f"--{name}" for name in ("fast", "tiny") if getattr(options, name)]
        passed = [f"--steps={options.steps}", f"--patience={options.patience}", *flags]
        capped = {name: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} for name in CAPPED}
        return run_each(__file__, options.only, passed, patience_s=options.patience, environments=capped)
    warnings.simplefilter("ignore" if not sys.warnoptions else "default")
    allow_tf32()
    has_gpu, status = torch.cuda.is_available(), 0
    if options.tiny:
        torch.set_num_threads(1)
    device = open_device(torch.device("cuda")) if has_gpu and not options.tiny else CpuDevice()
    setting = Setting(device=device, steps=options.steps, fast=options.fast, tiny=options.tiny, ends_s=ends_s)
    for name in options.only:
        if has_gpu or options.tiny or name in NEED_NO_GPU:
            status |= tell(BENCHES[name](setting), {"where": device.name, **about_machine(device, options.steps)})
        else:
            tell([{"bench": name, "skipped": NO_GPU}])
    return status


if __name__ == "__main__":
    sys.exit(main())
