"""Loss scaling where gradients are in host memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.errors import LayerOffloadError

_FUSED = torch_private.SCALES_IN_STEP_MARK


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that waits for the scale's copy before it scales gradients in host memory.

    With `LayerOffload(train="host")` gradients of streamed weights are in host memory, those of the rest on the device. torch's
    own scaler, and its fused optimizers, copy the scale to the host without waiting for it, so that these gradients are
    multiplied by the former bytes of that memory. This one copies it first: the host waits for the device once in each step.
    Arguments and methods are those of `torch.amp.GradScaler`.

    Example:
        >>> import memkit
        >>> scaler = memkit.GradScaler("cpu", init_scale=1024.0)
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient is infinite or NaN, as `torch.amp.GradScaler.step` does."""
        if not getattr(optimizer, _FUSED, False):
            return super().step(optimizer, *args, **kwargs)
        setattr(optimizer, _FUSED, False)  # else the optimizer would bring the scale to the host itself
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            setattr(optimizer, _FUSED, True)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # From pageable host memory to a device, torch has read a tensor when the call returns; the other way it may not wait.
        return torch_private.unscale_grads(self, optimizer, inv_scale.cpu(), found_inf.cpu(), allow_fp16)


def refuse_unscaled(is_streamed: Callable[[Tensor], bool], optimizer: torch.optim.Optimizer) -> None:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    scaler = frame.f_locals.get("self") if frame.f_code is _STEP else None
    if scaler is None or isinstance(scaler, GradScaler):
        return
    scale = torch_private.scale_of(scaler)
    if scale is None or scale.is_cpu:
        return
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(is_streamed(parameter) and parameter.grad is not None for parameter in parameters):
        raise LayerOffloadError(
            "torch.amp.GradScaler scales gradients in host memory without waiting for the scale to come there: they may have "
            'been multiplied by what was in memory before. With train="host" use memkit.GradScaler, which has the same '
            "arguments and methods"
        )


_STEP = torch.amp.GradScaler.step.__code__
