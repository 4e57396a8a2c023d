"""Which share streams: from the arguments, or from a measured step, to a `ResidencyPlan`; and the training mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memkit.core import backwards, torch_private
from memkit.core.sizes import check_budget_bytes, format_bytes
from memkit.core.tensors import has_plain_parts, is_plain, unique_storages
from memkit.device import Device, why_nothing_is_freed
from memkit.device.base import Event
from memkit.errors import warn_user
from memkit.plan import LayerCosts, ResidencyPlan, plan_again, plan_auto, plan_budget, plan_resident, plan_streamed_ratio
from memkit.transfer.disk import Disk
from memkit.transfer.lanes import Transfer
from memkit.weights.chunks import LayerChunk
from memkit.weights.fused import MakeOptimizer
from memkit.weights.host_copies import shared_between

if TYPE_CHECKING:
    from memkit.weights.streaming import Streamer

_MOST_WITHOUT_BACKWARD = 3
"""After this many forwards in grad mode without a backward none is expected."""
_MOST_SAMPLES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    taken_s: float
    h2d_bytes_per_s: float | None
    peak_bytes: int | None


@dataclass(slots=True)
class _Point:
    """A moment from which on a layer computes, or none does."""

    name: str | None
    is_backward: bool
    before: Event
    after: Event


class StepTiming:
    """Times the second pass of its kind: the first chooses kernels. If `is_trained`, samples ahead of it don't count."""

    def __init__(self, streamer: Streamer, *, is_trained: bool, resets_peak: bool) -> None:
        self._device, self._streamer = streamer.device, streamer
        self._resets_peak = resets_peak
        self._num_unfit_left = {True: _MOST_WITHOUT_BACKWARD, False: _MOST_SAMPLES if is_trained else 0}
        self._points: list[_Point] = []
        self._transfers: list[Transfer] = []
        self._seen = set[bool]()
        self._has_grad = self._is_timing = self._is_timed = False
        self._backward = -1

    def begin_pass(self) -> bool:
        if self._is_timed:
            return True
        is_timed = any(not point.is_backward and point.name for point in self._points)
        if is_timed and not any(point.is_backward for point in self._points):
            self._num_unfit_left[self._has_grad] -= 1
            is_timed = self._num_unfit_left[self._has_grad] < 0
        if is_timed:
            self.end_layer()
            self._is_timed, self._streamer.transfers = True, None
            return True
        self._has_grad = torch.is_grad_enabled()
        self._is_timing = self._has_grad in self._seen
        self._seen.add(self._has_grad)
        self._points.clear()
        self._transfers = []
        self._streamer.transfers = self._transfers if self._is_timing else None
        if self._is_timing and self._resets_peak:
            counter = self._device.memory_counter()
            if counter is not None:
                counter.reset_peak()
        return False

    def begin_layer(self, name: str) -> None:
        if not self._is_timing or self._is_timed:
            return
        task = torch_private.backward_task()
        is_backward = task != -1
        last = self._points[-1] if self._points else None
        if last is not None and (last.name, last.is_backward) == (name, is_backward):
            return
        self._add(name, is_backward)
        if is_backward and task != self._backward:
            backwards.on_end(lambda has_failed: self.fail() if has_failed else self.end_layer())
            self._backward = task

    def _add(self, name: str | None, is_backward: bool) -> None:
        now = self._device.record_event()
        self._points.append(_Point(name, is_backward, now, now))

    def note_ready(self) -> None:
        if self._points and self._points[-1].after is self._points[-1].before:
            self._points[-1].after = self._device.record_event()

    def end_layer(self) -> None:
        if self._points and self._points[-1].name is not None and not self._is_timed:
            self._add(None, self._points[-1].is_backward)

    def fail(self) -> None:
        if not self._is_timed:
            self._points.clear()

    def result(self) -> StepTimes:
        self._device.synchronize(self._points[-1].before)
        forward_s, backward_s = Counter[str](), Counter[str]()
        taken_s = 0.0
        for point, following in pairwise(self._points):
            if point.name is not None:
                seconds: Any = backward_s if point.is_backward else forward_s
                seconds[point.name] += max(point.after.elapsed_s(following.before), 0.0)
                taken_s += point.before.elapsed_s(following.before)
        copied = [transfer for transfer in self._transfers if transfer.done.is_reached()]
        copied_s = sum(transfer.started.elapsed_s(transfer.done) for transfer in copied)
        counter = self._device.memory_counter()
        return StepTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            taken_s=taken_s,
            h2d_bytes_per_s=sum(transfer.num_bytes for transfer in copied) / copied_s if copied_s > 0 else None,
            peak_bytes=None if counter is None else counter.peak_bytes(),
        )


_TRAIN = ("auto", "frozen", "host", "fused")
_MOSTLY = 0.5
"""Layers are trained if more than this share of their bytes requires grad."""
_USABLE = 0.95
"""Of the bytes that the process may allocate: the rest is lost between blocks."""
_BYTES_PER_TRAINED_BYTE = 4
"""A weight, its gradient, and two values of the optimizer."""


def choose_mode(train: str, layers: Mapping[str, nn.Module], optimizer: MakeOptimizer | None) -> str:
    if train not in _TRAIN:
        raise ValueError(
            f"LayerOffload needs train= one of {', '.join(map(repr, _TRAIN))}; found {train!r}. Omit it to have the mode "
            "chosen by what requires grad"
        )
    if optimizer is not None and (train not in ("auto", "fused") or not callable(optimizer)):
        raise ValueError(f'optimizer makes the optimizer for train="fused"; found {optimizer!r} with train="{train}"')
    if train == "fused" and optimizer is None:
        raise ValueError('train="fused" needs an optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-4); found None')
    if train == "auto" and optimizer is not None:
        return "fused"
    if train != "auto":
        return train
    parameters = [parameter for layer in layers.values() for parameter in layer.parameters()]
    trained_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return "host" if trained_bytes > _MOSTLY * sum(parameter.nbytes for parameter in parameters) else "frozen"


def check_disk(disk: object, *, train: str, offload_ratio: float | str | None) -> None:
    if disk is None:
        return
    if not isinstance(disk, Disk):
        raise TypeError(f'disk is a memkit.Disk, such as memkit.Disk("/scratch"); found {disk!r}')
    if train != "frozen":
        raise ValueError(
            f'disk= is for frozen layers, train="frozen": others would be written to the disk in each step; found '
            f'train="{train}". Leave one of them out'
        )
    if isinstance(offload_ratio, str):
        raise ValueError(
            f"disk= needs a number as offload_ratio, or budget or num_resident: what is measured is the link, not the disk; "
            f'found offload_ratio="{offload_ratio}"'
        )


def chunks_of(model: nn.Module, layers: Mapping[str, nn.Module], *, is_trained: bool) -> dict[str, LayerChunk]:
    """Return each layer's parameters that may stream: not shared with others, and frozen unless `is_trained`."""
    tied, found = shared_between(model, layers), dict[str, LayerChunk]()
    seen = set[int]()
    for name, module in layers.items():
        chosen = []
        for parameter in module.parameters():
            must_be_frozen = not is_trained or not is_plain(parameter)
            if not has_plain_parts(parameter) or not parameter.numel() or (parameter.requires_grad and must_be_frozen):
                continue
            shared = [key for key in unique_storages([parameter]) if key in tied]
            for key in shared:
                if key not in seen:
                    seen.add(key)
                    warn_user(f"LayerOffload: {', '.join(tied[key])} share their bytes, so they stay on the device")
            if not shared:
                chosen.append(parameter)
        if chosen:
            found[name] = LayerChunk(name, module, chosen, len(found))
    return found


def plan_layers(
    layers: Mapping[str, LayerChunk | None],
    *,
    offload_ratio: float | str | None,
    budget: int | str | None,
    num_resident: int | None,
    num_slots: int,
    state_bytes: int,
) -> ResidencyPlan:
    """Return which layers stream: with "auto", all at first. Exactly one of the sizes is not None."""
    sizes = {"offload_ratio": offload_ratio, "budget": budget, "num_resident": num_resident}
    given = [name for name, size in sizes.items() if size is not None]
    if len(given) != 1:
        raise ValueError(
            f"LayerOffload takes exactly one of offload_ratio, budget and num_resident; found {' and '.join(given) or 'none'}"
        )
    if not any(layers.values()) and offload_ratio != 0 and num_resident != len(layers):
        raise ValueError(
            'LayerOffload: none of the layers has parameters that may stream. With train="frozen" those that require grad '
            "stay on the device, and tied ones do always"
        )
    costs = costs_of(layers)
    if isinstance(offload_ratio, str):
        if offload_ratio != "auto":
            raise ValueError(f'offload_ratio is a number from 0 to 1, or "auto"; found {offload_ratio!r}')
        return plan_streamed_ratio(costs, 1.0, num_slots=num_slots)
    if offload_ratio is not None:
        return plan_streamed_ratio(costs, offload_ratio, num_slots=num_slots)
    if num_resident is not None:
        return plan_resident(costs, num_resident, num_slots=num_slots)
    assert budget is not None
    budget_bytes = check_budget_bytes("budget", budget)
    return plan_budget(costs, budget_bytes, num_slots=num_slots, state_bytes=state_bytes)


def why_layers_free_nothing(
    layers: Mapping[str, LayerChunk | None], plan: ResidencyPlan, device: Device, *, train: str, num_slots: int
) -> str | None:
    """Return a message if streaming frees no byte of the device; with train="host", gradients count as well."""
    if why := why_nothing_is_freed(device):
        return f"LayerOffload: {why}"
    costs = costs_of(layers)
    grad_bytes = sum(layer.grad_bytes for layer in costs if layer.name in plan.streamed) if train == "host" else 0
    if not plan.streamed or plan.freed_bytes + grad_bytes > 0:
        return None
    found = "1 layer streams" if len(plan.streamed) == 1 else f"{len(plan.streamed)} layers stream"
    for count in range(num_slots, 0, -1):
        freed_bytes = plan_streamed_ratio(costs, 1.0, num_slots=count).freed_bytes
        if freed_bytes > 0:
            all_stream = all(layer.name in plan.streamed for layer in costs if layer.num_bytes)
            changes = [] if all_stream else ["offload_ratio=1.0"]
            changes += [] if count == num_slots else [f"num_slots={count}"]
            wanted = "Take fewer slots" if all_stream else "Let more stream"
            advice = f"{wanted} ({', '.join(changes)} frees {format_bytes(freed_bytes)})"
            break
    else:
        advice = "Leave LayerOffload out, or name modules that are smaller and of about one size (layers=)"
    return (
        f"LayerOffload frees no memory on the device: {found} ({format_bytes(plan.streamed_bytes)}), and the slots on the "
        f"device take {format_bytes(sum(plan.slot_bytes))}, up to {num_slots} for layers of about one size. {advice}."
    )


def plan_measured(
    costs: list[LayerCosts], times: StepTimes, plan: ResidencyPlan, *, train: str, num_slots: int, capacity_bytes: int | None
) -> ResidencyPlan:
    """Return the plan that streams the most that hides; if the device has no room for the rest then, the least that fits."""
    if times.h2d_bytes_per_s is None:
        return plan_again(plan, costs, None)
    budget_bytes = None
    if capacity_bytes is not None and times.peak_bytes is not None:
        room_bytes = int(_USABLE * capacity_bytes) - times.peak_bytes
        budget_bytes = plan.device_bytes + room_bytes // (_BYTES_PER_TRAINED_BYTE if train == "host" else 1)
    try:
        return plan_auto(costs, num_slots=num_slots, link_bytes_per_s=times.h2d_bytes_per_s, budget_bytes=budget_bytes)
    except ValueError:  # not even the least fits by these figures, and yet it has run
        return plan_again(plan, costs, times.h2d_bytes_per_s)


def costs_of(layers: Mapping[str, LayerChunk | None], times: StepTimes | None = None) -> list[LayerCosts]:
    return [
        LayerCosts(
            name=name,
            num_bytes=0 if chunk is None else chunk.num_bytes,
            forward_s=None if times is None else times.forward_s.get(name, 0.0),
            backward_s=None if times is None else times.backward_s.get(name, 0.0),
            grad_bytes=sum(item.parameter.nbytes for item in chunk.parameters if item.parameter.requires_grad) if chunk else 0,
        )
        for name, chunk in layers.items()
    ]
