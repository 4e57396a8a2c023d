"""Counters that count nothing, moments, and figures that have one way be the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import pytest

from memkit.activations.budgeting import learning
from memkit.activations.budgeting.ways import Ways
from memkit.activations.saved.settled import Way
from memkit.device import CudaDevice, Event, MemoryCounter
from memkit.plan import RegionNeeds
from memkit.plan.budget.problem import Problem
from memkit.plan.regions import Moving, fit_regions
from memkit.transfer import Link


class Blind(MemoryCounter):
    """Counts nothing, so that only saved values are known."""

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def peak_reserved_bytes(self) -> None:
        return None

    def reset_peak(self) -> None:
        pass


@dataclass
class Moment(Event):
    at_s: float
    reached: bool = True

    def elapsed_s(self, end: Event) -> float:
        assert isinstance(end, Moment)
        assert self.reached
        assert end.reached
        return end.at_s - self.at_s

    def is_reached(self) -> bool:
        return self.reached


def make_up_times(monkeypatch: pytest.MonkeyPatch) -> Callable[[Way], None]:
    """Make plans of single ops slower than predicted; return a function that sets the fastest way."""
    chosen, note = Way.REGIONS, Ways._note

    def choose(way: Way) -> None:
        nonlocal chosen
        chosen = way

    def note_made_up(ways: Ways, _: Event, __: Event, peak_bytes: int | None) -> None:
        note(ways, Moment(0.0), Moment(1.0 if ways.way is chosen else 2.0), peak_bytes)

    monkeypatch.setattr(Ways, "_note", note_made_up)
    monkeypatch.setattr(learning, "_AS_PREDICTED", 0.0)
    for name in ("_OTHER_LINK", "_QUITE_OTHER_LINK"):
        monkeypatch.setattr(learning, name, math.inf)
    return choose


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> Callable[[Way], None]:
    """The same with saved values alone: on a GPU the workspaces of libraries are larger than these models."""
    monkeypatch.setattr(CudaDevice, "memory_counter", lambda _: Blind())
    return make_up_times(monkeypatch)


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some bytes hide behind the computation."""
    monkeypatch.setattr(learning, "fit_copies", fit_copies_of(4096))


@pytest.fixture
def quick_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make copies seem almost free, so that plans of single ops move values on every device, a GPU as well."""
    monkeypatch.setattr(learning, "_links", WeakKeyDictionary())
    link = Link(d2h_bytes_per_s=1e15, h2d_bytes_per_s=1e15, latency_s=0.0)
    monkeypatch.setattr(learning, "measure_link", lambda *_, **__: link)


def fit_copies_of(num_bytes: int) -> Callable[..., Moving | None]:
    """Return a function that lets so many bytes hide behind the computation, beside calls that are recomputed without
    copies."""

    def fit(problem: Problem, choices: Sequence[RegionNeeds], allowed_bytes: int, _: float) -> Moving | None:
        limit_bytes = fit_regions(problem, choices, allowed_bytes)
        return None if limit_bytes is None else Moving(limit_bytes, limit_bytes, num_bytes, 0)

    return fit
