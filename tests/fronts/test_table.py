"""The table of `memkit plan`, letter by letter, and the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memkit.fronts import CheckpointedBlocks, Front, FrontRow, LargestBatch
from memkit.fronts.picture import draw
from memkit.fronts.table import to_text

MIB = 2**20
FRONT = Front(
    model="ResNet",
    inputs="float32[256, 3, 224, 224]",
    gpu="H200",
    is_measured=True,
    optimizer=None,
    plain_s=0.1149,
    plain_peak_bytes=21274 * MIB,
    least_bytes=3980 * MIB,
    least_module="layer1.0.conv3",
    least_op="aten.convolution_backward.default",
    rows=(
        FrontRow(
            budget_bytes=21274 * MIB,
            peak_bytes=21274 * MIB,
            step_s=0.1149,
            bound_s=0.1149,
            num_kept=105,
            offload_s=0.1149,
            recompute_s=0.1149,
            checkpoint=CheckpointedBlocks(num_blocks=0, peak_bytes=21274 * MIB, step_s=0.1149),
        ),
        FrontRow(
            budget_bytes=10509 * MIB,
            peak_bytes=10480 * MIB,
            step_s=0.1219,
            bound_s=0.1213,
            replayed_s=7.0e-3,
            moved_bytes=1862 * MIB,
            num_kept=40,
            num_moved=15,
            num_again=50,
            offload_s=0.4263,
            recompute_s=0.1253,
            checkpoint=CheckpointedBlocks(num_blocks=12, peak_bytes=10400 * MIB, step_s=0.1402),
        ),
        FrontRow(budget_bytes=3980 * MIB, peak_bytes=3980 * MIB, step_s=0.7, replayed_s=0.01, moved_bytes=9 * 2**30),
        FrontRow(budget_bytes=2**30),
    ),
)

TEXT = """\
ResNet, float32[256, 3, 224, 224], on H200 (predicted)

budget  peak  step     / bound again moved kept/moved/  off- recom- check-
   GiB   GiB    ms plain    >=    ms   GiB       again  load   pute  point
------ ----- ----- ----- ----- ----- ----- ----------- ----- ------ ------
 20.78 20.78 114.9 1.000 1.000   0.0  0.00     105/0/0 1.000  1.000  1.000
 10.26 10.23 121.9 1.061 1.056   7.0  1.82    40/15/50 3.710  1.091  1.220
  3.89  3.89 700.0 6.092     -  10.0  9.00       0/0/0     -      -      -
  1.00     -     -     -     -     -     -           -     -      -      -

plain peak: 20.78 GiB, step 114.9 ms
least budget: 3.89 GiB (set by layer1.0.conv3, convolution_backward)"""


def test_the_whole_table() -> None:
    assert to_text(FRONT) == TEXT


def test_what_was_not_measured_is_marked_and_states_are_named() -> None:
    text = to_text(replace(FRONT, is_measured=False, optimizer="adamw", gpu="RTX 4090"))

    assert text.startswith(
        "ResNet, float32[256, 3, 224, 224], with the states of adamw, on RTX 4090\n(predicted; not measured)\n\n"
    )


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({}, "the largest batch that fits in 12.00 GiB: plain 140, planned 777"),
        ({"is_planned_found": False}, "the largest batch that fits in 12.00 GiB: plain 140, planned 777 or more"),
    ],
)
def test_the_largest_batch_is_below(found: dict[str, bool], line: str) -> None:
    batch = LargestBatch(budget_bytes=12 * 2**30, num_plain=140, num_planned=777, **found)

    assert to_text(replace(FRONT, batch=batch)).splitlines()[-1] == line


def test_small_models_are_in_mib_and_lines_fit_80_columns() -> None:
    rows = tuple(
        replace(row, budget_bytes=row.budget_bytes // 400, num_kept=1234, num_moved=1234, num_again=1234) for row in FRONT.rows
    )
    small = to_text(replace(FRONT, plain_peak_bytes=FRONT.plain_peak_bytes // 400, rows=rows, inputs="a" * 70))

    assert "MiB" in small.splitlines()[4]
    assert max(map(len, to_text(FRONT).splitlines())) <= 80
    assert max(map(len, small.splitlines()[:2])) <= 80


@pytest.mark.parametrize("width", [80, 72, 60, 40])
def test_narrow_terminals_have_fewer_columns_and_every_budget(width: int) -> None:
    long = replace(FRONT, plain_peak_bytes=2**20 * 2**30, plain_s=4.0, notes=("only the backend knows " * 5,))

    for front in (FRONT, replace(long, batch=LargestBatch(budget_bytes=2**40, num_plain=10**6, num_planned=10**7))):
        text = to_text(front, width=width)

        assert max(map(len, text.splitlines())) <= width
        assert {line.split()[0] for line in text.splitlines() if line.split()} >= {"20.78", "10.26", "3.89", "1.00"}
    assert ("moved" in to_text(FRONT, width=width)) == (width > 40)


def test_json_has_all_figures_and_the_plans() -> None:
    content = json.loads(FRONT.to_json({7: {"schema": "a plan"}}))

    assert content["schema"] == "memkit.Front"
    assert content["rows"][1]["checkpoint"] == {"num_blocks": 12, "peak_bytes": 10400 * MIB, "step_s": 0.1402}
    assert content["plans"] == {"7": {"schema": "a plan"}}


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"front.{suffix}"

    draw(FRONT, path)

    assert path.stat().st_size > 1000
