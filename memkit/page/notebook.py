"""A report in a notebook: a small picture of the step and of its modules, and the table.

It is HTML and SVG without scripts, about 100 KiB, so that it stays in the notebook's file, shows where scripts are not trusted,
and needs no library. The page (`write_page`) is what to zoom and click in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from memkit.page.sources import CATEGORIES, MEANINGS, PHASES, Memory, Report, Row, memory_of, op_name
from memkit.page.timeline import categories_of, sampled, spans_of
from memkit.sizes import format_gib

COLORS = {
    "param": "#0072b2",
    "optimizer state": "#cc79a7",
    "buffer": "#d9c500",
    "input": "#56b4e9",
    "param cast": "#d55e00",
    "grad": "#009e73",
    "activation": "#e69f00",
    "temp": "#8791a0",
}
"""Told apart by the color-blind as well; legible on white and on dark. Source: M. Okabe, K. Ito, Color Universal Design."""

_WIDTH, _HEIGHT, _TOP, _LEFT = 900, 240, 22, 8
_MOST_POINTS = 300
_ROW_HEIGHT, _MOST_BOXES, _MOST_DEPTH = 22, 250, 6
_LEAST_WIDTH = 2.0
_LETTER = 6.2
"""The width of a letter, about."""


def notebook_html(report: Report, *, table: str) -> str:
    """Return a report as HTML for a notebook.

    Args:
        report: what to show.
        table: its table as HTML, in which the user's texts are escaped.
    """
    memory = memory_of(report)
    parts = [f"<b>{escape(report.run.model)}</b>: where the memory of a step goes"]
    if memory is not None:
        parts += [_timeline(memory), _legend(memory)]
    boxes = _icicle(report.modules)
    if boxes:
        parts += ["Activations by module (hover over a box for its name and size):", boxes]
    parts.append(f"<details><summary>All modules</summary>{table}</details>" if len(parts) > 1 else table)
    if len(parts) > 2:
        parts.append('For a page to zoom and click in: <code>report.to_html("step.html")</code>')
    return "\n".join(f'<div style="margin:4px 0">{part}</div>' for part in parts)


# The timeline


def _timeline(memory: Memory) -> str:
    levels = categories_of(memory)
    places = sampled(memory.total_bytes, _MOST_POINTS, always=[memory.peak])
    num_moments, peak_bytes = len(memory.moments), max(max(memory.total_bytes), 1)
    width, height = _WIDTH - 2 * _LEFT, _HEIGHT - _TOP - 4

    def x(moment: int) -> str:
        return f"{_LEFT + width * moment / num_moments:.1f}"

    def y(num_bytes: int) -> str:
        return f"{_TOP + height * (1 - num_bytes / peak_bytes):.1f}"

    ends = [*places[1:], num_moments]
    found = []
    for name, begin, end in spans_of(memory):
        if name == PHASES["backward"]:
            size = f'width="{width * (end - begin) / num_moments:.1f}" height="{height}"'
            found.append(f'<rect x="{x(begin)}" y="{_TOP}" {size} fill="currentColor" opacity="0.07"/>')
        if end - begin > num_moments // 12:
            found.append(f'<text x="{x((begin + end) // 2)}" y="14" text-anchor="middle" opacity="0.7">{escape(name)}</text>')
    below = [0] * len(places)
    for category, level in levels.items():
        above = [under + level[place] for under, place in zip(below, places, strict=True)]
        up = " ".join(f"{x(begin)},{y(top)} {x(end)},{y(top)}" for begin, end, top in zip(places, ends, above, strict=True))
        down = " ".join(
            f"{x(end)},{y(top)} {x(begin)},{y(top)}"
            for begin, end, top in reversed(list(zip(places, ends, below, strict=True)))
        )
        color, name = COLORS.get(category, COLORS["temp"]), escape(CATEGORIES.get(category, category))
        found.append(f'<polygon points="{up} {down}" fill="{color}"><title>{name}</title></polygon>')
        below = above
    peak, is_right = x(memory.peak), memory.peak > num_moments // 2
    anchor, shift = ("end", -6) if is_right else ("start", 6)
    found.append(f'<line x1="{peak}" x2="{peak}" y1="{_TOP}" y2="{_HEIGHT - 4}" stroke="currentColor" stroke-dasharray="3 3"/>')
    text = f"peak {format_gib(peak_bytes)}"
    found.append(f'<text x="{float(peak) + shift:.1f}" y="{_TOP + 13}" text-anchor="{anchor}" font-weight="bold">{text}</text>')
    return _svg(_HEIGHT, found)


def _legend(memory: Memory) -> str:
    """Return what is there at the peak, category by category, in the colors of the picture."""
    peak, keys = memory.peak, []
    for category, level in categories_of(memory).items():
        color, name = COLORS.get(category, COLORS["temp"]), CATEGORIES.get(category, category)
        swatch = f'<span style="display:inline-block;width:11px;height:11px;border-radius:3px;background:{color}"></span>'
        keys.append(
            f'<span style="margin-right:16px;white-space:nowrap" title="{escape(MEANINGS.get(category, ""))}">{swatch} '
            f"{escape(name)} {format_gib(level[peak])}</span>"
        )
    moment = memory.moments[peak]
    module = f" in {escape(moment.module)}" if moment.module else ""
    return f"At the peak, while {escape(op_name(moment.op))} runs{module}:<br>{' '.join(keys)}"


# The icicle


def _icicle(rows: Sequence[Row]) -> str:
    """Return boxes for the largest modules, each below the one that it is in; "" where nothing is kept."""
    below = defaultdict[int | None, list[int]](list)
    for index, row in enumerate(rows):
        if row.activation_bytes > 0:
            below[row.parent].append(index)
    total = sum(rows[index].activation_bytes for index in below[None])
    if not total:
        return ""
    boxes = sorted(_boxes(rows, below, total), key=lambda box: -box[2])[:_MOST_BOXES]
    found = [_box(rows[index], x, width, depth, total) for index, x, width, depth in boxes]
    return _svg(_ROW_HEIGHT * (1 + max(depth for *_, depth in boxes)) + 2, found)


def _boxes(rows: Sequence[Row], below: dict[int | None, list[int]], total: int) -> Iterator[tuple[int, float, float, int]]:
    """Yield for each module that is wide enough to be seen its row, where it begins, how wide it is, and how deep."""
    pending: list[tuple[int | None, float, int]] = [(None, 0.0, 0)]
    while pending:
        parent, x, depth = pending.pop()
        for index in below[parent]:
            width = _WIDTH * rows[index].activation_bytes / total
            if width >= _LEAST_WIDTH:
                yield index, x, width, depth
                if depth + 1 < _MOST_DEPTH:
                    pending.append((index, x, depth + 1))
            x += width


def _box(row: Row, x: float, width: float, depth: int, total: int) -> str:
    share = row.activation_bytes / total
    title = escape(f"{row.fqn} ({row.type_name}): {format_gib(row.activation_bytes)}, {100 * share:.1f} %")
    y, num_letters = depth * _ROW_HEIGHT + 1, int((width - 8) / _LETTER)
    name = row.fqn if row.parent is None else row.fqn.rpartition(".")[2]
    label = f"{name}  {format_gib(row.activation_bytes)}"
    label = label if len(label) <= num_letters else name if len(name) <= num_letters else ""
    text = f'<text x="{x + 4:.1f}" y="{y + 15}" fill="#1b2430">{escape(label)}</text>' if label else ""
    size = f'width="{max(width - 1, 1):.1f}" height="{_ROW_HEIGHT - 1}"'
    fill = _mixed("#fdf0d2", COLORS["activation"], share**0.5)
    return f'<g><title>{title}</title><rect x="{x:.1f}" y="{y}" {size} fill="{fill}"/>{text}</g>'


def _mixed(low: str, high: str, share: float) -> str:
    parts = [[int(color[place:end], 16) for place, end in pairwise((1, 3, 5, 7))] for color in (low, high)]
    return "#" + "".join(f"{round(begin + (end - begin) * share):02x}" for begin, end in zip(*parts, strict=True))


def _svg(height: int, found: Sequence[str]) -> str:
    style = "max-width:100%;height:auto;font:12px system-ui,sans-serif"
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} fill="currentColor" style="{style}" role="img">{"".join(found)}</svg>'
    )
