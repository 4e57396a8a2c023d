"""What `examples/bench/bench_shard.py` measures: that its parts run, each with the bits of its first line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.bench.cases import BENCHES


@pytest.mark.full
def test_parts_run() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, BENCHES / "bench_shard.py", "--tiny"], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["part"] for line in lines] == ["full"] * 3 + ["lora"] * 3 + ["acting"] * 4 + ["states"] * 3
    assert all(line["same_bits"] and line["step_s"] > 0 and line["num_ranks"] == 2 for line in lines)
