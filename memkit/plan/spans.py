"""Which neighbors in a row of calls are tried as one region: *spans* of a `Sequential`'s children."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_LONGEST_PERIOD = 64
_SMALL = 4
"""A block of more members has spans of its own."""

_Span = tuple[int, int]
"""The place of its first member, and of the one behind its last."""


def find_spans(kinds: Sequence[Hashable], is_joined: Sequence[bool]) -> list[_Span]:
    """Return spans of a row, of which none overlaps another, unless it is in it: those around others first.

    Where the row repeats, as that of the layers of blocks without a module for each, spans begin as blocks do. These are joined
    two by two, up to all that repeats. So are the single members of what does not, and of large blocks.

    Args:
        kinds: of each member: where these repeat, the row does.
        is_joined: whether each is to be in a span with the one ahead of it, as an activation that writes to its input.
    """
    if not kinds:
        return []
    starts = [place for place in range(len(kinds)) if not place or not is_joined[place]]
    units = list(zip(starts, [*starts[1:], len(kinds)], strict=True))
    first, period, count = _repetition([tuple(kinds[slice(*unit)]) for unit in units])
    stop = first + period * count
    blocks = [units[place : place + period] for place in range(first, stop, max(1, period))]
    found = {*_joined(units[:first]), *_joined(units[stop:])}
    found.update(_joined([(block[0][0], block[-1][1]) for block in blocks]))
    for block in blocks:
        if block[-1][1] - block[0][0] > _SMALL:
            found.update(_joined(block))
    return sorted((span for span in found if span[1] - span[0] > 1), key=lambda span: (span[0], -span[1]))


def _repetition(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """Return where the longest stretch begins that repeats, after how many members, and how often it has them.

    Of stretches that are as long it is the one of the shortest period. Zeros if none repeats.
    """
    found, longest = (0, 0, 0), 0
    for period in range(2, min(_LONGEST_PERIOD, len(kinds) // 2) + 1):
        first = 0
        for place in range(len(kinds) - period + 1):
            if place < len(kinds) - period and kinds[place] == kinds[place + period]:
                continue
            length = place - first + period
            if length >= 2 * period and length > longest:
                found, longest = (first, period, length // period), length
            first = place + 1
    return found


def _joined(row: Sequence[_Span]) -> list[_Span]:
    """Return the members of a row of spans, two by two of them, two by two of these, and so on up to all."""
    found = list(row)
    while len(row) > 1:
        pairs = [(row[place][0], row[place + 1][1]) for place in range(0, len(row) - 1, 2)]
        row = [*pairs, *row[2 * len(pairs) :]]
        found += pairs
    return found
