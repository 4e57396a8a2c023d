"""A report as text: golden printouts, views, sentences, the list of what fills the peak, and tables that fit a terminal."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit import profile_memory
from memkit.errors import ReportFormatError
from memkit.profile import MemoryReport
from memkit.profile.table import SORT_KEYS
from tests.models import CASES
from tests.profile.cases import Holding
from tests.profile.traced import LlamaBlock

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
def resnet() -> MemoryReport:
    """The same with an optimizer."""
    with torch.device("meta"):
        model, images = torchvision.models.resnet50(), torch.empty(256, 3, 224, 224)
    return _meta(model, images, optimizer="adamw")


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


@pytest.mark.parametrize("depth", [0, 1, 2, 3, None])
def test_folded_rows_keep_what_is_below_them(resnet50: MemoryReport, depth: int | None) -> None:
    lines = resnet50.to_text(depth=depth, full=True).partition("\n\nmodel inputs")[0].splitlines()
    header, rows = lines[2], lines[4:]
    # Columns are right-aligned under their headers.
    end = header.index("self (MiB)") + len("self (MiB)")

    shown = [float(row[:end].split()[-1]) for row in rows]

    assert sum(shown) == pytest.approx(20974.20, abs=0.01 * len(rows))


def test_identical_siblings_are_one_row_with_their_sum_unless_all_are_asked_for() -> None:
    report = _meta(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(256, 256))

    line = next(line for line in str(report).splitlines() if line.startswith("[0-3] (x4)"))

    assert line.split()[2:6] == ["Linear", "1.00", "1.00", "4"]
    full = report.to_text(full=True).splitlines()[4:10]
    assert [line.split()[0] for line in full] == ["(model)", "0", "1", "2", "3", "(outside"]


def test_rows_that_differ_or_have_names_are_not_put_together() -> None:
    report = _meta(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)), torch.randn(2, 4))
    named = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.Linear(4, 4)))

    assert "[0-1] (x2)" in str(report)
    assert "\n2 " in str(report)
    assert "(x2)" not in str(_meta(named, torch.randn(2, 4)))


def test_different_shapes_are_counted() -> None:
    twice = Holding(lambda self, x: self.linear(x) + self.linear(x[:1]), linear=nn.Linear(4, 4))

    assert "(2, 4) x2 kinds" in str(_meta(twice, torch.randn(2, 4)))


@pytest.mark.parametrize("view", [{"depth": -1}, {"top": -1}, {"top": 1.5}, {"sort_by": "colour"}])
def test_views_that_do_not_exist(resnet50: MemoryReport, view: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        resnet50.to_text(**view)
    with pytest.raises(AttributeError, match=r"MemoryReport\.to_csv was removed in 0\.2; use to_json"):
        resnet50.to_csv()


def test_notebooks_show_a_table(resnet50: MemoryReport) -> None:
    html = resnet50._repr_html_()

    assert html.startswith("<pre>ResNet on meta")
    assert "20974.20 MiB" in html
    Script = type("<script>", (nn.Identity,), {})  # noqa: N806 - a class
    assert "<script>" not in _meta(Script(), torch.zeros(1))._repr_html_()


@pytest.fixture(scope="module")
def llama() -> MemoryReport:
    with torch.device("meta"):
        model, x = nn.Sequential(*(LlamaBlock(1024, 8) for _ in range(12))), torch.empty(8, 1024, 1024)
    return memkit.profile_memory(model, x, optimizer="adamw", print_table=False)


def sentence(report: MemoryReport) -> str:
    (line,) = [line for line in str(report).splitlines() if " at the peak of the step" in line]
    return line


def test_peak_in_words(resnet: MemoryReport) -> None:
    assert sentence(resnet) == (
        "Of 21.0 GiB at the peak of the step (in the backward of layer4.2.relu): activations 20.3, temporaries 0.2, "
        "optimizer states 0.2, inputs 0.1."
    )
    assert "\ngradients: 97.50 MiB\nstates of AdamW: 194.98 MiB\n" in str(resnet)


def test_figures_in_words_add_up(llama: MemoryReport) -> None:
    words = sentence(llama)

    total, *parts = map(float, re.findall(r"\b\d+\.\d\b", words))
    assert "optimizer states" in words
    assert sum(parts) == pytest.approx(total, abs=0.05 * (len(parts) + 1))


def test_small_steps_are_told_in_smaller_units_and_a_forward_alone_says_nothing_of_a_step() -> None:
    small, forward = (
        memkit.profile_memory(nn.Linear(8, 8), torch.ones(2, 8), backward=backward, print_table=False)
        for backward in (True, False)
    )

    assert sentence(small).startswith("Of 0.7 KiB at the peak of the step (in the backward of the model itself): param")
    assert "peak of the step" not in str(forward)
    assert forward.peak_to_text() == (
        "what is alive at the peak of the step is known of a profile with backward=True (--backward)."
    )


def test_list_at_the_peak_is_largest_first_and_complete(llama: MemoryReport) -> None:
    text = llama.peak_to_text(top=None)

    memory = llama.step_memory
    sizes = [float(line.split()[0]) for line in text.splitlines()[4:]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == pytest.approx(memory.peak_bytes / 2**20, abs=0.01 * len(sizes))


def test_layers_that_differ_in_their_number_are_one_line(llama: MemoryReport) -> None:
    lines = llama.peak_to_text().splitlines()

    assert any("[0-11].qkv (x12)" in line and "optimizer state" in line for line in lines)
    full = llama.peak_to_text(full=True, top=None)
    assert "(x12)" not in full
    assert " 11.qkv " in full


def test_list_at_the_peak_folds_modules(llama: MemoryReport) -> None:
    lines = llama.peak_to_text(depth=1, full=True, top=None).splitlines()[4:]

    assert {re.split(r" {2,}", line.strip())[3] for line in lines if "activation" in line} == {*map(str, range(12))}
    assert len(llama.peak_to_text(depth=0, top=None).splitlines()) <= 4 + 8


def test_rest_of_the_list_is_summed(llama: MemoryReport) -> None:
    memory = llama.step_memory

    lines = llama.peak_to_text(top=3).splitlines()

    shown = sum(float(line.split()[0]) for line in lines[4:7])
    rest = re.fullmatch(r"\.\.\. and \d+ more: ([\d.]+) MiB", lines[-1])
    assert shown + float(rest[1]) == pytest.approx(memory.peak_bytes / 2**20, abs=0.05)


@pytest.mark.parametrize("width", [80, 100, 172])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("which", ["resnet", "llama"])
def test_no_line_is_wider_than_the_terminal(which: str, full: bool, width: int, request: pytest.FixtureRequest) -> None:
    report: MemoryReport = request.getfixturevalue(which)

    texts = [report.to_text(width=width, full=full, sort_by=key) for key in (None, *SORT_KEYS)]
    texts.append(report.peak_to_text(width=width, full=full))

    assert max(len(line) for text in texts for line in text.splitlines()) <= width


def test_what_rows_are_sorted_by_never_goes(resnet: MemoryReport) -> None:
    for key, heading in (("calls", "#calls"), ("peak", "peak mem"), ("forward", "forward")):
        assert heading in resnet.to_text(width=60, sort_by=key).partition("---")[0]


def test_largest_is_named_where_it_is_not_shown(resnet: MemoryReport) -> None:
    assert "not shown: 83 rows, with the largest, layer1.[1-2].relu (x2) (self 2352.00 MiB)\n" in resnet.to_text(top=5)
    assert "not shown" not in resnet.to_text(top=5, sort_by="self")


def test_print_of_a_profile_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkit.profile.tracker.terminal_width", lambda: 70)

    memkit.profile_memory(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8))

    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a memkit report: it is not JSON"),
        ('{"schema": "memkit.MemoryReport", "schema_version": 3}', "has schema version 3; this memkit reads versions up to 2"),
        ('{"schema": "memkit.MemoryReport", "schema_version": 1}', "is not a whole memkit report: KeyError: 'tag'"),
        *((changes, "not a whole") for changes in ({"modules": [{}]}, {"saved": [{"category": "dust"}]}, {"run": 3})),
        ({"modules": []}, "not a whole memkit report"),
    ],
)
def test_text_that_is_no_report(text: str | dict[str, object], message: str, report: MemoryReport) -> None:
    damaged = text if isinstance(text, str) else json.dumps({**json.loads(report.to_json()), **text})

    with pytest.raises(ReportFormatError, match=f"^this text .*{message}"):
        MemoryReport.from_json(damaged)


def test_times_and_peaks_of_children_fit_into_their_parents(report: MemoryReport) -> None:
    rows = {row.fqn: row for row in report.modules}
    model, last = rows["(model)"], rows["last"]

    assert 0 < sum(rows[name].forward_s for name in ("first", "block", "last")) <= report.forward_s
    assert report.backward_s == pytest.approx(model.backward_s + rows["(outside modules)"].backward_s)
    assert model.backward_s >= last.backward_s > 0
    assert 0 < rows["block.0"].peak_bytes <= rows["block"].peak_bytes <= model.peak_bytes
    assert 0 < last.backward_peak_bytes <= model.backward_peak_bytes


MIB = 2**20


class Blocks(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


@functools.cache
def of_blocks(*, checkpointed: bool, optimizer: str | None = "adamw") -> MemoryReport:
    with torch.device("meta"):
        model, x = Blocks(checkpointed=checkpointed), torch.empty(4096, 256)
    return memkit.profile_memory(model, x, print_table=False, optimizer=optimizer)


def test_checkpoints_have_helped_and_parts_at_the_peak_add_up() -> None:
    before, after = of_blocks(checkpointed=False), of_blocks(checkpointed=True)

    found = before.compare(after)

    assert found.helped
    assert (found.peak.before, found.peak.after) == (before.step_peak_bytes, after.step_peak_bytes)
    assert found.time is None
    assert str(found).startswith(
        f"It helped: the peak of the step went from {found.peak.before / MIB:.2f} to {found.peak.after / MIB:.2f} MiB, "
        f"{-100 * found.peak.change:.0f} % less.\n"
    )
    rows = {line.rpartition(" (MiB)")[0]: line.rpartition(" (MiB)")[2].split() for line in str(found).splitlines()[4:]}
    assert rows["... optimizer states"][2] == "+0.0"
    assert rows["... activations"][2].startswith("-")
    assert rows["saved activations"][0] == f"{before.activation_bytes / MIB:.2f}"
    parts = [figure for figure in found.figures if figure.name.startswith("... ")]
    assert sum(figure.before or 0 for figure in parts) == found.peak.before
    assert sum(figure.after or 0 for figure in parts) == found.peak.after
    for width in (40, 80):
        assert max(map(len, found.to_text(width=width).splitlines())) <= width


def test_the_same_made_no_difference_and_the_other_way_round_it_did_not_help() -> None:
    before, after = of_blocks(checkpointed=False), of_blocks(checkpointed=True)

    assert str(after.compare(before)).startswith("It did not help: ")
    assert str(before.compare(before)).startswith("It made no difference: the peak of the step went from")
    assert of_blocks(checkpointed=False, optimizer=None).compare(after).peak.name == "peak of the forward"
    with pytest.raises(TypeError, match=r"or with what memkit\.stats returns; found int"):
        before.compare(3)


def test_times_are_compared_where_both_were_taken() -> None:
    model = Blocks(checkpointed=False)
    short = memkit.profile_memory(model, torch.randn(4, 256), backward=True, print_table=False, warmup=0)
    rows = [replace(row, forward_s=2.0, backward_s=4.0 if row.parent is None else None) for row in short.modules]
    fast = [replace(row, forward_s=1.0, backward_s=0.25) for row in short.modules]

    found = replace(short, modules=tuple(rows)).compare(replace(short, modules=tuple(fast)))

    assert found.time.before == 2.0 + 2 * 4.0  # of the model, and outside of it
    assert f"forward and backward take {found.time.after / found.time.before:.2f} times as long" in str(found)


def test_stats_of_memkit_are_taken() -> None:
    device = memkit.device.ReferenceDevice()
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(256, 64)
    before = memkit.profile_memory(model, x, backward=True, print_table=False, device="meta", target="cpu")
    for _ in range(4):
        with memkit.MemoryBudget("1GiB", "compared", device=device, min_bytes=1):
            output = model(x)
        output.sum().backward()
        model.zero_grad()
    stats = replace(memkit.stats("compared"), step_s=0.12, plain_s=0.1)

    found = before.compare(stats)

    assert (found.peak.before, found.peak.after) == (before.step_peak_bytes, stats.step_peak_bytes)
    assert "forward and backward take 1.20 times as long" in str(found)
