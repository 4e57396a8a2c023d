"""The page as a file: what is in it, how it is escaped, how large it is, how long it takes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memkit
from memkit.cli.main import main
from memkit.page.document import (
    MOST_POINTS,
    MOST_STORAGES,
    as_script_json,
    categories_of,
    contents_of,
    page_of,
    sampled,
    spans_of,
    timeline_of,
)
from memkit.page.under_plan import under_plan
from memkit.plan import Action, MemoryPlan, StepTrace, find_gpu
from memkit.plan.asked import problem_of, trace_of
from memkit.plan.budget.planning import JointPlanner
from memkit.plan.budget.problem import make_problem
from memkit.profile import MemoryReport
from memkit.profile.alive import AliveStorage, MemoryCategory, Moment, Phase, StepMemory
from tests.page.browser import EVIL, Block, needs_browser, opened, plans_of, profiled, report_of_blocks, report_of_evil
from tests.plan.budget.steps import gpu, layers, plan_budget_jointly, random_trace

MOST_BYTES = 8 * 10**6
_START_S = 10
"""What a browser takes to start."""


def _taken_s() -> float:
    """Return what the processor has spent on this process and on those it has started: others on a busy machine don't count."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


class _Parts(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + data


def parts_of(page: str) -> _Parts:
    parts = _Parts()
    parts.feed(page)
    return parts


def data_of(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(parts_of(page).texts["memkit-data"])
    return found


def test_nothing_is_loaded_from_elsewhere() -> None:
    parts = parts_of(page_of(report_of_blocks()))

    loading = [(tag, attrs) for tag, attrs in parts.tags if "src" in attrs or ("href" in attrs and attrs["href"] != "data:,")]
    assert loading == []
    assert "url(" not in parts.texts["style"]
    assert "@import" not in parts.texts["style"]


def test_file_holds_all_that_the_page_shows() -> None:
    report = report_of_blocks()

    data = data_of(page_of(report, plans=plans_of(report, 0.9)))

    assert data == json.loads(json.dumps(contents_of(report, plans_of(report, 0.9))))
    assert data["model"] == "Sequential"
    assert [row[0] for row in data["rows"]] == [row.fqn for row in report.modules]
    assert len(data["plans"]["rows"]) == 1


def test_texts_of_users_end_no_element() -> None:
    plain, evil = parts_of(page_of(report_of_blocks())), parts_of(page_of(report_of_evil()))

    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in plain.tags]
    assert evil.texts["title"].strip() == f"{EVIL[0]}: where the memory goes"
    assert {row[1] for row in json.loads(evil.texts["memkit-data"])["rows"]} >= set(EVIL)
    assert json.loads(evil.texts["memkit-data"])["tag"] == EVIL[1]


@pytest.mark.parametrize("text", [*EVIL, "<!--<script>", "]]>", "\u2028", "\ud800", "\x00", "é \U0001f600"])
def test_json_in_a_script_is_what_it_was(text: str) -> None:
    written = as_script_json({text: [text]})

    assert json.loads(written) == {text: [text]}
    assert not set(written) & set("<>&\u2028\u2029")
    assert written.isascii()


def test_texts_of_users_are_what_they_were(tmp_path: Path) -> None:
    report = report_of_blocks(1, tag="{{ plotly }} {{ script }}")
    report = replace(report, run=replace(report.run, model="a\ud800b"))

    report.to_html(tmp_path / "step.html")

    data = data_of((tmp_path / "step.html").read_text(encoding="utf-8"))
    assert (data["model"], data["tag"]) == ("a\ud800b", "{{ plotly }} {{ script }}")


def test_report_of_a_forward_says_how_to_have_a_timeline() -> None:
    data = data_of(page_of(memkit.profile_memory(nn.Linear(4, 4), torch.zeros(2, 4), print_table=False)))

    assert data["timeline"] is None
    assert "backward=True" in data["no_timeline"]
    assert data["rows"]


def test_what_no_tensor_holds_is_told() -> None:
    report = report_of_blocks()
    more = replace(report, backward_peak_bytes=report.step_memory.peak_bytes + 2**20, optimizer=None)

    assert [contents_of(each)["unseen_bytes"] for each in (report, more)] == [0, 2**20]


@pytest.mark.slow
def test_plans_need_the_trace_of_their_step() -> None:
    report = report_of_blocks()
    plans = plans_of(report, 0.9)

    with pytest.raises(ValueError, match="plans are shown against the trace of their step; found a report without one"):
        page_of(replace(report, trace=None), plans=plans)
    with pytest.raises(ValueError, match="this plan is for another step"):
        page_of(report_of_blocks(5), plans=plans)


def test_plans_are_sorted_by_their_budgets() -> None:
    report = report_of_blocks()
    plans = plans_of(report, 0.85, 1.0, 0.9)

    rows = contents_of(report, plans)["plans"]["rows"]

    assert [row["budget_bytes"] for row in rows] == sorted((plan.budget_bytes for plan in plans), reverse=True)
    for row, plan in zip(rows, sorted(plans, key=lambda plan: -plan.budget_bytes), strict=True):
        assert max(map(sum, zip(row["held"], row["again"], strict=True))) == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
        assert row["seconds"] == plan.predicted_s
        kept = row["kept_bytes"] + row["moved_bytes"] + row["again_bytes"]
        assert kept == sum(value.num_bytes for value in plan.values if not value.is_anchor)


def test_missing_plotly_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)

    with pytest.raises(ModuleNotFoundError) as error:
        report_of_blocks(1).to_html(tmp_path / "step.html")

    assert str(error.value).startswith("the page needs plotly, which cannot be imported (")
    assert str(error.value).endswith('Run: pip install "plotly>=5"')
    assert not (tmp_path / "step.html").exists()


def test_page_of_fifty_thousand_ops_is_small_and_soon_there() -> None:
    report = replace(report_of_blocks(1), step_memory=memory_of_ops(50_000))
    begin_s = time.process_time()

    page = page_of(report)

    assert time.process_time() - begin_s < 5
    assert len(page) < MOST_BYTES


def _resnet50() -> MemoryReport:
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        return profiled(models.resnet50(), torch.empty(256, 3, 224, 224))


def _of_five_thousand_modules() -> MemoryReport:
    """Of most of which nothing is saved: each has its row all the same, and a page of many ops is another test's."""
    with torch.device("meta"):
        parts = [nn.Sequential(Block(32), *[nn.Identity() for _ in range(11)]) for _ in range(320)]
        model = nn.Sequential(*[nn.Sequential(*parts[start : start + 10]) for start in range(0, 320, 10)])
        x = torch.empty(2048, 32)
    report = profiled(model, x)
    assert len(report.modules) > 5000
    return report


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "most_s"), [(_resnet50, 3), (_of_five_thousand_modules, 10)], ids=["ResNet-50", "5,000 modules"]
)
def test_page_is_soon_written_and_drawn(make: Callable[[], MemoryReport], most_s: float, tmp_path: Path) -> None:
    report = make()
    problem = problem_of(trace_of(report), find_gpu("RTX 3090"), "adamw")
    plan = plan_budget_jointly(problem, int(0.9 * problem.plain_peak_bytes), Action.OFFLOAD)  # the soonest made
    plans = [replace(plan, budget_bytes=plan.budget_bytes + number) for number in range(8)]
    begin_s = _taken_s()

    report.to_html(tmp_path / "step.html", plans=plans)

    written_s = _taken_s() - begin_s
    told = opened(
        tmp_path / "step.html", "get('unfold').click(); result.rows = document.querySelectorAll('#modules tbody tr').length;"
    )
    assert told["errors"] == []
    assert told["rows"] == len(report.modules)
    assert written_s < most_s
    assert _taken_s() - begin_s < most_s + _START_S
    assert (tmp_path / "step.html").stat().st_size < MOST_BYTES


def memory_of_ops(num_ops: int, *, seed: int = 0) -> StepMemory:
    """Return a step of so many ops, each of which makes a storage that stays for a while."""
    draw = random.Random(seed)
    storages = [AliveStorage(category=MemoryCategory.PARAM, module="(model)", what="w", num_bytes=2**24, begin=0, end=num_ops)]
    moments = []
    for place in range(num_ops):
        category = MemoryCategory.ACTIVATION if place % 3 else MemoryCategory.TEMP
        module, phase = f"layers.{place % 50}", Phase.FORWARD if place < num_ops // 3 else Phase.BACKWARD
        num_bytes, end = 512 * draw.randint(1, 4000), min(num_ops, place + draw.randint(1, 200))
        made = {"what": "mm", "num_bytes": num_bytes, "begin": place, "end": end}
        storages.append(AliveStorage(category=category, module=module, **made))
        moments.append(Moment(phase=phase, op="aten.mm.default", module=module))
    return StepMemory(moments=tuple(moments), storages=tuple(storages))


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=500), st.integers(4, 60))
def test_each_stretch_keeps_its_highest_and_its_lowest(levels: list[int], most: int) -> None:
    places = sampled(levels, most)

    assert places == sorted(set(places))
    assert len(places) <= most + 2
    ends = [number * len(levels) // (most // 2) for number in range(most // 2 + 1)]
    for begin, end in itertools.pairwise(ends):
        stretch = levels[begin:end]
        assert not stretch or {max(stretch), min(stretch)} <= {levels[place] for place in places if begin <= place < end}


@pytest.mark.parametrize("num_ops", [1, 30, 5000, 20_000])
def test_timeline_is_the_memory(num_ops: int) -> None:
    memory = memory_of_ops(num_ops)

    line = timeline_of(memory)

    assert line["num_moments"] == num_ops
    assert line["x"][line["peak"]] == memory.peak
    for index, place in enumerate(line["x"]):
        assert sum(series["y"][index] for series in line["series"]) == memory.total_bytes[place]
        assert line["texts"][line["modules"][index]] == memory.moments[place].module
    assert len(line["x"]) <= MOST_POINTS + 20
    for series in line["series"]:
        assert max(series["y"]) == max(memory.levels[MemoryCategory(series["key"])])
    sizes = sorted((row[3] for row in line["storages"]), reverse=True)
    assert sizes == sorted((storage.num_bytes for storage in memory.storages), reverse=True)[:MOST_STORAGES]


def test_timeline_of_a_few_ops() -> None:
    memory = memory_of_ops(30)

    line = timeline_of(memory)

    assert spans_of(memory) == [("forward", 0, 10), ("backward", 10, 30)]
    assert list(categories_of(memory)) == ["param", "activation", "temp"]  # but for those that are never there
    for moment in range(30):
        assert sum(row[3] for row in line["storages"] if row[4] <= moment < row[5]) == memory.total_bytes[moment]


MODEL = ["tests.page.test_document:small_model", "--input", "4096x64"]


def small_model() -> object:
    from torch import nn

    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_profile_draws_the_whole_step(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "step.html"

    assert main(["profile", *MODEL, "--device", device, "--html", str(page)]) == 0

    data = data_of(page.read_text(encoding="utf-8"))
    assert [phase["name"] for phase in data["timeline"]["phases"]] == ["forward", "loss", "backward"]
    assert data["timeline"]["num_moments"] > 10
    assert data["plans"] is None
    assert any(row[8] for row in data["rows"]) == (device == "cpu")  # seconds of forwards
    assert "(model)" in capsys.readouterr().out


def test_plan_draws_each_budget_and_the_optimizer(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"

    assert main(["plan", *MODEL, "--gpu", "RTX 3090", "--optimizer", "adamw", "--steps", "3", "--html", str(page)]) == 0

    data = data_of(page.read_text(encoding="utf-8"))
    assert len(data["plans"]["rows"]) == 3
    assert "optimizer state" in {series["key"] for series in data["timeline"]["series"]}
    highest = max(sum(values) for values in zip(*(series["y"] for series in data["timeline"]["series"]), strict=True))
    assert highest == pytest.approx(data["plans"]["plain_peak_bytes"], rel=0.01)


@pytest.mark.parametrize("command", [["profile", *MODEL], ["plan", *MODEL, "--gpu", "RTX 3090"]], ids=["profile", "plan"])
def test_missing_plotly_is_told_before_anything_runs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "plotly" else found(name, *more))

    assert main([*command, "--html", str(tmp_path / "step.html")]) != 0

    error = capsys.readouterr().err
    assert 'error: --html needs plotly; install it with pip install "plotly>=5"' in error
    assert not (tmp_path / "step.html").exists()


def test_file_that_cannot_be_written_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *MODEL, "--device", "meta", "--html", str(tmp_path / "missing" / "step.html")]) != 0

    assert "No such file or directory" in capsys.readouterr().err


def peak_under(trace: StepTrace, plan: MemoryPlan) -> int:
    base_bytes = plan.plain_peak_bytes - max(trace.live_bytes)
    levels = zip(trace.live_bytes, *under_plan(trace, plan), strict=True)
    return base_bytes + max(map(sum, levels))


@pytest.mark.parametrize("mib_per_s", [500, 20_000])
@pytest.mark.parametrize("seed", range(8))
def test_peak_of_a_step_is_as_predicted(seed: int, mib_per_s: int) -> None:
    trace = layers(6) if not seed else random_trace(seed)
    problem = make_problem(trace, gpu(mib_per_s))
    joint = JointPlanner(problem)

    for planner in (joint, *joint.alone.values()):
        least_bytes = planner.least().peak_bytes
        for share in (0.0, 0.3, 0.6, 0.9):
            plan = planner.plan(int(least_bytes + share * (problem.plain_peak_bytes - least_bytes)))
            assert peak_under(trace, plan) == plan.predicted_peak_bytes


@pytest.mark.parametrize("share", [0.95, 0.8])
def test_peak_of_a_model_is_as_predicted(share: float) -> None:
    report = report_of_blocks(6)
    assert report.trace is not None
    (plan,) = plans_of(report, share)

    assert peak_under(report.trace, plan) == plan.predicted_peak_bytes


def test_nothing_changes_where_all_stays() -> None:
    trace = layers(3)
    problem = make_problem(trace, gpu())

    saved, again = under_plan(trace, plan_budget_jointly(problem, problem.plain_peak_bytes))

    assert not any(saved)
    assert not any(again)


def test_what_leaves_is_gone_until_it_is_fetched() -> None:
    trace = layers(6)
    problem = make_problem(trace, gpu())
    plan = plan_budget_jointly(problem, int(0.7 * problem.plain_peak_bytes), Action.OFFLOAD)
    leaving = [value for value in plan.values if value.action is Action.OFFLOAD]

    saved, _ = under_plan(trace, plan)

    assert leaving
    assert min(saved) < 0
    assert -min(saved) <= sum(value.num_bytes for value in leaving)
    assert saved[0] == saved[-1] == 0


def test_plan_of_another_step_is_refused() -> None:
    problem = make_problem(layers(3), gpu())
    plan = plan_budget_jointly(problem, problem.plain_peak_bytes)

    with pytest.raises(ValueError, match="this plan is for another step: model"):
        under_plan(replace(layers(3), model="Other"), plan)
