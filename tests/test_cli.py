"""The `memkit` command: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torchvision

import memkit
from memkit import __version__, profile_memory
from memkit.cli import arguments, commands, main, progress, specs
from memkit.profile import MemoryReport
from memkit.profile.simulate import TARGETS
from memkit.profile.table import SORT_KEYS
from tests.bench.cases import assert_fails, run_command

PLAN = ["plan", "torch.nn:ReLU", "--input", "2", "--gpu", "H200", "--budget"]
RESNET = ["profile", "torchvision:resnet18", "--input", "2x3x64x64", "--device", "meta"]


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing counts as long, however busy the machine is."""
    monkeypatch.setattr(progress._Progress, "PATIENCE_S", math.inf)


def test_resnet50_figures(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(capsys, "profile", "torchvision:resnet50", "--input", "256x3x224x224", "--device", "meta")

    assert status == 0
    assert out.splitlines()[-3:] == [
        "parameters in all: 97.49 MiB",
        "activations in all: 20974.20 MiB",
        "forward time in all: -",
    ]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(capsys, "--version")[:2] == (0, f"memkit {__version__}, torch {metadata.version('torch')}\n")


def test_cpu_run_takes_time(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(
        capsys, "profile", "torchvision:resnet18", "--input", "2x3x32x32", "--device", "cpu", "--backward"
    )

    assert status == 0
    assert "train mode, forward and backward" in out
    assert out.splitlines()[-1].endswith(" ms")


def _in_a_folder(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> None:
    """Go where a module is."""
    path.write_text(text)
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])


_ZOO = """
from torch import nn
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
    def forward(self, tokens, mask):
        return self.embedding(tokens) * mask[..., None]
class Zoo:
    two_inputs = staticmethod(lambda: Two())
ready = nn.Linear(4, 4)
"""


def test_model_from_the_current_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_a_folder(monkeypatch, tmp_path / "my_models.py", _ZOO)
    inputs = ["--input", "2x3:int64", "--input", "2x3:bool", "--device", "cpu"]

    status, out, _ = run_command(capsys, "profile", "my_models:Zoo.two_inputs", *inputs)
    ready_status, ready_out, _ = run_command(capsys, "profile", "my_models:ready", "--input", "2x4", "--device", "meta")

    assert status == ready_status == 0
    assert out.startswith("Two on cpu")
    assert "(2, 3), (2, 3)" in out
    assert ready_out.startswith("Linear on meta")


def test_target_and_view_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_command(capsys, *RESNET, "--target", "cpu", "--full", "--sort", "self", "--top", "1")

    assert "as cpu would run it" in out
    assert "self share (%)" in out
    assert len(out.partition("\n\nmodel inputs")[0].splitlines()) == 5


SQUEEZENET = ["profile", "torchvision:squeezenet1_1", "--input", "2x3x32x32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtype_casts_the_model_and_inputs_without_a_dtype(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    def report_on(*device: str) -> MemoryReport:
        return MemoryReport.from_json(run_command(capsys, *SQUEEZENET, "--dtype", dtype, *device, "--json", "-")[1])

    meta, real = report_on("--device", "meta", "--target", "cpu"), report_on("--device", "cpu")

    assert {record.dtype for record in meta.saved if record.category == "input"} == {dtype}
    num_params = sum(parameter.numel() for parameter in torchvision.models.squeezenet1_1().parameters())
    assert meta.param_bytes == real.param_bytes == num_params * getattr(torch, dtype).itemsize
    assert meta.activation_bytes == real.activation_bytes


@pytest.mark.parametrize("device", [["cpu"], ["meta", "--target", "cpu"], ["meta", "--target", "cuda"]], ids=str)
def test_autocast_runs_as_the_targets_does(capsys: pytest.CaptureFixture[str], device: list[str]) -> None:
    model, x = torchvision.models.squeezenet1_1(), torch.empty(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = profile_memory(model, x, target=device[-1], device="meta", print_table=False)

    out = run_command(capsys, *SQUEEZENET, "--autocast", "bf16", "--device", *device, "--json", "-")[1]

    found = MemoryReport.from_json(out)
    assert found.run.autocast == "bfloat16"
    assert found.param_cast_bytes == expected.param_cast_bytes > 0
    assert found.activation_bytes == expected.activation_bytes


def test_files_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    json_path = tmp_path / "report.json"

    status, out, _ = run_command(capsys, *RESNET, "--json", str(json_path))
    shown = run_command(capsys, "show", str(json_path))

    assert status == 0
    assert MemoryReport.from_json(json_path).tag == "torchvision:resnet18"
    assert shown == (0, out, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["profile", "resnet50", "--input", "2x3"],
            "SPEC must be torchvision:NAME, timm:NAME, hf:CONFIG.json or package.module:factory",
        ),
        (["profile", "torchvision:", "--input", "2x3"], "SPEC must be"),
        (["profile", "torchvision:resnet51", "--input", "2x3"], "torchvision.models has no model 'resnet51'"),
        (["profile", "torchvision:nothing.resnet", "--input", "2"], "there is no module 'torchvision.models.nothing'"),
        (["profile", "torchvision:ResNet", "--input", "2x3"], "torchvision.models has no model 'ResNet'"),
        (["profile", "no_such_package:model", "--input", "2x3"], "there is no module 'no_such_package'"),
        (["profile", "torch.nn:Nothing", "--input", "2x3"], "torch.nn has no 'Nothing'"),
        (["profile", "math:pi", "--input", "2x3"], "math:pi is float; it must be"),
        (["profile", "builtins:dict", "--input", "2x3"], "builtins:dict gives dict, not a torch.nn.Module"),
        (["profile", "torch.nn:ReLU", "--input", "2xx3"], "found '2xx3'"),
        (["profile", "torch.nn:ReLU", "--input", "2x-3"], "found '2x-3'"),
        (["profile", "torch.nn:ReLU", "--input", "2x3:f31"], "knows no dtype 'f31'; it knows float32"),
        (["profile", "torch.nn:ReLU", "--input", "2x3:"], "knows no dtype ''"),
        (["profile", "torch.nn:ReLU"], "required: --input (see `memkit profile --help`)"),
        (["profile", "torch.nn:ReLU", "--inptu", "2x3"], "unrecognized arguments: --inptu 2x3"),
        (["profile", "--inptu", "2x3"], "unrecognized arguments: --inptu"),
        (["profile", "torch.nn:ReLU", "--input", "2", "--depth", "-1"], "argument --depth"),
        (["profile", "torch.nn:ReLU", "--input", "2", "--sort", "colour"], "argument --sort: invalid choice"),
        (["profile", "torch.nn:ReLU", "--input", "2", "--device", "tpu"], "argument --device: invalid choice"),
        (["profile", "torch.nn:ReLU", "--input", "2", "--json", "/no/such/folder/x.json"], "No such file or directory"),
        (["profile", "torch.nn:ReLU", "--input", "2", "--csv", "/tmp/x"], "argument --csv: it was removed in 0.2; use --json"),
        (["profile", "torch.nn:ReLU", "--input", "2", "--device", "cpu", "--target", "cpu"], "--target is for --device meta"),
        (["profile", "torch.nn:ReLU", "--input", "2", "--dtype", "int8"], "--dtype: needs one of float32, fp32, f32, float, "),
        (["profile", "torch.nn:ReLU", "--input", "2", "--autocast", "fp32"], "half, bfloat16, bf16; found 'fp32'"),
        (["show", "/no/such/file.json"], "No such file or directory: '/no/such/file.json'"),
        (["show", __file__], "is not a memkit report"),
        (["bench"], "required: BENCH"),
        (["bench", "fly"], "invalid choice: 'fly'"),
        (["bench", "offload", "x:y", "--ratios", "1"], "`memkit bench offload` was removed in 0.2; run examples/bench/"),
        (["bench", "layers"], "`memkit bench layers` was removed in 0.2; run examples/bench/bench_layers.py"),
        ([*PLAN, "0"], "needs shares above 0 and up to 1, or bytes"),
        ([*PLAN, "2.5"], "found '2.5'"),
        ([*PLAN, "1,-0.5"], "found '-0.5'"),
        ([*PLAN, "nan"], "found 'nan'"),
        ([*PLAN, "0.5,,1"], "found ''"),
        ([*PLAN, "8GBit"], "found '8GBit'"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "required: COMMAND"),
    ],
)
def test_failures_are_one_line_and_status_two(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert_fails(capsys, arguments, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "torch.nn:Linear", "--input", "2x3", "--device", "cpu"], "TypeError: Linear.__init__() missing"),
        (["profile", "torchvision:resnet18", "--input", "2x4x8x8", "--device", "meta"], "memkit: raised in conv1 (Conv2d)"),
        (
            ["profile", "torchvision:resnet18", "--input", "2x3", "--device", "cpu"],
            "raised in conv1 (Conv2d) | memkit: it needs (batch, 3, height, width), and was given (2, 3)",
        ),
        (
            ["profile", "torch.nn:ReLU", "--input", "99999999x99999x999", "--device", "cpu"],
            'needs none (device="meta", --device meta)',
        ),
        (["profile", "torchvision:detection.fasterrcnn_resnet50_fpn", "--input", "1x3x32x32", "--device", "meta"], "(model)"),
    ],
)
def test_failures_of_the_model_are_one_line_and_status_one(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_fails(capsys, arguments, message, status=1)


def test_output_is_checked_before_the_run_and_a_failed_run_leaves_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    run_command(capsys, "profile", "torchvision:resnet18", "--input", "2x4x8x8", "--device", "meta", "--json", str(path))
    monkeypatch.setattr(specs, "profile_memory", lambda *_, **__: pytest.fail("it ran"))

    status, _, err = run_command(capsys, *RESNET, "--json", str(tmp_path))

    assert (status, "Is a directory" in err) == (2, True)
    assert not path.exists()


@pytest.mark.slow
def test_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m memkit {' '.join(RESNET)} --full | head -n 1"

    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)

    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("ResNet on meta")


def test_interrupt_ends_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(specs, "profile_memory", interrupt)

    assert run_command(capsys, *RESNET) == (130, "", "memkit: error: interrupted\n")


def test_what_takes_long_shows_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown, command = threading.Event(), ["profile", "torch.nn:ReLU", "--input", "2", "--device", "meta"]

    def build(*_: object) -> torch.nn.Module:
        assert shown.wait(300)
        return torch.nn.ReLU()

    def show(*args: object, **options: object) -> None:
        print(*args, **options)
        shown.set()

    assert run_command(capsys, *command)[2] == ""
    monkeypatch.setattr(progress._Progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "print", show, raising=False)
    monkeypatch.setattr(specs, "build_model", build)
    assert run_command(capsys, *command)[2].startswith("memkit: building torch.nn:ReLU ...\n")


@pytest.mark.parametrize(
    ("command", "example"),
    [
        (["profile"], "memkit profile torchvision:resnet50 --input 256x3x224x224"),
        (["plan"], "memkit plan torchvision:resnet50 --input 256x3x224x224 --gpu H200"),
        (["bench", "machine"], "memkit bench machine --save"),
    ],
)
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], command: list[str], example: str) -> None:
    assert example in run_command(capsys, *command, "--help")[1]


@pytest.mark.parametrize(
    ("text", "budgets"),
    [("1,0.5", [1.0, 0.5]), ("8GiB, 512 MiB", ["8GiB", "512 MiB"]), ("0.2,1073741824", [0.2, "1073741824"])],
)
def test_budgets_are_shares_or_bytes(text: str, budgets: list[float | str]) -> None:
    options = main._parser().parse_args([*PLAN, text])

    assert options.budgets == budgets


def test_models_that_cannot_be_built_on_meta_are_built_with_data(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\ndef model():\n    return torch.nn.Dropout(float(torch.linspace(0, 0.5, 3)[1]))\n"
    _in_a_folder(monkeypatch, tmp_path / "reads_values.py", text)

    assert run_command(capsys, "profile", "reads_values:model", "--input", "2", "--device", "meta")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["profile", "resnet50", "--input", "2x3"], 2),
        (["profile", "torchvision:resnet50"], 2),
    ],
)
def test_what_needs_no_torch_imports_none(arguments: list[str], status: int) -> None:
    code = (
        "import sys\n"
        "from memkit.__main__ import main\n"
        f"sys.argv = ['memkit', *{arguments}]\n"
        "try:\n"
        "    status = main()\n"
        "except SystemExit as end:\n"
        "    status = end.code or 0\n"
        "print(status, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == f"{status} False False"


INTERRUPTED = {
    "while torch is imported": ("torch/__init__.py", "no_such_package:model"),
    "while the model is built": ("sleepy.py", "sleepy:model"),
}


@pytest.mark.slow
@pytest.mark.parametrize("when", INTERRUPTED)
def test_interrupt_is_one_line_at_any_time(when: str, tmp_path: Path) -> None:
    place, spec = INTERRUPTED[when]
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(
        "import sys, time\n"
        "print('begun', flush=True)\n"
        "try:\n"
        "    time.sleep(100)\n"
        "except KeyboardInterrupt:\n"  # as extension modules do, whose import may be interrupted
        "    raise ImportError('something else') from None\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(main.__file__).parents[1])])
    command = [sys.executable, "-m", "memkit", "profile", spec, "--input", "2", "--device", "meta"]
    child = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout.readline() == "begun\n"

    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=90)  # of the 100 s that it sleeps

    assert child.returncode == 130
    assert [line for line in err.splitlines() if line and not line.endswith(" ...")] == ["memkit: error: interrupted"]


def test_choices_are_those_of_the_profile_and_of_torch() -> None:
    assert tuple(SORT_KEYS) == main._SORT_KEYS
    assert main._TARGETS == TARGETS
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in arguments.DTYPES.values())


SPEC = ["torchvision:resnet18", "--input", "64x3x224x224", "--device", "meta"]
SMALL = ["torchvision:resnet18", "--input", "8x3x64x64", "--device", "meta"]


@pytest.fixture
def reports(tmp_path: Path) -> tuple[Path, Path]:
    """A report of a batch of 4096, and one of a batch of 1024."""
    paths = tmp_path / "before.json", tmp_path / "after.json"
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    for path, batch in zip(paths, (4096, 1024), strict=True):
        x = torch.empty(batch, 256, device="meta")
        path.write_text(profile_memory(model, x, backward=True, trace=True, print_table=False).to_json())
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
    plan = ["plan", *SMALL[:3], "--gpu", "H200", "--budget", "1.0"]

    (_, profiled, _), (_, planned, _) = (run_command(capsys, *it, "--json", "-") for it in (["profile", *SMALL], plan))

    assert MemoryReport.from_json(profiled).tag == "torchvision:resnet18"
    assert json.loads(planned)["schema"] == "memkit.Front"


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
    of_four = ["torchvision:resnet18", "--input", "2x4x8x8", "--device", "meta"]

    status, out, err = run_command(capsys, "profile", *of_four, "--debug")

    assert (status, out) == (1, "")
    assert "Traceback (most recent call last):" in err
    assert "torchvision/models/resnet.py" in err
    assert err.splitlines()[-1].startswith("memkit: error: RuntimeError: ")


_WARNING = r"""
import warnings
from torch import nn
class Model(nn.Linear):
    def forward(self, x):
        warnings.warn('use\nanother')
        warnings.warn('for developers', DeprecationWarning)
        return super().forward(x)
def model():
    return Model(2, 2)
"""


def test_warnings_are_shown_once_and_as_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_a_folder(monkeypatch, tmp_path / "warning_models.py", _WARNING)
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


def test_an_input_keeps_a_dtype_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = """from torch import nn
class Two(nn.Embedding):
    def forward(self, tokens, scale):
        return super().forward(tokens) * scale[..., None]
def two():
    return Two(10, 4)
"""
    (tmp_path / "two_inputs.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    arguments = ["--input", "2x3:int64", "--input", "2x3:fp32", "--dtype", "bf16", "--device", "meta"]

    status, _, error = run_command(capsys, "profile", "two_inputs:two", *arguments, "--json", "report.json")

    saved = MemoryReport.from_json(tmp_path / "report.json").saved
    assert status == 0, error
    assert [(record.dtype, record.storage_bytes) for record in saved] == [("int64", 48), ("float32", 24)]
