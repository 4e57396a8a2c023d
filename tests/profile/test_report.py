"""The table: golden printouts, views, marks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from memkit import profile_memory
from memkit.profile import MemoryReport
from tests.models import CASES

GOLDEN = Path(__file__).parent / "golden"


def _meta(model: nn.Module, *args: torch.Tensor, **options: object) -> MemoryReport:
    return profile_memory(model, *args, device="meta", print_table=False, **options)


def _without_version(text: str) -> str:
    first, _, rest = text.partition("\n")
    return first.partition(", torch ")[0] + "\n" + rest + "\n"


@pytest.fixture(scope="module")
def resnet50() -> MemoryReport:
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    return _meta(model, torch.empty(256, 3, 224, 224, device="meta"), backward=True)


@pytest.fixture(scope="module")
def small() -> MemoryReport:
    case = CASES["checkpoint_non_reentrant"]
    with torch.autocast("cpu", torch.bfloat16):
        return _meta(case.model(), *case.inputs(), backward=True, target="cpu")


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("resnet50_depth2", {"depth": 2}),
        ("resnet50_top10", {"sort_by": "self", "top": 10}),
        ("resnet50_full_depth1", {"depth": 1, "full": True}),
    ],
)
def test_printout_of_resnet50(resnet50: MemoryReport, name: str, view: dict[str, object]) -> None:
    assert _without_version(resnet50.to_text(**view)) == (GOLDEN / f"{name}.txt").read_text()


def test_printout_with_everything_set_aside(small: MemoryReport) -> None:
    assert _without_version(small.to_text(full=True)) == (GOLDEN / "small_full.txt").read_text()


def test_totals_are_the_last_three_lines(resnet50: MemoryReport) -> None:
    assert str(resnet50).splitlines()[-3:] == [
        "parameters in all: 97.49 MiB",
        "activations in all: 20974.20 MiB",
        "forward time in all: -",
    ]


def test_depth_folds_rows(resnet50: MemoryReport) -> None:
    text = resnet50.to_text(depth=1)

    assert "layer1 " in text
    assert "layer1.0" not in text


@pytest.mark.parametrize("depth", [0, 1, 2, 3, None])
def test_folded_rows_keep_what_is_below_them(resnet50: MemoryReport, depth: int | None) -> None:
    lines = resnet50.to_text(depth=depth, full=True).partition("\n\nmodel inputs")[0].splitlines()
    header, rows = lines[2], lines[4:]
    # Columns are right-aligned under their headers.
    end = header.index("self (MiB)") + len("self (MiB)")

    shown = [float(row[:end].split()[-1]) for row in rows]

    assert sum(shown) == pytest.approx(20974.20, abs=0.01 * len(rows))


def test_identical_siblings_are_one_row_with_their_sum() -> None:
    report = _meta(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(256, 256))

    line = next(line for line in str(report).splitlines() if line.startswith("[0-3] (x4)"))

    assert line.split()[2:6] == ["Linear", "1.00", "1.00", "4"]


def test_full_view_lists_each_sibling() -> None:
    report = _meta(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(256, 256))

    assert [line.split()[0] for line in report.to_text(full=True).splitlines()[4:10]] == [
        *("(model)", "0", "1", "2", "3", "(outside")
    ]


def test_rows_that_differ_are_not_put_together() -> None:
    report = _meta(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)), torch.randn(2, 4))

    assert "[0-1] (x2)" in str(report)
    assert "\n2 " in str(report)


def test_named_siblings_are_not_put_together() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    assert "(x2)" not in str(_meta(Named(), torch.randn(2, 4)))


def test_sorting_puts_the_largest_first(resnet50: MemoryReport) -> None:
    lines = resnet50.to_text(sort_by="self", full=True, top=1).splitlines()

    assert lines[4].startswith("layer1.0.relu ")
    assert lines[5] == ""


def test_different_shapes_are_counted() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.linear(x[:1])

    assert "(2, 4) x2 kinds" in str(_meta(Twice(), torch.randn(2, 4)))


@pytest.mark.parametrize("view", [{"depth": -1}, {"top": -1}, {"top": 1.5}, {"sort_by": "colour"}])
def test_views_that_do_not_exist(resnet50: MemoryReport, view: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        resnet50.to_text(**view)


def test_notebooks_show_a_table(resnet50: MemoryReport) -> None:
    html = resnet50._repr_html_()

    assert html.startswith("<pre>ResNet on meta")
    assert "20974.20 MiB" in html


def test_names_are_escaped_in_html() -> None:
    Script = type("<script>", (nn.Identity,), {})  # noqa: N806 - a class

    assert "<script>" not in _meta(Script(), torch.zeros(1))._repr_html_()


def test_what_was_removed_says_what_to_use(resnet50: MemoryReport) -> None:
    with pytest.raises(AttributeError, match=r"MemoryReport\.to_csv was removed in 0\.2; use to_json"):
        resnet50.to_csv()
