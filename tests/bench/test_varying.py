"""What `examples/bench/bench_varying.py` measures: that it runs, and that its figures are computed right."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch

from memkit.device import MemoryCounter
from tests.bench.cases import bench_module


@pytest.fixture
def varying() -> ModuleType:
    return bench_module("bench_varying")


def test_figures_are_those_of_later_steps_beside_checkpointed_ones(varying: ModuleType) -> None:
    steps, others = [(9.0, 12), (1.0, 8), (2.0, 9), (3.0, 10)], [(1.0, 1), (1.0, 1), (2.0, 1), (2.0, 1)]

    line = varying.figures(steps, [torch.zeros(2, 4096)] * 4, 10, others)

    assert line["first_ms"] == [9000.0, 1000.0]
    assert (line["later_ms"], line["ms_per_8192_tokens_later"]) == (2500.0, 2500.0)
    assert line["later_to_checkpointed"] == 1.25
    assert (line["worst_peak_to_budget"], line["worst_later_peak_to_budget"]) == (1.2, 1.0)


def test_peak_is_seen_though_others_reset_the_counter(varying: ModuleType) -> None:
    class Counter(MemoryCounter):
        most = now = 0

        def allocated_bytes(self) -> int:
            return self.now

        def peak_bytes(self) -> int:
            return self.most

        def peak_reserved_bytes(self) -> None:
            return None

        def reset_peak(self) -> None:
            self.most = self.now

    counter = Counter()
    peak = varying.Peak(counter)
    with peak.watched():
        counter.most = 7
        counter.reset_peak()
        counter.most = 3
        assert peak.take() == 7
        counter.most = 2
        assert peak.take() == 2
    assert Counter.reset_peak.__name__ == "reset_peak"


def test_steps_that_are_asked_for_override_the_most_of_a_family(varying: ModuleType) -> None:
    t5, qwen3 = varying.FAMILIES["t5"], varying.FAMILIES["qwen3"]

    assert [varying.num_batches(family, None, is_quick=False) for family in (t5, qwen3)] == [12, 40]
    assert varying.num_batches(t5, 20, is_quick=False) == 20
    assert varying.num_batches(t5, 20, is_quick=True) == 16


@pytest.mark.slow
@pytest.mark.integrations
def test_each_way_runs_without_a_gpu(
    varying: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["bench_varying.py", "--tiny", "--steps", "5", "--only", "qwen3"])

    varying.main()

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["way"] for line in lines] == ["plain", "checkpointed", "memkit"]
    assert lines[-1]["num_recorded"] == 3
    assert len(lines[-1]["warnings"]) == 1
