"""Have a device pin less than it is asked for, as a container or WSL does."""

from __future__ import annotations

import threading

import pytest
from torch import Tensor

from memkit.device import Device
from memkit.errors import HostMemoryError


class PinLimit:
    """Lets a device pin so many bytes at once, and none beyond.

    Attributes:
        pinned: the size of each range that is pinned, by its address.
    """

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.pinned: dict[int, int] = {}
        self._pin, self._unpin = device.pin, device.unpin
        self._lock = threading.Lock()
        monkeypatch.setattr(device, "pin", self.pin)
        monkeypatch.setattr(device, "unpin", self.unpin)

    def pin(self, host: Tensor) -> None:
        with self._lock:
            if sum(self.pinned.values()) + host.nbytes > self.limit_bytes:
                raise HostMemoryError("the test's limit on locked memory")
            self.pinned[host.data_ptr()] = host.nbytes
        self._pin(host)

    def unpin(self, host: Tensor) -> None:
        self._unpin(host)
        with self._lock:
            assert self.pinned.pop(host.data_ptr()) == host.nbytes
