"""Steps seen ahead: the trace of a step as it was measured, and what a step of other sizes will take."""

from __future__ import annotations

from bisect import bisect_left
from copy import copy
from typing import TYPE_CHECKING

from memkit.plan import NO_OP, Lifetime, OpKind, OpWork, Step, StepTrace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memkit.activations.budgeting.meter import Meter
    from memkit.plan import GpuSpec


_CONVOLUTIONS = (OpKind.CONVOLUTION, OpKind.CONVOLUTION_OF_FEW)


class Foresight:
    """The most bytes beside the base and the values saved so far, from each save to the next, and from each request to the
    next. A convolution on CUDA counts a workspace as large as what it reads and writes, which a run without data doesn't show.
    `is_whole` says whether the trace includes the loss."""

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
        return self._factor > 0

    def is_of(self, save: int, num_bytes: int) -> bool:
        if save >= len(self._sizes_bytes):
            return False
        size_bytes = self._sizes_bytes[save]
        return num_bytes == size_bytes if not self._factor else num_bytes <= self._factor * size_bytes

    def scaled(self, save: int, num_bytes: int) -> Foresight | None:
        """Return the prediction for a step of other sizes: larger in proportion to a save, but at least as large; None if none
        was predicted."""
        if save >= len(self._sizes_bytes) or not self._sizes_bytes[save]:
            return None
        found = copy(self)
        found.is_whole, found._factor = False, max(self._factor, num_bytes / self._sizes_bytes[save], 1.0)
        return found

    def after_save(self, num_saves: int) -> int:
        """Return the most bytes after `num_saves` saves, up to the next save or the first request."""
        return self._of(self._saves, num_saves)

    def after_request(self, num_requests: int) -> int:
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


_BACKWARD = "backward"


def observed_trace(meter: Meter, step: Step, names: Mapping[int, tuple[str, str]], *, target: str, min_bytes: int) -> StepTrace:
    """Return a measured step as a trace. Its backward has one op for each interval between two requests."""
    lineage, num_forward = step.lineage, meter.num_forward_ops
    num_ops = len(meter.live_bytes)
    first_request = num_forward + 1
    use_places = tuple(first_request + request for request in range(len(step.uses)))
    last_use: dict[int, int] = {}
    for request, value in enumerate(step.uses):
        last_use[value] = request
    saved_at: dict[int, int] = {}
    for value, place in zip(step.saves, meter.save_places, strict=True):
        saved_at.setdefault(value, place)
    lifetimes: dict[int, Lifetime] = {}
    for value in (*saved_at, *(value for value in meter.released if value not in saved_at)):
        maker = lineage.maker[value]
        if maker == NO_OP and value not in saved_at:
            continue
        made = max(saved_at[value] - 1, 0) if maker == NO_OP else meter.op_places[maker]
        if value in saved_at:
            freed = min(first_request + step.use_end(last_use[value]), num_ops) if value in last_use else num_ops
            released = min(meter.released.get(value, first_request), freed)
        else:
            if lineage.num_bytes[value] < min_bytes:
                continue
            freed = released = meter.released[value]
        lifetimes[value] = Lifetime(made_at=made, released_at=max(released, made), freed_at=max(freed, made))
    works = [_work(name) for name in meter.names]
    works += [_work(_BACKWARD)] * (num_ops - num_forward)
    return StepTrace(
        model="",
        inputs="",
        target=target,
        min_bytes=min_bytes,
        ops=tuple(works),
        num_forward_ops=num_forward,
        step=step,
        op_places=tuple(meter.op_places),
        save_places=tuple(meter.save_places),
        use_places=use_places,
        lifetimes=lifetimes,
        live_bytes=tuple(meter.live_bytes),
        base_bytes=meter.base_bytes,
        trainable_numel=0,
        trainable_bytes=0,
        names=dict(names),
    )


def measured_s(meter: Meter, step: Step) -> list[float]:
    seconds = [0.0] * meter.num_forward_ops
    for place, taken_s in zip(meter.op_places, step.lineage.seconds, strict=True):
        seconds[place] += taken_s
    for place, taken_s in meter.opaque_s().items():
        seconds[place] += taken_s
    return seconds + list(meter.stretches_s())


def _work(name: str) -> OpWork:
    return OpWork(name=name, kind=OpKind.POINTWISE, flops=0.0, num_bytes=0, dtype="")


def is_other_link(link: GpuSpec, found: tuple[float, float], least: float) -> bool:
    """Tell whether the bandwidth in either direction differs from that in the plan by at least the fraction `least`."""
    planned = link.d2h_bytes_per_s, link.h2d_bytes_per_s
    return any(max(rate / known, known / rate) - 1 > least for rate, known in zip(found, planned, strict=True) if rate > 0)
