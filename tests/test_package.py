"""The shape of the package: imports point down, names are exported, importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import memkit

PACKAGE = Path(memkit.__file__).parent

# A room may import from rooms of a lower rank, and from itself.
RANKS = {
    "_version": 0,
    "errors": 0,
    "sizes": 0,
    "calls": 1,
    "hooks": 1,
    "owners": 1,
    "device": 1,
    "transfer": 2,
    "profile": 3,
    "plan": 4,
    "activations": 5,
    "weights": 5,
    "distributed": 5,
    "specs": 6,
    "progress": 6,
    "bench": 6,
    "cli": 7,
    "__init__": 8,
}


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "memkit":
                found.update(f"memkit.{alias.name}" for alias in node.names)
            else:
                found.add(node.module)
    return {name for name in found if name.split(".")[0] == "memkit"}


def _upward_edges(room: str, imports: set[str]) -> list[str]:
    return [name for name in sorted(imports) if _room(name) != room and RANKS[_room(name)] >= RANKS[room]]


def test_imports_point_down() -> None:
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")

        assert _upward_edges(room, _imports(path)) == [], path


def test_layering_check_can_fail() -> None:
    assert _upward_edges("device", {"memkit.profile.records"}) == ["memkit.profile.records"]
    assert _upward_edges("hooks", {"memkit.device"}) == ["memkit.device"]


def test_only_the_cuda_device_names_torch_cuda() -> None:
    naming = [path.name for path in PACKAGE.rglob("*.py") if "torch.cuda" in _code_of(path)]

    assert naming == ["cuda.py"]


def _code_of(path: Path) -> str:
    """Source without strings and comments, so that docstrings may speak of what they stand for."""
    return ast.unparse(_WithoutStrings().visit(ast.parse(path.read_text())))


class _WithoutStrings(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(value="") if isinstance(node.value, str) else node


def test_all_is_sorted_and_complete() -> None:
    assert memkit.__all__ == sorted(memkit.__all__)
    assert all(hasattr(memkit, name) for name in memkit.__all__)


def test_public_objects_are_documented() -> None:
    undocumented = [name for name in memkit.__all__ if name != "__version__" and not getattr(memkit, name).__doc__]

    assert undocumented == []


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_lean() -> None:
    code = (
        "import sys, torch, memkit; "
        "print(torch.cuda.is_initialized(), [name for name in ('torchvision', 'matplotlib', 'IPython') if name in sys.modules])"
    )

    assert _run(code) == "False []\n"


def test_version_is_written_once() -> None:
    setup = (PACKAGE.parent / "setup.cfg").read_text()

    assert "version = attr: memkit._version.__version__" in setup
    assert memkit.__version__ not in setup


def test_type_information_is_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()
