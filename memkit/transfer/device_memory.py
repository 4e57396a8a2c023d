"""One account of the device memory that memkit itself keeps from step to step (slots, undo buffers), by feature."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Protocol

import torch

from memkit.core.sizes import format_bytes
from memkit.device.base import Device
from memkit.errors import note_on


class MemoryHolder(Protocol):
    holder: str  # its name for users: "LayerOffload's slots"

    @property
    def num_bytes(self) -> int: ...


class DeviceMemory:
    """The holders of a device's memory that no `MemoryBudget` can move: it reports them when a budget can't be kept."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._holders = weakref.WeakSet[MemoryHolder]()

    def join(self, holder: MemoryHolder) -> None:
        self._holders.add(holder)

    def allocate(self, holder: MemoryHolder, num_bytes: int) -> torch.UntypedStorage:
        try:
            with torch.inference_mode(False):
                return self._device.allocate(num_bytes)
        except torch.OutOfMemoryError as error:
            beside = self.describe()
            told = f"no room on the device for {format_bytes(num_bytes)} of {holder.holder}"
            note_on(error, f"memkit: {told}; {beside}" if beside else f"memkit: {told}")
            raise

    def held(self) -> dict[str, int]:
        counted = Counter[str]()
        for holder in tuple(self._holders):
            counted[holder.holder] += holder.num_bytes
        return {name: num_bytes for name, num_bytes in counted.most_common() if num_bytes}

    def describe(self) -> str:
        held = ", ".join(f"{format_bytes(num_bytes)} for {name}" for name, num_bytes in self.held().items())
        return f"memkit itself holds {held}" if held else ""


_memories: dict[Device, DeviceMemory] = {}


def device_memory_of(device: Device) -> DeviceMemory:
    return _memories.get(device) or _memories.setdefault(device, DeviceMemory(device))
