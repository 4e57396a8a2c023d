"""The page of a report: one self-contained HTML file with its data as JSON (bytes and seconds), styles, scripts and
plotly.js."""

from __future__ import annotations

import functools
import html
import importlib.resources
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from memkit._version import __version__
from memkit.core.extras import library
from memkit.page.under_plan import under_plan
from memkit.plan import Action, MemoryPlan, StepTrace
from memkit.plan.step import short_name

# A `MemoryReport` and its parts: `to_html` is a method of the report, so pages are below profiles and can't import these.
Report = Any
Memory = Any
Storage = Any

CATEGORIES = {
    "param": ("parameters", "the weights of the model"),
    "optimizer state": ("optimizer states", "what the optimizer keeps for each weight, such as Adam's two moments"),
    "buffer": ("buffers", "state of modules that is not trained, such as running means"),
    "input": ("inputs", "what you pass to the model"),
    "param cast": ("parameter casts", "copies of weights in another dtype, as autocast makes"),
    "grad": ("gradients", "gradients of the weights"),
    "activation": ("activations", "made in the forward and kept for the backward"),
    "temp": ("temporaries", "everything else: what passes from one operation to the next"),
}
"""The name and explanation of each category of bytes, from the bottom of the page's stack to its top."""


def memory_of(report: Report) -> Memory | None:
    memory = report.step_memory
    return memory if memory is not None and memory.moments else None


def peak_bytes_of(report: Report) -> Any:
    return report.step_peak_bytes if report.step_peak_bytes is not None else report.forward_peak_bytes


MOST_POINTS = 2000
MOST_STORAGES = 6000  # the most storages whose lifetimes are on a page, the largest ones
_MOST_SHAPES = 2


def sampled(levels: Sequence[int], most: int, *, always: Iterable[int] = ()) -> list[int]:
    """Return up to `most` places (and `always`) that draw a line of levels: the highest and the lowest of each stretch."""
    num_places = len(levels)
    if num_places <= most:
        return list(range(num_places))
    num_stretches = most // 2
    edges = [place * num_places // num_stretches for place in range(num_stretches + 1)]
    found = {0, num_places - 1, *always}
    for begin, end in pairwise(edges):
        stretch = range(begin, end)
        found.add(max(stretch, key=levels.__getitem__))
        found.add(min(stretch, key=levels.__getitem__))
    return sorted(found)


def spans_of(memory: Memory) -> list[tuple[str, int, int]]:
    spans, begin = list[tuple[str, int, int]](), 0
    for phase, moments in groupby(memory.moments, key=lambda moment: moment.phase):
        end = begin + sum(1 for _ in moments)
        spans.append((phase.value.removesuffix(" step"), begin, end))
        begin = end
    return spans


def categories_of(memory: Memory) -> dict[str, Sequence[int]]:
    levels = {category.value: level for category, level in memory.levels.items() if any(level)}
    return {name: levels[name] for name in dict.fromkeys([*CATEGORIES, *levels]) if name in levels}


def timeline_of(memory: Memory) -> dict[str, Any]:
    texts: dict[str, int] = defaultdict(lambda: len(texts))
    levels, spans = categories_of(memory), spans_of(memory)
    edges = [place for _, begin, end in spans for place in (begin, end - 1)]
    highest = [max(range(len(level)), key=level.__getitem__) for level in levels.values()]
    places = sampled(memory.total_bytes, MOST_POINTS, always=[memory.peak, *edges, *highest])
    largest = sorted(memory.storages, key=lambda storage: -storage.num_bytes)[:MOST_STORAGES]
    names = list(levels)
    return {
        "num_moments": len(memory.moments),
        "x": places,
        "ops": [texts[short_name(memory.moments[place].op)] for place in places],
        "modules": [texts[memory.moments[place].module] for place in places],
        "series": [{"key": name, "y": [level[place] for place in places]} for name, level in levels.items()],
        "phases": [{"name": name, "begin": begin, "end": end} for name, begin, end in spans],
        "peak": places.index(memory.peak),
        "storages": [
            [names.index(it.category.value), texts[it.module], texts[it.what], it.num_bytes, it.begin, it.end]
            for it in largest
            if it.num_bytes and it.begin < it.end
        ],
        "texts": list(texts),
    }


def contents_of(report: Report, plans: Sequence[MemoryPlan] = ()) -> dict[str, Any]:
    memory, shapes = memory_of(report), _shapes(report.modules[0].input_shapes)
    return {
        "version": __version__,
        "model": report.run.model,
        "tag": report.tag,
        "where": where_of(report, shapes and f"input {shapes}"),
        "facts": facts_of(report),
        "categories": [{"key": key, "name": name, "meaning": meaning} for key, (name, meaning) in CATEGORIES.items()],
        "timeline": None if memory is None else timeline_of(memory),
        "unseen_bytes": 0 if memory is None else max(0, (peak_bytes_of(report) or 0) - max(memory.total_bytes)),
        "no_timeline": "" if memory is not None else _NO_TIMELINE[report.run.backward],
        "rows": [
            [*_FIGURES(row), _shapes(row.input_shapes), _shapes(row.output_shapes), ", ".join(row.marks)]
            for row in report.modules
        ],
        "plans": plans_of(report, plans),
    }


def where_of(report: Report, *more: str) -> list[str]:
    run = report.run
    return [
        f"on meta, as {run.target} would run it" if run.device == "meta" else f"on {run.device} ({run.device_name})",
        *filter(None, more),
        "train mode" if run.training else "eval mode",
        *([f"autocast {run.autocast}"] if run.autocast else []),
        "forward and backward" if run.backward else "forward",
        f"torch {run.torch_version}",
    ]


def facts_of(report: Report) -> list[dict[str, Any]]:
    optimizer, peak = report.optimizer, "peak of the step" if report.run.backward else "peak"
    facts: list[tuple[str, int | None, float | None, str]] = [
        (peak, peak_bytes_of(report), None, "the most on the device at once"),
        ("activations", report.activation_bytes, None, "kept for the backward, inputs included"),
        ("parameters", report.param_bytes, None, "the weights of the model"),
        ("gradients", report.grad_bytes, None, "of the weights, when the backward is over"),
    ]
    if optimizer is not None:
        facts.append(("optimizer states", optimizer.state_bytes, None, f"what {optimizer.name} keeps for the weights"))
    facts += [
        ("reserved", report.reserved_peak_bytes, None, "the most that CUDA's allocator took"),
        ("forward", None, report.forward_s, "the time of the model's forward"),
        ("backward", None, report.backward_s, "the time of the backward"),
    ]
    known = [fact for fact in facts if fact[1] is not None or fact[2] is not None]
    return [dict(zip(("name", "bytes", "seconds", "meaning"), fact, strict=True)) for fact in known]


_NO_TIMELINE = {
    True: "This report has no timeline: what runs inside compiled code cannot be seen, and reports of older versions have "
    "none. For one, profile the model as it is before torch.compile.",
    False: "This report is of a forward alone. For a timeline of the whole step, profile with "
    "profile_memory(model, ..., backward=True), or with an optimizer.",
}
_FIGURES = attrgetter(
    *("fqn", "type_name", "parent", "param_bytes", "activation_bytes", "self_bytes", "num_calls", "peak_bytes"),
    *("forward_s", "backward_s"),
)


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    more = len(shapes) - _MOST_SHAPES
    return ", ".join("x".join(map(str, shape)) or "()" for shape in shapes[:_MOST_SHAPES]) + (f" +{more}" if more > 0 else "")


def plans_of(report: Report, plans: Sequence[MemoryPlan]) -> dict[str, Any] | None:
    if not plans:
        return None
    trace = report.trace
    if trace is None:
        raise ValueError(
            "plans are shown against the trace of their step; found a report without one. Profile with "
            'profile_memory(model, ..., device="meta", backward=True, trace=True), and plan from that report'
        )
    ordered = sorted(plans, key=lambda plan: (-plan.budget_bytes, -plan.predicted_peak_bytes))
    first = ordered[0]
    extra_bytes = max(0, first.plain_peak_bytes - trace.peak_bytes)
    before = [trace.base_bytes + extra_bytes + live for live in trace.live_bytes]
    places = sampled(before, MOST_POINTS // 2)
    return {
        "gpu": first.gpu,
        "is_measured": first.is_measured,
        "plain_s": first.plain_s,
        "plain_peak_bytes": first.plain_peak_bytes,
        "least_bytes": min(plan.min_budget_bytes for plan in ordered),
        "num_moments": len(before),
        "turn": trace.num_forward_ops,
        "before": {"x": places, "y": [before[place] for place in places]},
        "notes": list(dict.fromkeys(note for plan in ordered for note in plan.notes)),
        "rows": [_plan_of(trace, before, plan) for plan in ordered],
    }


def _plan_of(trace: StepTrace, before: Sequence[int], plan: MemoryPlan) -> dict[str, Any]:
    saved, again = under_plan(trace, plan)
    held = [level + change for level, change in zip(before, saved, strict=True)]
    places = sampled([level + more for level, more in zip(held, again, strict=True)], MOST_POINTS // 2)
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.predicted_peak_bytes,
        "seconds": plan.predicted_s,
        "bound_s": plan.bound_s,
        "replayed_s": plan.replayed_s,
        "stall_s": plan.stall_s,
        "kept_bytes": plan.kept_bytes,
        "moved_bytes": plan.offload_bytes,
        "again_bytes": plan.recompute_bytes,
        "x": places,
        "held": [held[place] for place in places],
        "again": [again[place] for place in places],
        "modules": _modules_of(plan),
    }


def _modules_of(plan: MemoryPlan) -> list[list[Any]]:
    found: dict[str, dict[Action, int]] = defaultdict(lambda: dict.fromkeys(Action, 0))
    for value in plan.values:
        if not value.is_anchor:
            found[value.module or "(model)"][value.action] += value.num_bytes
    changed = {module: sums[Action.OFFLOAD] + sums[Action.RECOMPUTE] for module, sums in found.items()}
    order = [module for module in sorted(changed, key=lambda module: -changed[module]) if changed[module]]
    return [
        [module, *(found[module][action] for action in (Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE))]
        for module in order[:200]
    ]


def write_page(report: Report, path: str | os.PathLike[str], *, plans: Iterable[MemoryPlan] = ()) -> None:
    Path(path).write_text(page_of(report, plans=plans), encoding="utf-8", errors="xmlcharrefreplace")


def page_of(report: Report, *, plans: Iterable[MemoryPlan] = ()) -> str:
    parts = {
        "title": html.escape(f"{report.run.model}: where the memory goes"),
        "style": _asset("page.css"),
        "data": as_script_json(contents_of(report, list(plans))),
        "plotly": str(library("plotly.offline", "the page").get_plotlyjs()),
        "script": "\n".join(map(_asset, ("base.js", "timeline.js", "modules.js", "plans.js", "main.js"))),
    }
    first, *pieces = _asset("page.html").split("{{")  # once, so that no user text counts as a placeholder
    filled = (piece.partition("}}") for piece in pieces)
    return "".join([first, *(f"{parts[name.strip()]}{rest}" for name, _, rest in filled)])


def as_script_json(content: Any) -> str:
    """Return JSON that is safe in a script element: it can neither end the element nor begin a comment."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def _asset(name: str) -> str:
    return (importlib.resources.files("memkit.page") / "assets" / name).read_text(encoding="utf-8")
