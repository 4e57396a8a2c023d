"""Free ranges of an arena's addresses, and which of them an allocation takes."""

from __future__ import annotations

from bisect import bisect_left

from memkit.transfer.spans import Range


class Gaps:
    """Ranges that are not in use."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        """Lowest first; no two touch."""

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def take(self, size: int, *, scatters: bool = False) -> tuple[Range, ...]:
        """Take so many bytes of the lowest range that has as many; return none where no range has.

        Args:
            scatters: take them of several ranges then, the largest first.
        """
        for at, (start, end) in enumerate(self.ranges):
            if end - start >= size:
                self.ranges[at : at + 1] = [(start + size, end)] if end - start > size else []
                return ((start, start + size),)
        taken = []
        for start, end in sorted(self.ranges, key=lambda gap: gap[0] - gap[1]) if scatters else ():
            end = min(end, start + size)
            size -= end - start
            taken += [(start, end)] if start < end else []
        for byte_range in taken:
            self.cut(byte_range)
        return tuple(sorted(taken))

    def free(self, byte_range: Range) -> None:
        """Add a range, as one with those that touch it."""
        start, end = byte_range
        at = bisect_left(self.ranges, byte_range)
        if at < len(self.ranges) and self.ranges[at][0] == end:
            end = self.ranges.pop(at)[1]
        if at > 0 and self.ranges[at - 1][1] == start:
            at -= 1
            start = self.ranges.pop(at)[0]
        self.ranges.insert(at, (start, end))

    def cut(self, byte_range: Range) -> None:
        """Remove a range from what is free."""
        start, end = byte_range
        parts = (part for gap in self.ranges for part in ((gap[0], min(gap[1], start)), (max(gap[0], end), gap[1])))
        self.ranges = [part for part in parts if part[0] < part[1]]
