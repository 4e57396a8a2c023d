"""Predicts what a step without a plan takes beside its saved values: from a trace that was made without data, or from the first
step. This keeps the first steps within the budget."""

from __future__ import annotations

from bisect import bisect_left
from copy import copy
from typing import TYPE_CHECKING

from memkit.plan import OpKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memkit.plan import StepTrace

_CONVOLUTIONS = (OpKind.CONVOLUTION, OpKind.CONVOLUTION_OF_FEW)


class Foresight:
    """The most bytes beside the base and the values saved so far, from each save to the next, and from each request to the
    next.

    A convolution on CUDA may take a workspace, which a run without data doesn't show. It is counted with as many bytes as the
    convolution reads and writes, which is what converting these to another memory format takes.

    Args:
        trace: the trace of a step like those to come.
        is_whole: whether the trace includes the loss, rather than only the module that is called.
    """

    def __init__(self, trace: StepTrace, *, is_whole: bool = True) -> None:
        self.is_whole = is_whole
        self._factor = 0.0
        """The factor of all figures; 0 if the sizes are the same as in the trace."""
        num_bytes = trace.step.lineage.num_bytes
        self._sizes_bytes = [num_bytes[value] for value in trace.step.saves]
        held = [0] * (len(trace.ops) + 1)
        first = dict(zip(reversed(trace.step.saves), reversed(trace.save_places), strict=True))
        for value, place in first.items():
            life = trace.lifetimes.get(value)
            if life is not None and place < life.freed_at:  # until it is saved, nobody knows that it will be
                held[min(max(place, 0), len(trace.ops))] += num_bytes[value]
                held[min(life.freed_at, len(trace.ops))] -= num_bytes[value]
        beside, there = [], 0
        for change, live, op in zip(held, trace.live_bytes, trace.ops, strict=False):
            there += change
            workspace_bytes = op.num_bytes if trace.target == "cuda" and op.kind in _CONVOLUTIONS else 0
            beside.append(max(live - there, 0) + workspace_bytes)
        turn = trace.use_places[0] if trace.use_places else len(trace.ops)
        self._saves = _most_between(trace.save_places, beside, turn)
        self._requests = _most_between(trace.use_places, beside, len(trace.ops))

    @property
    def is_scaled(self) -> bool:
        """Whether this is for a step of other sizes than the trace."""
        return self._factor > 0

    def is_of(self, save: int, num_bytes: int) -> bool:
        """Tell whether a save of `num_bytes` may be the predicted save with the ordinal `save`."""
        if save >= len(self._sizes_bytes):
            return False
        size_bytes = self._sizes_bytes[save]
        return num_bytes == size_bytes if not self._factor else num_bytes <= self._factor * size_bytes

    def scaled(self, save: int, num_bytes: int) -> Foresight | None:
        """Return the prediction for a step of other sizes, such as longer sequences: larger in proportion to a save, but at
        least as large; None if no such save was predicted."""
        if save >= len(self._sizes_bytes) or not self._sizes_bytes[save]:
            return None
        found = copy(self)
        found.is_whole, found._factor = False, max(self._factor, num_bytes / self._sizes_bytes[save], 1.0)
        return found

    def after_save(self, num_saves: int) -> int:
        """Return the most bytes after `num_saves` saves, up to the next save or the first request."""
        return self._of(self._saves, num_saves)

    def after_request(self, num_requests: int) -> int:
        """Return the most bytes after `num_requests` requests, up to the next request or the end."""
        return self._of(self._requests, num_requests)

    def _of(self, found: Sequence[int], number: int) -> int:
        most = found[min(max(number - 1, 0), len(found) - 1)] if found else 0
        return int(most * self._factor) if self._factor else most


def _most_between(places: Sequence[int], beside: Sequence[int], end: int) -> list[int]:
    """Return for each place the most bytes from there to the next different place, or to the end."""
    found = []
    for place in places:
        after = bisect_left(places, place + 1)
        until = places[after] if after < len(places) else end
        found.append(max(beside[place : max(until, place + 1)], default=0))
    return found
