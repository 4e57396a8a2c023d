"""An arena whose calls are broken off by Ctrl-C: it loses no memory, and gives none to two."""

from __future__ import annotations

import itertools

import pytest

from memkit.core.sizes import HOST_PAGE_BYTES
from memkit.device import ReferenceDevice
from memkit.device.base import Event
from memkit.transfer import Arena, Span, host_memory
from tests.interrupts import interrupts

SIZES = (HOST_PAGE_BYTES // 2, HOST_PAGE_BYTES, 1000, 3 * HOST_PAGE_BYTES // 2)


class Case:
    """Takes spans of an arena, as one step does, and gives them back."""

    def __init__(self, *, trims: bool) -> None:
        self.device = ReferenceDevice()
        self.arena = Arena(self.device)
        self._trims = trims
        self._held: list[Span] = []

    def step(self) -> None:
        for size in SIZES:
            self._held.append(self.arena.take(size))
        self._held += self.arena.take_pinned_as_one(SIZES[:2])
        self._give_all(self.device.record_event())
        if self._trims:
            self.arena.reserve(self.arena.held_bytes + HOST_PAGE_BYTES)
            self.arena.trim_gaps()
            self.arena.trim()

    def _give_all(self, last_use: Event | None) -> None:
        while self._held:
            if self.arena.has(self._held[0]):
                self.arena.give(self._held[0], last_use)
            self._held.pop(0)

    def go_on(self) -> None:
        """What the caller of a call that was broken off does: all is given back that is known to be taken."""
        self._give_all(None)
        self.arena.trim_gaps()


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SMALLEST_SEGMENT_BYTES", HOST_PAGE_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("trims", [False, True])
def test_interrupted_arena_neither_loses_memory_nor_gives_it_to_two(trims: bool) -> None:
    case = Case(trims=trims)
    case.step()

    for place in interrupts(case.step, 60):
        case.go_on()
        assert (case.arena.in_use_bytes, case.arena.held_bytes, case.arena._gaps.ranges) == (0, 0, []), place
        assert case.device._pinned == [], place

        spans = [case.arena.take(size) for size in SIZES]
        for span in spans:
            assert sum(piece.numel() for piece in span.pieces) == span.num_bytes
        used = sorted(byte_range for span in spans for byte_range in span.ranges)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(used)), place
        assert sum(pinned.numel() for pinned in case.device._pinned) == case.arena.held_bytes, place
        for span in spans:
            case.arena.give(span)
