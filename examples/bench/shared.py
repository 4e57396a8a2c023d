"""What the bench scripts have in common: a process for each bench, the versions in each line, engines timed in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from measuring import Engine, Measurement, Workload, measure

import memkit
from memkit.device import Device

Line = dict[str, Any]
"""What is printed as one line of JSON."""


def run_in_process(
    script: str,
    name: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    patience_s: float | None = None,
) -> int:
    """Run one bench of a script in a process of its own, so that it does not find what another has left reserved or pinned.

    Args:
        arguments: what the script was called with, less the names of benches.
        environment: what to set beside what is set here.
        patience_s: how long it may take.

    Returns:
        The exit status.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    command = [sys.executable, script, *arguments, "--here", "--only", name]
    return subprocess.run(command, check=False, env={**os.environ, **(environment or {})}, timeout=patience_s).returncode


def allow_tf32() -> None:
    """Let float32 products be those of TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def about_run(num_steps: int) -> Line:
    """Return what each line says of the run that it is of."""
    return {
        "torch": torch.__version__,
        "memkit": memkit.__version__,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
        "steps": num_steps,
    }


def measure_in_turn(
    workload: Workload,
    engines: Mapping[str, Engine],
    device: Device,
    *,
    num_rounds: int,
    num_steps: int,
    num_warmup: tuple[int, int],
) -> dict[str, list[Measurement]]:
    """Measure each engine in several rounds, since small differences are about as small as the drift.

    Args:
        num_warmup: steps that do not count: in the first round, and in those after it.
    """
    first, later = num_warmup
    found: dict[str, list[Measurement]] = {name: [] for name in engines}
    for turn in range(num_rounds):
        for name, engine in engines.items():
            warmup = first if turn == 0 else later
            found[name].append(measure(workload, engine, device, num_steps=num_steps, num_warmup=warmup))
    return found
