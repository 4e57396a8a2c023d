"""What a report says in sentences, the list of what fills the peak, and tables that fit a terminal."""

from __future__ import annotations

import re

import pytest
import torch
import torchvision
from torch import nn

import memkit
from memkit.profile import MemoryReport
from memkit.profile.table import SORT_KEYS
from tests.profile.traced import LlamaBlock


@pytest.fixture(scope="module")
def resnet() -> MemoryReport:
    with torch.device("meta"):
        model, images = torchvision.models.resnet50(), torch.empty(256, 3, 224, 224)
    return memkit.profile_memory(model, images, optimizer="adamw", print_table=False)


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


def test_figures_in_words_add_up(llama: MemoryReport) -> None:
    words = sentence(llama)

    total, *parts = map(float, re.findall(r"\b\d+\.\d\b", words))
    assert "optimizer states" in words
    assert sum(parts) == pytest.approx(total, abs=0.05 * (len(parts) + 1))


def test_small_steps_are_told_in_smaller_units() -> None:
    report = memkit.profile_memory(nn.Linear(8, 8), torch.ones(2, 8), backward=True, print_table=False)

    assert sentence(report).startswith("Of 0.7 KiB at the peak of the step (in the backward of the model itself): param")


def test_forward_alone_says_nothing_of_a_step() -> None:
    report = memkit.profile_memory(nn.Linear(8, 8), torch.ones(2, 8), print_table=False)

    assert "peak of the step" not in str(report)
    assert report.peak_to_text() == (
        "what is alive at the peak of the step is known of a profile with backward=True (--backward)."
    )


def test_totals_stay_the_last_three_lines(resnet: MemoryReport) -> None:
    assert [line.partition(":")[0] for line in str(resnet).splitlines()[-3:]] == [
        *("parameters in all", "activations in all", "forward time in all")
    ]


def test_gradients_and_states_have_lines(resnet: MemoryReport) -> None:
    assert "\ngradients: 97.50 MiB\nstates of AdamW: 194.98 MiB\n" in str(resnet)


def test_list_at_the_peak_is_largest_first_and_complete(llama: MemoryReport) -> None:
    text = llama.peak_to_text(top=None)

    memory = llama.step_memory
    assert memory is not None
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
    assert memory is not None

    lines = llama.peak_to_text(top=3).splitlines()

    shown = sum(float(line.split()[0]) for line in lines[4:7])
    rest = re.fullmatch(r"\.\.\. and \d+ more: ([\d.]+) MiB", lines[-1])
    assert rest is not None
    assert shown + float(rest[1]) == pytest.approx(memory.peak_bytes / 2**20, abs=0.05)


@pytest.mark.parametrize("width", [80, 100, 172])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("which", ["resnet", "llama"])
def test_no_line_is_wider_than_the_terminal(which: str, full: bool, width: int, request: pytest.FixtureRequest) -> None:
    report: MemoryReport = request.getfixturevalue(which)

    texts = [report.to_text(width=width, full=full, sort_by=key) for key in (None, *SORT_KEYS)]
    texts.append(report.peak_to_text(width=width, full=full))

    assert max(len(line) for text in texts for line in text.splitlines()) <= width


def test_narrow_tables_keep_the_figures(resnet: MemoryReport) -> None:
    text = resnet.to_text(width=80, depth=1)

    assert ["layer1", "0.82", "8036.01", "1", "7840.01"] in [line.split() for line in text.splitlines()]
    assert "shape" not in text
    assert "Sequential" not in text


def test_what_rows_are_sorted_by_never_goes(resnet: MemoryReport) -> None:
    for key, heading in (("calls", "#calls"), ("peak", "peak mem"), ("forward", "forward")):
        assert heading in resnet.to_text(width=60, sort_by=key).partition("---")[0]


def test_wide_terminals_have_whole_headings(resnet: MemoryReport) -> None:
    heading = resnet.to_text(width=172, depth=1).splitlines()[2]

    assert heading.split("  ")[0] == "module name"
    assert "parameter size (MiB)    activation size (MiB)    #calls  input shape" in heading
    assert "forward time" not in heading  # nothing is in it


def test_largest_is_named_where_it_is_not_shown(resnet: MemoryReport) -> None:
    assert "not shown: 83 rows, with the largest, layer1.[1-2].relu (x2) (self 2352.00 MiB)\n" in resnet.to_text(top=5)
    assert "not shown" not in resnet.to_text(top=5, sort_by="self")


def test_print_of_a_profile_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkit.profile.tracker.terminal_width", lambda: 70)

    memkit.profile_memory(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8))

    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70
