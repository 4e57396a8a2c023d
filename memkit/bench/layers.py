"""`memkit bench layers`: time and peak of a step at several offload ratios of its layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from memkit.bench import engines
from memkit.bench.curves import where_of
from memkit.bench.layer_rows import LayerBench, LayerRow
from memkit.bench.measure import Engine, Measurement, Workload, let_go, measure
from memkit.device import Device
from memkit.plan import check_ratio
from memkit.storages import storage_bytes
from memkit.transfer import Link, measure_link
from memkit.weights import LayerOffload, LayerStats
from memkit.weights.host_copies import DevicePlacement
from memkit.weights.selection import find_layers

_log = logging.getLogger("memkit.bench")

StepOf = Callable[[nn.Module], Workload]
"""Makes the step of a model."""

_Found = TypeVar("_Found")

_SGD = partial(torch.optim.SGD, lr=0.0)
"""What steps inside of the backward. A step by nothing takes as long as any other, and the weights stay what they are."""


def bench_layers(
    step_of: StepOf,
    model: nn.Module,
    ratios: Sequence[float],
    device: Device,
    *,
    train: str = "auto",
    num_steps: int = 20,
    num_warmup: int = 4,
    link: Link | None = None,
) -> LayerBench:
    """Measure a step of a model as it is, and with ratios of its layers streamed; all in one run.

    Args:
        step_of: makes the step of the model.
        model: on the CPU if it may be larger than the device; it is left where it was found. All parameters of its layers that
            are to stream as frozen must not require grad (see `freeze_layers`).
        ratios: what to give `LayerOffload` as `offload_ratio`.
        device: where the steps run. The bench times with its events.
        train: what to give `LayerOffload`. With "fused" the optimizer is plain SGD, whose step then is part of the plain
            backward as well.
        num_steps, num_warmup: steps that count, and steps ahead of them that do not, for each line.
        link: how fast bytes move; measured by default.

    Raises:
        TypeError: a ratio is no number.
        ValueError: a ratio is not from 0 to 1, or the model has no layers that may stream.
    """
    ratios = tuple(check_ratio(ratio, where="a ratio") for ratio in ratios)
    layers = find_layers(model, None).values()
    layer_bytes = storage_bytes(parameter for layer in layers for parameter in layer.parameters())
    steps = {"num_steps": num_steps, "num_warmup": num_warmup}
    workload, whole_step_of = step_of(model), partial(_whole_step_of, step_of, train)
    if link is None:
        _log.info("measuring the link")
        link = measure_link(device)
    measured_plainly = partial(_measure_plainly, whole_step_of, model, device, **steps)
    plain = _unless_out_of_memory(f"{workload.name}: plain", measured_plainly, device)
    measured_at = partial(
        measure_ratio, workload, device=device, plain=plain, link=link, train=train, engine=engines.plain, **steps
    )
    rows = [_unless_out_of_memory(f"{workload.name}: ratio {ratio:g}", partial(measured_at, ratio), device) for ratio in ratios]
    return LayerBench(
        name=workload.name,
        where=where_of(device),
        train=train,
        backward=workload.backward,
        num_layers=len(layers),
        layer_bytes=layer_bytes,
        plain=plain,
        link=link,
        ratios=ratios,
        rows=tuple(row for row in rows if row is not None),
    )


def measure_ratio(
    workload: Workload,
    ratio: float,
    device: Device,
    *,
    plain: Measurement | None,
    link: Link,
    train: str = "auto",
    slots: int = 3,
    engine: Engine = engines.plain,
    num_steps: int = 20,
    num_warmup: int = 4,
) -> LayerRow:
    """Measure a step at one offload ratio, by one `LayerOffload` that is open over all steps.

    Args:
        workload: the step. With train="fused" it has no `update`.
        ratio: what to give `LayerOffload` as `offload_ratio`.
        device: where the step runs.
        plain: the plain step of the same run, if there is room for it, which the row is compared with.
        link: how fast bytes move.
        train, slots: what to give `LayerOffload`. With "fused" the optimizer is plain SGD.
        engine: makes a context for the forward of each step.
        num_steps, num_warmup: steps that count, and steps ahead of them that do not.

    Raises:
        ValueError: the ratio is not from 0 to 1, or the model has no layers that may stream.
        torch.OutOfMemoryError: the device has no room.
    """
    optimizer = _SGD if train == "fused" else None
    with LayerOffload(
        workload.model, offload_ratio=ratio, num_slots=slots, train=train, optimizer=optimizer, device=device
    ) as offload:
        warm: list[LayerStats] = []
        found = measure(
            workload,
            engine,
            device,
            num_steps=num_steps,
            num_warmup=num_warmup,
            after_warmup=lambda: warm.append(offload.stats()),
            num_in_a_row=num_steps,
        )
        (before,), stats = warm, offload.stats()
    num_counted = num_steps + 1 + num_steps  # those in a row as well
    return LayerRow(
        ratio=ratio,
        memkit=found,
        plain=plain,
        link=link,
        num_streamed=stats.num_streamed,
        streamed_bytes=stats.streamed_bytes,
        slot_bytes=stats.slot_bytes,
        d2h_bytes=(stats.d2h_bytes - before.d2h_bytes) / num_counted,
        num_fetches=(stats.num_fetches - before.num_fetches) / num_counted,
        num_demand_fetches=(stats.num_demand_fetches - before.num_demand_fetches) / num_counted,
        num_overflows=stats.num_overflows,
        stall_s=(sum(stats.stall_s.values()) - sum(before.stall_s.values())) / num_counted,
    )


def freeze_layers(model: nn.Module) -> None:
    """Have the parameters of a model's layers require no grad, so that they stream as frozen ones.

    Raises:
        ValueError: the model has no layers that could be found.
    """
    for layer in find_layers(model, None).values():
        layer.requires_grad_(False)


def _whole_step_of(step_of: StepOf, train: str, model: nn.Module) -> Workload:
    """Return a step with all that a fused one does."""
    found = step_of(model)
    return replace(found, update=_SGD(model.parameters()).step) if train == "fused" and found.backward else found


def _measure_plainly(step_of: StepOf, model: nn.Module, device: Device, *, num_steps: int, num_warmup: int) -> Measurement:
    with _on_device(model, device):
        return measure(
            step_of(model), engines.plain, device, num_steps=num_steps, num_warmup=num_warmup, num_in_a_row=num_steps
        )


@contextmanager
def _on_device(model: nn.Module, device: Device) -> Iterator[None]:
    """Have a model on the device for a while."""
    placement = DevicePlacement()
    try:
        placement.place([*model.parameters(), *model.buffers()], device.torch_device)
        yield
    finally:
        model.zero_grad(set_to_none=True)
        placement.restore()


def _unless_out_of_memory(what: str, measured: Callable[[], _Found], device: Device) -> _Found | None:
    """Return what was measured, or None where the device has no room."""
    _log.info("%s", what)
    try:
        return measured()
    except torch.OutOfMemoryError as error:
        _log.info("%s: %s", what, error)
        let_go(error, device)
        return None
