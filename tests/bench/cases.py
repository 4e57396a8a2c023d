"""What the tests of the benches and of the command share."""

from __future__ import annotations

import importlib
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit.cli import main
from memkit.device import ReferenceDevice

BENCHES = Path(__file__).parents[2] / "examples" / "bench"
NUM_LAYERS = 6
STACK_WIDTH = 16


def bench_module(name: str) -> ModuleType:
    """Return a module of `examples/bench`, where modules import each other as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHES)
        return importlib.import_module(name)


measuring = bench_module("measuring")
Workload, StepOf = measuring.Workload, measuring.StepOf


def lines_of_part(script: str, name: str) -> list[dict[str, Any]]:
    """Return what a part of a script tells in a tiny run of one step, made in this process: what a process of its own imports
    takes longer than most parts do. Any: JSON."""
    device = ReferenceDevice()
    setting = bench_module("setting").Setting(device=device, steps=1, fast=False, tiny=True, ends_s=time.perf_counter() + 400)
    about = {"part": name, "device": device.name, "cuda": None, **bench_module("shared").about_run(1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as scripts do
        return [json.loads(json.dumps({**line, **about})) for line in bench_module(script).PARTS[name].run(setting)]


def layers(batch: Tensor, *, num_layers: int = NUM_LAYERS, seen: Callable[[], None] = lambda: None) -> Workload:
    """Linear layers as wide as the batch, with a GELU after each.

    Args:
        batch: what they are given, [batch, width].
        seen: called at each forward.
    """
    width = batch.shape[1]
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)])

    def forward() -> Tensor:
        seen()
        return model(batch)

    return Workload(name="layers", model=model, forward=forward, loss=Tensor.sum)


def square_layers(width: int) -> Workload:
    """The same for a batch of as many rows as columns: each saved storage is 4 * width * width bytes."""
    return layers(torch.randn(width, width))


class Stack(nn.Module):
    """A stem, layers in a list, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(STACK_WIDTH, STACK_WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(STACK_WIDTH, STACK_WIDTH), nn.GELU()) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(STACK_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Take [batch, width], return [batch, 4]."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack_step(*, backward: bool = True, seen: Callable[[], None] = lambda: None) -> StepOf:
    """Return what makes the step of a `Stack`."""
    batch = torch.randn(8, STACK_WIDTH)

    def step_of(model: nn.Module) -> Workload:
        def forward() -> Tensor:
            seen()
            return model(batch)

        return Workload(name="stack", model=model, forward=forward, loss=Tensor.sum, backward=backward)

    return step_of


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the exit status of `memkit` with some arguments, and what it printed."""
    try:
        status = main.main(arguments)
    except SystemExit as end:
        status = int(str(end.code))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def assert_fails(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, *, status: int = 2) -> None:
    """The command ends with a status after one line that says what is wrong."""
    found, out, err = run_command(capsys, *arguments)

    assert (found, out) == (status, "")
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("memkit: error: ")
