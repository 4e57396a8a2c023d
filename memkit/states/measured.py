"""How fast an optimizer steps on the host, and the link copies beside that: for the split of `update="both"`."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from memkit.device.base import Device
from memkit.plan import StateRates
from memkit.states.shells import cut_group, shell_of, step_of
from memkit.transfer.link import measure_beside_copies

_SIDE = 2048
_NUM_BLOCKS = 8
"""With their states more than a processor's cache holds."""
_LINK_BYTES = 64 * 2**20
_NUM_COPIES = 128
_NUM_COPIES_ELSEWHERE = 2
"""Where nothing is copied beside what the host does."""


class _Block:
    """A parameter in host memory, stepped as a piece of states is: with casts where a float32 copy is stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, has_master: bool) -> None:
        self.parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE))
        self.parameter.grad = torch.full_like(self.parameter, 1e-3)
        group = {**cut_group(optimizer.param_groups[0], []), "params": [self.parameter]}
        group.pop("param_names", None)
        self._shell = shell_of(optimizer, [group], type(optimizer.state)(dict))
        self._step = step_of(optimizer)
        self._copies = [torch.zeros(_SIDE, _SIDE, dtype=torch.bfloat16) for _ in range(3)] if has_master else []

    def step(self) -> None:
        assert self.parameter.grad is not None
        if self._copies:
            grad, parameter, rounded = self._copies
            self.parameter.grad.copy_(grad)
        self._step(self._shell)
        if self._copies:
            parameter.copy_(self.parameter.detach())


def measure_rates(device: Device, optimizer: torch.optim.Optimizer, *, has_master: bool) -> StateRates:
    """Return what a split between device and host is made from: the link with both ways busy and the class's step on
    parameters in host memory, each beside the other.

    Args:
        has_master: whether float32 copies are stepped.
    """
    with torch.inference_mode(False):
        blocks = [_Block(optimizer, has_master=has_master) for _ in range(_NUM_BLOCKS)]
        for block in blocks:
            block.step()
        turns = itertools.cycle(blocks)
        is_apart = device.torch_device.type == "cuda"
        blocks_per_s, link_bytes_per_s = measure_beside_copies(
            device,
            lambda: next(turns).step(),
            num_bytes=_LINK_BYTES,
            num_copies=_NUM_COPIES if is_apart else _NUM_COPIES_ELSEWHERE,
            most_acts=None if is_apart else _NUM_BLOCKS,
        )
    return StateRates(link_bytes_per_s=link_bytes_per_s, host_numel_per_s=blocks_per_s * _SIDE * _SIDE)
