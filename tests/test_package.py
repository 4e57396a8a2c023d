"""The shape of the package: imports point down, names are exported, importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import memkit
from memkit import _torch_floor

PACKAGE = Path(memkit.__file__).parent

# A room may import from rooms of a lower rank, and from itself.
RANKS = {
    "_version": 0,
    "errors": 0,
    "interrupts": 0,
    "sizes": 0,
    "_torch_floor": 0,
    "storages": 0,
    "attached": 1,
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
    "commands": 7,
    "cli": 8,
    "__main__": 9,
    "__init__": 9,
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


def test_names_at_the_top_level() -> None:
    """Actions are at the top; records, plans and exceptions are in rooms of their own."""
    assert memkit.__all__ == [
        "CPUOffload",
        "GradScaler",
        "LayerOffload",
        "Rematerialize",
        "attach",
        "detach",
        "device",
        "keep",
        "no_offload",
        "profile_memory",
        "recompute",
        "reset",
        "schedules",
        "stats",
    ]
    assert all(hasattr(memkit, name) for name in memkit.__all__)


def test_nothing_else_is_at_the_top_level() -> None:
    code = (
        "import memkit, types; [getattr(memkit, name) for name in memkit.__all__]; "
        "print(sorted(name for name, value in vars(memkit).items() if not name.startswith('_') "
        "and not isinstance(value, types.ModuleType) and name not in (*memkit.__all__, 'annotations', 'TYPE_CHECKING', 'Any')))"
    )

    assert _run(code) == "[]\n"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'memkit' has no attribute 'Offload'"):
        memkit.Offload  # noqa: B018


def test_rooms_are_there_without_an_import_of_their_own() -> None:
    names = ["profile.MemoryReport", "plan.Action", "errors.MemkitError", "activations.SavedTensorStats", "weights.LayerStats"]

    assert _run(f"import memkit; print({', '.join(f'memkit.{name}.__name__' for name in names)})").split() == [
        name.split(".")[1] for name in names
    ]


def test_public_objects_are_documented() -> None:
    undocumented = [name for name in memkit.__all__ if not getattr(memkit, name).__doc__]

    assert undocumented == []


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_lean() -> None:
    code = (
        "import sys, torch, memkit; [getattr(memkit, name) for name in memkit.__all__]; "
        "print(torch.cuda.is_initialized(), [name for name in ('torchvision', 'matplotlib', 'IPython') if name in sys.modules])"
    )

    assert _run(code) == "False []\n"


def test_import_waits_for_torch_until_it_is_needed() -> None:
    assert _run("import sys, memkit; print('torch' in sys.modules, memkit.__version__)") == f"False {memkit.__version__}\n"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("2.9.1+cu128", 'memkit needs torch 2.10 or newer; found 2.9.1+cu128. Run: pip install "torch>=2.10"'),
        ("1.13", 'memkit needs torch 2.10 or newer; found 1.13. Run: pip install "torch>=2.10"'),
        (None, 'memkit needs torch 2.10 or newer; found none. Run: pip install "torch>=2.10"'),
    ],
)
def test_torch_that_is_too_old_is_one_line(found: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_floor, "torch_version", lambda: found)

    with pytest.raises(ImportError) as error:
        _torch_floor.require_torch()

    assert str(error.value) == message


@pytest.mark.parametrize("found", ["2.10.0", "2.15.0+cu132", "3.0", "2.12.0a0+git1234", "unknown"])
def test_newer_torch_is_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_floor, "torch_version", lambda: found)

    _torch_floor.require_torch()


def test_oldest_torch_is_the_one_that_pip_asks_for() -> None:
    setup = (PACKAGE.parent / "setup.cfg").read_text()

    assert f"torch>={'.'.join(map(str, _torch_floor.OLDEST))}\n" in setup


def test_version_is_written_once() -> None:
    setup = (PACKAGE.parent / "setup.cfg").read_text()

    assert "version = attr: memkit._version.__version__" in setup
    assert memkit.__version__ not in setup


def test_type_information_is_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()
