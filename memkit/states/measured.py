"""How fast an optimizer steps on the host, beside how fast the link is: for the split of `update="both"`."""

from __future__ import annotations

import time

import torch
from torch import nn

from memkit.device.base import Device
from memkit.plan import StateRates
from memkit.states.shells import cut_group, shell_of, step_of
from memkit.transfer.link import measure_both_ways

_NUM_ELEMENTS = 2**22
_LINK_BYTES = 64 * 2**20
_REPEATS = 3


def measure_rates(device: Device, optimizer: torch.optim.Optimizer) -> StateRates:
    """Return what a split between device and host is made from: the link with both ways busy, and the class's step on a
    parameter in host memory."""
    link_bytes_per_s = measure_both_ways(device, num_bytes=_LINK_BYTES, repeats=_REPEATS)
    return StateRates(link_bytes_per_s=link_bytes_per_s, host_numel_per_s=_host_numel_per_s(optimizer))


def _host_numel_per_s(optimizer: torch.optim.Optimizer) -> float:
    with torch.inference_mode(False):
        side = round(_NUM_ELEMENTS**0.5)
        parameter = nn.Parameter(torch.zeros(side, side))
        parameter.grad = torch.full_like(parameter, 1e-3)
        group = {**cut_group(optimizer.param_groups[0], []), "params": [parameter]}
        group.pop("param_names", None)
        shell = shell_of(optimizer, [group], type(optimizer.state)(dict))
        step = step_of(optimizer)
        step(shell)
        best_s = float("inf")
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            step(shell)
            best_s = min(best_s, time.perf_counter() - begun)
    return parameter.numel() / max(best_s, 1e-9)
