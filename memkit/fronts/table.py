"""A front as text, in 80 columns or fewer."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from memkit.fronts.front import Front, FrontRow
from memkit.sizes import format_gib

_COLUMNS = 80
_HEADS = (
    ("", "budget"),
    ("", "peak"),
    ("step", "ms"),
    ("/", "plain"),
    ("bound", ">="),
    ("again", "ms"),
    ("moved", ""),
    ("kept/moved/", "again"),
    ("off-", "load"),
    ("recom-", "pute"),
    ("check-", "point"),
)
_BUDGET, _PEAK, _MOVED = 0, 1, 6
_GO = (5, 7, 4, _MOVED, 10, 8, 9)
"""The columns that are left out if the table is too wide, in this order."""


def to_text(front: Front, *, width: int | None = None) -> str:
    """Return the table, one row per budget, with what is said of the whole above and below it.

    Args:
        width: no line is longer: a table that is too wide loses columns, the least telling first. None keeps all.
    """
    columns = _COLUMNS if width is None else min(width, _COLUMNS)
    unit, unit_bytes = ("GiB", 2**30) if front.plain_peak_bytes >= 2**30 else ("MiB", 2**20)
    heads = [
        (below, unit) if place in (_BUDGET, _PEAK) else ("moved", unit) if place == _MOVED else (above, below)
        for place, (above, below) in enumerate(_HEADS)
    ]
    cells = [_cells(row, front.plain_s, unit_bytes) for row in front.rows]
    above = [[head[level] for head in heads] for level in (0, 1)]
    widths = [max(map(len, column)) for column in zip(*above, *cells, strict=True)]
    places, may_go = list(range(len(widths))), list(_GO)
    while width is not None and may_go and sum(widths[place] + 1 for place in places) - 1 > width:
        places.remove(may_go.pop(0))

    def line(row: Sequence[str]) -> str:
        return " ".join(row[place].rjust(widths[place]) for place in places).rstrip()

    lines = [*_headline(front, columns), "", *map(line, above), line(["-" * width for width in widths])]
    return "\n".join([*lines, *map(line, cells), "", *_below(front, columns)])


def _headline(front: Front, columns: int) -> list[str]:
    states = "" if front.optimizer is None else f", with the states of {front.optimizer}"
    how = "predicted" if front.is_measured else "predicted; not measured"
    return textwrap.wrap(f"{front.model}, {front.inputs}{states}, on {front.gpu} ({how})", columns)


def _cells(row: FrontRow, plain_s: float, unit_bytes: int) -> list[str]:
    def size(num_bytes: int | None) -> str:
        return "-" if num_bytes is None else f"{num_bytes / unit_bytes:.2f}"

    def share(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds / plain_s:.3f}" if plain_s else "1.000"

    fits = row.step_s is not None
    return [
        size(row.budget_bytes),
        size(row.peak_bytes),
        "-" if row.step_s is None else f"{row.step_s * 1e3:.1f}",
        share(row.step_s),
        share(row.bound_s),
        f"{row.replayed_s * 1e3:.1f}" if fits else "-",
        size(row.moved_bytes) if fits else "-",
        f"{row.num_kept}/{row.num_moved}/{row.num_again}" if fits else "-",
        share(row.offload_s),
        share(row.recompute_s),
        share(None if row.checkpoint is None else row.checkpoint.step_s),
    ]


def _below(front: Front, columns: int) -> list[str]:
    op = front.least_op.removeprefix("aten.").partition(".")[0]
    where = ", ".join(part for part in (front.least_module, op) if part)
    least = f"least budget: {format_gib(front.least_bytes)}" + (f" (set by {where})" if where else "")
    lines = [
        *textwrap.wrap(f"plain peak: {format_gib(front.plain_peak_bytes)}, step {front.plain_s * 1e3:.1f} ms", columns),
        *textwrap.wrap(least, columns),
    ]
    ranks = front.ranks
    if ranks is not None:
        shards = (
            f"parameters {format_gib(ranks.param_bytes)}, gradients {format_gib(ranks.grad_bytes)}, states "
            f"{format_gib(ranks.state_bytes)}"
        )
        gathered = f"gathered at a time {format_gib(ranks.gathered_bytes)}"
        said = f"on each of {ranks.num_ranks} ranks: "
        if ranks.is_offloaded:
            said += f"{gathered}, on the way there {format_gib(ranks.brought_bytes)}; in host memory {shards}"
        else:
            said += f"{shards}, {gathered}"
        lines += textwrap.wrap(said, columns)
    batch = front.batch
    if batch is not None:
        plain = f"{batch.num_plain}{'' if batch.is_plain_found else ' or more'}"
        planned = f"{batch.num_planned}{'' if batch.is_planned_found else ' or more'}"
        said = f"the largest batch that fits in {format_gib(batch.budget_bytes)}: plain {plain}, planned {planned}"
        lines += textwrap.wrap(said, columns)
    return [*lines, *(line for note in front.notes for line in textwrap.wrap(f"note: {note}", columns))]
