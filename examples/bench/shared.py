"""What the bench scripts have in common: a process for each bench, the versions in each line, engines timed in turn."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
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


def run_each(
    script: str,
    names: Sequence[str],
    arguments: Sequence[str],
    *,
    patience_s: float,
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> int:
    """Run benches of a script one after the other, each in a process of its own; return an exit status."""
    status = 0
    for name in names:
        start_s = time.perf_counter()
        try:
            found = run_in_process(script, name, arguments, environment=environments.get(name), patience_s=patience_s)
            status |= found != 0
        except subprocess.TimeoutExpired:
            tell([{"bench": name, "error": f"took longer than {patience_s} s"}])
            status = 1
        print(f"{name}: {time.perf_counter() - start_s:.0f} s in all", file=sys.stderr, flush=True)
    return status


NO_GPU = "nothing was measured: there is no CUDA device here"


def tell(lines: Iterable[Line], about: Line = MappingProxyType({})) -> int:
    """Print lines of JSON, each with what they have in common; return an exit status."""
    try:
        for line in lines:
            print(json.dumps({**line, **about}), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500], **about}), flush=True)
        return 1
    return 0


def about_run(num_steps: int) -> Line:
    """Return what each line says of the run that it is of."""
    return {
        "torch": torch.__version__,
        "memkit": memkit.__version__,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
        "steps": num_steps,
    }


def about_machine(device: Device, num_steps: int) -> Line:
    """Return the same, and where it is."""
    about = {"device": device.name, "cuda": torch.version.cuda, "python": platform.python_version()}
    return {**about, **about_run(num_steps)}


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
