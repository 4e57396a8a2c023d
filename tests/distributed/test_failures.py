"""A rank that dies: no other one waits for ever, and torchrun names it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def _torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    starting = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(starting, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "last_step"), [("dies", 1), ("before", -1)])
def test_no_rank_hangs_where_another_dies(how: str, last_step: int) -> None:
    start = time.monotonic()
    done = _torchrun("-m", "tests.distributed.failing", how)

    assert done.returncode != 0
    assert time.monotonic() - start < 300  # and not the 600 s that ranks would wait for each other
    assert done.stdout.count("has made step") == 2 * (last_step + 1)
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert "rank      : 1 (local_rank: 1)" in done.stderr  # the first failure, as torchrun reports it


@pytest.mark.slow
def test_example_runs_on_two_ranks() -> None:
    done = _torchrun("examples/shard.py", "--tiny")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same bits") == 2
    assert "NOT" not in done.stdout
