"""What the tests of the benches and of the command share."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit.cli import main, progress
from memkit.device import Device, ReferenceDevice

BENCHES = Path(__file__).parents[2] / "examples" / "bench"
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
NUM_LAYERS = 6
STACK_WIDTH = 16


def bench_module(name: str) -> ModuleType:
    """Return a module of `examples/bench`, where modules import each other as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHES)
        return importlib.import_module(name)


measuring = bench_module("measuring")
Workload, StepOf = measuring.Workload, measuring.StepOf


def tiny_setting(device: Device | None = None, **options: Any) -> Any:
    """Return the setting of a tiny run of one step."""
    given = {"steps": 1, "fast": False, "tiny": True, "ends_s": time.perf_counter() + 400, **options}
    return bench_module("setting").Setting(device=device or ReferenceDevice(), **given)


def lines_of(part: Callable[[Any], Any], setting: Any = None) -> list[dict[str, Any]]:
    """Return what a part of a script tells in a tiny run, made in this process: what a process of its own imports takes longer
    than most parts do. Any: JSON."""
    about = {"device": "reference", "cuda": None, **bench_module("shared").about_run(1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as scripts do
        return [json.loads(json.dumps({**line, **about})) for line in part(setting or tiny_setting())]


def printed_by(script: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return what a script prints, run in this process."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [f"{script}.py", *arguments])
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert not bench_module(script).main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def cells(table: str) -> list[list[str]]:
    """Return the rows of a table in Markdown below its ruler."""
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress._Progress, "PATIENCE_S", math.inf)  # however busy the machine is
        found, out, err = run_command(capsys, *arguments)

    assert (found, out) == (status, "")
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("memkit: error: ")
