"""What need not be there, libraries and a GPU: what is said where it is missing."""

from __future__ import annotations

import configparser
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memkit
from memkit.cli.main import main
from memkit.cli.specs import build_model
from memkit.core import extras
from memkit.errors import DeviceUnavailableError, MemkitError

PACKAGE = Path(memkit.__file__).parent


@pytest.mark.parametrize("module", ["plotly.offline", "matplotlib.figure", "transformers", "lightning.pytorch"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(
        ModuleNotFoundError, match=rf'it needs {package}, which .* Run: pip install "{package}>=[\d.]+"$'
    ) as found:
        extras.library(module, "it")

    assert found.value.name == package


@pytest.mark.parametrize("spec", ["torchvision:resnet18", "timm:resnet18"])
def test_a_model_of_a_missing_library_says_how_to_install_it(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = spec.partition(":")[0]
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(MemkitError, match=rf'install it with pip install "{package}>=[\d.]+"$'):
        build_model(spec, torch.device("meta"))


@pytest.mark.parametrize("folder", ["memkit", "docs", "examples"])
def test_no_command_needs_memkit_on_an_index(folder: str) -> None:
    files = [path for path in (PACKAGE.parent / folder).rglob("*") if path.suffix in (".py", ".md")]

    assert files
    assert [str(path) for path in files if "install" in path.read_text() and "torch-memkit[" in path.read_text()] == []


def test_versions_are_those_of_the_extras() -> None:
    setup = configparser.ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg")
    lines = {line for extra in setup["options.extras_require"].values() for line in extra.split() if ">=" in line}

    assert {f"{package}>={version}" for package, version in extras._OLDEST.items()} <= lines


TRY = r"Run on a machine with a GPU, or pass device=memkit\.device\.Ref"
NEEDS_NONE = r'finds no CUDA device here\. Use device "meta", which needs none\.'
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "CPUOffload": (lambda: memkit.CPUOffload(0.5, device="cuda"), TRY),
    "Rematerialize": (lambda: memkit.Rematerialize(0.5, device="cuda:0"), TRY),
    "LayerOffload": (lambda: memkit.LayerOffload(nn.Sequential(nn.Linear(2, 2)), offload_ratio=1.0, device="cuda"), TRY),
    "profile": (lambda: memkit.profile_memory(nn.Linear(2, 2), torch.ones(2, 2), device="cuda"), NEEDS_NONE),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_can_be_tried_instead_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call, message = CALLS[name]

    with pytest.raises(DeviceUnavailableError, match=message):
        call()


def test_the_command_that_profiles_needs_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    status = main(["profile", "torch.nn:ReLU", "--input", "2x2", "--device", "cuda"])

    assert status == 2
    assert 'Use device "meta", which needs none.' in capsys.readouterr().err
