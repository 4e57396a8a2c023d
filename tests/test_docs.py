"""What the documentation says runs, and says the truth."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memkit

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page, "python")], ids=lambda page: page.name)
def test_snippets_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}

    for block in _blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


def test_readme_shows_what_its_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    readme = ROOT / "README.md"

    exec(compile(_blocks(readme, "python")[0], str(readme), "exec"), {})

    def without_version(text: str) -> str:
        return re.sub(r"torch \S+", "torch", text)

    assert without_version(_blocks(readme, "text")[0]) == without_version(capsys.readouterr().out)


def test_readme_commands_are_the_ones_that_ci_runs() -> None:
    commands = [command.strip() for command in _blocks(ROOT / "README.md", "console")]
    ci = (ROOT / ".ci" / "run").read_text()

    assert len(commands) == 2
    assert all(command in ci for command in commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", sorted(module.name for module in pkgutil.walk_packages(memkit.__path__, prefix="memkit.")))
def test_examples_in_docstrings_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=ROOT)

    assert done.returncode == 0, done.stderr


def test_bench_runs_without_a_gpu() -> None:
    script = ROOT / "examples" / "bench" / "bench_profile.py"

    done = subprocess.run(
        [sys.executable, str(script), "--meta", "--models", "resnet50"], capture_output=True, text=True, cwd=ROOT
    )

    assert '"activation_bytes": 21993045504' in done.stdout, done.stderr
