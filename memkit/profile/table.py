"""A report as text: chooses rows and columns; measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memkit.profile.records import ModuleRecord, Shapes
from memkit.profile.tree import Mark, children_of
from memkit.sizes import MIB, format_mib
from memkit.terminal import LAST, TextColumn, table_text, wrapped

if TYPE_CHECKING:
    from memkit.profile.report import MemoryReport


# The table shows so many shapes of a call; the report holds them all.
_MAX_SHAPES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table: its header, its cells, and whether it is left out if the table is too wide."""

    header: str
    cell: Callable[[ModuleRecord, MemoryReport], str]
    right: bool = True
    goes: int | None = None
    """See `TextColumn.goes`: shapes are left out first, then types; measurements only if nothing else is left."""


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _shapes(shapes: Shapes) -> str:
    shown = [f"({', '.join(map(str, shape))})" for shape in shapes[:_MAX_SHAPES]]
    more = len(shapes) - len(shown)
    return ", ".join(shown) + (f" +{more}" if more else "") or "-"


def _name(row: ModuleRecord, report: MemoryReport) -> str:
    return f"{row.fqn} [{', '.join(row.marks)}]" if row.marks else row.fqn


def _input_shapes(row: ModuleRecord, report: MemoryReport) -> str:
    kinds = f" x{row.num_signatures} kinds" if row.num_signatures > 1 else ""
    return _shapes(row.input_shapes) + kinds


def _share(row: ModuleRecord, report: MemoryReport) -> str:
    return f"{100 * row.self_bytes / report.activation_bytes:.1f}" if report.activation_bytes else "-"


NAME = Column(header="module name", cell=_name, right=False)
TYPE = Column(header="type", cell=lambda row, _: row.type_name or "-", right=False, goes=2)
PARAMS = Column(header="parameter size (MiB)", cell=lambda row, _: _mib(row.param_bytes))
HOST_PARAMS = Column(header="of it on the host (MiB)", cell=lambda row, _: _mib(row.host_param_bytes or None), goes=LAST + 2)
ACTIVATIONS = Column(header="activation size (MiB)", cell=lambda row, _: _mib(row.activation_bytes))
CALLS = Column(header="#calls", cell=lambda row, _: str(row.num_calls), goes=LAST + 1)
INPUT = Column(header="input shape", cell=_input_shapes, right=False, goes=0)
OUTPUT = Column(header="output shape", cell=lambda row, _: _shapes(row.output_shapes), right=False, goes=1)
PEAK = Column(header="peak mem (MiB)", cell=lambda row, _: _mib(row.peak_bytes), goes=LAST + 5)
FORWARD = Column(header="forward time (ms)", cell=lambda row, _: _ms(row.forward_s), goes=LAST + 6)
SELF = Column(header="self (MiB)", cell=lambda row, _: _mib(row.self_bytes))
SHARE = Column(header="self share (%)", cell=_share, goes=LAST)
SAVES = Column(header="storages saved", cell=lambda row, _: f"{row.num_storages} ({row.num_saves}x)", goes=4)
DTYPE = Column(header="dtype", cell=lambda row, _: row.dtype or "-", right=False, goes=3)
BACKWARD = Column(header="backward time (ms)", cell=lambda row, _: _ms(row.backward_s), goes=LAST + 4)
BACKWARD_PEAK = Column(header="backward peak (MiB)", cell=lambda row, _: _mib(row.backward_peak_bytes), goes=LAST + 3)

DEFAULT_COLUMNS = (NAME, TYPE, PARAMS, ACTIVATIONS, CALLS, INPUT, OUTPUT, PEAK, FORWARD)
FULL_COLUMNS = (
    *(NAME, TYPE, PARAMS, ACTIVATIONS, SELF, SHARE, SAVES, CALLS, INPUT, OUTPUT, DTYPE, PEAK, FORWARD),
    *(BACKWARD, BACKWARD_PEAK),
)

# Columns that are shown beside the default ones when the rows are sorted by them.
EXTRA_COLUMNS = {"self": SELF, "backward": BACKWARD}

# What rows are sorted by never goes.
_COLUMN_OF = {"calls": CALLS, "peak": PEAK, "forward": FORWARD, "backward": BACKWARD}

SORT_KEYS: dict[str, Callable[[ModuleRecord], Any]] = {
    "activation": lambda row: -row.activation_bytes,
    "self": lambda row: -row.self_bytes,
    "params": lambda row: -row.param_bytes,
    "calls": lambda row: -row.num_calls,
    "peak": lambda row: -(row.peak_bytes or 0),
    "forward": lambda row: -(row.forward_s or 0.0),
    "backward": lambda row: -(row.backward_s or 0.0),
    "name": lambda row: row.fqn,
}


def check_view(*, depth: int | None, sort_by: str | None, top: int | None) -> None:
    """Raise ValueError unless these are arguments for `to_text`."""
    for name, value in (("depth", depth), ("top", top)):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise ValueError(f"{name} must be a whole number, 0 or more; found {value!r}")
    if sort_by is not None and sort_by not in SORT_KEYS:
        raise ValueError(f"sort_by must be one of {', '.join(map(repr, SORT_KEYS))}; found {sort_by!r}")


def to_text(
    report: MemoryReport, *, depth: int | None, sort_by: str | None, top: int | None, full: bool, width: int | None
) -> str:
    """See `MemoryReport.to_text`."""
    check_view(depth=depth, sort_by=sort_by, top=top)
    columns = _with_host(report, FULL_COLUMNS if full else DEFAULT_COLUMNS)
    if sort_by in EXTRA_COLUMNS and EXTRA_COLUMNS[sort_by] not in columns:
        columns = (*columns, EXTRA_COLUMNS[sort_by])
    rows = _rows(report, depth=depth, sort_by=sort_by, full=full)
    shown, hidden = rows[:top], rows[len(rows[:top]) :]
    table = table_text([_as_text(column, shown, report, sort_by) for column in columns], width)
    words = report.in_words()
    below = [*_largest_hidden(shown, hidden), _lines(_notes(report)), *(["", words, ""] if words else [])]
    return "\n".join(
        [
            wrapped(_headline(report), width),
            "",
            table,
            "",
            *(wrapped(part, width) for part in [*below, _lines(_totals(report))]),
        ]
    )


def _as_text(column: Column, rows: Sequence[ModuleRecord], report: MemoryReport, sort_by: str | None) -> TextColumn:
    return TextColumn(
        heading=column.header,
        cells=[column.cell(row, report) for row in rows],
        right=column.right,
        goes=None if sort_by is not None and column is _COLUMN_OF.get(sort_by) else column.goes,
        shortens=column is NAME,
    )


def _largest_hidden(shown: Sequence[ModuleRecord], hidden: Sequence[ModuleRecord]) -> list[str]:
    """Name the row that saves most by itself, if it is not shown."""
    largest = max((*shown, *hidden), key=lambda row: row.self_bytes)
    if largest in shown or not largest.self_bytes:
        return []
    return [f"not shown: {len(hidden)} rows, with the largest, {largest.fqn} (self {format_mib(largest.self_bytes)})"]


def _with_host(report: MemoryReport, columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Add the column for host memory, if any parameter is there."""
    if not report.host_param_bytes:
        return columns
    place = columns.index(PARAMS) + 1
    return (*columns[:place], HOST_PARAMS, *columns[place:])


def _rows(report: MemoryReport, *, depth: int | None, sort_by: str | None, full: bool) -> list[ModuleRecord]:
    rows = _folded(report.modules, depth)
    if not full:
        rows = _collapsed(rows)
    if sort_by is not None:
        rows.sort(key=SORT_KEYS[sort_by])
    return rows


def _headline(report: MemoryReport) -> str:
    run = report.run
    where = f"meta, as {run.target} would run it" if run.device == "meta" else f"{run.device} ({run.device_name})"
    shards = report.sharding
    return ", ".join(
        [
            f"{run.model} on {where}",
            *([] if shards is None else [f"rank {shards.rank} of {shards.num_ranks}"]),
            "train mode" if run.training else "eval mode",
            *([f"autocast {run.autocast}"] if run.autocast else []),
            "forward and backward" if run.backward else "forward",
            f"torch {run.torch_version}",
        ]
    )


def _notes(report: MemoryReport) -> list[tuple[str, str]]:
    """Return what was counted separately, and what the table can't show."""
    notes = [("model inputs among the activations", format_mib(report.input_bytes))]
    if report.param_cast_bytes:
        notes.append(("parameter casts (not counted as activations)", format_mib(report.param_cast_bytes)))
    notes.append(("buffers", format_mib(report.buffer_bytes)))
    if report.optimizer is not None:
        notes.append(("gradients", "-" if report.grad_bytes is None else format_mib(report.grad_bytes)))
        notes.append((f"states of {report.optimizer.name}", format_mib(report.optimizer.state_bytes)))
    if report.sharding is not None:
        split = f"parameters as a whole, split between {report.sharding.num_shards} ranks"
        notes.append((split, format_mib(report.sharding.whole_bytes)))
        if report.sharding.gathered_bytes is not None:
            notes.append(("... gathered at once, at most", format_mib(report.sharding.gathered_bytes)))
    if report.host_param_bytes:
        notes.append(("parameters on the device", format_mib(report.device_param_bytes)))
        notes.append(("... in host memory, streamed", format_mib(report.host_param_bytes)))
    if report.host_param_bytes and report.sharding is None:
        notes.append(("slots on the device for what streams", format_mib(report.slot_bytes)))
    for mark in Mark:
        names = report.marked(mark.value)
        if names:
            shown = ", ".join(names[:4]) + (f", ... {len(names)} in all" if len(names) > 4 else "")
            notes.append((f"{mark.value} ({mark.meaning})", shown))
    if report.forward_peak_bytes is not None and report.before_bytes is not None:
        notes.append(("allocated before", format_mib(report.before_bytes)))
        notes.append(("peak of the forward", format_mib(report.forward_peak_bytes)))
        notes.append(("... unaccounted: neither from before nor saved", format_mib(report.unaccounted_bytes or 0)))
    if report.backward_peak_bytes is not None:
        notes.append(("peak of the backward", format_mib(report.backward_peak_bytes)))
    if report.reserved_peak_bytes is not None:
        notes.append(("reserved by the allocator, at most", format_mib(report.reserved_peak_bytes)))
    if report.backward_s is not None:
        notes.append(("backward time in all", f"{_ms(report.backward_s)} ms"))
    return notes


def _totals(report: MemoryReport) -> list[tuple[str, str]]:
    return [
        ("parameters in all", format_mib(report.param_bytes)),
        ("activations in all", format_mib(report.activation_bytes)),
        ("forward time in all", "-" if report.forward_s is None else f"{_ms(report.forward_s)} ms"),
    ]


def _lines(pairs: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in pairs)


def _folded(rows: Sequence[ModuleRecord], depth: int | None) -> list[ModuleRecord]:
    """Leave out the rows below a depth, and add their own figures to the rows above them."""
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
            rows[index],
            parent=positions.get(rows[index].parent),
            self_bytes=self_bytes,
            num_storages=num_storages,
            num_saves=num_saves,
        )
        for index, (self_bytes, num_storages, num_saves) in sorted(own.items())
    ]


def _collapsed(rows: Sequence[ModuleRecord]) -> list[ModuleRecord]:
    """Merge runs of identical siblings, and so their children, into one row with their sum (for peaks: their maximum).

    Only siblings named by their position are merged, as in `nn.Sequential` and `nn.ModuleList`.
    """
    below = children_of([row.parent for row in rows])
    kinds = _kinds(rows, below)
    found: list[ModuleRecord] = []

    def alike(first: int, other: int) -> bool:
        positions = rows[first].fqn.rpartition(".")[2].isdigit() and rows[other].fqn.rpartition(".")[2].isdigit()
        return positions and bool(kinds[first] == kinds[other])

    def walk(group: list[int], name: str) -> None:
        found.append(_merged([rows[index] for index in group], name))
        children = [below[index] for index in group]
        start = 0
        while start < len(children[0]):
            end = start + 1
            while end < len(children[0]) and all(alike(own[start], own[end]) for own in children):
                end += 1
            members = [own[position] for own in children for position in range(start, end)]
            walk(members, _joined(name, [rows[index].fqn.rpartition(".")[2] for index in children[0][start:end]]))
            start = end

    for index, row in enumerate(rows):
        if row.parent is None:
            walk([index], row.fqn)
    return found


def _kinds(rows: Sequence[ModuleRecord], below: list[list[int]]) -> list[Any]:
    """Return for each row a value that is equal for rows with identical subtrees.

    How often storages are saved again doesn't count: the last layer of a stack differs from the others in that.
    """
    numbers: dict[Any, int] = {}
    kinds: list[Any] = [None] * len(rows)
    for index in reversed(range(len(rows))):
        own = replace(
            rows[index],
            fqn="",
            parent=None,
            num_saves=0,
            peak_bytes=None,
            forward_s=None,
            backward_s=None,
            backward_peak_bytes=None,
        )
        # Children with names that are not positions ("conv1") are part of what a module is.
        names = tuple(rows[child].fqn.rpartition(".")[2] for child in below[index])
        kind = (own, names, tuple(kinds[child] for child in below[index]))
        kinds[index] = numbers.setdefault(kind, len(numbers))
    return kinds


def _joined(parent: str, names: list[str]) -> str:
    last = names[0] if len(names) == 1 else f"[{names[0]}-{names[-1]}]"
    return last if parent == "(model)" else f"{parent}.{last}"


def _merged(rows: Sequence[ModuleRecord], name: str) -> ModuleRecord:
    if len(rows) == 1:
        return replace(rows[0], fqn=name)
    first = rows[0]

    def total(field: str) -> Any:
        values = [getattr(row, field) for row in rows if getattr(row, field) is not None]
        return sum(values) if values else None

    def highest(field: str) -> Any:
        return max((getattr(row, field) for row in rows if getattr(row, field) is not None), default=None)

    sums = (
        "num_calls",
        "param_bytes",
        "host_param_bytes",
        "activation_bytes",
        "self_bytes",
        "num_storages",
        "num_saves",
        "forward_s",
        "backward_s",
    )
    return replace(
        first,
        fqn=f"{name} (x{len(rows)})",
        **{field: total(field) for field in sums},
        **{field: highest(field) for field in ("peak_bytes", "backward_peak_bytes")},
    )
