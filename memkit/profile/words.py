"""The sentences of a report, and the list of what fills the peak: chooses words; measures nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memkit.profile.alive import AliveItem, MemoryCategory, Moment, Phase, StepMemory, short_name
from memkit.profile.tree import OUTSIDE_NAME, ROOT_NAME
from memkit.sizes import MIB, format_mib, unit_of
from memkit.terminal import LAST, TextColumn, table_text, wrapped

if TYPE_CHECKING:
    from memkit.profile.report import MemoryReport

PLURALS = {
    MemoryCategory.PARAM: "parameters",
    MemoryCategory.BUFFER: "buffers",
    MemoryCategory.INPUT: "inputs",
    MemoryCategory.OPTIMIZER_STATE: "optimizer states",
    MemoryCategory.GRAD: "gradients",
    MemoryCategory.ACTIVATION: "activations",
    MemoryCategory.PARAM_CAST: "parameter casts",
    MemoryCategory.TEMP: "temporaries",
}
_LEAST_SHARE = 0.005
"""Categories below this share of the peak are summed up."""
_UNSEEN = "other tensors, workspaces and rounding"
_NEEDS_STEP = "what is alive at the peak of the step is known of a profile with backward=True (--backward)"
_NEEDS_EAGER = "what is alive at the peak cannot be told, since torch.compile runs a part of the model; profile it before that"


def peak_words(report: MemoryReport) -> str | None:
    """Return one sentence on what fills the peak of the step; None for a profile without a backward."""
    peak_bytes = report.step_peak_bytes
    if peak_bytes is None:
        return None
    unit, unit_bytes = unit_of(peak_bytes)
    begin = f"Of {peak_bytes / unit_bytes:.1f} {unit} at the peak of the step"
    memory = report.step_memory
    if memory is None or not memory.moments:
        return (
            None if memory is not None else f"The step takes {peak_bytes / unit_bytes:.1f} {unit} at its peak; {_NEEDS_EAGER}."
        )
    shown, rest, least = [], peak_bytes, max(_LEAST_SHARE * peak_bytes, 0.05 * unit_bytes)  # what is less would be 0.0
    for category, num_bytes in memory.category_bytes(memory.peak).items():
        if num_bytes >= least:
            shown.append(f"{PLURALS[category]} {num_bytes / unit_bytes:.1f}")
            rest -= num_bytes
    if rest >= least:
        # of a measured peak also what is no tensor of the step
        others = _UNSEEN if peak_bytes > memory.peak_bytes else "others"
        shown.append(f"{others} {rest / unit_bytes:.1f}")
    return f"{begin} ({where(memory.moments[memory.peak])}): {', '.join(shown)}."


def where(moment: Moment) -> str:
    """Return a moment in words, such as "in the backward of layer1.0.relu"."""
    if moment.phase is Phase.OPTIMIZER_STEP:
        return "in the optimizer's step"
    if moment.phase is Phase.LOSS:
        return "in the loss"
    of = {ROOT_NAME: "the model itself", OUTSIDE_NAME: "the loss"}.get(moment.module, moment.module)
    return f"in the {moment.phase.value} of {of}"


def peak_text(report: MemoryReport, *, depth: int | None, top: int | None, full: bool, width: int | None) -> str:
    """See `MemoryReport.peak_to_text`."""
    memory = report.step_memory
    if memory is None or not memory.moments:
        return wrapped(f"{_NEEDS_EAGER if report.run.backward else _NEEDS_STEP}.", width)
    items = folded(memory, depth=depth, full=full)
    shown, rest = items[:top], items[len(items[:top]) :]
    at = memory.moments[memory.peak]
    title = f"alive at the peak of the step, {where(at)} ({short_name(at.op)}): {format_mib(memory.peak_bytes)}"
    lines = [wrapped(title, width), "", _table(shown, memory.peak_bytes, width)]
    if rest:
        lines += ["", f"... and {len(rest)} more: {format_mib(sum(item.num_bytes for item in rest))}"]
    unseen_bytes = (report.step_peak_bytes or 0) - memory.peak_bytes
    if unseen_bytes > 0:  # what an allocator has counted beside the storages of the step
        lines += ["", wrapped(f"beside these, {_UNSEEN}: {format_mib(unseen_bytes)}", width)]
    return "\n".join(lines)


def folded(memory: StepMemory, *, depth: int | None, full: bool) -> list[AliveItem]:
    """Return what exists at the peak by category and module, largest first.

    Args:
        depth: figures of modules below this depth are added to those above.
        full: keep modules apart whose names differ only in numbers, such as "layers.0.mlp" and "layers.1.mlp".
    """
    groups: dict[tuple[MemoryCategory, str], list[AliveItem]] = {}
    for item in memory.grouped_at(memory.peak):
        item = replace(item, module=_above(item.module, depth))
        groups.setdefault((item.category, item.module if full else re.sub(r"\b\d+\b", "*", item.module)), []).append(item)
    found = [
        replace(
            items[0],
            module=_joined([item.module for item in items]),
            num_bytes=sum(item.num_bytes for item in items),
            num_storages=sum(item.num_storages for item in items),
        )
        for items in groups.values()
    ]
    return sorted(found, key=lambda item: -item.num_bytes)


def _above(module: str, depth: int | None) -> str:
    if depth is None or module in (ROOT_NAME, OUTSIDE_NAME):
        return module
    return ".".join(module.split(".")[:depth]) or ROOT_NAME


def _joined(modules: Sequence[str]) -> str:
    """Return one name for modules whose names differ in numbers alone."""
    distinct = list(dict.fromkeys(modules))
    if len(distinct) == 1:
        return distinct[0]
    parts = []
    for column in zip(*(name.split(".") for name in distinct), strict=True):
        numbers = sorted({int(part) for part in column if part.isdecimal()})
        is_run = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
        some = f"[{numbers[0]}-{numbers[-1]}]" if is_run else f"[{','.join(map(str, numbers))}]"
        parts.append(column[0] if len(set(column)) == 1 else some if len(numbers) <= _MOST_NUMBERS or is_run else "*")
    return f"{'.'.join(parts)} (x{len(distinct)})"


_MOST_NUMBERS = 4


def _table(items: Sequence[AliveItem], peak_bytes: int, width: int | None) -> str:
    shares = [f"{100 * item.num_bytes / peak_bytes:.1f}" if peak_bytes else "-" for item in items]
    return table_text(
        [
            TextColumn(heading="size (MiB)", cells=[f"{item.num_bytes / MIB:.2f}" for item in items]),
            TextColumn(heading="share (%)", cells=shares, goes=LAST),
            TextColumn(heading="category", cells=[item.category.value for item in items], right=False),
            TextColumn(heading="module", cells=[item.module for item in items], right=False, shortens=True),
            TextColumn(heading="storages", cells=[str(item.num_storages) for item in items], goes=0),
            TextColumn(heading="largest", cells=[item.what for item in items], right=False, shortens=True),
        ],
        width,
    )
