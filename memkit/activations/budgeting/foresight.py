"""What a step that was never run here takes beside its saved values, by a report of it: so that the first one keeps to its
budget."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memkit.plan import StepTrace


class Foresight:
    """The most bytes beside the base and the saved values, from each save to the next, and from each request to the next.

    Args:
        trace: of a step without data, as `profile_memory(..., trace=True)` makes it.
    """

    def __init__(self, trace: StepTrace) -> None:
        held = [0] * (len(trace.ops) + 1)
        for value in dict.fromkeys(trace.step.saves):
            life = trace.lifetimes.get(value)
            if life is not None:
                held[min(max(life.made_at, 0), len(trace.ops))] += trace.step.lineage.num_bytes[value]
                held[min(max(life.freed_at, 0), len(trace.ops))] -= trace.step.lineage.num_bytes[value]
        beside, there = [], 0
        for change, live in zip(held, trace.live_bytes, strict=False):
            there += change
            beside.append(max(live - there, 0))
        turn = trace.use_places[0] if trace.use_places else len(trace.ops)
        self._saves = _most_between(trace.save_places, beside, turn)
        self._requests = _most_between(trace.use_places, beside, len(trace.ops))

    def after_save(self, num_saves: int) -> int:
        """Return the most bytes after so many saves, up to the next one or to the first request."""
        return self._saves[min(max(num_saves - 1, 0), len(self._saves) - 1)] if self._saves else 0

    def after_request(self, num_requests: int) -> int:
        """Return the most bytes after so many requests, up to the next one or to the end."""
        return self._requests[min(max(num_requests - 1, 0), len(self._requests) - 1)] if self._requests else 0


def _most_between(places: Sequence[int], beside: Sequence[int], end: int) -> list[int]:
    """Return for each place the most from there to the next other one, or to the end."""
    found = []
    for place in places:
        after = bisect_left(places, place + 1)
        until = places[after] if after < len(places) else end
        found.append(max(beside[place : max(until, place + 1)], default=0))
    return found
