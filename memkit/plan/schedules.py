"""The ratio as a function of the iteration: `memkit.schedules`.

A schedule is called once per iteration, as `schedule(iteration, last_peak_bytes)`: the iteration counts from 0, and the peak is
the allocator's in the previous iteration (None before the first). A function of the iteration alone works as well.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memkit.core.sizes import check_budget_bytes, format_mib
from memkit.plan.ratio import check_ratio

Schedule = Callable[..., float]


@dataclass(frozen=True, slots=True)
class _Ramp:
    start: float
    end: float
    num_iterations: int
    is_cosine: bool

    def __call__(self, iteration: int) -> float:
        if iteration >= self.num_iterations:
            return self.end
        share = iteration / self.num_iterations
        if self.is_cosine:
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True, slots=True)
class _Piecewise:
    ratios: tuple[tuple[int, float], ...]

    def __call__(self, iteration: int) -> float:
        return [ratio for first, ratio in self.ratios if first <= iteration][-1]


@dataclass(slots=True)
class _FitMemory:
    """Lowers the ratio from 1 while the peak fits, bisects once it does not, then stays, and moves only up."""

    target_bytes: int
    ratio: float = 1.0
    _fitting: list[tuple[float, int]] = field(default_factory=list)
    _too_low: float | None = None
    _is_settled: bool = False
    _has_warned: bool = False

    def __call__(self, iteration: int, last_peak_bytes: int | None) -> float:
        if last_peak_bytes is not None:
            self.ratio = self._next(last_peak_bytes)
        return self.ratio

    def _next(self, peak_bytes: int) -> float:
        if peak_bytes > self.target_bytes:
            return self._after_too_much(peak_bytes)
        if self._is_settled:
            return self.ratio
        self._fitting.append((self.ratio, peak_bytes))
        if self._too_low is not None:
            return self._between(self._too_low, self.ratio)
        self._is_settled = self.ratio == 0
        slopes = [
            (later[1] - earlier[1]) / (earlier[0] - later[0])
            for earlier, later in zip(self._fitting, self._fitting[1:], strict=False)
            if earlier[0] > later[0]
        ]
        steepest = max(slopes, default=0.0)
        to_target = (self.target_bytes - peak_bytes) / steepest if steepest > 0 else 0.1
        return self.ratio - min(max(0.02, min(0.1, to_target)), self.ratio)

    def _after_too_much(self, peak_bytes: int) -> float:
        if self.ratio >= 1.0:
            if not self._has_warned:
                warnings.warn(
                    f"fit_memory: the peak is {format_mib(peak_bytes)} even with everything offloaded; the target was "
                    f"{format_mib(self.target_bytes)}. Use a smaller batch, or checkpointing beside the offload",
                    stacklevel=2,
                )
            self._has_warned = self._is_settled = True
            return 1.0
        if self._is_settled:  # something else has changed
            return min(1.0, self.ratio + 0.1 / 2)
        self._too_low = self.ratio
        return self._between(self.ratio, self._fitting[-1][0] if self._fitting else 1.0)

    def _between(self, too_low: float, fitting: float) -> float:
        if fitting - too_low < 1.5 * 0.02:
            self._is_settled = True
            return fitting
        return (too_low + fitting) / 2


def constant(ratio: float) -> Schedule:
    """Return a schedule that always gives the same ratio.

    Raises:
        TypeError, ValueError: `ratio` is no number from 0 to 1.

    Example:
        >>> from memkit import schedules
        >>> schedules.constant(0.3)(17)
        0.3
    """
    return _Piecewise(((0, check_ratio(ratio, where="ratio")),))


def linear(start: float, end: float, *, num_iterations: int) -> Schedule:
    """Return a schedule that goes from `start` to `end` in a straight line, and stays there.

    Raises:
        TypeError, ValueError: `start` or `end` is no number from 0 to 1, or `num_iterations` is not at least 1.

    Example:
        >>> from memkit import schedules
        >>> [schedules.linear(0, 1, num_iterations=4)(iteration) for iteration in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]
    """
    return _ramp(start, end, num_iterations, is_cosine=False)


def cosine(start: float, end: float, *, num_iterations: int) -> Schedule:
    """Return a schedule that goes from `start` to `end` along half a cosine, slowly at both ends, and stays there.

    Raises:
        TypeError, ValueError: as for `linear`.

    Example:
        >>> from memkit import schedules
        >>> [round(schedules.cosine(0, 1, num_iterations=4)(iteration), 3) for iteration in (0, 1, 2, 4)]
        [0.0, 0.146, 0.5, 1.0]
    """
    return _ramp(start, end, num_iterations, is_cosine=True)


def _ramp(start: float, end: float, num_iterations: int, *, is_cosine: bool) -> Schedule:
    if isinstance(num_iterations, bool) or not isinstance(num_iterations, int) or num_iterations < 1:
        raise ValueError(f"num_iterations must be an integer of at least 1; found {num_iterations!r}")
    return _Ramp(check_ratio(start, where="start"), check_ratio(end, where="end"), num_iterations, is_cosine)


def piecewise(ratios: Mapping[int, float]) -> Schedule:
    """Return a schedule that changes at given iterations.

    Args:
        ratios: the first iteration of each piece, and its ratio. The first piece begins at 0.

    Raises:
        TypeError, ValueError: an iteration is no integer of at least 0, none is 0, or a ratio is no number from 0 to 1.

    Example:
        >>> from memkit import schedules
        >>> schedule = schedules.piecewise({0: 0.0, 100: 0.5})
        >>> schedule(99), schedule(100)
        (0.0, 0.5)
    """
    for first in ratios:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(f"the pieces begin at iterations, integers from 0 on; found {first!r}")
    if 0 not in ratios:
        raise ValueError(f"the first piece must begin at iteration 0; found {sorted(ratios)}")
    return _Piecewise(tuple((first, check_ratio(ratios[first], where=f"the piece at {first}")) for first in sorted(ratios)))


def fit_memory(target_bytes: int | str) -> Schedule:
    """Return a schedule that finds the smallest ratio at which the peak of an iteration fits.

    It begins with 1, which needs the least memory, and lowers the ratio by at most a tenth per iteration. When the peak no
    longer fits, it goes back, bisects the gap, and stays. From then on it only rises, when a peak does not fit. It holds state:
    make one per training run.

    Args:
        target_bytes: the most bytes that an iteration may allocate at its peak, or text such as "8GiB".

    Raises:
        TypeError, ValueError: `target_bytes` is no positive number of bytes.

    Example:
        >>> from memkit import schedules
        >>> schedule = schedules.fit_memory("8GiB")
        >>> schedule(0, None)
        1.0
    """
    return _FitMemory(check_budget_bytes("target_bytes", target_bytes))


def takes_peak(schedule: Schedule) -> bool:
    try:
        parameters = inspect.signature(schedule).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    positional = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2 or any(item.kind is item.VAR_POSITIONAL for item in parameters)


def call_schedule(schedule: Schedule, iteration: int, last_peak_bytes: int | None) -> float:
    ratio = schedule(iteration, last_peak_bytes) if takes_peak(schedule) else schedule(iteration)
    return check_ratio(ratio, where=f"the ratio that the schedule gives for iteration {iteration}")
