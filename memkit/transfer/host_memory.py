"""Room in host memory: addresses, memory behind them, and how much of it the machine and its container have left."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from pathlib import Path

import torch

from memkit.device.base import Device
from memkit.errors import HostMemoryError
from memkit.sizes import format_mib

PAGE_BYTES = 2 * 2**20
"""Size of a huge page: segments begin and end at multiples of it."""
# Linux's MAP_NORESERVE, MADV_HUGEPAGE and MADV_WIPEONFORK: else a fork copies pinned memory at once, not only when a process
# writes to it, which costs each worker of a data loader seconds and gigabytes. With it the child finds zeros.
_MAP_NORESERVE, _ADVICE = (0x4000, (14, 18)) if sys.platform == "linux" else (0, ())

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


class PinError(HostMemoryError):
    """Raised when there is room, but the system does not pin it."""


class Addresses:
    """A range of addresses, without memory behind them until they are touched."""

    def __init__(self) -> None:
        # Some virtual machines grow while their memory is used, so that what they have now says little.
        num_bytes = max(4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 64 * 2**30)
        while True:
            try:
                self._map = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
                break
            except OSError as error:  # the system counts addresses as memory
                num_bytes //= 2
                if num_bytes < PAGE_BYTES:
                    raise HostMemoryError(f"the system gives no addresses for host memory: {error}") from error
        for advice in _ADVICE:
            with contextlib.suppress(OSError):  # the kernel may be too old, or built without
                self._map.madvise(advice)
        self._skipped = -torch.frombuffer(self._map, dtype=torch.uint8).data_ptr() % PAGE_BYTES
        self.num_bytes = num_bytes
        # The map is not closed: it lives until the last tensor on it dies. What is skipped is not in the storage either, since
        # torch tells by the first byte of its storage whether a tensor is pinned.
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=self._skipped)
        self._touching_bytes = 0
        self._has_touched = threading.Condition()

    def commit(self, device: Device, start: int, end: int) -> None:
        """Touch and pin memory; many threads do so side by side.

        Raises:
            PinError: the system does not pin it.
            HostMemoryError: the machine or the container has no room.
        """
        self.touch(start, end)
        try:
            device.pin(self.bytes[start:end])
        except BaseException as error:
            self.forget(start, end)  # at once: it may never be asked for again
            if isinstance(error, HostMemoryError):
                raise PinError(*error.args) from error
            raise

    def touch(self, start: int, end: int) -> None:
        """Have memory behind some addresses; many threads do so side by side.

        Raises:
            HostMemoryError: the machine or the container has no room.
        """
        num_bytes = end - start
        with self._has_touched:
            # Memory that other threads are touching only partly counts as used yet: without room beside it, look again later.
            while (refusal := refusal_of(num_bytes, self._touching_bytes)) and self._touching_bytes:
                self._has_touched.wait()
            if refusal:
                raise refusal
            self._touching_bytes += num_bytes
        try:
            self.bytes[start : end : mmap.PAGESIZE].zero_()  # without the GIL
        finally:
            with self._has_touched:
                self._touching_bytes -= num_bytes
                self._has_touched.notify_all()

    def forget(self, start: int, end: int) -> None:
        """Give the memory behind some addresses back to the system."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, self._skipped + start, end - start)


def no_room(num_bytes: int, room_bytes: int, limit: str) -> HostMemoryError:
    """Return what to raise where a limit leaves less room than is needed."""
    return HostMemoryError(
        f"{format_mib(num_bytes)} more of host memory is needed; {limit} leaves {format_mib(max(room_bytes, 0))}. "
        "Offload less, or raise the limit."
    )


def refusal_of(num_bytes: int, promised_bytes: int) -> HostMemoryError | None:
    """Return what to raise if the machine or the container has no room for more bytes beside those promised to others."""
    limits = {"the container's memory limit": container_room_bytes(), "the machine's available memory": available_bytes()}
    for limit, room_bytes in limits.items():
        if room_bytes is not None and num_bytes + promised_bytes > room_bytes:
            return no_room(num_bytes, room_bytes - promised_bytes, limit)
    return None


def container_room_bytes() -> int | None:
    """Return how many more bytes the control groups of this process (version 2 or 1) allow; None if they set no limit.

    Files that are cached and not in use count as room: the kernel drops them first.
    """
    rooms = []
    for line in _lines(OWN_CGROUPS):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names, cache = CGROUP, ("memory.max", "memory.current"), "inactive_file "
        elif "memory" in controllers.split(","):
            root, names, cache = CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file "
        else:
            continue
        own = root / path.lstrip("/")
        for group in (own, *own.parents):  # each group above may set a limit; a container may see its own as the root
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit_bytes, used_bytes = (int((group / name).read_text()) for name in names)
                cached_bytes = sum(int(stat.split()[1]) for stat in _lines(group / "memory.stat") if stat.startswith(cache))
                rooms.append(limit_bytes - used_bytes + cached_bytes)
    return min(rooms, default=None)


def available_bytes() -> int | None:
    """Return how many bytes the machine can give without swapping, less 5 % of all (at least 1 GiB); None where unknown."""
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in _lines(MEMINFO))}
    if "MemAvailable" not in found:
        return None
    return found["MemAvailable"] - max(2**30, found.get("MemTotal", 0) // 20)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
