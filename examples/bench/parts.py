"""Benches of many parts: each runs in a process of its own, one after the other, and all begin at once. Prints lines of JSON.

The processes import what they need, open the device and then wait for their turn: when all of them do, the first goes on, and
from then on only one of them does anything at a time. A part that fails or takes longer than its limit loses what it has not
printed; the others go on. When the minutes are over, what is left is told as skipped.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peers import add_wheels
from setting import Setting, say
from shared import NO_GPU, Line, about_machine, allow_tf32, tell

from memkit.device import ReferenceDevice, cuda_is_available, open_device

IMPORTED_AHEAD = ("torchvision", "transformers", "torch._dynamo")
MODELS_AHEAD = ("LlamaForCausalLM", "GPT2LMHeadModel", "WhisperForConditionalGeneration")
GO = "go"
READY_S = 120.0
"""How long to wait for processes to be ready."""
SCALE_OF_TINY = 5
"""Tiny runs go on machines of all kinds: so much longer may each part take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What runs in a process of its own."""

    run: Callable[[Setting], Iterator[Line]]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script whose parts these are."""

    path: str
    parts: Mapping[str, Part]
    about: str
    """What `--help` says."""
    minutes: float
    """How long all of it may take, where nothing is asked for."""

    def run_parts(self, names: Sequence[str], passed: Sequence[str], minutes: float, *, scale: float = 1.0) -> int:
        """Run parts one after the other in processes that were begun ahead; return whether one has failed, as an exit status.

        Args:
            passed: arguments for each process.
            minutes: for all of it.
            scale: of the limit of each part.
        """
        ends_s, status = time.perf_counter() + 60 * minutes, 0
        reading, writing = os.pipe()
        children = {name: self._begin(name, passed, writing) for name in names}
        os.close(writing)
        try:
            _wait_until_closed(reading, READY_S)
            say(f"all {len(children)} processes are ready, {ends_s - time.perf_counter():.0f} s are left")
            for name, child in children.items():
                start_s = time.perf_counter()
                limit_s = min(scale * self.parts[name].limit_s, ends_s - start_s)
                if limit_s <= 0:
                    tell([{"part": name, "skipped": f"no time was left: all of it may take {minutes:g} minutes"}])
                    continue
                failure = _finish(child, limit_s)
                taken_s = time.perf_counter() - start_s
                tell([{"part": name, "taken_s": taken_s, **({"error": failure} if failure else {})}])
                say(f"{name}: {taken_s:.0f} s in all")
                status |= bool(failure)
        finally:
            for child in children.values():
                _end(child)
        return status

    def _begin(self, name: str, passed: Sequence[str], ready: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, self.path, *passed, f"--ready={ready}", "--here", "--only", name],
            pass_fds=(ready,),
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.parts[name].environment},
            start_new_session=True,  # so that what it has started ends with it
        )

    def _here(self, name: str, *, steps: int, tiny: bool, ready: int | None) -> int:
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
        setting = Setting(device=device, steps=steps, fast=False, tiny=tiny, ends_s=ends_s)
        about = {"part": name, **about_machine(device, steps)}
        return tell(self.parts[name].run(setting), about)

    def main(self) -> int:
        """Run the parts that are asked for."""
        names_of_parts = list(self.parts)
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument(
            "--only", nargs="*", default=names_of_parts, choices=names_of_parts, metavar="PART", help="these parts"
        )
        parser.add_argument("--except", nargs="*", default=[], choices=names_of_parts, metavar="PART", dest="left_out")
        parser.add_argument("--steps", type=int, default=10, help="steps that count, for each median; default: 10")
        parser.add_argument("--minutes", type=float, default=self.minutes, help=f"for all of it; default: {self.minutes:g}")
        parser.add_argument("--wheels", type=Path, help="a folder with wheels of trl and torchtune, to be compared with")
        parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
        parser.add_argument("--ready", type=int, help=argparse.SUPPRESS)
        parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
        options = parser.parse_args()
        names = [name for name in options.only if name not in options.left_out]
        if not options.tiny and not cuda_is_available():
            return tell({"part": name, "skipped": NO_GPU} for name in names)
        if options.here:
            if options.wheels is not None:
                _add_wheels(options.wheels)
            return self._here(names[0], steps=options.steps, tiny=options.tiny, ready=options.ready)
        passed = [f"--steps={options.steps}", *(["--tiny"] if options.tiny else [])]
        passed += [] if options.wheels is None else [f"--wheels={options.wheels}"]
        return self.run_parts(names, passed, options.minutes, scale=SCALE_OF_TINY if options.tiny else 1)


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


def _import_ahead() -> None:
    for module in IMPORTED_AHEAD:
        try:
            found = importlib.import_module(module)
            for model in MODELS_AHEAD if module == "transformers" else ():
                getattr(found, model)
        except ImportError as error:  # what needs it will say so
            say(f"{module}: {error}")


def _add_wheels(folder: Path) -> None:
    try:
        add_wheels(folder)
    except ImportError as error:  # what would be compared with them is left out
        say(f"{folder}: {error}")
