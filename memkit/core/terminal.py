"""Text and tables that fit the terminal, and output to standard output or a file. No torch here."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

ELLIPSIS = "…"
_EMPTY = frozenset({"", "-"})
LAST = 100  # columns from this number on are left out only if shorter cells are not enough
_SHORTEST = 16


def terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def shortened(text: str, width: int) -> str:
    """Return a text of at most `width` characters (1 or more), without the middle of a longer one: 'model.la….q_proj'."""
    if len(text) <= width:
        return text
    head = width // 2
    tail = width - head - len(ELLIPSIS)
    return text[:head] + ELLIPSIS + (text[-tail:] if tail > 0 else "")


def wrapped(text: str, width: int | None) -> str:
    """Return a text with lines broken between words at `width` characters; None leaves it unchanged."""
    if width is None:
        return text
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextColumn:
    heading: str
    cells: Sequence[str]
    right: bool = True
    goes: int | None = None  # when it is left out; from `LAST` on only if cells can't be shorter; None: never
    shortens: bool = False  # whether its cells may lose their middles if leaving out columns is not enough


def table_text(columns: Sequence[TextColumn], width: int | None = None) -> str:
    """Return a table no wider than `width` if it can be: with columns left out, broken headings and shortened cells."""
    if width is None:
        return _made(columns)
    shown = [column for column in columns if column.goes is None or not _EMPTY.issuperset(column.cells)]
    if _width(shown) > width:
        shown = [_with_narrow_heading(column) for column in shown]
    may_go = sorted((column for column in shown if column.goes is not None), key=lambda column: column.goes or 0)
    while _width(shown) > width and may_go and (may_go[0].goes or 0) < LAST:
        shown.remove(may_go.pop(0))
    while may_go and _width(_with_short_cells(shown, _width(shown) - width, _SHORTEST)) > width:
        shown.remove(may_go.pop(0))
    return _made(_with_short_cells(shown, _width(shown) - width, _SHORTEST if may_go else 1))


def _made(columns: Sequence[TextColumn]) -> str:
    return tabulate(
        list(zip(*(column.cells for column in columns), strict=True)),
        headers=[column.heading for column in columns],
        colalign=["right" if column.right else "left" for column in columns] if any(it.cells for it in columns) else None,
        disable_numparse=True,
        tablefmt="simple",
    )


_BETWEEN, _PADDING = 2, 2  # blanks between columns, and how much wider a column is than its heading: `tabulate.MIN_PADDING`


def _width(columns: Sequence[TextColumn]) -> int:
    widths = (max(max(map(len, it.heading.split("\n"))) + _PADDING, max(map(len, it.cells), default=0)) for it in columns)
    return sum(widths) + _BETWEEN * (len(columns) - 1)


def _with_narrow_heading(column: TextColumn) -> TextColumn:
    longest = max([*map(len, column.heading.split()), *map(len, column.cells)])
    lines = [line for part in column.heading.split("\n") for line in textwrap.wrap(part, longest, break_on_hyphens=False)]
    return replace(column, heading="\n".join(lines))


def _with_short_cells(columns: Sequence[TextColumn], over: int, shortest: int) -> list[TextColumn]:
    widths = {
        place: max(map(len, (*column.cells, *column.heading.split("\n"))))
        for place, column in enumerate(columns)
        if column.shortens
    }
    while over > 0 and max(widths.values(), default=0) > shortest:
        widest = max(widths, key=widths.__getitem__)
        widths[widest] -= 1
        over -= 1
    return [
        replace(
            column,
            heading="\n".join(shortened(line, widths[place]) for line in column.heading.split("\n")),
            cells=[shortened(cell, widths[place]) for cell in column.cells],
        )
        if place in widths
        else column
        for place, column in enumerate(columns)
    ]


STDOUT = Path("-")


def check_writable(path: Path | None) -> None:
    if path is None or path == STDOUT:
        return
    there = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not there:
        path.unlink()


def write_text(path: Path, text: str) -> None:
    if path == STDOUT:
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    else:
        path.write_text(text, encoding="utf-8")
