"""What fine-tunes and measures under the Hugging Face Trainer, at a small scale: an example and a bench."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.cases import MISSING

pytest.importorskip("transformers", reason=MISSING)
pytest.importorskip("accelerate", reason=MISSING)

pytestmark = [pytest.mark.integrations, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(*arguments: str, script: str = "fine_tune_trainer.py") -> str:
    command = [sys.executable, "-W", "error::UserWarning:__main__", str(EXAMPLES / script), "--tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example_streams_all_layers_and_learns_within_its_budget() -> None:
    printed = _run("--steps", "6")

    assert "streamed: 8 of 8 layers" in printed
    peaks = [float(peak) for peak in re.findall(r"'memkit/\w+/peak_gib': '?([\d.e-]+)", printed)]
    assert peaks
    assert max(peaks) * 2**30 <= 2 * 2**20
    first, last = re.findall(r"^loss: ([\d.]+) to ([\d.]+)$", printed, re.MULTILINE)[0]
    assert float(last) < float(first)


def test_example_takes_a_config_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    config = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shared = ("--config", str(tmp_path / "config.json"), "--steps", "4", "--accumulate", "2", "--output", str(tmp_path / "out"))

    whole = _run(*shared)
    resumed = _run(*shared, "--resume", str(tmp_path / "out" / "checkpoint-2"))

    assert "streamed: 4 of 4 layers" in whole
    assert re.findall(r"^loss: .* to (.*)$", whole, re.MULTILINE) == re.findall(r"^loss: .* to (.*)$", resumed, re.MULTILINE)


def test_bench_gives_a_budget_the_peak_with_checkpoints() -> None:
    lines = [json.loads(line) for line in _run("--steps", "2", script="bench/bench_trainer.py").splitlines()]

    assert [line.get("error") for line in lines] == [None] * 3
    assert [(line["way"], line["budget"]) for line in lines] == [("plain", None), ("checkpointing", None), ("memkit", "2MiB")]
    assert all(line["step_s"] > 0 and len(line["steps_s"]) == 4 for line in lines)
