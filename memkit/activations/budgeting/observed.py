"""Turns a measured step into the trace that is planned from, in the same form as a trace without data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memkit.plan import NO_OP, Lifetime, OpKind, OpWork, Step, StepTrace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memkit.activations.budgeting.meter import Meter
    from memkit.plan import GpuSpec

_BACKWARD = "backward"


def observed_trace(meter: Meter, step: Step, names: Mapping[int, tuple[str, str]], *, target: str, min_bytes: int) -> StepTrace:
    """Return a measured step as a trace. Its backward has one op for each interval between two requests.

    Args:
        meter: the meter, after the step.
        step: which op made which value.
        names: for each value made by an op, the names of the op and the module.
        target, min_bytes: see `StepTrace`.
    """
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
    """Return the seconds of each op in the trace of a measured step. Makes the host wait."""
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
