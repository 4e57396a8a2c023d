"""What is seen of memkit from outside: labels in a profiler's trace, and what is logged."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import memkit
from memkit.core.torch_state import label
from memkit.device import ReferenceDevice
from tests.activations.chains import UNIT_BYTES, leaf_on, step


def _labels(context: object, units: list[int]) -> set[str]:
    device = torch.device("cpu")
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        step(leaf_on(device), units, lambda: context)  # type: ignore[arg-type, return-value]
    return {event.name for event in trace.events() if event.name.startswith("memkit::")}


def test_copies_waits_and_replays_are_in_a_trace() -> None:
    device = ReferenceDevice()
    offload = memkit.CPUOffload(1.0, "traced", min_bytes=0, window_bytes=0, device=device)
    remat = memkit.Rematerialize(2 * UNIT_BYTES, "replayed", policy="dtr", min_bytes=0, device=device)

    assert _labels(offload, [1] * 6) == {"memkit::evict", "memkit::fetch", "memkit::wait"}
    assert _labels(remat, [1] * 6) == {"memkit::replay"}


def test_a_label_asks_for_names_only_where_a_profiler_runs() -> None:
    asked = []

    class Piece:
        @property
        def names(self) -> str:
            asked.append(self)
            return "a to b"

    with label("step", Piece()):
        pass
    assert not asked
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace, label("step", Piece()):
        pass

    assert "memkit::step (a to b)" in {event.name for event in trace.events()}


@pytest.mark.parametrize("kind", ["offload", "remat"])
def test_plans_and_deviations_are_logged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    device = ReferenceDevice()
    x = leaf_on(device.torch_device)

    def context() -> object:
        if kind == "offload":
            return memkit.CPUOffload(0.5, "logged", min_bytes=0, window_bytes=0, device=device)
        return memkit.Rematerialize(0.5, "logged", min_bytes=0, device=device)

    with caplog.at_level(logging.DEBUG, logger="memkit"):
        for _ in range(4):  # the plan is made again once it is known what each op takes
            step(x, [1] * 6, context)  # type: ignore[arg-type]
        known = [record.getMessage() for record in caplog.records]
        caplog.clear()
        step(x, [1] * 6, context)  # type: ignore[arg-type]
        steady = list(caplog.records)
        step(x, [1, 1, 2, 1], context)  # type: ignore[arg-type]

    assert any(text.endswith("offload 3.00 KiB of 6.00 KiB, in 6 storages") or "recompute 3.00 KiB" in text for text in known)
    assert not steady
    assert caplog.records
