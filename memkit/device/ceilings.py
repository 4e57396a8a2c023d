"""How fast a device computes at most, and so the least time of an op."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from memkit.device.base import Device

_COPIED_BYTES = {"cuda": 2**28}
_MATRIX_DIM = {"cuda": 4096}
_LAUNCH_S = 4e-6
_NUM_SMALL_OPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    bytes_per_s: float
    flops_per_s: float

    def estimate_s(self, func: Any, args: Sequence[Any], results: Any) -> float:
        """Return the least time of an op: the bytes of its tensors or its FLOPs, and a launch."""
        num_bytes = _bytes_in(args) + _bytes_in(results)
        return _LAUNCH_S + max(num_bytes / self.bytes_per_s, flops_of(func, args, {}, results) / self.flops_per_s)


GUESSED = Ceilings(bytes_per_s=1e12, flops_per_s=1e14)  # a typical GPU's: for plans that are made without one
_measured: dict[Device, Ceilings] = {}


def measure_ceilings(device: Device) -> Ceilings:
    if device not in _measured:
        _measured[device] = _measure(device)
    return _measured[device]


def _measure(device: Device) -> Ceilings:
    where = device.torch_device
    num_bytes, dim = _COPIED_BYTES.get(where.type, 2**22), _MATRIX_DIM.get(where.type, 256)
    with torch.no_grad():
        source = torch.zeros(num_bytes // 4, device=where)
        copied_s = _fastest_s(device, lambda: source.clone())
        matrix = torch.zeros(dim, dim, device=where)
        multiplied_s = _fastest_s(device, lambda: matrix @ matrix)
    return Ceilings(bytes_per_s=2 * num_bytes / copied_s, flops_per_s=2 * dim**3 / multiplied_s)


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> float:
    """Return the floating-point operations of an op, two for each multiply-add; 0 where `flop_registry` does not know them."""
    count = flop_registry.get(getattr(func, "overloadpacket", None))
    if count is None:
        return 0.0
    try:
        return float(count(*args, **kwargs, out_val=results))
    except Exception:  # an op that the registry knows with other arguments
        return 0.0


def measure_flops(device: Device, dtype: torch.dtype) -> float | None:
    """Return the FLOPs per second of a large product of nonzero matrices; None if the device cannot multiply in that dtype."""
    dim = _MATRIX_DIM.get(device.torch_device.type, 256)
    try:
        matrix = (torch.arange(dim * dim, device=device.torch_device) % 251).sub(125).div(125).to(dtype).view(dim, dim)
        return 2 * dim**3 / _fastest_s(device, lambda: matrix @ matrix)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None


def measure_launch(device: Device) -> float:
    small = torch.zeros(1, device=device.torch_device)

    def run() -> None:
        for _ in range(_NUM_SMALL_OPS):
            small.add_(0)

    return _fastest_s(device, run) / _NUM_SMALL_OPS


def _fastest_s(device: Device, run: Any) -> float:
    fastest_s = math.inf
    for _ in range(4):
        start = device.record_event()
        result = run()
        end = device.record_event()
        device.synchronize()
        del result
        fastest_s = min(fastest_s, start.elapsed_s(end))
    return max(fastest_s, 1e-9)


def _bytes_in(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    if isinstance(argument, list | tuple):
        return sum(map(_bytes_in, argument))
    return 0
