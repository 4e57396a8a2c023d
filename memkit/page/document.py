"""The page as one HTML file that needs nothing else: its text, its styles, its scripts and plotly.js are all in it."""

from __future__ import annotations

import functools
import html
import importlib.resources
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memkit.extras import library
from memkit.page.contents import contents_of
from memkit.page.sources import Report
from memkit.plan import MemoryPlan

_SCRIPTS = ("base.js", "timeline.js", "modules.js", "plans.js", "main.js")


def write_page(report: Report, path: str | os.PathLike[str], *, plans: Iterable[MemoryPlan] = ()) -> None:
    """Write the page of a report to a file.

    Args:
        report: whose page it is.
        path: where to.
        plans: for the report's step, each for a budget of its own.

    Raises:
        ModuleNotFoundError: plotly is not installed.
        ValueError: a plan is for another step.
        OSError: the file cannot be written.
    """
    text = page_of(report, plans=plans)
    Path(path).write_text(text, encoding="utf-8", errors="xmlcharrefreplace")


def page_of(report: Report, *, plans: Iterable[MemoryPlan] = ()) -> str:
    """Return the page of a report as HTML.

    Raises:
        ModuleNotFoundError: plotly is not installed.
        ValueError: a plan is for another step.
    """
    plotly = _plotly_script()
    parts = {
        "title": html.escape(f"{report.run.model}: where the memory goes"),
        "style": _asset("page.css"),
        "data": as_script_json(contents_of(report, list(plans))),
        "plotly": plotly,
        "script": "\n".join(map(_asset, _SCRIPTS)),
    }
    pieces = _asset("page.html").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:  # once each, so that nothing of the user's is taken for a place to fill
        name, _, rest = piece.partition("}}")
        filled += [parts[name.strip()], rest]
    return "".join(filled)


def as_script_json(content: Any) -> str:
    r"""Return JSON that may stand in a script element: nothing in it can end that, or begin a comment.

    Args:
        content: Any, as `json.dumps` takes it.

    Example:
        >>> as_script_json("</script>")
        '"\\u003c/script\\u003e"'
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plotly_script() -> str:
    """Return plotly.js, which the package has with it.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    return str(library("plotly.offline", "the page").get_plotlyjs())


@functools.cache
def _asset(name: str) -> str:
    return (importlib.resources.files("memkit.page") / "assets" / name).read_text(encoding="utf-8")
