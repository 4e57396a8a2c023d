"""`--html` on the command line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from memkit.cli.main import main
from tests.page.test_document import data_of

MODEL = ["tests.page.test_command:small_model", "--input", "4096x64"]


def small_model() -> object:
    from torch import nn

    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)])


def test_profile_draws_the_whole_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "step.html"

    assert main(["profile", *MODEL, "--device", "meta", "--html", str(page)]) == 0

    data = data_of(page.read_text(encoding="utf-8"))
    assert [phase["name"] for phase in data["timeline"]["phases"]] == ["forward", "loss", "backward"]
    assert data["plans"] is None
    assert "(model)" in capsys.readouterr().out


def test_profile_on_a_device_draws_what_was_measured(tmp_path: Path) -> None:
    page = tmp_path / "step.html"

    assert main(["profile", *MODEL, "--device", "cpu", "--html", str(page)]) == 0

    data = data_of(page.read_text(encoding="utf-8"))
    assert data["timeline"]["num_moments"] > 10
    assert any(row[8] for row in data["rows"])  # seconds of forwards


def test_plan_draws_each_budget_and_the_optimizer(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"

    assert main(["plan", *MODEL, "--gpu", "RTX 3090", "--optimizer", "adamw", "--steps", "3", "--html", str(page)]) == 0

    data = data_of(page.read_text(encoding="utf-8"))
    assert len(data["plans"]["rows"]) == 3
    assert "optimizer state" in {series["key"] for series in data["timeline"]["series"]}
    highest = max(sum(values) for values in zip(*(series["y"] for series in data["timeline"]["series"]), strict=True))
    assert highest == pytest.approx(data["plans"]["plain_peak_bytes"], rel=0.01)


@pytest.mark.parametrize("command", [["profile", *MODEL], ["plan", *MODEL, "--gpu", "RTX 3090"]], ids=["profile", "plan"])
def test_missing_plotly_is_told_before_anything_runs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "plotly" else found(name, *more))

    assert main([*command, "--html", str(tmp_path / "step.html")]) != 0

    error = capsys.readouterr().err
    assert 'error: --html needs plotly; install it with pip install "plotly>=5"' in error
    assert not (tmp_path / "step.html").exists()


def test_file_that_cannot_be_written_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *MODEL, "--device", "meta", "--html", str(tmp_path / "missing" / "step.html")]) != 0

    assert "No such file or directory" in capsys.readouterr().err
