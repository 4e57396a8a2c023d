"""Values for loggers and progress bars: what features predicted and did."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memkit
from memkit.device import ReferenceDevice

GIB = 2**30


def model_of_layers() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])


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


def test_what_is_not_known_is_left_out() -> None:
    budget = memkit.MemoryBudget("1GiB", "young", device=ReferenceDevice())
    with budget:
        model_of_layers()(torch.randn(4, 64)).sum().backward()

    values = memkit.live_values("young")

    assert "memkit/young/predicted_peak_gib" not in values
    assert values["memkit/young/budget_gib"] == 1.0


def test_offload_tells_what_moved() -> None:
    model, device = model_of_layers(), ReferenceDevice()
    with memkit.CPUOffload(1.0, "moved", device=device, min_bytes=1024):
        loss = model(torch.randn(256, 64)).sum()
    loss.backward()

    values = memkit.live_values("moved")

    assert values["memkit/moved/moved_gib"] * GIB == memkit.stats("moved").moved_out_bytes > 0
    assert "memkit/moved/recomputed_gib" not in values


def test_rematerialize_tells_what_is_made_again() -> None:
    model = model_of_layers()
    for _ in range(3):
        with memkit.Rematerialize(0.5, "again", min_bytes=1024):
            loss = model(torch.randn(256, 64)).sum()
        loss.backward()

    values = memkit.live_values("again")

    assert values["memkit/again/recomputed_gib"] * GIB == memkit.stats("again").dropped_bytes > 0
    assert "memkit/again/moved_gib" not in values


def test_layers_tell_what_streams() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]).requires_grad_(False)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=ReferenceDevice()) as offload:
        model(torch.randn(4, 64))

        values = memkit.live_values(offload)

        assert values["memkit/layers/moved_in_gib"] * GIB == offload.stats().h2d_bytes > 0
        assert "memkit/layers/waited_ms" in values


def test_values_are_plain_and_flat() -> None:
    model, device = model_of_layers(), ReferenceDevice()
    for tag in ("one", "other"):
        with memkit.CPUOffload(1.0, tag, device=device, min_bytes=1024):
            model(torch.randn(256, 64)).sum().backward()

    values = memkit.live_values("one", "other")

    assert {name.split("/")[1] for name in values} == {"one", "other"}
    assert all(type(value) in (int, float) for value in values.values())


def test_unknown_tag_is_refused() -> None:
    with pytest.raises(ValueError, match='found none under "nobody"'):
        memkit.live_values("nobody")


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"live_values needs tags, or features that have stats\(\); found Linear"):
        memkit.live_values(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stats needs a context with a tag"):
        memkit.live_values(memkit.no_offload())


def test_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = model_of_layers(), ReferenceDevice()
    with memkit.MemoryBudget(0.8, "soon", device=device, min_bytes=1024):
        model(torch.randn(256, 64)).sum().backward()

    def wait(*_: object) -> None:
        raise AssertionError("waited")

    monkeypatch.setattr(ReferenceDevice, "synchronize", wait)

    assert memkit.live_values("soon")
