"""The lists of files in the docstrings of packages: each file is in the one of its folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "memkit"
FOLDERS = sorted(path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("*/**/__init__.py"))


def _listed(folder: Path) -> list[str]:
    """Return what a folder's docstring lists, in order: files without their ending, and folders with a slash."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return re.findall(r"^- `([\w/]+)`: \S", docstring, re.MULTILINE)


@pytest.mark.parametrize("name", FOLDERS)
def test_docstring_of_a_folder_lists_each_of_its_files_once(name: str) -> None:
    folder = PACKAGE / name
    files = [path.stem for path in folder.glob("*.py") if path.name != "__init__.py"]
    folders = [f"{path.parent.name}/" for path in folder.glob("*/__init__.py")]

    assert sorted(_listed(folder)) == sorted(files + folders)


def test_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('"""Room.\n\n- `one`: first\n- `two`:\n"""\n')

    assert _listed(tmp_path) == ["one"]
