"""Lines of JSON as tables of markdown, and those put into a page.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Those of which there are lines are written anew, the others
are left as they are; without a page all are printed. Where a part was run again, the lines of the last run count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from shared import Line

MIB = 2**20
Row = list[str]
Table = tuple[str, list[Row]]
"""A header, its columns between bars, and rows."""
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def made_of(lines: Sequence[Line], tables: Mapping[str, Callable[[list[Line]], Table]]) -> dict[str, str]:
    """Return the tables of which there are lines, by their names, as markdown."""
    found = {name: make(list(lines)) for name, make in tables.items()}
    return {name: markdown(header, rows) for name, (header, rows) in found.items() if rows}


def filled(page: str, made: dict[str, str]) -> str:
    """Return a page with tables in their places.

    Raises:
        ValueError: it has no place for one of them.
    """
    places = {name for _, name, _ in _PLACE.findall(page)}
    if not places.issuperset(made):
        raise ValueError(f"found no place in the page for {', '.join(sorted(made.keys() - places))}")
    return _PLACE.sub(lambda match: f"{match[1]}{made[match[2]]}{match[3]}" if match[2] in made else match[0], page)


def markdown(header: str, rows: Sequence[Row]) -> str:
    """Return a table, whose first column is on the left and whose others are on the right."""
    columns = header.split(" | ")
    ruler = ["---", *["--:"] * (len(columns) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ruler, *rows))


# Cells


def in_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def in_us(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.1f}"


def as_ratio(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def in_mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:.0f}"


def as_number(number: int | None) -> str:
    return "-" if number is None else str(number)


def bold(cell: str) -> str:
    return f"**{cell}**"


def lines_of(lines: Sequence[Line], bench: str, **wanted: str) -> Iterator[Line]:
    """Yield the lines of a bench that are like what is wanted."""
    for line in lines:
        if line.get("bench") == bench and all(line.get(name) == value for name, value in wanted.items()):
            yield line


def last_by(key: Callable[[Line], object], lines: Iterator[Line]) -> list[Line]:
    """Return the last of the lines with each key."""
    return list({key(line): line for line in lines}.values())


def row_of(line: Line, first: Row, cells: Callable[[Line], Row], num_columns: int) -> Row:
    """Return a row; where something went wrong, what that was."""
    for what in ("error", "refused", "skipped"):
        if what in line:
            said = f"{what}: {line[what]}".replace("|", "/")
            return [*first, said, *["-"] * (num_columns - len(first) - 1)]
    return [*first, *cells(line)]


def rows_of(lines: Sequence[Line], header: str, first: Callable[[Line], Row], cells: Callable[[Line], Row]) -> list[Row]:
    num_columns = len(header.split(" | "))
    return [row_of(line, first(line), cells, num_columns) for line in lines]


def machine(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    names = ("device", "torch", "cuda", "memkit", "steps")
    found = {tuple(str(line[name]) for name in names) for line in lines if "device" in line}
    return "device | torch | CUDA | memkit | steps", [list(row) for row in sorted(found)]


def main(tables: Callable[[Sequence[Line]], dict[str, str]], lines: str, page: str = "") -> None:
    """Put the tables of a file of lines into a page; without one, print them."""
    made = tables([json.loads(line) for line in Path(lines).read_text().splitlines()])
    if page:
        Path(page).write_text(filled(Path(page).read_text(), made))
    else:
        print("\n".join(f"{name}\n\n{table}" for name, table in made.items()))
