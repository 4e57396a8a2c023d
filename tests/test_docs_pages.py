"""How the documentation hangs together: every page is found, every link leads somewhere, words are used as explained."""

from __future__ import annotations

import ast
import configparser
import contextlib
import fnmatch
import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memkit
from memkit import errors

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ = [page for page in (ROOT / "README.md", *PAGES) if page.name != "changelog.md"]
FEATURES = ("budget", "rematerialize", "offload", "layer-offload", "profile", "plan", "compiling")
MOST_LINES_OF_A_FEATURE = 200


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _toctrees() -> list[str]:
    """Return the entries of all toctrees, patterns included."""
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(":")]


def _slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub and MyST make it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)|\{\w+\}", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@functools.cache
def _anchors(page: Path) -> set[str]:
    text = _without_code(page.read_text())
    headings = re.findall(r"^#{1,3} (.+)$", text, re.MULTILINE)
    return {_slug(heading) for heading in headings} | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def test_every_page_is_in_one_place_of_the_contents() -> None:
    names = [page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES if page.name != "index.md"]

    for name in names:
        matching = [entry for entry in _toctrees() if fnmatch.fnmatchcase(name, entry)]
        assert len(matching) == 1, (name, matching)


def test_every_room_is_in_the_table_of_rooms() -> None:
    (table,) = re.findall(
        r"^\| room \| what it owns \|\n(.*?)\n\n", (DOCS / "concepts.md").read_text(), re.MULTILINE | re.DOTALL
    )
    named = {name for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([\w/]+)`", cell)}
    found = {f"{path.name}/" if path.is_dir() else path.stem for path in (ROOT / "memkit").iterdir()}

    assert named
    assert found - named <= {"__init__", "_version", "__pycache__/", "py"}  # py.typed


@pytest.mark.parametrize("name", FEATURES)
def test_page_of_a_feature_is_short_and_has_what_readers_look_for(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()

    assert len(text.splitlines()) <= MOST_LINES_OF_A_FEATURE
    assert "```python" in text
    assert re.search(r"^## When ", text, re.MULTILINE) or name in ("profile", "plan")


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_to_a_heading(page: Path) -> None:
    text = _without_code(page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
        if not target.startswith("http"):
            found = page if not target else (page.parent / target).resolve()
            assert anchor in _anchors(found), f"{target}#{anchor}"
    for target in re.findall(r"\{doc\}`(?:[^`<]*<)?([\w/.-]+)>?`", text):
        assert (page.parent / f"{target}.md").exists(), target
    for target in re.findall(r"\{ref\}`(?:[^`<]*<)?([\w-]+)>?`", text):
        assert any(target in _anchors(other) for other in PAGES), target


def test_kinds_of_budgets_are_those_of_the_arguments() -> None:
    (table,) = re.findall(r"^\| you write \| name .*?\n\n", (DOCS / "budget.md").read_text(), re.MULTILINE | re.DOTALL)
    calls = re.findall(r"(MemoryBudget|plan_memory|Rematerialize|LayerOffload|CPUOffload)\((?:(\w+)=)?", table)

    assert {name for name, _ in calls} == {"MemoryBudget", "plan_memory", "Rematerialize", "LayerOffload", "CPUOffload"}
    for name, argument in calls:
        parameters = inspect.signature(getattr(memkit, name)).parameters
        assert (argument or "budget") in parameters, (name, argument)


def test_reference_has_all_that_is_promised() -> None:
    text = (DOCS / "api.md").read_text()
    modules = {"device", "errors", "profile", "plan", "schedules", "weights", "activations", "__version__"}

    for name in set(memkit.__all__) - modules:
        assert re.search(rf"auto(?:function|class):: memkit\.{name}$", text, re.MULTILINE), name


def test_troubleshooting_says_what_to_do_about_every_error() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    names = {name for name, found in vars(errors).items() if isinstance(found, type) and found.__module__ == errors.__name__}

    assert names <= set(re.findall(r"memkit\.errors\.(\w+)", text))
    assert names <= set(re.findall(r"\w+", (DOCS / "api.md").read_text()))


def test_extras_of_the_page_on_installing_exist() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = re.findall(r"^\| `(\w+)` \|", (DOCS / "install.md").read_text(), re.MULTILINE)

    assert named
    assert set(named) <= set(setup["options.extras_require"])


def test_readme_fits_a_model_in_12_gib_by_one_call_with_one_argument() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    calls = [
        node
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "memkit.MemoryBudget"
    ]

    (call,) = calls
    assert [ast.literal_eval(argument) for argument in call.args] == ["12GiB"]
    assert call.keywords == []


@pytest.mark.slow
def test_reference_shows_attributes_with_their_texts_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "api.md").write_text((DOCS / "api.md").read_text())
    (source / "conf.py").write_text((DOCS / "conf.py").read_text())
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "text", "-D", "root_doc=api", str(source), str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    assert done.returncode == 0, done.stderr
    text = " ".join((tmp_path / "api.txt").read_text().split())
    assert "Rows in tree order: the model first" in text
    assert "Type: Rows in tree order" not in text
    assert "class memkit.profile.MemoryReport Where the memory" in text, "the constructor of a record is left out"


_OF_OTHERS = {
    "assign", "cache_enabled", "create_graph", "device_placement", "dtype", "enabled", "error_if_nonfinite", "fused",
    "inplace", "is_grads_batched", "lr", "memory", "mmap", "peak", "use_cache", "use_reentrant", "vectorize",
    "gradient_checkpointing",
    "DTYPE", "KEY", "LimitMEMLOCK", "amsgrad", "foreach", "differentiable", "weights_only", "pin_memory", "T_max",
}  # fmt: skip
"""Arguments on the pages that are not memkit's. Recipes are full of those."""


def _arguments_of_memkit() -> set[str]:
    promised = [getattr(memkit, name) for name in memkit.__all__]
    public = [*promised, *vars(memkit.plan).values(), *vars(memkit.profile).values(), *vars(memkit.schedules).values()]
    functions = [found for found in public if callable(found)]
    methods = [found for kind in functions if isinstance(kind, type) for found in vars(kind).values() if callable(found)]
    names = set[str]()
    for function in (*functions, *methods):
        with contextlib.suppress(TypeError, ValueError):  # some builtins have no signature
            names |= inspect.signature(function).parameters.keys()
    return names


@pytest.mark.parametrize("page", [page for page in READ if page.name != "recipes.md"], ids=lambda page: page.name)
def test_arguments_on_pages_exist(page: Path) -> None:
    codes = re.findall(r"`([^`\n]+)`", _without_code(page.read_text()))
    named = {name for code in codes if not code.startswith("--") for name in re.findall(r"(?<![\w.-])([a-z]\w+)=", code)}

    assert named - _arguments_of_memkit() - _OF_OTHERS == set()
