"""What a `StateOffload` is given: where its parameters are, and what is said before anything moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memkit.device import CpuDevice, Device, open_device
from memkit.errors import StateOffloadError, warn_user
from memkit.states.pieces import StateRecord


def device_of(parameters: list[Tensor], asked: str | torch.device | Device | None) -> Device:
    """Return the device that all parameters are on.

    Raises:
        ValueError: they are on several, or on another than was asked for.
    """
    places = {parameter.device for parameter in parameters}
    if len(places) > 1:
        raise ValueError(
            f"StateOffload needs all parameters on one device; found {', '.join(sorted(map(str, places)))}. Move the model "
            "first, or make an optimizer and a StateOffload for each device"
        )
    (place,) = places
    device = open_device(place if asked is None else asked)
    if device.torch_device != place:
        raise ValueError(
            f"StateOffload needs parameters on {device.torch_device}; found them on {place}. Move the model there before the "
            "optimizer is made"
        )
    if isinstance(device, CpuDevice) and asked is None:
        warn_user(
            "StateOffload: the parameters are in host memory, and so are the states already: nothing is freed. Move the "
            "model to a GPU first"
        )
    return device


def dtypes(parameters: list[Tensor]) -> str:
    return ", ".join(sorted({str(parameter.dtype) for parameter in parameters}))


def warn_if_unfused(optimizer: torch.optim.Optimizer) -> None:
    if any("fused" in group and not group["fused"] for group in optimizer.param_groups):
        warn_user(
            f"StateOffload: {type(optimizer).__name__} steps on the host without its fused kernel, which is several times "
            "slower. Make it with fused=True"
        )


def refuse_sparse(records: Sequence[StateRecord]) -> None:
    """Raise if a gradient is sparse.

    Raises:
        StateOffloadError: it is.
    """
    for record in records:
        grad = record.parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            raise StateOffloadError(
                f"StateOffload streams dense states; the gradient of {record.name} is sparse. Use sparse=False"
            )
