"""The page in a browser: it is drawn from the file alone, and does what is clicked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memkit.core.sizes import format_gib
from memkit.plan import MemoryPlan
from memkit.profile import MemoryReport
from tests.page.browser import EVIL, needs_browser, opened, plans_of, report_of_blocks, report_of_evil

pytestmark = [needs_browser, pytest.mark.slow]

_CLICKS = """
    const line = get("timeline-chart"), icicle = get("icicle-chart");
    result.title = document.title;
    result.words = get("in-words").textContent;
    result.at_peak = get("moment-title").textContent;
    result.areas = line.data.map((trace) => trace.name);
    result.alive_at_peak = texts("#alive tbody tr");
    set(get("moment"), 0);
    result.at_begin = get("moment-title").textContent;
    result.alive_at_begin = texts("#alive tbody tr");
    get("to-peak").click();
    result.back = get("moment-title").textContent;
    const area = line.querySelector(".nsewdrag").getBoundingClientRect();
    await mouse(line.querySelector(".nsewdrag"), area.left + area.width * 0.9, area.top + area.height * 0.5);
    result.clicked = get("moment-where").textContent;
    document.querySelector('#moment-bars button[data-key="activation"]').click();
    await wait(100);
    result.areas_without = line.data.map((trace) => trace.name);

    result.boxes = icicle.data[0].values[0];
    get("by-params").click();
    await wait(100);
    result.boxes_of_params = icicle.data[0].values[0];
    result.boxes_with_text = icicle.querySelectorAll("g.slice text.slicetext").length;
    const slice = icicle.querySelectorAll("g.slice path")[1].getBoundingClientRect();
    await mouse(icicle.querySelectorAll("g.slice path")[1], slice.left + 5, slice.top + 5);
    await wait(1500);
    result.looked_into = icicle.data[0].level || icicle._fullData[0].level;

    const names = () => [...document.querySelectorAll("#modules tbody tr")].map((row) => row.dataset.name);
    result.rows = names();
    get("unfold").click();
    result.unfolded = names();
    get("fold").click();
    result.folded = names();
    const sort = (key) => document.querySelector(`#modules th button[data-key="${key}"]`).click();
    get("unfold").click();
    sort(3);
    result.by_params = names();
    result.sorted = [...document.querySelectorAll("#modules th")].map((head) => head.getAttribute("aria-sort"));
    sort(3);
    sort(3);
    result.unsorted = names();
    document.querySelector('#modules tr[data-name="1"] .fold').click();
    result.without_blocks = names();
    set(get("find"), "gelu");
    result.found = names();

    result.plans = [];
    for (let place = 0; place <= Number(get("budget").max); place += 1) {
      set(get("budget"), place);
      result.plans.push([get("budget-label").textContent, ...texts("#plan-answer b")]);
    }
    const front = get("front-chart"), points = front.querySelectorAll(".scatterlayer .trace.scatter path.point");
    const first = points[0].getBoundingClientRect();
    await mouse(front.querySelector(".nsewdrag"), first.left + first.width / 2, first.top + first.height / 2);
    result.chosen = get("budget-label").textContent;
    result.after = get("plan-chart").data.map((trace) => [trace.name, Math.max(...trace.y)]);

    result.background = getComputedStyle(document.body).backgroundColor;
    get("theme").click();
    await wait(100);
    result.other_background = getComputedStyle(document.body).backgroundColor;
    result.text_color = line.layout.font.color;
"""


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    return report_of_blocks()


@pytest.fixture(scope="module")
def plans(report: MemoryReport) -> list[MemoryPlan]:
    return plans_of(report, 1.0, 0.9, 0.8)


@pytest.fixture(scope="module")
def told(report: MemoryReport, plans: list[MemoryPlan], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    page = tmp_path_factory.mktemp("page") / "step.html"
    report.to_html(page, plans=plans)
    return opened(page, _CLICKS)


def test_page_is_drawn_from_the_file_alone(told: dict[str, Any]) -> None:
    assert told["ready"] == "yes"
    assert told["errors"] == []
    assert told["loaded"] == []
    assert told["title"] == "Sequential: where the memory goes"


def test_timeline_stacks_what_is_there(told: dict[str, Any]) -> None:
    names = ["parameters", "optimizer states", "inputs", "gradients", "activations", "temporaries"]

    assert told["areas"] == [*names, "in all"]
    assert told["areas_without"] == [*(name for name in names if name != "activations"), "in all"]


def test_peak_is_told_and_what_is_alive_there(told: dict[str, Any], report: MemoryReport) -> None:
    memory = report.step_memory
    largest = memory.grouped_at(memory.peak)[0]

    assert told["at_peak"] == told["back"] == f"At the peak: {format_gib(memory.peak_bytes)}"
    assert format_gib(memory.peak_bytes) in told["words"]
    assert told["alive_at_peak"][0].startswith(f"{format_gib(largest.num_bytes)}{largest.module}")


def test_another_moment_can_be_looked_at(told: dict[str, Any], report: MemoryReport) -> None:
    memory = report.step_memory

    assert told["at_begin"] == f"At this moment: {format_gib(memory.total_bytes[0])}"
    assert told["alive_at_begin"] != told["alive_at_peak"]
    assert "in the backward" in told["clicked"]


def test_icicle_switches_and_is_looked_into(told: dict[str, Any], report: MemoryReport) -> None:
    assert told["boxes"] == report.activation_bytes
    assert told["boxes_of_params"] == report.param_bytes
    assert told["boxes_with_text"] > 3
    assert told["looked_into"] not in (None, "", "0")


def test_table_folds_sorts_and_finds(told: dict[str, Any], report: MemoryReport) -> None:
    names = [row.fqn for row in report.modules]

    assert told["unfolded"] == told["unsorted"] == names
    assert told["folded"] == ["(model)", "0", "1", "(outside modules)"]
    assert told["by_params"][:4] == ["(model)", "1", "1.0", "1.0.fc1"]
    assert told["by_params"][-2] == "0"
    assert "descending" in told["sorted"]
    assert told["without_blocks"] == told["folded"]
    assert told["found"] == [row.fqn for row in report.modules if row.type_name == "GELU"]


def test_slider_tells_each_plan(told: dict[str, Any], plans: list[MemoryPlan]) -> None:
    assert [row[0] for row in told["plans"]] == [f"Budget: {format_gib(plan.budget_bytes)}" for plan in plans]
    assert [row[1] for row in told["plans"]] == [format_gib(plan.predicted_peak_bytes) for plan in plans]
    assert [float(row[2].removesuffix(" ms")) for row in told["plans"]] == pytest.approx(
        [1e3 * plan.predicted_s for plan in plans], abs=0.051
    )


def test_click_on_a_plan_chooses_it(told: dict[str, Any], plans: list[MemoryPlan]) -> None:
    assert told["chosen"] == f"Budget: {format_gib(plans[0].budget_bytes)}"
    (_, held), (_, after), (_, before) = told["after"]

    assert held <= after == pytest.approx(plans[0].predicted_peak_bytes / 2**20)
    assert before == pytest.approx(plans[0].plain_peak_bytes / 2**20)


def test_theme_switches(told: dict[str, Any]) -> None:
    assert told["background"] == "rgb(244, 246, 249)"
    assert told["other_background"] == "rgb(14, 19, 26)"
    assert told["text_color"] == "#e5ebf3"


def test_dark_is_followed_and_a_phone_needs_no_scrolling_aside(report: MemoryReport, tmp_path: Path) -> None:
    report.to_html(tmp_path / "step.html", plans=plans_of(report, 0.9))

    told = opened(
        tmp_path / "step.html",
        """
        result.theme = document.documentElement.dataset.theme;
        result.widths = [document.documentElement.scrollWidth, window.innerWidth];
        result.charts = [...document.querySelectorAll(".chart")].map((chart) => chart.querySelector("svg").clientWidth);
        """,
        width=500,
        is_dark=True,
    )

    assert told["errors"] == []
    assert told["theme"] == "dark"
    assert told["widths"][0] <= told["widths"][1]
    assert len(told["charts"]) == 4
    assert all(0 < width <= told["widths"][1] for width in told["charts"])


def test_names_of_the_users_do_nothing(tmp_path: Path) -> None:
    report = report_of_evil()
    report.to_html(tmp_path / "step.html", plans=plans_of(report, 0.95))

    told = opened(
        tmp_path / "step.html",
        """
        const inside = (selector) => document.querySelectorAll(`main ${selector}`).length;
        result.elements = [inside("script"), inside("img"), inside("td b"), inside("[onerror]")];
        result.names = [...document.querySelectorAll("#modules tbody tr")].map((row) => row.dataset.name);
        result.kinds = texts("#modules tbody td:nth-child(2)");
        result.labels = [...get("icicle-chart").querySelectorAll("text.slicetext")].map((text) => text.textContent);
        const line = get("timeline-chart");
        Plotly.Fx.hover(line, { xval: 10 }, "xy");
        await wait(300);
        result.hover = [...line.querySelectorAll(".hoverlayer text")].map((text) => text.textContent).join(" ");
        """,
    )

    assert told["errors"] == told["alerts"] == told["loaded"] == []
    assert told["elements"] == [0, 0, 0, 0]
    assert told["names"] == [row.fqn for row in report.modules]
    assert told["kinds"][1:-1] == list(EVIL)
    assert all(any(name.replace(".", "_") in label for label in told["labels"]) for name in EVIL)
    assert any(name in told["hover"] for name in EVIL)


def test_check_of_names_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "step.html"
    report_of_blocks(1).to_html(page)
    page.write_text(page.read_text().replace("<main", f"{EVIL[0]}<main", 1))

    assert opened(page)["alerts"] == ["1"]
