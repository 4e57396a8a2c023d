"""What memkit itself takes of a device: one account, in which everybody stands who keeps memory there from step to step."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Protocol

import torch

from memkit.device.base import Device
from memkit.errors import note_on
from memkit.sizes import format_bytes


class Holder(Protocol):
    """Who keeps memory of a device for what comes and goes, such as slots."""

    holder: str
    """What it is to a user: "LayerOffload's slots"."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that it has now."""


class DeviceMemory:
    """Who of memkit has how much of a device.

    The model's weights, activations and states aren't in here: only the room that they pass through. A `MemoryBudget` can move
    none of it, and tells how much there is where a budget can't be kept to.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._holders = weakref.WeakSet[Holder]()

    def join(self, holder: Holder) -> None:
        """Count what a holder has from now on, for as long as it lives."""
        self._holders.add(holder)

    def allocate(self, holder: Holder, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage for a holder, which counts it from now on.

        Raises:
            torch.OutOfMemoryError: the device has no room. It says who of memkit has how much.
        """
        try:
            with torch.inference_mode(False):
                return self._device.allocate(num_bytes)
        except torch.OutOfMemoryError as error:
            beside = self.describe()
            told = f"no room on the device for {format_bytes(num_bytes)} of {holder.holder}"
            note_on(error, f"memkit: {told}; {beside}" if beside else f"memkit: {told}")
            raise

    def held(self) -> dict[str, int]:
        """Return the bytes that are held, by what they are, the most first."""
        counted = Counter[str]()
        for holder in tuple(self._holders):
            counted[holder.holder] += holder.num_bytes
        return {name: num_bytes for name, num_bytes in counted.most_common() if num_bytes}

    def describe(self) -> str:
        """Return that as part of a sentence, "" if nothing is held."""
        held = self.held()
        if not held:
            return ""
        return f"memkit itself holds {', '.join(f'{format_bytes(num_bytes)} for {name}' for name, num_bytes in held.items())}"


_memories: dict[Device, DeviceMemory] = {}


def device_memory_of(device: Device) -> DeviceMemory:
    """Return the account of a device: always the same one."""
    return _memories.get(device) or _memories.setdefault(device, DeviceMemory(device))
