"""A report as text: its table, its sentences, the list of the peak's contents, and two reports side by side."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from memkit.core.sizes import MIB, format_mib, unit_of
from memkit.core.terminal import LAST, TextColumn, table_text, wrapped
from memkit.page.document import CATEGORIES, where_of
from memkit.plan.step import short_name
from memkit.profile.alive import AliveItem, MemoryCategory, Moment, Phase, StepMemory, grouped
from memkit.profile.tree import MEANINGS, OUTSIDE_NAME, ROOT_NAME, Mark, children_of

if TYPE_CHECKING:
    from memkit.profile.report import MemoryReport, ModuleRecord
    from memkit.profile.tree import Shapes

_UNSEEN = "other tensors, workspaces and rounding"
_NEEDS_STEP = "what is alive at the peak of the step is known of a profile with backward=True (--backward)"
_NEEDS_EAGER = "what is alive at the peak cannot be told, since torch.compile runs a part of the model; profile it before that"
_IN_FULL = ("self", "share", "saves", "dtype", "backward", "backward peak")
_TIME = "forward and backward"
_PEAK = "peak of the step"


def peak_words(report: MemoryReport) -> str | None:
    """Return one sentence on what fills the peak of the step; None for a profile without a backward."""
    peak_bytes = report.step_peak_bytes
    if peak_bytes is None:
        return None
    unit, unit_bytes = unit_of(peak_bytes)
    size = f"{peak_bytes / unit_bytes:.1f} {unit}"
    memory = report.step_memory
    if memory is None or not memory.moments:
        return None if memory is not None else f"The step takes {size} at its peak; {_NEEDS_EAGER}."
    shown, rest, least = [], peak_bytes, max(0.005 * peak_bytes, 0.05 * unit_bytes)  # less would print as 0.0
    for category, num_bytes in memory.category_bytes(memory.peak).items():
        if num_bytes >= least:
            shown.append(f"{CATEGORIES[category.value][0]} {num_bytes / unit_bytes:.1f}")
            rest -= num_bytes
    if rest >= least:
        # a measured peak also has bytes of no tensor of the step
        others = _UNSEEN if peak_bytes > memory.peak_bytes else "others"
        shown.append(f"{others} {rest / unit_bytes:.1f}")
    return f"Of {size} at the peak of the step ({where(memory.moments[memory.peak])}): {', '.join(shown)}."


def where(moment: Moment) -> str:
    if moment.phase is Phase.OPTIMIZER_STEP:
        return "in the optimizer's step"
    if moment.phase is Phase.LOSS:
        return "in the loss"
    of = {ROOT_NAME: "the model itself", OUTSIDE_NAME: "the loss"}.get(moment.module, moment.module)
    return f"in the {moment.phase.value} of {of}"


def peak_text(report: MemoryReport, *, depth: int | None, top: int | None, full: bool, width: int | None) -> str:
    memory = report.step_memory
    if memory is None or not memory.moments:
        return wrapped(f"{_NEEDS_EAGER if report.run.backward else _NEEDS_STEP}.", width)
    items = folded(memory, depth=depth, full=full)
    shown, rest = items[:top], items[len(items[:top]) :]
    at = memory.moments[memory.peak]
    title = f"alive at the peak of the step, {where(at)} ({short_name(at.op)}): {format_mib(memory.peak_bytes)}"
    shares = [f"{100 * item.num_bytes / memory.peak_bytes:.1f}" if memory.peak_bytes else "-" for item in shown]
    columns = [
        TextColumn(heading="size (MiB)", cells=[_mib(item.num_bytes) for item in shown]),
        TextColumn(heading="share (%)", cells=shares, goes=LAST),
        TextColumn(heading="category", cells=[item.category.value for item in shown], right=False),
        TextColumn(heading="module", cells=[item.module for item in shown], right=False, shortens=True),
        TextColumn(heading="storages", cells=[str(item.num_storages) for item in shown], goes=0),
        TextColumn(heading="largest", cells=[item.what for item in shown], right=False, shortens=True),
    ]
    lines = [wrapped(title, width), "", table_text(columns, width)]
    if rest:
        lines += ["", f"... and {len(rest)} more: {format_mib(sum(item.num_bytes for item in rest))}"]
    unseen_bytes = (report.step_peak_bytes or 0) - memory.peak_bytes
    if unseen_bytes > 0:  # bytes that the allocator counted beside the storages of the step
        lines += ["", wrapped(f"beside these, {_UNSEEN}: {format_mib(unseen_bytes)}", width)]
    return "\n".join(lines)


def folded(memory: StepMemory, *, depth: int | None, full: bool) -> list[AliveItem]:
    items = list(memory.grouped_at(memory.peak))
    for place, item in enumerate(items):
        if depth is not None and item.module not in (ROOT_NAME, OUTSIDE_NAME):
            items[place] = replace(item, module=".".join(item.module.split(".")[:depth]) or ROOT_NAME)
    found = grouped(items, lambda item: item.module if full else re.sub(r"\b\d+\b", "*", item.module))
    return [replace(item, module=_one_name(modules)) for item, modules in found]


def _one_name(distinct: Sequence[str]) -> str:
    if len(distinct) == 1:
        return distinct[0]
    parts = []
    for column in zip(*(name.split(".") for name in distinct), strict=True):
        numbers = sorted({int(part) for part in column if part.isdecimal()})
        is_run = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
        some = f"[{numbers[0]}-{numbers[-1]}]" if is_run else f"[{','.join(map(str, numbers))}]"
        parts.append(column[0] if len(set(column)) == 1 else some if len(numbers) <= 4 or is_run else "*")
    return f"{'.'.join(parts)} (x{len(distinct)})"


class _Column(NamedTuple):
    heading: str
    cell: Callable[[ModuleRecord, MemoryReport], str]
    right: bool = True
    goes: int | None = None  # shapes are left out first, then types; measurements only if nothing else is left


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _shapes(shapes: Shapes, num_kinds: int = 1) -> str:
    shown = [f"({', '.join(map(str, shape))})" for shape in shapes[:2]]
    more = len(shapes) - len(shown)
    kinds = f" x{num_kinds} kinds" if num_kinds > 1 else ""
    return (", ".join(shown) + (f" +{more}" if more else "") or "-") + kinds


def _share(row: ModuleRecord, report: MemoryReport) -> str:
    return f"{100 * row.self_bytes / report.activation_bytes:.1f}" if report.activation_bytes else "-"


_COLUMNS = {
    "name": _Column("module name", lambda row, _: row.fqn + f" [{', '.join(row.marks)}]" * bool(row.marks), right=False),
    "type": _Column("type", lambda row, _: row.type_name or "-", right=False, goes=2),
    "params": _Column("parameter size (MiB)", lambda row, _: _mib(row.param_bytes)),
    "host": _Column("of it on the host (MiB)", lambda row, _: _mib(row.host_param_bytes or None), goes=LAST + 2),
    "activation": _Column("activation size (MiB)", lambda row, _: _mib(row.activation_bytes)),
    "self": _Column("self (MiB)", lambda row, _: _mib(row.self_bytes)),
    "share": _Column("self share (%)", _share, goes=LAST),
    "saves": _Column("storages saved", lambda row, _: f"{row.num_storages} ({row.num_saves}x)", goes=4),
    "calls": _Column("#calls", lambda row, _: str(row.num_calls), goes=LAST + 1),
    "input": _Column("input shape", lambda row, _: _shapes(row.input_shapes, row.num_signatures), right=False, goes=0),
    "output": _Column("output shape", lambda row, _: _shapes(row.output_shapes), right=False, goes=1),
    "dtype": _Column("dtype", lambda row, _: row.dtype or "-", right=False, goes=3),
    "peak": _Column("peak mem (MiB)", lambda row, _: _mib(row.peak_bytes), goes=LAST + 5),
    "forward": _Column("forward time (ms)", lambda row, _: _ms(row.forward_s), goes=LAST + 6),
    "backward": _Column("backward time (ms)", lambda row, _: _ms(row.backward_s), goes=LAST + 4),
    "backward peak": _Column("backward peak (MiB)", lambda row, _: _mib(row.backward_peak_bytes), goes=LAST + 3),
}

SORT_KEYS = {
    "activation": "activation_bytes",
    "self": "self_bytes",
    "params": "param_bytes",
    "calls": "num_calls",
    "peak": "peak_bytes",
    "forward": "forward_s",
    "backward": "backward_s",
    "name": "fqn",
}


def check_view(*, depth: int | None, sort_by: str | None, top: int | None) -> None:
    for name, value in (("depth", depth), ("top", top)):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise ValueError(f"{name} must be a whole number, 0 or more; found {value!r}")
    if sort_by is not None and sort_by not in SORT_KEYS:
        raise ValueError(f"sort_by must be one of {', '.join(map(repr, SORT_KEYS))}; found {sort_by!r}")


def to_text(
    report: MemoryReport, *, depth: int | None, sort_by: str | None, top: int | None, full: bool, width: int | None
) -> str:
    check_view(depth=depth, sort_by=sort_by, top=top)
    names = [name for name in _COLUMNS if (full or name not in _IN_FULL) and (name != "host" or report.host_param_bytes)]
    if sort_by is not None and sort_by not in names:
        names.append(sort_by)
    rows = _folded(report.modules, depth)
    if not full:
        rows = _collapsed(rows)
    if sort_by == "name":
        rows.sort(key=lambda row: row.fqn)
    elif sort_by is not None:
        rows.sort(key=lambda row: -(getattr(row, SORT_KEYS[sort_by]) or 0))
    shown, hidden = rows[:top], rows[len(rows[:top]) :]
    columns = [
        TextColumn(
            heading=column.heading,
            cells=[column.cell(row, report) for row in shown],
            right=column.right,
            goes=None if name == sort_by else column.goes,  # the sort column never goes
            shortens=name == "name",
        )
        for name, column in ((name, _COLUMNS[name]) for name in names)
    ]
    largest = max(rows, key=lambda row: row.self_bytes)
    below = [f"{name}: {value}" for name, value in _notes(report)]
    if largest not in shown and largest.self_bytes:
        told = f"{largest.fqn} (self {format_mib(largest.self_bytes)})"
        below.insert(0, f"not shown: {len(hidden)} rows, with the largest, {told}")
    words = report.in_words()
    below += ["", words, ""] if words else []
    below += [
        f"parameters in all: {format_mib(report.param_bytes)}",
        f"activations in all: {format_mib(report.activation_bytes)}",
        f"forward time in all: {'-' if report.forward_s is None else f'{_ms(report.forward_s)} ms'}",
    ]
    shards = report.sharding
    where = ", ".join(where_of(report, "" if shards is None else f"rank {shards.rank} of {shards.num_ranks}"))
    title, *parts = (wrapped(part, width) for part in (f"{report.run.model} {where}", *below))
    return "\n".join([title, "", table_text(columns, width), "", *parts])


def _notes(report: MemoryReport) -> list[tuple[str, str]]:
    optimizer, sharding, on_host = report.optimizer, report.sharding, report.host_param_bytes
    sizes: list[tuple[str, int | None]] = [("model inputs among the activations", report.input_bytes)]
    if report.param_cast_bytes:
        sizes.append(("parameter casts (not counted as activations)", report.param_cast_bytes))
    sizes.append(("buffers", report.buffer_bytes))
    if optimizer is not None:
        sizes += [("gradients", report.grad_bytes), (f"states of {optimizer.name}", optimizer.state_bytes)]
    if sharding is not None:
        sizes.append((f"parameters as a whole, split between {sharding.num_shards} ranks", sharding.whole_bytes))
        if sharding.gathered_bytes is not None:
            sizes.append(("... gathered at once, at most", sharding.gathered_bytes))
    if on_host:
        sizes += [("parameters on the device", report.device_param_bytes), ("... in host memory, streamed", on_host)]
    if on_host and sharding is None:
        sizes.append(("slots on the device for what streams", report.slot_bytes))
    notes = [(name, "-" if num_bytes is None else format_mib(num_bytes)) for name, num_bytes in sizes]
    for mark in Mark:
        names = report.marked(mark.value)
        if names:
            shown = ", ".join(names[:4]) + (f", ... {len(names)} in all" if len(names) > 4 else "")
            notes.append((f"{mark.value} ({MEANINGS[mark]})", shown))
    peaks: list[tuple[str, int | None]] = []
    if report.forward_peak_bytes is not None and report.before_bytes is not None:
        peaks += [("allocated before", report.before_bytes), ("peak of the forward", report.forward_peak_bytes)]
        peaks.append(("... unaccounted: neither from before nor saved", report.unaccounted_bytes))
    peaks.append(("peak of the backward", report.backward_peak_bytes))
    peaks.append(("reserved by the allocator, at most", report.reserved_peak_bytes))
    notes += [(name, format_mib(num_bytes)) for name, num_bytes in peaks if num_bytes is not None]
    return [*notes, *([] if report.backward_s is None else [("backward time in all", f"{_ms(report.backward_s)} ms")])]


def _folded(rows: Sequence[ModuleRecord], depth: int | None) -> list[ModuleRecord]:
    """Drop the rows below a depth, and add their figures to the rows above."""
    if depth is None:
        return list(rows)
    own = {index: [row.self_bytes, row.num_storages, row.num_saves] for index, row in enumerate(rows)}
    for index in reversed(range(len(rows))):  # parents come before their children
        parent = rows[index].parent
        if rows[index].depth > depth and parent is not None:
            own[parent] = [upper + lower for upper, lower in zip(own[parent], own.pop(index), strict=True)]
    positions: dict[int | None, int | None] = {index: position for position, index in enumerate(sorted(own))}
    return [
        replace(
            rows[index], parent=positions.get(rows[index].parent), self_bytes=self_bytes, num_storages=stored, num_saves=saves
        )
        for index, (self_bytes, stored, saves) in sorted(own.items())
    ]


def _collapsed(rows: Sequence[ModuleRecord]) -> list[ModuleRecord]:
    """Merge runs of identical siblings named by position, and so their children, into one row with their sum."""
    below = children_of([row.parent for row in rows])
    kinds = _kinds(rows, below)
    found: list[ModuleRecord] = []

    def last_name(index: int) -> str:
        return rows[index].fqn.rpartition(".")[2]

    def walk(group: list[int], name: str) -> None:
        found.append(_merged([rows[index] for index in group], name))
        children = [below[index] for index in group]

        def kind(place: int) -> list[int]:
            return [kinds[own[place]] if last_name(own[place]).isdigit() else ~own[place] for own in children]

        for _, run in groupby(range(len(children[0])), kind):
            places = list(run)
            names = [last_name(children[0][place]) for place in places]
            last = names[0] if len(names) == 1 else f"[{names[0]}-{names[-1]}]"
            members = [own[place] for own in children for place in places]
            walk(members, last if name == ROOT_NAME else f"{name}.{last}")

    for index, row in enumerate(rows):
        if row.parent is None:
            walk([index], row.fqn)
    return found


def _kinds(rows: Sequence[ModuleRecord], below: list[list[int]]) -> list[int]:
    """Return for each row a number that is equal for rows with identical subtrees, whatever the saves of a storage."""
    numbers: dict[Any, int] = {}
    kinds = [0] * len(rows)
    for index in reversed(range(len(rows))):
        own = replace(rows[index], fqn="", parent=None, num_saves=0, peak_bytes=None, backward_peak_bytes=None)
        own = replace(own, forward_s=None, backward_s=None)
        # Children with names that are not positions ("conv1") belong to a module's kind.
        names = tuple(rows[child].fqn.rpartition(".")[2] for child in below[index])
        kind = (own, names, tuple(kinds[child] for child in below[index]))
        kinds[index] = numbers.setdefault(kind, len(numbers))
    return kinds


def _merged(rows: Sequence[ModuleRecord], name: str) -> ModuleRecord:
    if len(rows) == 1:
        return replace(rows[0], fqn=name)
    added = (
        *("num_calls", "param_bytes", "host_param_bytes", "activation_bytes", "self_bytes", "num_storages", "num_saves"),
        *("forward_s", "backward_s"),
    )
    figures: dict[str, Any] = {}
    for how, fields in ((sum, added), (max, ("peak_bytes", "backward_peak_bytes"))):
        for field in fields:
            known = [getattr(row, field) for row in rows if getattr(row, field) is not None]
            figures[field] = how(known) if known else None
    return replace(rows[0], fqn=f"{name} (x{len(rows)})", **figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """One figure before and after: bytes, or seconds. None if it is unknown."""

    name: str
    before: float | None
    """Bytes or seconds in the first report."""
    after: float | None
    """Bytes or seconds in the second report."""
    in_s: bool = False
    """Whether it is in seconds; else in bytes."""

    @property
    def change(self) -> float | None:
        """The relative change: -0.25 is a quarter less; None if a figure is unknown, or the first is 0."""
        return None if self.before is None or self.after is None or not self.before else self.after / self.before - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two steps side by side. Its `str()` is a verdict in one sentence and a table."""

    figures: tuple[ComparedFigure, ...]
    """The peak of the step first, then its parts, largest first, then times."""

    @property
    def peak(self) -> ComparedFigure:
        """The peak of the step, or of the forward if one of the two has no backward."""
        return self.figures[0]

    @property
    def time(self) -> ComparedFigure | None:
        """Forward and backward together, if both were timed."""
        return next((figure for figure in self.figures if figure.name == _TIME and figure.change is not None), None)

    @property
    def helped(self) -> bool:
        """Whether the peak is lower."""
        return self.peak.change is not None and self.peak.change < 0

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, width: int | None = None) -> str:
        """Return the verdict and the table; see `MemoryReport.to_text` for `width`."""
        largest = max((figure.before or 0) for figure in self.figures if not figure.in_s)
        unit, unit_bytes = unit_of(int(largest))

        def cell(figure: ComparedFigure, value: float | None) -> str:
            return _ms(value) if figure.in_s else "-" if value is None else f"{value / unit_bytes:.2f}"

        shown = [figure for figure in self.figures if figure.before or figure.after]
        names = [f"{it.name} ({'ms' if it.in_s else unit})" for it in shown]
        changes = ["-" if it.change is None else f"{100 * it.change:+.1f}" for it in shown]
        columns = [
            TextColumn(heading="", cells=names, right=False, shortens=True),
            TextColumn(heading="before", cells=[cell(it, it.before) for it in shown]),
            TextColumn(heading="after", cells=[cell(it, it.after) for it in shown]),
            TextColumn(heading="change (%)", cells=changes),
        ]
        return f"{wrapped(self._verdict(unit, unit_bytes), width)}\n\n{table_text(columns, width)}"

    def _verdict(self, unit: str, unit_bytes: int) -> str:
        peak, time = self.peak, self.time
        if peak.before is None or peak.after is None or peak.change is None:
            return f"The {peak.name} is not known of both."
        sizes = f"{peak.before / unit_bytes:.2f} to {peak.after / unit_bytes:.2f} {unit}"
        took = "" if time is None or time.change is None else f"; forward and backward take {1 + time.change:.2f} times as long"
        if abs(peak.change) < 0.005:
            return f"It made no difference: the {peak.name} went from {sizes}{took}."
        less = f"{100 * abs(peak.change):.0f} % {'less' if peak.change < 0 else 'more'}"
        return f"It {'helped' if self.helped else 'did not help'}: the {peak.name} went from {sizes}, {less}{took}."


def compare(before: MemoryReport, after: Any) -> Comparison:
    peak = ComparedFigure(name=_PEAK, before=before.step_peak_bytes, after=getattr(after, "step_peak_bytes", None))
    if not hasattr(after, "step_memory"):
        if not hasattr(after, "step_s"):
            raise TypeError(
                f"a report is compared with another, or with what memkit.stats returns; found {type(after).__name__}"
            )
        plain_s = getattr(after, "plain_s", None)
        time = ComparedFigure(name=_TIME, before=plain_s or _seconds(before), after=after.step_s, in_s=True)
        return Comparison(figures=(peak, time))
    if peak.before is None or peak.after is None:
        peak = ComparedFigure(name="peak of the forward", before=before.forward_peak_bytes, after=after.forward_peak_bytes)
    parts = [
        ComparedFigure(name=f"... {CATEGORIES[it.value][0]}", before=_at_peak(before, it), after=_at_peak(after, it))
        for it in MemoryCategory
    ]
    parts.sort(key=lambda figure: -max(figure.before or 0, figure.after or 0))
    kept = ComparedFigure(name="saved activations", before=before.activation_bytes, after=after.activation_bytes)
    times = ComparedFigure(name=_TIME, before=_seconds(before), after=_seconds(after), in_s=True)
    return Comparison(figures=(peak, *parts, kept, times))


def _at_peak(report: MemoryReport, category: MemoryCategory) -> int | None:
    memory = report.step_memory
    return None if memory is None or not memory.moments else memory.levels[category][memory.peak]


def _seconds(report: MemoryReport) -> float | None:
    if report.forward_s is None or report.backward_s is None:
        return None
    return report.forward_s + report.backward_s
