"""How full a device will be: what a backward has on it at each place of its order."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from memkit.plan.timeline import Levels


class Forecast:
    """The bytes on a device during a backward that goes as an earlier one did.

    What was allocated is known for the moments at which a record was asked for. The operator that asked then makes more: the
    gradient of what it was given, which is as large. Its scratch memory is not known.

    Args:
        sizes_bytes: bytes of each record, in the order in which the backward asks for them. Each is free once the one after it
            is asked for, at the latest.
        working_bytes: for each, what was allocated beside the records when it was asked for.
        stays: for each, whether it is on the device from the start.
        limit_bytes: what of the records may be on the device when the backward begins.
    """

    def __init__(
        self,
        sizes_bytes: Sequence[int],
        working_bytes: Sequence[int],
        stays: Sequence[bool],
        *,
        limit_bytes: int,
    ) -> None:
        self._used_bytes = tuple(itertools.accumulate(sizes_bytes, initial=0))
        self._working_bytes = tuple(working + size for size, working in zip(sizes_bytes, working_bytes, strict=True))
        levels = Levels(len(sizes_bytes))
        for place, (size, working, stay) in enumerate(zip(sizes_bytes, self._working_bytes, stays, strict=True)):
            levels.add(place, place + 1, working)
            levels.add(0 if stay else place, place + 1, size)
        self.peak_bytes = max(limit_bytes + working_bytes[0], levels.peak_bytes)
        """What the backward may reach: at its begin, or when it needs the most."""
        self._highest: list[list[int]] = []
        """For spans of 1, 2, 4 and more places, by where they begin: the highest level in them, but for what was used before.
        Made when it is first asked for."""

    def level_bytes(self, now: int, until: int, live_bytes: int) -> int:
        """Return the most from now until a later place is passed, if nothing else is fetched on the way.

        Args:
            now: the place that was asked for last.
            until: the later place.
            live_bytes: bytes of the records that are on the device now, among them all those in between.
        """
        first, num_places = now + 1, min(until + 1, len(self._working_bytes)) - now - 1
        if num_places <= 0:
            return live_bytes
        if not self._highest:
            used = (0, *self._used_bytes)
            self._highest = [list(map(operator.sub, self._working_bytes, used))]
        span = num_places.bit_length() - 1
        while len(self._highest) <= span:
            row, width = self._highest[-1], 1 << (len(self._highest) - 1)
            self._highest.append(list(map(max, row, row[width:])))
        row = self._highest[span]
        return live_bytes + self._used_bytes[now] + max(row[first], row[first + num_places - (1 << span)])
