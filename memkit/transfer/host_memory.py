"""Host memory of arenas: addresses without memory behind them, pinned segments of them, and spans of those."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.core.sizes import HOST_PAGE_BYTES, format_mib, rounded
from memkit.device.base import Device, Event
from memkit.errors import HostMemoryError

if TYPE_CHECKING:
    from memkit.transfer.arena import Staging

# Linux's MAP_NORESERVE, MADV_HUGEPAGE and MADV_WIPEONFORK: else a fork copies pinned memory at once, not only when a process
# writes to it, which costs each worker of a data loader seconds and gigabytes. With it the child finds zeros.
_MAP_NORESERVE, _ADVICE = (0x4000, (14, 18)) if sys.platform == "linux" else (0, ())

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


class PinError(HostMemoryError):
    """Raised when there is room, but the system does not pin it."""


class Addresses:
    def __init__(self) -> None:
        # Some virtual machines grow while their memory is used, so that their current memory says little.
        num_bytes = max(4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 64 * 2**30)
        while True:
            try:
                self._map = mmap.mmap(
                    -1, num_bytes + HOST_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
                )
                break
            except OSError as error:  # the system counts addresses as memory
                num_bytes //= 2
                if num_bytes < HOST_PAGE_BYTES:
                    raise HostMemoryError(f"the system gives no addresses for host memory: {error}") from error
        for advice in _ADVICE:
            with contextlib.suppress(OSError):  # the kernel may be too old, or built without
                self._map.madvise(advice)
        self._skipped = -torch.frombuffer(self._map, dtype=torch.uint8).data_ptr() % HOST_PAGE_BYTES
        self.num_bytes = num_bytes
        # The map is not closed: it lives until the last tensor on it dies. What is skipped is not in the storage either, since
        # torch tells by the first byte of its storage whether a tensor is pinned.
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=self._skipped)
        self._touching_bytes = 0
        self._has_touched = threading.Condition()

    def commit(self, device: Device, start: int, end: int) -> None:
        self.touch(start, end)
        try:
            device.pin(self.bytes[start:end])
        except BaseException as error:
            self.forget(start, end)  # at once: it may never be asked for again
            if isinstance(error, HostMemoryError):
                raise PinError(*error.args) from error
            raise

    def touch(self, start: int, end: int) -> None:
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
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, self._skipped + start, end - start)


def no_room(num_bytes: int, room_bytes: int, limit: str) -> HostMemoryError:
    return HostMemoryError(
        f"{format_mib(num_bytes)} more of host memory is needed; {limit} leaves {format_mib(max(room_bytes, 0))}. "
        "Offload less, or raise the limit."
    )


def refusal_of(num_bytes: int, promised_bytes: int) -> HostMemoryError | None:
    """Return the error if the machine or the container has no room for more bytes beside those promised to others."""
    limits = {"the container's memory limit": container_room_bytes(), "the machine's available memory": available_bytes()}
    for limit, room_bytes in limits.items():
        if room_bytes is not None and num_bytes + promised_bytes > room_bytes:
            return no_room(num_bytes, room_bytes - promised_bytes, limit)
    return None


def container_room_bytes() -> int | None:
    """Return how many more bytes the process's control groups allow, counting unused cached files; None without limits."""
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


Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """Allocated host memory: `pieces` of uint8, cut where no copy may cross. Writers wait for `free_events`."""

    offset: int
    num_bytes: int
    pieces: tuple[Tensor, ...]
    free_events: tuple[Event, ...]
    ranges: tuple[Range, ...]
    whole: Any
    """All its bytes as one tensor, also across such edges: for the host. None if it is scattered."""
    staging: Staging | None
    """`Lanes` copies an unpinned span through it; None if the span is pinned."""

    def part(self, start: int, end: int) -> Span:
        """Return some bytes of a span that was pinned as one, as a span. Only the whole is given back."""
        assert len(self.pieces) == 1
        piece = self.whole[start:end]
        return replace(self, offset=self.offset + start, num_bytes=end - start, pieces=(piece,), ranges=(), whole=piece)


class Gaps:
    def __init__(self) -> None:
        self.ranges: list[Range] = []

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def take(self, size: int, *, scatters: bool = False) -> tuple[Range, ...]:
        """Take bytes of the lowest range that has room. If none has: none, or with `scatters` of several, the largest first."""
        for at, (start, end) in enumerate(self.ranges):
            if end - start >= size:
                self.ranges[at : at + 1] = [(start + size, end)] if end - start > size else []
                return ((start, start + size),)
        taken = []
        for start, end in sorted(self.ranges, key=lambda gap: gap[0] - gap[1]) if scatters else ():
            end = min(end, start + size)
            size -= end - start
            taken += [(start, end)] if start < end else []
        for byte_range in taken:
            self.cut(byte_range)
        return tuple(sorted(taken))

    def free(self, byte_range: Range) -> None:
        start, end = byte_range
        at = bisect_left(self.ranges, byte_range)
        if at < len(self.ranges) and self.ranges[at][0] == end:
            end = self.ranges.pop(at)[1]
        if at > 0 and self.ranges[at - 1][1] == start:
            at -= 1
            start = self.ranges.pop(at)[0]
        self.ranges.insert(at, (start, end))

    def cut(self, byte_range: Range) -> None:
        start, end = byte_range
        parts = (part for gap in self.ranges for part in ((gap[0], min(gap[1], start)), (max(gap[0], end), gap[1])))
        self.ranges = [part for part in parts if part[0] < part[1]]


SMALLEST_SEGMENT_BYTES = 32 * 2**20
LARGEST_SEGMENT_BYTES = 256 * 2**20
_NUM_THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Memory committed as one. `pinned` is done once it is touched and (if `is_pinned`) pinned, or that has failed."""

    start: int
    end: int
    bytes: Tensor
    pinned: Future[None]
    is_pinned: bool


class PinnedSegments:
    """The segments of one arena, lowest first, under its lock, which no pinning thread takes: see [Note: interrupted arena]."""

    def __init__(self, device: Device) -> None:
        self.all: list[Segment] = []
        self.addresses: Addresses | None = None
        self.num_pins = 0
        self._device = device
        self._dropping: list[Segment] = []
        weakref.finalize(self, _unpin, device, self.all).atexit = False

    @property
    def num_bytes(self) -> int:
        return sum(segment.end - segment.start for segment in tuple(self.all))

    def add(self, sizes_bytes: Sequence[int], *, limit_bytes: int | None, is_pinned: bool) -> list[Segment]:
        """Begin to touch and pin memory behind the committed memory, in segments of these sizes: multiples of a page."""
        if not sizes_bytes:
            return []
        num_bytes, start = sum(sizes_bytes), self.all[-1].end if self.all else 0
        if limit_bytes is not None and self.num_bytes + num_bytes > limit_bytes:
            raise no_room(num_bytes, limit_bytes - self.num_bytes, "host_limit_bytes")
        self.addresses = self.addresses or Addresses()
        if start + num_bytes > self.addresses.num_bytes:
            raise no_room(num_bytes, self.addresses.num_bytes - start, "the system's limit on addresses")
        edges = list(itertools.accumulate(sizes_bytes, initial=start))
        threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="memkit-pin")
        commit = partial(self.addresses.commit, self._device) if is_pinned else self.addresses.touch
        added = [
            Segment(first, last, self.addresses.bytes[first:last], Future(), is_pinned)
            for first, last in itertools.pairwise(edges)
        ]
        self.all += added
        for segment in added:
            threads.submit(_resolve, segment.pinned, partial(commit, segment.start, segment.end))
        threads.shutdown(wait=False)
        self.num_pins += len(added) if is_pinned else 0
        return added

    def drop(self, segment: Segment) -> None:
        self._dropping.append(segment)
        self._finish_drop()

    def _finish_drop(self) -> None:
        segment = self._dropping[-1]
        if segment in self.all:
            self.all.remove(segment)
        _unpin(self._device, [segment])
        assert self.addresses is not None
        self.addresses.forget(segment.start, segment.end)
        self._dropping.pop()

    def mend(self) -> None:
        while self._dropping:
            self._finish_drop()
        for segment in [segment for segment in self.all if segment.pinned.cancel()]:
            self.drop(segment)  # no thread has begun to pin it, and perhaps none ever will


def _unpin(device: Device, segments: list[Segment]) -> None:
    for segment in segments:
        if not segment.pinned.cancel() and segment.pinned.exception() is None and segment.is_pinned:
            device.unpin(segment.bytes)


def _resolve(promise: Future[None], commit: Callable[[], None]) -> None:
    if not promise.set_running_or_notify_cancel():
        return
    try:
        commit()
    except BaseException as error:
        promise.set_exception(error)
    else:
        promise.set_result(None)


def shares(num_bytes: int) -> list[int]:
    num_bytes = rounded(max(num_bytes, 0), HOST_PAGE_BYTES)
    share = rounded(min(max(num_bytes // _NUM_THREADS, SMALLEST_SEGMENT_BYTES), LARGEST_SEGMENT_BYTES), HOST_PAGE_BYTES)
    return [min(share, num_bytes - start) for start in range(0, num_bytes, share)]
