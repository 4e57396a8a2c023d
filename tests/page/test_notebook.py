"""A report in a notebook: light, without scripts, and nothing of the user's is taken for HTML."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import memkit
from memkit.sizes import format_gib
from tests.page.reports import EVIL, report_of_blocks, report_of_evil
from tests.page.test_document import parts_of
from tests.page.test_timeline import memory_of_ops

_SVG = "{http://www.w3.org/2000/svg}"


def pictures_of(html: str) -> list[ElementTree.Element]:
    """Return the pictures, which must be well-formed."""
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def test_shows_the_timeline_the_boxes_and_the_table() -> None:
    report = report_of_blocks()
    assert report.step_memory is not None

    html = report._repr_html_()

    line, boxes = pictures_of(html)
    assert f"peak {format_gib(report.step_memory.peak_bytes)}" in "".join(line.itertext())
    assert {"activations", "gradients", "optimizer states"} <= {title.text for title in line.iter(f"{_SVG}title")}
    titles = [title.text or "" for title in boxes.iter(f"{_SVG}title")]
    assert titles[0].startswith("(model) (Sequential): ")
    assert any(title.startswith("1.0.act (GELU): ") for title in titles)
    assert "<table>" in html


def test_areas_are_as_high_as_what_is_there() -> None:
    report = report_of_blocks()
    memory = report.step_memory
    assert memory is not None

    line = pictures_of(report._repr_html_())[0]

    heights = [float(point.split(",")[1]) for area in line.iter(f"{_SVG}polygon") for point in area.get("points", "").split()]
    low, high = max(heights), min(heights)
    top = [float(point.split(",")[1]) for point in list(line.iter(f"{_SVG}polygon"))[-1].get("points", "").split()]
    assert min(top) == high
    assert (low - float(top[0])) / (low - high) == pytest.approx(memory.total_bytes[0] / memory.peak_bytes, abs=0.01)


def test_needs_no_scripts_and_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)

    tags = {tag for tag, _ in parts_of(report_of_blocks()._repr_html_()).tags}

    assert not tags & {"script", "style", "link", "iframe", "img", "object"}


def test_names_of_users_are_texts() -> None:
    evil = report_of_evil()

    html = evil._repr_html_()

    assert not {tag for tag, _ in parts_of(html).tags} & {"script", "img"}
    titles = [title.text or "" for title in pictures_of(html)[1].iter(f"{_SVG}title")]
    assert all(any(title.startswith(f"{name.replace('.', '_')} ({name})") for title in titles) for name in EVIL)


@pytest.mark.full
def test_stays_light_for_large_models() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(200)])
        x = torch.empty(64, 8)
    report = memkit.profile_memory(model, x, device="meta", print_table=False)
    report = replace(report, step_memory=memory_of_ops(50_000))

    assert len(report._repr_html_()) < 400_000


def test_report_of_a_forward_has_boxes_and_the_table() -> None:
    report = memkit.profile_memory(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.zeros(4, 8), print_table=False)

    html = report._repr_html_()

    assert len(pictures_of(html)) == 1
    assert "<table>" in html


def test_model_that_keeps_nothing_has_the_table() -> None:
    report = memkit.profile_memory(nn.Identity(), torch.zeros(1), print_table=False)

    assert "<table>" in report._repr_html_()
    assert pictures_of(report._repr_html_()) == []
