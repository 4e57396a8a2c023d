"""The questions of a beginner, each answered by one command; and that what is printed fits the terminal."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

import memkit
from memkit.cli import commands
from memkit.profile import MemoryReport
from tests.bench.cases import assert_fails, run_command

SPEC = ["torchvision:resnet18", "--input", "64x3x224x224", "--device", "meta"]
SMALL = ["torchvision:resnet18", "--input", "8x3x64x64", "--device", "meta"]


@pytest.fixture
def reports(tmp_path: Path) -> tuple[Path, Path]:
    """A report of a batch of 8, and one of a batch of 4."""
    paths = tmp_path / "before.json", tmp_path / "after.json"
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    for path, batch in zip(paths, (4096, 1024), strict=True):
        x = torch.empty(batch, 256, device="meta")
        path.write_text(memkit.profile_memory(model, x, backward=True, trace=True, print_table=False).to_json())
    return paths


# The six questions (the sixth, of a line for a Trainer, is one of the integrations)


def test_does_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(capsys, "profile", *SPEC, "--optimizer", "adamw", "--fit", "12GiB")

    assert status == 0
    assert re.search(
        r"^Of 1\.5 GiB at the peak of the step .*This fits in 12 GiB as it is, with 10\.5 GiB to spare\.$", out, re.M
    )


def test_what_fills_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(capsys, "profile", *SPEC, "--peak")

    lines = out.splitlines()
    assert status == 0
    assert lines[0].startswith("alive at the peak of the step, in the backward of layer4.1.conv2 (convolution_backward): ")
    assert lines[2].split() == ["size", "(MiB)", "share", "(%)", "category", "module", "storages", "largest"]
    assert lines[4].split()[2:5] == ["activation", "bn1", "3"]
    assert lines[-1].startswith("Of 1.4 GiB at the peak of the step")


def test_did_it_help(capsys: pytest.CaptureFixture[str], reports: tuple[Path, Path]) -> None:
    status, out, _ = run_command(capsys, "show", *map(str, reports))

    assert status == 0
    assert re.match(r"It helped: the peak of the step went from [\d.]+ to [\d.]+ MiB, \d\d % less\.\n", out)
    assert "... activations (MiB)" in out


# Output


def test_json_to_standard_output_is_all_that_goes_there(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(capsys, "profile", *SMALL, "--json", "-")

    assert status == 0
    assert MemoryReport.from_json(out).tag == "torchvision:resnet18"


def test_plan_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    spec = ["torchvision:resnet18", "--input", "8x3x64x64", "--gpu", "H200", "--budget", "1.0"]

    status, out, _ = run_command(capsys, "plan", *spec, "--json", "-")

    assert status == 0
    assert json.loads(out)["schema"] == "memkit.Front"


@pytest.mark.parametrize("how", [[], ["--peak"], ["--full"], ["after"]], ids=str)
def test_shown_reports_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], how: list[str], reports: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "terminal_width", lambda: 80)

    status, out, _ = run_command(capsys, "show", str(reports[0]), *[str(reports[1]) if it == "after" else it for it in how])

    assert status == 0
    assert max(map(len, out.splitlines())) <= 80


def test_show_converts_and_fits_a_report(capsys: pytest.CaptureFixture[str], reports: tuple[Path, Path]) -> None:
    as_json, fitted = (run_command(capsys, "show", str(reports[0]), *how) for how in (["--json", "-"], ["--fit", "1GiB"]))

    assert MemoryReport.from_json(as_json[1]) == MemoryReport.from_json(reports[0])
    assert fitted[0] == 0
    assert "This fits in 1 GiB as it is" in fitted[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", *SMALL, "--fit", "12"], 'reads as 12 bytes or as 12 GiB. Write "12B" or "12GiB"'),
        (["profile", *SMALL, "--gpu", "RTX 3060", "--fit", "12GiB"], "--fit: the RTX 3060 has 11.6 GiB that can be allocated"),
        (["profile", *SMALL, "--gpu", "RTX 4080"], "--gpu: memkit knows H200"),
        (
            ["profile", *SMALL, "--optimizer", "adamw8bit"],
            "found 'adamw8bit'. Any other optimizer, such as one of another library, can be counted in Python: "
            "memkit.profile_memory(model, x, optimizer=instance), made on the model's parameters",
        ),
        (["profile", *SMALL, "--input", "3x=2"], "needs the name of an argument ahead of ="),
        (["show", "nothing.json", "--fit", "x"], "needs shares above 0 and up to 1, or bytes"),
        (["bench", "machine", "--device", "card"], "--device: "),
    ],
)
def test_usage_errors_are_status_two(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert_fails(capsys, arguments, message)


def test_report_without_a_trace_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = memkit.profile_memory(torch.nn.Linear(2, 2), torch.ones(1, 2), print_table=False)
    path.write_text(report.to_json())

    assert_fails(capsys, ["show", str(path), "--fit", "1GiB"], "--fit: a plan needs a report with a trace")
    assert_fails(capsys, ["show", str(path), str(path), "--peak"], "two reports are compared: leave out")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(
        capsys, "profile", "torchvision:resnet18", "--input", "2x4x8x8", "--device", "meta", "--debug"
    )

    assert (status, out) == (1, "")
    assert "Traceback (most recent call last):" in err
    assert "torchvision/models/resnet.py" in err
    assert err.splitlines()[-1].startswith("memkit: error: RuntimeError: ")


def test_warnings_are_shown_once_and_as_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "warning_models.py").write_text(
        "import warnings\nfrom torch import nn\n"
        "class Model(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        warnings.warn('use\\nanother')\n"
        "        warnings.warn('for developers', DeprecationWarning)\n"
        "        return super().forward(x)\n"
        "def model():\n    return Model(2, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "warnoptions", [])

    _, _, err = run_command(capsys, "profile", "warning_models:model", "--input", "2x2", "--device", "cpu", "--backward")

    assert err == "memkit: warning: use another\n"
    with pytest.warns(UserWarning, match="after"):
        warnings.warn("after", stacklevel=1)


def test_language_model_by_its_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    inputs = [part for name in ("input_ids", "labels", "attention_mask") for part in ("--input", f"{name}=4x32")]

    status, out, err = run_command(
        capsys, "profile", f"hf:{tmp_path}", *inputs, "--device", "meta", "--optimizer", "adamw", "--fit", "1GiB"
    )

    assert status == 0
    assert [line for line in err.splitlines() if not line.endswith(" ...")] == []  # on a slow machine it says what goes on
    assert out.startswith("LlamaForCausalLM on meta")
    assert "states of AdamW: " in out
    assert "This fits in 1 GiB as it is" in out
