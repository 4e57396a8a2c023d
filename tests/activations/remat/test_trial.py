"""Whole steps tell whether regions or single ops are faster, without waiting for any."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memkit.activations.saved.settled import TimedWays, Way
from memkit.device import Event


class _Moment(Event):
    def __init__(self, at_s: float, is_reached: Callable[[], bool]) -> None:
        self._at_s, self._is_reached = at_s, is_reached

    def elapsed_s(self, end: Event) -> float:
        assert isinstance(end, _Moment)
        return end._at_s - self._at_s

    def is_reached(self) -> bool:
        return self._is_reached()


class _Clock:
    """The part of a device that a trial uses."""

    def __init__(self) -> None:
        self.now_s, self.is_done = 0.0, True

    def record_event(self) -> Event:
        return _Moment(self.now_s, lambda: self.is_done)


def _steps(trial: TimedWays, clock: _Clock, way: Way, *taken_s: float) -> None:
    """Run steps one way; in between, other work takes its time."""
    for step_s in taken_s:
        trial.begin_step(clock)  # type: ignore[arg-type]  # as much of a device as it needs
        clock.now_s += step_s / 3
        trial.end_forward(way)
        x = torch.ones(1, requires_grad=True)
        y = x * 2

        def ask(_: torch.Tensor, rest_s: float = step_s) -> None:
            trial.begin_backward()
            trial.begin_backward()  # once for each thing that is made again
            clock.now_s += rest_s * 2 / 3

        y.register_hook(ask)
        y.backward()
        clock.now_s += 100


@pytest.mark.parametrize(("ops_s", "regions_s", "prefers_ops"), [(2.0, 1.0, False), (1.0, 2.0, True), (1.0, 1.0, False)])
def test_prefers_what_was_faster_at_its_fastest(ops_s: float, regions_s: float, prefers_ops: bool) -> None:
    trial, clock = TimedWays(), _Clock()
    assert trial.lacks_ops

    _steps(trial, clock, Way.OPS, 50.0, ops_s)

    assert not trial.lacks_ops
    assert not trial.prefers_ops()
    _steps(trial, clock, Way.REGIONS, 0.001, 50.0, regions_s)  # the first does not count
    assert trial.prefers_ops() is prefers_ops


def test_does_not_wait_for_the_device() -> None:
    trial, clock = TimedWays(), _Clock()
    _steps(trial, clock, Way.OPS, 1.0, 1.0)
    _steps(trial, clock, Way.REGIONS, 2.0, 2.0, 2.0)
    clock.is_done = False

    assert not trial.prefers_ops()
    clock.is_done = True
    assert trial.prefers_ops()


def test_one_that_is_not_open_times_nothing() -> None:
    trial, clock = TimedWays(is_open=False), _Clock()

    _steps(trial, clock, Way.REGIONS, 2.0, 2.0, 2.0)

    assert not trial.lacks_ops
    assert not trial.prefers_ops()


def test_a_backward_that_fails_does_not_count() -> None:
    trial, clock = TimedWays(), _Clock()
    trial.begin_step(clock)  # type: ignore[arg-type]  # as much of a device as it needs
    trial.end_forward(Way.OPS)
    y = torch.ones(1, requires_grad=True) * 2

    def fail(_: torch.Tensor) -> None:
        trial.begin_backward()
        raise ArithmeticError

    y.register_hook(fail)
    with pytest.raises(ArithmeticError):
        y.backward()

    _steps(trial, clock, Way.OPS, 1.0)
    assert trial.lacks_ops
