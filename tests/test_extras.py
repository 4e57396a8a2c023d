"""Libraries that need not be there: what is said where one is missing, and that it can be run wherever memkit is from."""

from __future__ import annotations

import configparser
import sys
from pathlib import Path

import pytest
import torch

import memkit
from memkit.cli.specs import build_model
from memkit.core import extras
from memkit.errors import MemkitError

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
