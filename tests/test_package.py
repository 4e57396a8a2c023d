"""The shape of the package: imports point down, names are exported, importing is cheap."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import memkit
from memkit import _torch_floor
from memkit.core import torch_private

PACKAGE = Path(memkit.__file__).parent

# A room may import from rooms of a lower rank, and from itself.
RANKS = {
    "_version": 0,
    "errors": 0,
    "_torch_floor": 0,
    "removed": 0,
    "core": 1,
    "plan": 2,
    "device": 2,
    "transfer": 3,
    "recording": 3,
    "page": 3,
    "optimizers": 3,
    "profile": 4,
    "weights": 4,
    "states": 4,
    "activations": 5,
    "distributed": 5,
    "live": 6,
    "cli": 6,
    "integrations": 7,
    "__main__": 7,
    "__init__": 8,
}


@functools.cache
def _tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is read once for all tests."""
    return ast.parse(path.read_text())


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
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
    assert _upward_edges("device", {"memkit.profile.report"}) == ["memkit.profile.report"]
    assert _upward_edges("core", {"memkit.device"}) == ["memkit.device"]


MOST_LINES = {
    "": 475,
    "activations": 11786,
    "cli": 1121,
    "core": 2715,
    "device": 1312,
    "distributed": 669,
    "integrations": 801,
    "optimizers": 489,
    "page": 538,
    "plan": 6333,
    "profile": 5086,
    "recording": 2199,
    "states": 5688,
    "transfer": 1953,
    "weights": 4539,
}
"""The lines that each room may have, "" for the modules beside the rooms: raised only by a commit that says what for."""


def test_rooms_keep_to_their_lines() -> None:
    num_lines = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        *rooms, _ = path.relative_to(PACKAGE).parts
        num_lines[rooms[0] if rooms else ""] += len(path.read_text().splitlines())

    assert {room: number for room, number in num_lines.items() if number > MOST_LINES[room]} == {}


def test_only_the_cuda_device_names_torch_cuda() -> None:
    naming = [path.name for path in PACKAGE.rglob("*.py") if "cuda" in path.read_text() and "torch.cuda" in _code_of(path)]

    assert naming == ["cuda.py"]


def test_only_torch_private_names_what_is_private_in_torch() -> None:
    trees = {path: _tree(path) for path in PACKAGE.rglob("*.py")}
    private = {name.symbol.rpartition(".")[2] for name in torch_private.NAMES.values()} - _OVERRIDDEN
    own = set[str]().union(*map(_own_names, trees.values()))

    found = {
        str(path): _private_names(tree, own, own - private) for path, tree in trees.items() if path.name != "torch_private.py"
    }

    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("code", "is_private"),
    [
        ("from torch._ops import OpOverload", True),
        ("import torch._dynamo", True),
        ("self.alias._version", True),
        ("attrgetter('_cdata')", True),
        ("sys.modules['torch._dynamo']", True),
        ("from memkit.core.torch_private import version_of", True),
        ("module._buffers", True),
        *((code, False) for code in ("self._buffers", "other._own", "sys._getframe(1)", "tensor.__dict__")),
    ],
)
def test_check_of_private_names_can_fail(code: str, is_private: bool) -> None:
    assert bool(_private_names(ast.parse(code), {"_own", "_buffers"}, {"_own"})) == is_private


def test_each_name_of_torch_private_is_used() -> None:
    nodes = [node for path in PACKAGE.rglob("*.py") if path.name != "torch_private.py" for node in ast.walk(_tree(path))]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.value for node in nodes if isinstance(node, ast.Constant)}

    settings = {name for name, private in torch_private.NAMES.items() if private.purpose == "to replay by the same kernels"}

    assert torch_private.NAMES.keys() - used - settings == {"skips_dynamo"}  # which is overridden


def test_each_name_that_is_looked_up_in_torch_private_is_there() -> None:
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(_tree(path))]
    reads = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch_private"]
    own = vars(torch_private).keys() | {"DispatchMode", "OpOverload"}  # types of their own for the checker

    assert {node.attr for node in reads} - own <= torch_private.NAMES.keys()


def _own_names(tree: ast.AST) -> set[str]:
    """Return what classes define: their methods and attributes, slots, and what is set on `self` or `cls`."""
    own = set[str]()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                own.add(node.attr)
    return own


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private(name: object) -> bool:
    return isinstance(name, str) and any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


_READERS = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")


def _private_names(tree: ast.AST, own: set[str], known_as_own: set[str]) -> list[str]:
    """Return what code names that is private in torch, or must be that: no class of ours defines it.

    Args:
        own: what classes of ours define.
        known_as_own: what of that is no name of torch's, so that it is ours on any object.
    """
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.startswith("torch.") and _is_private(name.name)]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{name.name}" for name in node.names]
            found += [name for name in names if name.startswith("torch.") and _is_private(name)]
            looked_up = node.module == "memkit.core.torch_private"  # at once, and not when it is used
            found += [name for name in names if looked_up and name.rpartition(".")[2] not in _FOR_TYPE_CHECKING]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            is_ours = node.attr in (own if _is_self(node.value) else known_as_own)
            is_ours |= isinstance(node.value, ast.Name) and node.value.id in sys.stdlib_module_names
            is_ours |= node.attr == "_replace"  # of a named tuple
            found += [] if is_ours else [ast.unparse(node)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _READERS:
            texts = [given.value for given in node.args if isinstance(given, ast.Constant)]
            found += [str(text) for text in texts if _is_private(text) and text not in known_as_own]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = node.value.startswith("torch.") and " " not in node.value
            found += [node.value] if is_name and _is_private(node.value) else []
    return found


_OVERRIDDEN = {"_should_skip_dynamo", "_unscale_grads_"}
_FOR_TYPE_CHECKING = ("OpOverload", "DispatchMode")


def _code_of(path: Path) -> str:
    """Source without strings and comments, so that docstrings may speak of what they stand for."""
    return ast.unparse(_WithoutStrings().visit(ast.parse(path.read_text())))


class _WithoutStrings(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(value="") if isinstance(node.value, str) else node


def test_names_at_the_top_level() -> None:
    """Actions are at the top; records, plans and exceptions are in rooms of their own."""
    assert " ".join(memkit.__all__) == (
        "CPUOffload Disk GradScaler LayerOffload MemoryBudget Rematerialize StateOffload attach detach device keep live_values "
        "no_offload offload plan_memory profile_memory recompute reset schedules shard stats"
    )
    assert [name for name in memkit.__all__ if not getattr(memkit, name).__doc__] == []
    with pytest.raises(AttributeError, match="module 'memkit' has no attribute 'Offload'"):
        memkit.Offload  # noqa: B018


_FRESH = """
import json, sys, types
import memkit
found = {"version": memkit.__version__, "torch before it is needed": "torch" in sys.modules}
rooms = memkit.profile.MemoryReport, memkit.plan.Action, memkit.errors.MemkitError
rooms += memkit.activations.SavedTensorStats, memkit.weights.LayerStats
found["rooms"] = [kind.__name__ for kind in rooms]
for name in memkit.__all__:
    getattr(memkit, name)
known = *memkit.__all__, "annotations", "TYPE_CHECKING", "Any"
found["others"] = sorted(
    name for name, value in vars(memkit).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in known
)
import torch
found["CUDA"] = torch.cuda.is_initialized()
found["libraries"] = [name for name in ("torchvision", "matplotlib", "plotly", "IPython") if name in sys.modules]
print(json.dumps(found))
"""
"""What a process that has just started finds: first what is there at once, then the rooms, at last all public names."""


def test_import_is_lean_and_waits_for_torch_until_it_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == {
        "version": memkit.__version__,
        "torch before it is needed": False,
        "rooms": ["MemoryReport", "Action", "MemkitError", "SavedTensorStats", "LayerStats"],
        "others": [],
        "CUDA": False,
        "libraries": [],
    }


def test_planning_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import memkit.plan.front"

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("found", ["2.9.1+cu128", "1.13", None])
def test_torch_that_is_too_old_is_one_line(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_floor, "torch_version", lambda: found)

    with pytest.raises(ImportError) as error:
        _torch_floor.require_torch()

    assert str(error.value) == f'memkit needs torch 2.10 or newer; found {found or "none"}. Run: pip install "torch>=2.10"'


@pytest.mark.parametrize("found", ["2.10.0", "2.15.0+cu132", "3.0", "2.12.0a0+git1234", "unknown"])
def test_newer_torch_is_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_floor, "torch_version", lambda: found)

    _torch_floor.require_torch()


def test_setup_asks_for_the_oldest_torch_and_names_no_version() -> None:
    setup = (PACKAGE.parent / "setup.cfg").read_text()

    assert f"torch>={'.'.join(map(str, _torch_floor.OLDEST))}\n" in setup
    assert "version = attr: memkit._version.__version__" in setup
    assert memkit.__version__ not in setup
    assert (PACKAGE / "py.typed").exists()


# The lists of files in the docstrings of folders


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


def test_check_of_lists_can_fail(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('"""Room.\n\n- `one`: first\n- `two`:\n"""\n')

    assert _listed(tmp_path) == ["one"]


_CLASSES = ("Thread", "Timer", "ThreadPoolExecutor")


def _unnamed(source: str) -> list[int]:
    """Return the lines that begin threads without a name of memkit's."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    begin = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in _CLASSES]
    return [call.lineno for call in begin if not re.search(r"'memkit", ast.unparse(call))]


def test_threads_have_names_of_memkit() -> None:
    assert {str(path): lines for path in PACKAGE.rglob("*.py") if (lines := _unnamed(path.read_text()))} == {}


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
