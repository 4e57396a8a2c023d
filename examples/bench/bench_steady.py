"""What a steady step costs: all figures in one run, each part in a process of its own. Prints lines of JSON.

    python examples/bench/bench_steady.py                      # all on this machine's GPU, at most 9 minutes
    python examples/bench/bench_steady.py --only remat_gpt2 offload_gpt2
    python examples/bench/bench_steady.py --except flat

Seconds that each part is expected to take on an H200, in the order of the run; 510 in all, and 25 until all are ready:

    chain                6    797 storages of 256 KiB and of 1 MiB, all moved
    region               3    a region of two small ops, beside torch.utils.checkpoint
    remat_gpt2          36    budgets against the fewest evenly spaced checkpointed layers, and a budget of 1 over plain
    remat_whisper       32
    offload_gpt2        38    ratios over plain, and over what the link allows
    offload_whisper     26
    remat_llama         58
    remat_resnet50      33
    offload_resnet50    46
    offload_llama       60
    compiled            70    a Llama with compiled blocks, offloaded and recomputed, beside checkpointing by hand
    reserved            12    reserved over allocated where all moves, with expandable segments
    host                40    what the host takes on tiny inputs, four models
    flat                50    from a hundred storages to a hundred thousand

The processes begin all at once, import what they need, open the device and then wait for their turn: when all of them do, the
first goes on, and from then on only one of them does anything at a time. A part that fails or takes longer than its limit loses
what it has not printed; the others go on. When the minutes are over, what is left is told as skipped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from bench_compiled import compiled_both
from bench_host import hosts
from host_chains import chain, flat
from host_region import region
from offload_ratios import offload_ratios, offload_reserved
from remat_spaced import remat_spaced
from setting import Setting, say
from shared import Line, about_run, allow_tf32

from memkit.device import ReferenceDevice, cuda_is_available, open_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What runs in a process of its own."""

    run: Callable[[Setting], Iterator[Line]]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


PARTS = {
    "chain": Part(run=chain, limit_s=40),
    "region": Part(run=region, limit_s=30),
    "remat_gpt2": Part(run=partial(remat_spaced, "gpt2"), limit_s=90),
    "remat_whisper": Part(run=partial(remat_spaced, "whisper"), limit_s=90),
    "offload_gpt2": Part(run=partial(offload_ratios, "gpt2"), limit_s=70),
    "offload_whisper": Part(run=partial(offload_ratios, "whisper"), limit_s=70),
    "remat_llama": Part(run=partial(remat_spaced, "llama"), limit_s=110),
    "remat_resnet50": Part(run=partial(remat_spaced, "resnet50"), limit_s=90),
    "offload_resnet50": Part(run=partial(offload_ratios, "resnet50"), limit_s=90),
    "offload_llama": Part(run=partial(offload_ratios, "llama"), limit_s=110),
    "compiled": Part(run=compiled_both, limit_s=150),
    "reserved": Part(run=offload_reserved, limit_s=50, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "host": Part(run=hosts, limit_s=120),
    "flat": Part(run=flat, limit_s=120),
}
IMPORTED_AHEAD = ("torchvision", "transformers", "torch._dynamo")
MODELS_AHEAD = ("LlamaForCausalLM", "GPT2LMHeadModel", "WhisperForConditionalGeneration")
GO = "go"
READY_S = 120.0
"""How long to wait for processes to be ready."""


def run_parts(names: Sequence[str], passed: Sequence[str], minutes: float, *, scale: float = 1.0) -> int:
    """Run parts one after the other in processes that were begun ahead; return whether one has failed, as an exit status.

    Args:
        passed: arguments for each process.
        minutes: for all of it.
        scale: of the limit of each part.
    """
    ends_s, status = time.perf_counter() + 60 * minutes, 0
    reading, writing = os.pipe()
    children = {name: _begin(name, passed, writing) for name in names}
    os.close(writing)
    try:
        _wait_until_closed(reading, READY_S)
        say(f"all {len(children)} processes are ready, {ends_s - time.perf_counter():.0f} s are left")
        for name, child in children.items():
            start_s = time.perf_counter()
            limit_s = min(scale * PARTS[name].limit_s, ends_s - start_s)
            if limit_s <= 0:
                _tell({"part": name, "skipped": f"no time was left: all of it may take {minutes:g} minutes"})
                continue
            failure = _finish(child, limit_s)
            taken_s = time.perf_counter() - start_s
            _tell({"part": name, "taken_s": taken_s, **({"error": failure} if failure else {})})
            say(f"{name}: {taken_s:.0f} s in all")
            status |= bool(failure)
    finally:
        for child in children.values():
            _end(child)
    return status


def _begin(name: str, passed: Sequence[str], ready: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *passed, f"--ready={ready}", "--here", "--only", name],
        pass_fds=(ready,),
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **PARTS[name].environment},
        start_new_session=True,  # so that what it has started ends with it
    )


def _wait_until_closed(reading: int, most_s: float) -> None:
    """Wait until every process has closed its end of a pipe, because it is ready or has ended."""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        readable, _, _ = select.select([pipe], [], [], most_s)
        if not readable:
            say(f"some process is not ready after {most_s:.0f} s")


def _finish(child: subprocess.Popen[str], limit_s: float) -> str:
    """Let a process go on, wait for its end, and return what went wrong."""
    try:
        child.communicate(f"{GO} {limit_s}\n", timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(child)
        return f"took longer than {limit_s:.0f} s"
    return f"ended with status {child.returncode}" if child.returncode else ""


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.stdin is not None and not child.stdin.closed:
        child.stdin.close()


def _here(name: str, *, steps: int, tiny: bool, ready: int | None) -> int:
    """Run a part in this process, once it is told to go on."""
    warnings.simplefilter("ignore" if not sys.warnoptions else "default")
    _import_ahead()
    if tiny:
        torch.set_num_threads(1)
    device = ReferenceDevice() if tiny else open_device("cuda")
    torch.ones(1, device=device.torch_device)
    if ready is not None:
        os.close(ready)
    word, _, limit_s = sys.stdin.readline().partition(" ")
    if word != GO:
        return 1
    ends_s = time.perf_counter() + float(limit_s)
    allow_tf32()
    setting = Setting(device=device, steps=steps, fast=False, plots=None, tiny=tiny, ends_s=ends_s)
    about = {"part": name, "device": device.name, "cuda": torch.version.cuda, **about_run(steps)}
    try:
        for line in PARTS[name].run(setting):
            _tell({**line, **about})
    except Exception as error:
        traceback.print_exc()
        _tell({"error": f"{type(error).__name__}: {error}"[:500], **about})
        return 1
    return 0


def _import_ahead() -> None:
    for module in IMPORTED_AHEAD:
        try:
            found = importlib.import_module(module)
            for model in MODELS_AHEAD if module == "transformers" else ():
                getattr(found, model)
        except ImportError as error:  # what needs it will say so
            say(f"{module}: {error}")


def _tell(line: Line) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS), metavar="PART", help="these parts")
    parser.add_argument("--except", nargs="*", default=[], choices=list(PARTS), metavar="PART", dest="left_out")
    parser.add_argument("--steps", type=int, default=10, help="steps that count, for each median; default: 10")
    parser.add_argument("--minutes", type=float, default=8.9, help="for all of it; default: 8.9")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ready", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [name for name in options.only if name not in options.left_out]
    if not options.tiny and not cuda_is_available():
        for name in names:
            _tell({"part": name, "skipped": "nothing was measured: there is no CUDA device here"})
        return 0
    if options.here:
        return _here(names[0], steps=options.steps, tiny=options.tiny, ready=options.ready)
    if options.tiny:  # on machines of all kinds
        return run_parts(names, [f"--steps={options.steps}", "--tiny"], options.minutes, scale=5)
    return run_parts(names, [f"--steps={options.steps}"], options.minutes)


if __name__ == "__main__":
    sys.exit(main())
