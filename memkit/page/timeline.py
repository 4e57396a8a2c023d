"""The bytes of a step over its moments, reduced to few points that keep the shape, with what exists at each point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

from memkit.page.sources import CATEGORIES, PHASES, Memory, op_name

MOST_POINTS = 2000
MOST_STORAGES = 6000
"""A page has the lifetimes of at most this many storages, the largest ones."""


def sampled(levels: Sequence[int], most: int, *, always: Iterable[int] = ()) -> list[int]:
    """Return places that draw a line of levels as few as are asked for: of each stretch the highest and the lowest.

    No stretch is drawn lower than it is: the highest level of all is among them.

    Args:
        levels: bytes at each place.
        most: how many places to return at most, but for those of `always`; at least 4.
        always: places that are returned in any case.

    Example:
        >>> sampled([0, 5, 1, 0, 0, 9, 2, 3], 4, always=[7])
        [0, 1, 4, 5, 7]
    """
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
    """Return the parts of the step in turn: what each is called, its first moment, and the first one behind it."""
    spans, begin = list[tuple[str, int, int]](), 0
    for phase, moments in groupby(memory.moments, key=lambda moment: moment.phase):
        end = begin + sum(1 for _ in moments)
        spans.append((PHASES.get(_text(phase), _text(phase)), begin, end))
        begin = end
    return spans


def categories_of(memory: Memory) -> dict[str, Sequence[int]]:
    """Return the levels of the categories that are there at any moment, from the bottom of a stack to its top."""
    levels = {_text(category): level for category, level in memory.levels.items()}
    ordered = [*(name for name in CATEGORIES if name in levels), *(name for name in levels if name not in CATEGORIES)]
    return {name: levels[name] for name in ordered if any(levels[name])}


def timeline_of(memory: Memory) -> dict[str, Any]:
    """Return a timeline as what JSON knows. Texts are written once, and told by their numbers."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    levels, spans = categories_of(memory), spans_of(memory)
    edges = [place for _, begin, end in spans for place in (begin, end - 1)]
    highest = [max(range(len(level)), key=level.__getitem__) for level in levels.values()]
    places = sampled(memory.total_bytes, MOST_POINTS, always=[memory.peak, *edges, *highest])
    largest = sorted(memory.storages, key=lambda storage: -storage.num_bytes)[:MOST_STORAGES]
    names = list(levels)
    return {
        "num_moments": len(memory.moments),
        "x": places,
        "ops": [number(op_name(memory.moments[place].op)) for place in places],
        "modules": [number(memory.moments[place].module) for place in places],
        "series": [{"key": name, "y": [level[place] for place in places]} for name, level in levels.items()],
        "phases": [{"name": name, "begin": begin, "end": end} for name, begin, end in spans],
        "peak": places.index(memory.peak),
        "storages": [
            [
                names.index(_text(storage.category)),
                number(storage.module),
                number(storage.what),
                storage.num_bytes,
                storage.begin,
                storage.end,
            ]
            for storage in largest
            if storage.num_bytes and storage.begin < storage.end
        ],
        "texts": list(texts),
    }


def _text(name: str) -> str:
    """Return a name as plain text: that of an enum's member is its value."""
    return str(getattr(name, "value", name))
