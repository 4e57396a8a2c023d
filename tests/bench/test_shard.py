"""What `examples/bench/bench_shard.py` measures: that its parts run, and that bits are those of FSDP2 by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.bench.cases import BENCHES


@pytest.mark.slow
def test_parts_run() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, BENCHES / "bench_shard.py", "--tiny", "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    counts = {"full": 2, "lora": 2, "acting": 8, "states": 3, "host_params": 14, "ends": 4, "profiled": 2, "bits": 13}
    assert [line["part"] for line in lines] == [part for part, number in counts.items() for _ in range(number)]
    assert all(line["step_s"] > 0 and line["num_ranks"] == 2 for line in lines)
    assert all(line["num_differing"] == 0 and line["of"] > 1000 for line in lines if line["part"] == "bits")
    assert sum("of_roofline" in line for line in lines) == 13
    assert all(line["profiled_peak_bytes"] > line["gathered_bytes"] > 0 for line in lines if line["part"] == "profiled")
