"""Where bytes live: streams, events and memory counters. Nothing outside this room names `torch.cuda`."""

from __future__ import annotations

import torch

from memkit.device.base import Device, Event, MemoryCounter, Stream
from memkit.device.cpu import CpuDevice
from memkit.device.cuda import CudaDevice, cuda_generator, cuda_is_available, cuda_is_capturing
from memkit.device.reference import ReferenceDevice

__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Event",
    "MemoryCounter",
    "ReferenceDevice",
    "Stream",
    "cuda_is_available",
    "default_generator",
    "is_capturing",
    "open_device",
]


def open_device(torch_device: torch.device) -> Device:
    """Return the `Device` for a `torch.device`.

    Raises:
        DeviceUnavailableError: it is a CUDA device and this machine has no such device.
        ValueError: memkit does not know the kind of device.
    """
    if torch_device.type == "cuda":
        return CudaDevice(torch_device)
    if torch_device.type == "cpu":
        return CpuDevice()
    raise ValueError(f'memkit runs on "cpu" and "cuda"; found "{torch_device.type}". Move the model to one of these.')


def is_capturing() -> bool:
    """Tell whether this thread's work is being captured into a graph instead of run."""
    return cuda_is_capturing()


def default_generator(torch_device: torch.device) -> torch.Generator:
    """Return the random number generator that ops on a device draw from by default."""
    return cuda_generator(torch_device) if torch_device.type == "cuda" else torch.default_generator
