"""What is seen of memkit from outside: live values, labels in a profiler's trace, and what is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memkit
from memkit.core.torch_state import label
from memkit.device import ReferenceDevice
from memkit.live import values_of
from memkit.weights import LayerStats
from tests.activations.chains import UNIT_BYTES, leaf_on, step

GIB = 2**30


def model_of_layers() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])


def states_of_a_model(**options: Any) -> memkit.StateOffload:
    """Return the states of an optimizer that has made two steps."""
    model = model_of_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    states = memkit.StateOffload(optimizer, device=ReferenceDevice(), **options)
    for _ in range(2):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    return states


def test_budget_tells_predicted_beside_actual() -> None:
    model = model_of_layers()
    budget = memkit.MemoryBudget(0.8, "live", device=ReferenceDevice(), min_bytes=1024)
    for _ in range(5):
        with budget:
            loss = model(torch.randn(256, 64)).sum()
        loss.backward()

    values, stats = memkit.live_values("live"), memkit.stats("live")

    assert values["memkit/live/budget_gib"] * GIB == stats.budget_bytes
    assert values["memkit/live/predicted_peak_gib"] * GIB == stats.predicted_peak_bytes
    assert values["memkit/live/peak_gib"] * GIB == stats.step_peak_bytes
    assert values["memkit/live/predicted_step_ms"] == pytest.approx(1e3 * (stats.predicted_s or 0))
    assert values["memkit/live/num_plans"] == stats.num_plans
    assert memkit.live_values(budget).keys() == values.keys()


def test_what_is_not_known_is_left_out_and_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with memkit.MemoryBudget("1GiB", "young", device=ReferenceDevice()):
        model_of_layers()(torch.randn(4, 64)).sum().backward()
    monkeypatch.setattr(ReferenceDevice, "synchronize", lambda *_: pytest.fail("waited"))

    values = memkit.live_values("young")

    assert "memkit/young/predicted_peak_gib" not in values
    assert values["memkit/young/budget_gib"] == 1.0


@pytest.mark.parametrize(
    ("make", "told", "field", "other"),
    [
        (partial(memkit.CPUOffload, 1.0, device=ReferenceDevice()), "moved_gib", "moved_out_bytes", "recomputed_gib"),
        (partial(memkit.Rematerialize, 0.5), "recomputed_gib", "dropped_bytes", "moved_gib"),
    ],
    ids=["CPUOffload", "Rematerialize"],
)
def test_contexts_tell_what_they_did(make: Callable[..., Any], told: str, field: str, other: str) -> None:
    for tag in ("did", "did too"):
        for _ in range(3):
            with make(tag=tag, min_bytes=1024):
                loss = model_of_layers()(torch.randn(256, 64)).sum()
            loss.backward()

    values = memkit.live_values("did", "did too")

    assert values[f"memkit/did/{told}"] * GIB == getattr(memkit.stats("did"), field) > 0
    assert f"memkit/did/{other}" not in values
    assert {name.split("/")[1] for name in values} == {"did", "did too"}
    for peak_bytes in (None, 3 * GIB):  # of an allocator, where it counts
        counted = values_of([replace(memkit.stats("did"), peak_allocated_bytes=peak_bytes)])
        assert counted.get("memkit/did/peak_allocated_gib") == (None if peak_bytes is None else 3)
    assert all(type(value) in (int, float) for value in values.values())


def test_layers_tell_what_streams() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]).requires_grad_(False)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=ReferenceDevice()) as offload:
        model(torch.randn(4, 64))

        values = memkit.live_values(offload)

        assert values["memkit/layers/moved_in_gib"] * GIB == offload.stats().h2d_bytes > 0
        assert "memkit/layers/waited_ms" in values
        assert memkit.live_values(offload, offload) == values


def layer_stats(**figures: Any) -> LayerStats:
    counts = {name: 1 for name, kind in LayerStats.__annotations__.items() if kind == "int"}
    unknown = dict.fromkeys(("predicted_s", "actual_s", "predicted_peak_bytes", "actual_peak_bytes"))
    return LayerStats(**{**counts, **unknown, "stall_s": {}, **figures})


def test_values_of_several_models_that_stream_are_sums_but_for_peaks() -> None:
    one = layer_stats(h2d_bytes=2 * GIB, actual_peak_bytes=5 * GIB, actual_s=0.5, stall_s={"0": 0.1, "1": 0.2})
    other = layer_stats(h2d_bytes=3 * GIB, actual_peak_bytes=4 * GIB, actual_s=0.25, stall_s={"0": 0.3})

    values = values_of([one, other])

    assert values["memkit/layers/moved_in_gib"] == 5
    assert values["memkit/layers/num_demand_fetches"] == 2
    assert values["memkit/layers/peak_gib"] == 5  # of the device that they share
    assert values["memkit/layers/step_ms"] == 750
    assert values["memkit/layers/waited_ms"] == pytest.approx(600)
    values = values_of([layer_stats(actual_s=0.5), layer_stats()])  # of those that know them
    assert values["memkit/layers/step_ms"] == 500
    assert "memkit/layers/peak_gib" not in values


def test_states_tell_where_they_are_and_those_of_several_are_added_up() -> None:
    opened = [states_of_a_model() for _ in range(2)]
    one, other = (states.stats() for states in opened)

    values = memkit.live_values(*opened)

    names = {"host": "host", "room": "room", "resident": "resident", "moved_in": "h2d", "moved_out": "d2h"}
    assert values == {
        f"memkit/states/{name}_gib": (getattr(one, f"{field}_bytes") + getattr(other, f"{field}_bytes")) / GIB
        for name, field in names.items()
    }
    assert all(value > 0 for name, value in values.items() if name != "memkit/states/resident_gib")
    for states in opened:
        states.close()


def test_states_on_a_disk_are_told_where_there_are_some(tmp_path: Path) -> None:
    with states_of_a_model(disk=memkit.Disk(tmp_path, limit="1MiB")) as states:
        values, stats = memkit.live_values(states), states.stats()

    found = [values[f"memkit/states/{name}_gib"] * GIB for name in ("disk", "read", "written")]
    assert found == [stats.disk_bytes, stats.disk_read_bytes, stats.disk_written_bytes]
    assert all(value > 0 for value in found)


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"live_values needs tags, or features that have stats\(\); found Linear"):
        memkit.live_values(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='found none under "nobody"'):
        memkit.live_values("nobody")
    with pytest.raises(ValueError, match="stats needs a context with a tag"):
        memkit.live_values(memkit.no_offload())


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
    device, make = ReferenceDevice(), memkit.CPUOffload if kind == "offload" else memkit.Rematerialize
    x, window = leaf_on(device.torch_device), {"window_bytes": 0} if kind == "offload" else {}

    def run(units: list[int]) -> list[str]:
        caplog.clear()
        step(x, units, lambda: make(0.5, "logged", min_bytes=0, device=device, **window))  # type: ignore[arg-type]
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.DEBUG, logger="memkit"):
        known = [text for _ in range(4) for text in run([1] * 6)]  # planned again once it is known what each op takes
        assert not run([1] * 6)
        assert run([1, 1, 2, 1])

    assert any(text.endswith("offload 3.00 KiB of 6.00 KiB, in 6 storages") or "recompute 3.00 KiB" in text for text in known)
