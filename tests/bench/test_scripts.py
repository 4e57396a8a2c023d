"""The scripts in `examples/bench`: what they print, and how the search for the largest batch goes on."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from memkit.device import ReferenceDevice
from memkit.plan import plan_ratio
from tests.bench.cases import BENCHES, NUM_LAYERS, bench_module, square_layers

pytestmark = pytest.mark.slow

SUPERNET_PHASES = [
    "remat_supernet_plain",
    "remat_supernet_plain_steps",
    "remat_supernet",
    "remat_supernet_steps",
    "remat_supernet_larger",
    "remat_supernet_largest",
]


def _script(*arguments: str, name: str = "bench_remat.py") -> list[dict[str, object]]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(BENCHES / name), *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_script_says_what_it_does_not_measure_without_a_gpu() -> None:
    (line,) = _script("--only", "cap")

    assert line == {"bench": "cap", "skipped": "nothing was measured: there is no CUDA device here"}


def test_host_script_tells_what_each_engine_takes_beyond_plain() -> None:
    *lines, stays = _script("--steps", "1", "--only", "llama", name="bench_host.py")

    assert [line["engine"] for line in lines] == ["offload 0.0", "offload 0.1", "offload 1.0", "remat 1.0", "remat 0.5"]
    assert [bool(line["num_moved"]) for line in lines] == [False, True, True, False, False]
    assert [bool(line["num_dropped"]) for line in lines] == [False, False, False, False, True]
    assert stays["bench"] == "host_stays"
    assert stays["num_stay"] == lines[1]["num_saves"] - lines[1]["num_moved"]


@pytest.mark.parametrize(
    ("given", "benches"),
    [
        (["--only", "supernet"], SUPERNET_PHASES),
        (
            ["--here", "--only", "planning", "recorder_host", "resnet50"],
            ["remat_planning"] * 3 + ["remat_recorder_host"] * 4 + ["remat", "remat_fit"],
        ),
    ],
)
def test_script_runs(given: list[str], benches: list[str]) -> None:
    lines = _script("--tiny", "--fast", "--steps", "1", *given)

    assert [line["bench"] for line in lines] == benches
    for line in lines:
        assert "error" not in line
        assert line["torch"] == torch.__version__


def test_layers_script_runs() -> None:
    pytest.importorskip("transformers")
    lines = _script("--tiny", "--steps", "1", "--only", "forward", "--ratios", "0.5", "1", name="bench_layers.py")

    assert [(line["bench"], line["ratio"]) for line in lines] == [("layers", 0.5), ("layers", 1.0)]
    for line in lines:
        assert "error" not in line
        assert line["torch"] == torch.__version__


def test_ratios_move_what_their_plan_says_and_are_set_beside_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    script = bench_module("bench_offload")
    monkeypatch.setattr(script, "_on_gpu", lambda make: make())
    options = argparse.Namespace(ratios=[0, 0.5, 1], steps=1, fast=False, peers=False)

    line, close = script.against_roofline(lambda: square_layers(512), options, ReferenceDevice())

    sizes = [2**20] * (2 * NUM_LAYERS - 1)  # each GELU's input and each Linear's, the model's own input apart
    assert line["saved_bytes"] == sum(sizes)
    for row in line["rows"]:
        assert row["moved_bytes"] == plan_ratio(sizes, row["ratio"], window_bytes=row["window_bytes"]).offload_bytes
        assert row["roofline_s"] >= max(line["plain"]["forward_s"], line["plain"]["backward_s"])
        assert row["to_roofline"] == row["memkit_s"] / row["roofline_s"]
    assert [row["synchronous_s"] is None for row in line["rows"]] == [True, False, False]
    assert close["bench"] == "offload_close_to_plain"


@pytest.fixture
def remat_supernet(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHES)
    return importlib.import_module("remat_supernet")


def _run_up_to(most: int, tried: list[int]) -> Callable[[int], dict[str, Any]]:
    def run(batch: int) -> dict[str, Any]:
        tried.append(batch)
        return {"batch": batch} if batch <= most else {"batch": batch, "error": "no room"}

    return run


@pytest.mark.parametrize(
    ("most", "tried", "has_run"),
    [(1000, [250], True), (249, [250, 200], True), (100, [250, 200, 150, 100], True), (99, [250, 200, 150, 100], False)],
)
def test_search_begins_at_what_is_to_be_shown_and_goes_down(
    remat_supernet: ModuleType, most: int, tried: list[int], has_run: bool
) -> None:
    seen: list[int] = []

    found = remat_supernet.first_that_runs(_run_up_to(most, seen), 100)

    assert seen == tried
    assert found["batch"] == tried[-1]
    assert ("error" not in found) == has_run


def test_larger_batches_are_tried_up_to_the_first_that_does_not_run(remat_supernet: ModuleType) -> None:
    seen: list[int] = []

    found = list(remat_supernet.larger_that_run(_run_up_to(420, seen), 100, has_time=lambda: True))

    assert seen == [300, 350, 400, 450]
    assert ["error" in line for line in found] == [False, False, False, True]


def test_larger_batches_are_tried_while_there_is_time(remat_supernet: ModuleType) -> None:
    seen: list[int] = []
    checks = itertools.count()

    found = list(remat_supernet.larger_that_run(_run_up_to(1000, seen), 100, has_time=lambda: next(checks) < 2))

    assert [line["batch"] for line in found] == seen == [300, 350]
