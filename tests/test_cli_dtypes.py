"""`memkit profile --dtype` and `--autocast`: which dtypes a run from the command line has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memkit import profile_memory
from memkit.cli import main
from memkit.profile import MemoryReport
from tests.bench.cases import run_command

MODEL = ["profile", "torchvision:squeezenet1_1"]
META = ["--device", "meta", "--target", "cpu"]


def _report(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> MemoryReport:
    path = folder / "report.json"
    status, _, error = run_command(capsys, *MODEL, *arguments, "--json", str(path))
    assert status == 0, error
    return MemoryReport.from_json(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_casts_the_model_and_inputs_without_a_dtype(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")

    meta = _report(capsys, tmp_path, "--input", "2x3x32x32", "--dtype", name, *META)
    real = _report(capsys, tmp_path, "--input", "2x3x32x32", "--dtype", name, "--device", "cpu")

    assert {record.dtype for record in meta.saved if record.category == "input"} == {name}
    assert meta.param_bytes == real.param_bytes == _num_params() * dtype.itemsize
    assert meta.activation_bytes == real.activation_bytes


def _num_params() -> int:
    import torchvision

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in torchvision.models.squeezenet1_1().parameters())


def test_an_input_keeps_a_dtype_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_inputs.py").write_text(
        "from torch import nn\n"
        "class Two(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding = nn.Embedding(10, 4)\n"
        "    def forward(self, tokens, scale):\n"
        "        return self.embedding(tokens) * scale[..., None]\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--input", "2x3:int64", "--input", "2x3:fp32", "--dtype", "bf16", "--device", "meta"]

    status, _, error = run_command(capsys, "profile", "two_inputs:Two", *arguments, "--json", "report.json")

    saved = MemoryReport.from_json(tmp_path / "report.json").saved
    assert status == 0, error
    assert [(record.dtype, record.storage_bytes) for record in saved] == [("int64", 48), ("float32", 24)]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_autocast_runs_as_the_targets_does(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str) -> None:
    import torchvision

    with torch.device("meta"):
        model, x = torchvision.models.squeezenet1_1(), torch.empty(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = profile_memory(model, x, target=target, device="meta", print_table=False)

    found = _report(capsys, tmp_path, "--input", "2x3x32x32", "--autocast", "bf16", "--device", "meta", "--target", target)

    assert found.run.autocast == "bfloat16"
    assert found.param_cast_bytes == expected.param_cast_bytes == 2 * _num_params_of_convolutions(model)
    assert found.activation_bytes == expected.activation_bytes


def _num_params_of_convolutions(model: torch.nn.Module) -> int:
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Conv2d))


def test_autocast_on_the_cpu_is_that_of_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    real = _report(capsys, tmp_path, "--input", "2x3x32x32", "--autocast", "bf16", "--device", "cpu")
    meta = _report(capsys, tmp_path, "--input", "2x3x32x32", "--autocast", "bf16", *META)

    assert real.run.autocast == "bfloat16"
    assert real.activation_bytes == meta.activation_bytes
    assert real.param_cast_bytes == meta.param_cast_bytes > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "argument --dtype: needs one of float32, fp32, f32, float, float64, "),
        (["--dtype", "bf17"], "found 'bf17'"),
        (["--autocast", "fp32"], "argument --autocast: needs one of float16, fp16, f16, half, bfloat16, bf16; found 'fp32'"),
    ],
)
def test_dtypes_that_do_not_fit_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main.main([*MODEL, "--input", "2x3x32x32", *arguments])

    assert raised.value.code == 2
    assert message in capsys.readouterr().err
