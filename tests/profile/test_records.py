"""Reports as values: JSON, totals."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from memkit import profile_memory
from memkit.errors import ReportFormatError
from memkit.profile import MemoryReport
from tests.models import CASES


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    case = CASES["checkpoint_reentrant"]
    return profile_memory(case.model(), *case.inputs(), backward=True, tag="tagged", print_table=False)


def test_json_and_its_file_bring_back_the_same_report(report: MemoryReport, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    bare = profile_memory(nn.Identity(), torch.zeros(()), device="meta", print_table=False)  # without times or shapes

    assert MemoryReport.from_json(report.to_json()) == MemoryReport.from_json(path) == report
    assert MemoryReport.from_json(bare.to_json()) == bare


@pytest.mark.parametrize("how", [copy.deepcopy, lambda report: pickle.loads(pickle.dumps(report))])
def test_reports_can_be_copied(report: MemoryReport, how: object) -> None:
    assert how(report) == report


def _changed(report: MemoryReport, **changes: object) -> str:
    return json.dumps({**json.loads(report.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a memkit report: it is not JSON"),
        ('{"schema": "memkit.MemoryReport", "schema_version": 3}', "has schema version 3; this memkit reads versions up to 2"),
        ('{"schema": "memkit.MemoryReport", "schema_version": 1}', "is not a whole memkit report: KeyError: 'tag'"),
    ],
)
def test_text_that_is_no_report(text: str, message: str) -> None:
    with pytest.raises(ReportFormatError) as raised:
        MemoryReport.from_json(text)

    assert message in str(raised.value)
    assert str(raised.value).startswith("this text")


@pytest.mark.parametrize("changes", [{"modules": []}, {"modules": [{}]}, {"saved": [{"category": "dust"}]}, {"run": 3}])
def test_damaged_report(report: MemoryReport, changes: dict[str, object]) -> None:
    with pytest.raises(ReportFormatError, match="not a whole memkit report"):
        MemoryReport.from_json(_changed(report, **changes))


def test_times_of_children_fit_into_their_parent(report: MemoryReport) -> None:
    rows = {row.fqn: row for row in report.modules}
    children = sum(rows[name].forward_s for name in ("first", "block", "last"))

    assert 0 < children <= report.forward_s


def test_backward_times_add_up(report: MemoryReport) -> None:
    rows = {row.fqn: row for row in report.modules}

    assert report.backward_s == pytest.approx(rows["(model)"].backward_s + rows["(outside modules)"].backward_s)
    assert rows["(model)"].backward_s >= rows["last"].backward_s > 0


def test_peaks_of_children_fit_into_their_parent(report: MemoryReport) -> None:
    rows = {row.fqn: row for row in report.modules}

    assert 0 < rows["block.0"].peak_bytes <= rows["block"].peak_bytes <= rows["(model)"].peak_bytes
    assert 0 < rows["last"].backward_peak_bytes <= rows["(model)"].backward_peak_bytes
