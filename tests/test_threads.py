"""Threads of memkit's are called so, by which tests count them and debuggers show them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memkit

_CLASSES = ("Thread", "Timer", "ThreadPoolExecutor")


def _unnamed(source: str) -> list[int]:
    """Return the lines that begin threads without a name of memkit's."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    begin = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in _CLASSES]
    return [call.lineno for call in begin if not any(_is_own_name(part) for part in ast.walk(call))]


def _is_own_name(part: ast.AST) -> bool:
    return isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("memkit")


def test_threads_have_names_of_memkit() -> None:
    root = Path(memkit.__file__).parent
    found = {str(path): _unnamed(path.read_text()) for path in root.rglob("*.py")}

    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("threading.Thread(target=f)", [1]),
        ("Thread(target=f, name='other')", [1]),
        ("\nThreadPoolExecutor(1)", [2]),
        ("ThreadPoolExecutor(1, 'memkit parts')", []),
        ("[threading.Thread(target=f, name=f'memkit-disk-{n}') for n in range(3)]", []),
    ],
)
def test_check_can_fail(source: str, lines: list[int]) -> None:
    assert _unnamed(source) == lines
