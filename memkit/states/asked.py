"""The arguments of a `StateOffload`, checked before anything moves, and which optimizers have one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.owners import owners, with_offloaded_states
from memkit.core.tensors import is_plain
from memkit.core.torch_state import is_dtensor, local_of
from memkit.device import Device, open_device, why_nothing_is_freed
from memkit.errors import StateOffloadError, warn_user
from memkit.optimizers import needs_master
from memkit.optimizers.steppers import ReducedLayer, layers_of, stepper_of, steppers
from memkit.removed import removed
from memkit.states.packing import described, lie_alike
from memkit.states.pieces import StateRecord
from memkit.states.trial import refuse_by_kind
from memkit.transfer.disk import Disk

_opened = weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple["weakref.ref[Any]", "weakref.finalize[..., Any]"]]()
_UPDATES = ("auto", "device", "host")


def claim(optimizer: torch.optim.Optimizer, states: Any) -> None:
    known = _opened.get(optimizer)
    found = None if known is None else known[0]()
    if found is not None:
        raise ValueError(f"this {type(optimizer).__name__} has a StateOffload already: {found!r}. Call close() of that first")
    ref, dropped = weakref.ref(states), weakref.finalize(states, _await_all, states.device)
    dropped.atexit = False
    _opened[optimizer], with_offloaded_states[optimizer] = (ref, dropped), partial(_coming_bytes, ref)


def _await_all(device: Device) -> None:
    if not device.is_capturing():
        device.synchronize()


def _coming_bytes(ref: weakref.ref[Any]) -> int:
    states = ref()
    return 0 if states is None or states.optimizer.state else int(states.plan.resident_bytes)


def release(optimizer: torch.optim.Optimizer, states: Any) -> None:
    known = _opened.get(optimizer)
    if known is not None and known[0]() is states:
        known[1].detach()
        del _opened[optimizer]
        with_offloaded_states.pop(optimizer, None)


def weakly(method: Callable[..., Any], *, when_gone: Callable[[], object] = lambda: None) -> Callable[..., Any]:
    """Return a function that calls a method without keeping its object alive, and `when_gone` once that is dead."""
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = ref()
        if found is not None:
            return found(*args)
        when_gone()
        return None

    return call


def check_options(*, update: str, master: torch.dtype | None, when: str, overlap_forward: bool, disk: Disk | None) -> None:
    if update == "both":
        raise ValueError(removed('StateOffload(update="both")', 'use "device", or "host" with a device_budget'))
    if update not in _UPDATES:
        raise ValueError(f"update is one of {', '.join(map(repr, _UPDATES))}; found {update!r}")
    if master not in (None, torch.float32):
        raise ValueError(f"master is torch.float32 or None; found {master!r}")
    if when not in ("step", "backward"):
        raise ValueError(f"when is 'step' or 'backward'; found {when!r}")
    if not isinstance(overlap_forward, bool):
        raise TypeError(f"overlap_forward is True or False; found {overlap_forward!r}")
    if overlap_forward and when == "backward":
        raise ValueError(
            'overlap_forward=True needs a step behind the backward; found when="backward", which leaves nothing to overlap. '
            "Leave one of them out"
        )
    if disk is None:
        return
    if not isinstance(disk, Disk):
        raise TypeError(f'disk is a memkit.Disk, such as memkit.Disk("/scratch"); found {disk!r}')
    if update not in ("auto", "device"):
        raise ValueError(
            f'disk= is for states that are stepped on the device, update="device"; found update="{update}". Leave one of them '
            "out"
        )
    if overlap_forward:
        raise ValueError(
            "overlap_forward=True has optimizer.step() give out the whole step at once, and with disk= that waits for the disk "
            'before it returns: nothing would be left to run beside the forward. Use when="backward", where the disk reads and '
            "writes beside the backward, or leave one of them out"
        )


def refuse_beside_layers(optimizer: torch.optim.Optimizer, *, update: str, when: str, overlap_forward: bool) -> None:
    """Check the options for an optimizer of a `LayerOffload`, whose streamed parameters are stepped within the backward."""
    if stepper_of(optimizer) is None:
        return
    found = None
    if when != "backward":
        found = f'when="{when}". Use when="backward"'
    elif update not in ("auto", "device"):
        found = f'update="{update}". Use update="device"'
    if overlap_forward:
        found = 'overlap_forward=True. Leave it out, and use when="backward"'
    if found is not None:
        raise ValueError(
            'StateOffload steps the parameters of a LayerOffload(train="fused") on the device, within the backward; found '
            f"{found}"
        )


def device_of(optimizer: torch.optim.Optimizer, asked: str | torch.device | Device | None) -> Device:
    parameters = [parameter for _, parameter in _named(optimizer)]
    layers = stepper_of(optimizer)
    for parameter in parameters:
        if is_dtensor(parameter):
            _refuse_shard(parameter)
        elif torch_private.is_wrapper(parameter):
            raise ValueError(
                f"StateOffload needs plain parameters, or shards of such; found a {type(parameter).__name__}, which wraps "
                "others. Leave these parameters to another optimizer"
            )
    if layers is not None:
        streamed = set(map(id, layers.streamed()))
        parameters = [parameter for parameter in parameters if id(parameter) not in streamed]
    places = {parameter.device for parameter in parameters}
    if layers is not None:
        places.add(layers.device.torch_device)
    if len(places) > 1:
        raise ValueError(
            f"StateOffload needs all parameters on one device; found {', '.join(sorted(map(str, places)))}. Move the model "
            "first, or make an optimizer and a StateOffload for each device"
        )
    (place,) = places
    device = open_device(place if asked is None else asked)
    if layers is not None and device.torch_device == place:
        device = layers.device  # it knows what else is under way there
    if device.torch_device != place:
        raise ValueError(
            f"StateOffload needs parameters on {device.torch_device}; found them on {place}. Move the model there before the "
            "optimizer is made"
        )
    if why := why_nothing_is_freed(device):
        warn_user(f"StateOffload: {why}")
    return device


def _refuse_shard(parameter: Any) -> None:
    kind = parameter.device_mesh.device_type
    if parameter.device.type == "cpu" != kind:
        raise ValueError(
            f"StateOffload needs an optimizer whose states are on a device; found shards of a model on {kind}, in host memory: "
            "its step is on the CPU, and its states are there already. Leave StateOffload out, or shard without "
            'offload_policy. After memkit.shard, when="backward" steps them beside the backward'
        )
    found = None
    if any(placement.is_partial() for placement in parameter.placements):
        found = f"with placements {tuple(parameter.placements)}, of which each rank has a summand"
    elif not parameter.dim():
        found = "without dimensions, whose states can't be told from counts"
    elif not is_plain(local_of(parameter)):
        found = f"of a {type(local_of(parameter)).__name__}"
    if found is not None:
        raise ValueError(
            f"StateOffload steps shards (DTensor) whose local tensors are plain; found one {found}. Leave it to "
            "another optimizer"
        )


def device_of_host_layers(optimizer: torch.optim.Optimizer, *, update: str, **asked: Any) -> Device | None:
    if not layers_of(optimizer):
        return None
    found = next((f"{name}={value!r}" for name, value in asked.items() if value not in (None, 0)), None)
    if update not in ("auto", "host"):
        found = f'update="{update}"'
    if found is not None:
        raise ValueError(
            "StateOffload steps shards in host memory where they are, with their states, and moves nothing; found "
            f"{found}. Leave it out"
        )
    return next(iter(host_layers_of(optimizer).values())).device


def host_layers_of(optimizer: torch.optim.Optimizer) -> dict[int, ReducedLayer]:
    """Return the layers of an optimizer's shards in host memory, by parameter id. Raise if a parameter has none."""
    refuse_by_kind(optimizer)
    _refuse_twice(optimizer)
    found = layers_of(optimizer)
    for name, parameter in _named(optimizer):
        if id(parameter) not in found:
            raise ValueError(
                "StateOffload steps shards in host memory of a model that memkit.shard has split; found beside them "
                f"{name}, a {described(parameter)} on {parameter.device}. Leave it to another optimizer"
            )
    return found


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield f"parameter {number}.{index}", parameter


def check_parameters(optimizer: torch.optim.Optimizer, *, is_beside: bool) -> None:
    _refuse_twice(optimizer)
    _refuse_streamed(optimizer)
    if is_beside and any(is_dtensor(parameter) for _, parameter in _named(optimizer)):
        raise ValueError(
            'StateOffload steps shards (DTensor) with when="step" and without overlap_forward, since FSDP2 sets their '
            "gradients itself, and gathers them ahead of the forward; found the other. Leave it out. Shards in host memory, by "
            'memkit.shard(model, offload_policy=CPUOffloadPolicy()), are stepped with when="backward"'
        )


def _refuse_streamed(optimizer: torch.optim.Optimizer) -> None:
    layers = stepper_of(optimizer)
    own = set() if layers is None else set(map(id, layers.streamed()))
    streamed = {id(parameter) for owner in owners() for parameter in owner.streamed().parameters} - own
    others = [stepper for stepper in steppers if stepper is not optimizer]
    stepped = {id(parameter) for stepper in others for _, parameter in _named(stepper)}
    for name, parameter in _named(optimizer):
        if id(parameter) in stepped:
            raise ValueError(
                f'StateOffload: {name} is stepped within the backward by LayerOffload(train="fused"), by an optimizer that it '
                'has made. Give the StateOffload that one: memkit.StateOffload(offload.optimizer, when="backward")'
            )
        if id(parameter) in streamed:
            raise ValueError(
                f"StateOffload: {name} streams by LayerOffload, and its states are in host memory already. Make one optimizer "
                "for the parameters that stream, and another one, with a StateOffload, for the others"
            )


def _refuse_twice(optimizer: torch.optim.Optimizer) -> None:
    places: dict[int, str] = {}
    for place, parameter in _named(optimizer):
        known = places.setdefault(id(parameter), place)
        if known != place:
            raise ValueError(
                f"StateOffload needs each parameter once; found {known} again as {place}. Leave it out there when you make the "
                "optimizer"
            )


def check_groups(optimizer: torch.optim.Optimizer, device: Device, *, is_beside: bool) -> None:
    refuse_by_kind(optimizer)
    check_parameters(optimizer, is_beside=is_beside)
    if any(group["params"] for group in optimizer.param_groups):
        device_of(optimizer, device)


def check_master(master: torch.dtype | None, parameters: list[Tensor]) -> None:
    if master is not None and not any(needs_master(parameter, master) for parameter in parameters):
        found = ", ".join(sorted({str(parameter.dtype) for parameter in parameters}))
        raise ValueError(f"master=torch.float32 is for parameters of lower precision; found {found}. Leave it out")


def refuse_captured(device: Device) -> None:
    if torch.compiler.is_compiling() or device.is_capturing():
        raise StateOffloadError(
            "StateOffload: a step whose states stream can't be compiled or captured into a graph. Step outside of that"
        )


def warn_if_unfused(optimizer: torch.optim.Optimizer) -> None:
    if any("fused" in group and not group["fused"] for group in optimizer.param_groups):
        warn_user(
            f"StateOffload: {type(optimizer).__name__} steps on the host without its fused kernel, which is several times "
            "slower. Make it with fused=True"
        )


def refuse_gradients(records: Sequence[StateRecord]) -> None:
    """Raise if a gradient is sparse or split otherwise than its parameter, or a parameter no longer needs its float32 copy."""
    for record in records:
        grad = record.parameter.grad
        if record.has_master and record.parameter.dtype.itemsize >= torch.float32.itemsize:
            raise StateOffloadError(
                f"StateOffload steps a float32 copy of {record.name}, which was cast to {record.parameter.dtype} since. Call "
                "close(), and make another StateOffload"
            )
        if grad is not None and grad.layout is not torch.strided:
            raise StateOffloadError(
                f"StateOffload streams dense states; the gradient of {record.name} is sparse. Use sparse=False"
            )
        if grad is not None and record.is_shard and not lie_alike(grad, record.parameter):
            raise StateOffloadError(
                f"StateOffload steps {record.name}, a shard, by a gradient that is split in the same way, a "
                f"{described(record.parameter)}; found a {described(grad)}. Call "
                "parameter.grad = parameter.grad.redistribute(placements=parameter.placements) ahead of the step"
            )
