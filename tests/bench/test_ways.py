"""The picture of all ways to save memory, and the page that it is drawn from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench.cases import bench_module

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "budget_h200_2026-11.md"
PICTURE = ROOT / "docs" / "pictures" / "ways_resnet50.svg"

draw_ways = bench_module("draw_ways")


def _drawn(picture: str) -> set[str]:
    return set(re.findall(r'<g id="([^"]+ of plain)">', picture))


def test_picture_shows_what_the_page_tells() -> None:
    names = {draw_ways.name_of(point) for point in draw_ways.points_in(PAGE.read_text())}

    assert len(names) > 15
    assert _drawn(PICTURE.read_text()) == names, "the page has changed: draw the picture again with draw_ways.py"


def test_every_way_is_in_the_picture() -> None:
    ways = {point.way for point in draw_ways.points_in(PAGE.read_text())}

    assert ways == {"plain PyTorch", *draw_ways.WAYS}


def test_picture_follows_its_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = PAGE.read_text().replace("| 17419 |", "| 17000 |")
    assert page != PAGE.read_text()

    draw_ways.draw(draw_ways.points_in(page), tmp_path / "ways.svg")

    assert {name for name in _drawn((tmp_path / "ways.svg").read_text()) if "17000" in name}
    assert not {name for name in _drawn(PICTURE.read_text()) if "17000" in name}


def test_figures_in_the_text_are_those_of_the_picture() -> None:
    text = " ".join((ROOT / "docs" / "start-here.md").read_text().split())
    points = [point for point in draw_ways.points_in(PAGE.read_text()) if point.way == draw_ways.BUDGET]
    plain = next(point for point in draw_ways.points_in(PAGE.read_text()) if point.way == "plain PyTorch")

    assert f"from {plain.peak_mib / 1024:.1f} GiB to" in text
    said = {(float(gib), float(percent)) for gib, percent in re.findall(r"to ([\d.]+) GiB for ([\d.]+) %", text)}
    known = {(round(point.peak_mib / 1024, 1), round(100 * (point.over_plain - 1), 1)) for point in points}
    assert len(said & known) == 2
