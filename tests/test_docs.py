"""What the documentation says runs, and says the truth; its pages hang together, and every link leads somewhere."""

from __future__ import annotations

import ast
import configparser
import contextlib
import doctest
import fnmatch
import functools
import importlib
import inspect
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

import memkit
from memkit import errors
from memkit.activations.offloading import moving_stage as stage
from memkit.cli.main import _parser, main
from memkit.plan.gpu import GPUS
from memkit.weights.chunks import LayerChunk
from memkit.weights.slots import Slot
from memkit.weights.streaming import Streamer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_INTEGRATIONS = ("recipes.md", "fine_tune_trainer.py")
"""What needs other libraries: run by tests/integrations."""
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in OF_INTEGRATIONS)


ON_THE_CPU = pytest.mark.filterwarnings("ignore:.*nothing moves. the CPU has no memory apart from the host's")
"""What the README's first lines are told on a machine without a GPU."""


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@ON_THE_CPU
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize(
    "page", [page for page in PAGES if _blocks(page, "python") and page.name not in OF_INTEGRATIONS], ids=lambda page: page.name
)
def test_snippets_run(page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where they write files
    names: dict[str, object] = {}

    for block in _blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


LINES = (
    "memkit.profile_memory(model, x)",
    'with CPUOffload(offload_ratio=0.3, tag="resnet"):',
    'with CPUOffload(offload_ratio=schedule, tag="resnet"):',
)
"""What memkit is for, word for word."""


@pytest.mark.slow
@ON_THE_CPU
@pytest.mark.parametrize("moves", [False, True])
def test_readme_begins_with_what_memkit_is_for(
    moves: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = memkit.device.ReferenceDevice()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if moves:
        monkeypatch.setattr(stage, "open_device", lambda _: device)
    block = _blocks(ROOT / "README.md", "python")[0]
    once, reset, by_schedule = block.partition('memkit.reset("resnet")')
    names: dict[str, object] = {}

    exec(compile(once, "README.md", "exec"), names)
    before = memkit.stats("resnet")
    exec(compile(reset + by_schedule, "README.md", "exec"), names)
    after = memkit.stats("resnet")

    assert all(re.search(rf"^ *{re.escape(line)}", block, re.MULTILINE) for line in LINES)
    assert (before.ratios, after.ratios) == ((0.3,), (0.0, 0.125, 0.25, 0.375, 0.5))
    assert [stats.num_copies_out > 0 for stats in (before, after)] == [moves] * 2
    assert capsys.readouterr().out.startswith("ResNet on ")
    memkit.reset("resnet")


@pytest.mark.parametrize(
    ("name", "of_blocks", "shown"),
    [
        ("README.md", [1], ""),
        ("docs/answers.md", [0], "Of 5.3 GiB"),
        ("docs/tutorial.md", None, ""),
        ("docs/layer-offload.md", [0, 1], ""),
        ("docs/layer-offload-details.md", [0, "profile_memory"], "Model on meta"),
    ],
)
def test_page_shows_what_its_example_prints(
    name: str, of_blocks: list[Any] | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for where lines are broken, and the version of torch.

    Args:
        of_blocks: which blocks run, by their numbers or by what they have; None for all.
        shown: how the text begins that is compared; the first one, or all where all blocks run.
    """
    blocks, texts = (_blocks(ROOT / name, language) for language in ("python", "text"))
    names: dict[str, object] = {"memkit": memkit, "torch": torch, "torchvision": torchvision}
    for which in range(len(blocks)) if of_blocks is None else of_blocks:
        block = blocks[which] if isinstance(which, int) else next(found for found in blocks if which in found)
        exec(compile(block, name, "exec"), names)

    text = "".join(texts) if of_blocks is None else next(found for found in texts if found.startswith(shown))
    assert _words(text) in _words(capsys.readouterr().out)


def _words(text: str) -> str:
    return " ".join(re.sub(r"torch \d\S*", "torch", text).split())


@pytest.mark.slow
def test_page_of_answers_shows_what_its_commands_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where they write files
    text = (ROOT / "docs" / "answers.md").read_text()
    samples = re.findall(r"^```console\n(.*?)^```\n\n^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)

    assert len(samples) == 5
    for commands, shown in samples:
        for command in commands.replace("\\\n", "").splitlines():
            assert main(shlex.split(command.removeprefix("$ memkit "))) == 0, command
        printed = " ".join(capsys.readouterr().out.split())  # lines are broken elsewhere
        assert " ".join(shown.removesuffix("\n...\n").split()) in printed, commands


def test_six_questions_have_the_commands_that_are_answered() -> None:
    def pasted(page: Path) -> list[str]:
        blocks = [block.replace("\\\n", "") for block in _blocks(page, "console")]
        return [" ".join(command.split()) for block in blocks for command in re.findall(r"^\$ (.+)$", block, re.MULTILINE)]

    asked = re.findall(r"^\| [^|]+\? \| `(memkit [^`]+)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    before = pasted(ROOT / "README.md")

    assert (len(asked), len(before)) == (5, 2)
    assert {*asked, *before} <= set(pasted(ROOT / "docs" / "answers.md"))


def _commands_of_memkit(page: Path) -> list[str]:
    """Return the commands on a page that can be pasted: in blocks, and in a line's code."""
    text = page.read_text().replace("\\\n", "")
    found = re.findall(r"^(?:\$ |    )(memkit .+)$|`(memkit [^`]+)`", text, re.MULTILINE)
    commands = [" ".join(command.split()) for pair in found for part in pair for command in part.split(" && ")]
    return [
        command
        for command in commands
        if re.search(r" (--input|--save) [^.[]|\.json", command) and not re.search("MODEL|CONFIG", command)
    ]


@pytest.mark.slow
def test_every_other_command_on_a_page_can_be_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)  # where they write files
    answered = _commands_of_memkit(ROOT / "docs" / "answers.md")  # they run above, and what they print is compared
    commands = {command for page in PAGES for command in _commands_of_memkit(page)} - set(answered)

    assert len(answered) == 7
    assert len(commands) >= 6
    for command in commands:
        arguments = shlex.split(command.removeprefix("memkit "))
        if arguments[0] == "bench":  # on a GPU
            _parser().parse_args(arguments)
        else:
            assert main(arguments) == 0, command


def test_page_on_streaming_in_depth_draws_the_schedule_that_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "layer-offload-details.md"
    table = next(block for block in _blocks(page, "text") if block.startswith("time"))
    rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()[2:]]
    names: dict[str, Any] = {}
    exec(compile(_blocks(page, "python")[0], str(page), "exec"), names)
    model = names["Model"](num_layers=6)
    model.layers.requires_grad_(False)
    uses, copies, holds = list[str](), list[str](), list[list[str]]()
    slots: list[Slot] = []
    use, fetch = Streamer.use, Streamer._fetch

    def note_use(streamer: Streamer, chunk: LayerChunk) -> Slot:
        slot = use(streamer, chunk)
        row = f"{streamer._phase.value} {chunk.position}"
        if row not in uses:
            uses.append(row)
            holds.append([str(found.chunk.position) for found in slots if found.chunk is not None])
        return slot

    def note_fetch(streamer: Streamer, chunk: LayerChunk, slot: Slot) -> None:
        if slot not in slots:
            slots.append(slot)
        copies.append(f"layer {chunk.position} to slot {slots.index(slot)}")
        fetch(streamer, chunk, slot)

    monkeypatch.setattr(Streamer, "use", note_use)
    monkeypatch.setattr(Streamer, "_fetch", note_fetch)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=names["device"]):
        model(names["x"]).sum().backward()

    assert [row[1] for row in rows if row[1] not in ("stem", "head, loss")] == uses
    assert [row[2] for row in rows if row[2] != "-"] == copies
    assert [slot.removesuffix(" in use") for slot in rows[-1][3:]] == holds[-1]


def test_readme_commands_are_the_ones_that_ci_runs() -> None:
    commands = [command.strip() for command in _blocks(ROOT / "README.md", "console") if not command.startswith("$ ")]
    ci = (ROOT / ".ci" / "run").read_text()

    setup, *run_and_test = commands
    assert setup == "python3 -m venv .venv && . .venv/bin/activate"
    assert len(run_and_test) == 2
    assert all(command in ci for command in run_and_test)


@pytest.mark.parametrize("name", sorted(module.name for module in pkgutil.walk_packages(memkit.__path__, prefix="memkit.")))
def test_examples_in_docstrings_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linecache.checkcache", lambda *_: None)  # of all files, which a debugger that is made each time does

    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: what one of its own imports takes longer than most examples do."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])

    runpy.run_path(str(path), run_name="__main__")

    assert capsys.readouterr().out


def _curve_of(picture: Path) -> list[tuple[int, float]]:
    """Return the points of memkit's curve in a picture of time against peak, as MiB and milliseconds, by its axes' labels."""
    text = picture.read_text()
    axes = []
    for number in (1, 2):
        axis = text[text.index(f'<g id="matplotlib.axis_{number}">') :]
        found = re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"[^>]*/>.*?<!-- ([\d.]+) -->', axis, re.DOTALL)
        (x, y, low), (x_end, y_end, high) = found[0], found[2]
        begin, end = (float(x), float(x_end)) if number == 1 else (float(y), float(y_end))
        axes.append((begin, float(low), (float(high) - float(low)) / (end - begin)))
    line = re.search(r'<g id="line2d_\d+">\s*<path d="(M[^"]+)" clip-path', text)
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", line[1])]
    (x_begin, x_low, x_unit), (y_begin, y_low, y_unit) = axes
    return [(round(1024 * (x_low + (x - x_begin) * x_unit)), round(y_low + (y - y_begin) * y_unit, 1)) for x, y in points]


PICTURES = sorted((ROOT / "docs" / "benchmarks").glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_picture_and_table_are_of_one_run(picture: Path) -> None:
    (page,) = [page for page in PAGES if page.parent == picture.parent and picture.name in page.read_text()]
    rows = [set(re.findall(r"[\d.]+", row)) for row in page.read_text().splitlines() if row.startswith("|")]

    for peak_mib, step_ms in _curve_of(picture):
        assert any(f"{peak_mib}" in row and f"{step_ms}" in row for row in rows), (peak_mib, step_ms)


@pytest.mark.slow
def test_page_on_planning_shows_the_table_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "plan.md"
    (command,) = _blocks(page, "console")
    table, *_ = _blocks(page, "text")

    assert main(command.removeprefix("$ memkit").split()) == 0

    assert _without_bounds(capsys.readouterr().out) == _without_bounds(table)


def _without_bounds(text: str) -> list[list[str]]:
    """Return the words of each line, but for the bounds, which need scipy."""
    return [words[:4] + words[5:] if len(words) == 11 else words for words in map(str.split, text.splitlines())]


def test_page_on_planning_knows_the_gpus() -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    found = re.findall(r"^\| ([\w -]+) \| ([\d.]+) \| (\d+) \| (\d+), (\d+) \| ", text, re.MULTILINE)

    assert {name: figures for name, *figures in found} == {
        name: [
            f"{spec.memory_bytes / 2**30:g}",
            f"{spec.bytes_per_s / 1e9:.0f}",
            *(f"{spec.flops_per_s[dtype] / 1e12:.0f}" for dtype in ("bfloat16", "float32")),
        ]
        for name, spec in GPUS.items()
    }


DOCS = ROOT / "docs"
_OF_DOCS = PAGES[1:]
READ = [page for page in PAGES if page.name != "changelog.md"]
FEATURES = ("budget", "rematerialize", "offload", "layer-offload", "profile", "plan", "compiling")
MOST_LINES_OF_A_FEATURE = 200


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _toctrees() -> list[str]:
    """Return the entries of all toctrees, patterns included."""
    lines = [line.strip() for page in _OF_DOCS for block in _blocks(page, r"\{toctree\}") for line in block.splitlines()]
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
    names = [page.relative_to(DOCS).with_suffix("").as_posix() for page in _OF_DOCS if page.name != "index.md"]

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
    text = _without_code(page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
        if not target.startswith("http"):
            assert anchor in _anchors((page.parent / target).resolve() if target else page), f"{target}#{anchor}"
    for target in re.findall(r"\{doc\}`(?:[^`<]*<)?([\w/.-]+)>?`", text):
        assert (page.parent / f"{target}.md").exists(), target
    for target in re.findall(r"\{ref\}`(?:[^`<]*<)?([\w-]+)>?`", text):
        assert any(target in _anchors(other) for other in _OF_DOCS), target


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
    nodes = [node for block in _blocks(ROOT / "README.md", "python") for node in ast.walk(ast.parse(block))]

    assert [ast.unparse(node) for node in nodes if isinstance(node, ast.Call) and "MemoryBudget" in ast.unparse(node.func)] == [
        "memkit.MemoryBudget('12GiB')"
    ]


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
