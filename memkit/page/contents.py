"""Everything that a page shows, as JSON values. Bytes are integers, seconds are numbers; the page chooses units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from memkit._version import __version__
from memkit.page.sources import CATEGORIES, MEANINGS, Report, Row, memory_of, peak_bytes_of
from memkit.page.timeline import MOST_POINTS, sampled, timeline_of
from memkit.page.under_plan import under_plan
from memkit.plan import Action, MemoryPlan, StepTrace

_MOST_POINTS_OF_A_PLAN = MOST_POINTS // 2
_MOST_MODULES_OF_A_PLAN = 200
_MOST_SHAPES = 2
_ACTIONS = (Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE)


def contents_of(report: Report, plans: Sequence[MemoryPlan] = ()) -> dict[str, Any]:
    """Return what the page of a report shows, with plans for its step.

    Raises:
        ValueError: a plan is for another step, or the report has no trace, which plans are shown against.
    """
    memory = memory_of(report)
    return {
        "version": __version__,
        "model": report.run.model,
        "tag": report.tag,
        "where": where_of(report),
        "facts": facts_of(report),
        "categories": [{"key": key, "name": name, "meaning": MEANINGS[key]} for key, name in CATEGORIES.items()],
        "timeline": None if memory is None else timeline_of(memory),
        "unseen_bytes": 0 if memory is None else max(0, (peak_bytes_of(report) or 0) - max(memory.total_bytes)),
        "no_timeline": "" if memory is not None else why_no_timeline(report),
        "rows": rows_of(report.modules),
        "plans": plans_of(report, plans),
    }


def where_of(report: Report) -> list[str]:
    """Return how the profile was taken, part by part."""
    run, shapes = report.run, _shapes(report.modules[0].input_shapes)
    on = f"on meta, as {run.target} would run it" if run.device == "meta" else f"on {run.device} ({run.device_name})"
    return [
        on,
        *([f"input {shapes}"] if shapes else []),
        "train mode" if run.training else "eval mode",
        *([f"autocast {run.autocast}"] if run.autocast else []),
        "forward and backward" if run.backward else "forward only",
        f"torch {run.torch_version}",
    ]


def facts_of(report: Report) -> list[dict[str, Any]]:
    """Return the figures on top of a page: a name, a number of bytes or seconds, and what it is."""
    optimizer = report.optimizer
    facts: list[tuple[str, int | None, float | None, str]] = [
        ("peak of the step" if report.run.backward else "peak", peak_bytes_of(report), None, "the most on the device at once"),
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
    return [
        {"name": name, "bytes": num_bytes, "seconds": seconds, "meaning": meaning}
        for name, num_bytes, seconds, meaning in facts
        if num_bytes is not None or seconds is not None
    ]


def why_no_timeline(report: Report) -> str:
    """Return why a report has no timeline, and what to do for one."""
    if report.run.backward:
        return (
            "This report has no timeline: what runs inside compiled code cannot be seen, and reports of older versions have "
            "none. For one, profile the model as it is before torch.compile."
        )
    return (
        "This report is of a forward alone. For a timeline of the whole step, profile with "
        "profile_memory(model, ..., backward=True), or with an optimizer."
    )


def rows_of(rows: Sequence[Row]) -> list[list[Any]]:
    """Return the modules, each as a list: name, class, parent, parameters, activations, own activations, calls, peak, forward
    and backward seconds, inputs, outputs, marks."""
    return [
        [
            row.fqn,
            row.type_name,
            row.parent,
            row.param_bytes,
            row.activation_bytes,
            row.self_bytes,
            row.num_calls,
            row.peak_bytes,
            row.forward_s,
            row.backward_s,
            _shapes(row.input_shapes),
            _shapes(row.output_shapes),
            ", ".join(row.marks),
        ]
        for row in rows
    ]


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    more = len(shapes) - _MOST_SHAPES
    return ", ".join("x".join(map(str, shape)) or "()" for shape in shapes[:_MOST_SHAPES]) + (f" +{more}" if more > 0 else "")


def plans_of(report: Report, plans: Sequence[MemoryPlan]) -> dict[str, Any] | None:
    """Return plans, that of the largest budget first, each with what the step takes under it; None without any.

    Raises:
        ValueError: a plan is for another step, or the report has no trace.
    """
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
    places = sampled(before, _MOST_POINTS_OF_A_PLAN)
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
    found = under_plan(trace, plan)
    held = [level + change for level, change in zip(before, found.saved_bytes, strict=True)]
    after = [level + again for level, again in zip(held, found.again_bytes, strict=True)]
    places = sampled(after, _MOST_POINTS_OF_A_PLAN)
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
        "again": [found.again_bytes[place] for place in places],
        "modules": _modules_of(plan),
    }


def _modules_of(plan: MemoryPlan) -> list[list[Any]]:
    """Return, for the modules with the most affected bytes, what stays, moves and is recomputed of their values."""
    found: dict[str, dict[Action, int]] = defaultdict(lambda: dict.fromkeys(Action, 0))
    for value in plan.values:
        if not value.is_anchor:
            found[value.module or "(model)"][value.action] += value.num_bytes
    changed = [(sums[Action.OFFLOAD] + sums[Action.RECOMPUTE], module) for module, sums in found.items()]
    order = [module for num_bytes, module in sorted(changed, key=lambda pair: -pair[0]) if num_bytes]
    return [[module, *(found[module][action] for action in _ACTIONS)] for module in order[:_MOST_MODULES_OF_A_PLAN]]
