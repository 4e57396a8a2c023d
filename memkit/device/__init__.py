"""Where bytes live: streams, events and memory counters. Nothing outside this room names `torch.cuda`.

- `base`: `Device`: the contract
- `cuda`: CUDA
- `cpu`: the CPU
- `reference`: `ReferenceDevice`: a stand-in on the CPU on which races show
- `ceilings`: peak FLOPs and memory bandwidth, measured
"""

from __future__ import annotations

import torch

from memkit.device.base import Device, Event, MemoryCounter, Stream
from memkit.device.cpu import CpuDevice
from memkit.device.cuda import CudaDevice, cuda_is_available, default_generator, is_capturing
from memkit.device.reference import ReferenceDevice

__all__ = ["CpuDevice", "CudaDevice", "Device", "Event", "MemoryCounter", "ReferenceDevice", "Stream", "cuda_is_available"]
__all__ += ["default_generator", "is_capturing", "open_device", "why_nothing_is_freed"]
_TRY_OUT = "Run on a machine with a GPU, or pass device=memkit.device.ReferenceDevice() to try it out"


def open_device(device: str | torch.device | Device, *, advice: str = _TRY_OUT) -> Device:
    """Return the `Device` for a name such as "cuda:1" or a `torch.device`; a `Device` is returned unchanged.

    Args:
        device: name, `torch.device` or `Device`.
        advice: the error's advice where there is no CUDA device.

    Raises:
        DeviceUnavailableError: it is a CUDA device and this machine has no such device.
        TypeError: it is none of these.
        ValueError: memkit does not know the kind of device, or torch does not know the name.
    """
    if isinstance(device, Device):
        return device
    torch_device = _named(device) if isinstance(device, str) else device
    if not isinstance(torch_device, torch.device):
        raise TypeError(
            f'device is a name such as "cuda:1", a torch.device or a memkit.device.Device; found {type(device).__name__}'
        )
    if torch_device.type == "cuda":
        return CudaDevice(torch_device, advice=advice)
    if torch_device.type == "cpu":
        return CpuDevice()
    raise ValueError(f'memkit runs on "cpu" and "cuda"; found "{torch_device.type}". Move the model to one of these.')


def _named(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f'device must be the name of a torch.device, such as "cuda:1"; found {name!r}') from None


def why_nothing_is_freed(device: Device) -> str | None:
    """Return why copies to the host free nothing on a device, and what to do; None if they free some."""
    if device.has_own_memory:
        return None
    name = "the CPU" if device.torch_device.type == "cpu" else f'"{device.torch_device}" ({device.name})'
    return (
        f"{name} has no memory apart from the host's, so moving bytes to the host frees nothing. Use a GPU with memory of its "
        "own, or pass device=memkit.device.ReferenceDevice() to try it out."
    )
