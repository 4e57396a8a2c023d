"""Host memory for bytes that leave a device: pinned, of the exact size, and used again in the same places.

One range of addresses is set aside once; addresses cost nothing. Memory is committed (touched and pinned) from its low end
upwards, many pieces side by side, which is several times faster than pinning them one after the other, and nothing is rounded
up to a power of two. Spans are handed out at the lowest address where they fit, so that the same sequence of spans lands in the
same places in every step: then nothing is pinned any more, and nothing is fragmented.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from memkit.device.base import Device, Event
from memkit.errors import HostMemoryError
from memkit.sizes import format_mib

ALIGNMENT_BYTES = 512
PAGE_BYTES = 2 * 2**20
"""Size of a huge page: segments begin and end at multiples of it."""
SMALLEST_SEGMENT_BYTES = 32 * 2**20
LARGEST_SEGMENT_BYTES = 512 * 2**20
_NUM_THREADS = 8
_MAP_NORESERVE = 0x4000 if hasattr(mmap, "MAP_ANONYMOUS") and os.uname().sysname == "Linux" else 0
_SPARE_BYTES = 2**30
"""Memory of the machine that is left for others."""

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A stretch of host memory.

    `pieces` are its bytes, in order: tensors of dtype uint8, cut where pinned segments meet, since one copy must not cross such
    an edge. Work that writes to the span waits for `free_events` first: copies that may still read what was there before.
    """

    offset: int
    num_bytes: int
    pieces: tuple[Tensor, ...]
    free_events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Memory that was committed as one. `pinned` is done once it is touched and pinned."""

    start: int
    end: int
    bytes: Tensor
    pinned: Future[None]


@dataclass(slots=True)
class _Gap:
    """Committed memory that nobody uses, with the last uses of its parts: (start, end, event)."""

    start: int
    end: int
    last_uses: list[tuple[int, int, Event]] = field(default_factory=list)


class Arena:
    """Pinned host memory for one device. Its methods may be called from several threads.

    From the second of two equal sequences of spans on, nothing is pinned. What is held beyond the most that was ever in use is
    less than a page (2 MiB), plus the gaps that a change of the sequence leaves: at most the size of one span for each change
    of order, none where spans are given back in the reverse order, or all before the next is taken.

    Args:
        device: whose copies use the memory.
        limit_bytes: the most to hold. The limit of the container, and what the machine has available, are respected as well.
    """

    def __init__(self, device: Device, *, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.peak_in_use_bytes = 0
        self.num_pins = 0
        """How many segments were pinned so far."""
        self._device = device
        self._lock = threading.RLock()
        self._range: _AddressRange | None = None
        self._segments: list[_Segment] = []
        self._end = 0
        """Where the committed addresses end."""
        self._gaps: list[_Gap] = []
        self._spans: dict[int, Span] = {}
        self._in_use_bytes = 0
        weakref.finalize(self, _unpin_all, device, self._segments).atexit = False

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the spans that are taken."""
        return self._in_use_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are pinned, or being pinned."""
        return sum(segment.end - segment.start for segment in self._segments)

    def take(self, num_bytes: int) -> Span:
        """Return a span of at least one byte.

        Raises:
            HostMemoryError: a limit is met, or the system does not pin as much.
        """
        assert num_bytes > 0
        size = _rounded(num_bytes, ALIGNMENT_BYTES)
        with self._lock:
            gap = next((gap for gap in self._gaps if gap.end - gap.start >= size), None) or self._grow(size)
            start, end = gap.start, gap.start + size
            self._await_pins(start, end)
            last_uses = [event for first, last, event in gap.last_uses if first < end and start < last]
            gap.start = end
            gap.last_uses = [use for use in gap.last_uses if use[1] > end]
            if gap.start == gap.end:
                self._gaps.remove(gap)
            free_events = tuple(dict.fromkeys(event for event in last_uses if not event.is_reached()))
            span = Span(start, num_bytes, tuple(self._pieces(start, start + num_bytes)), free_events)
            self._spans[start] = span
            self._in_use_bytes += size
            self.peak_in_use_bytes = max(self.peak_in_use_bytes, self._in_use_bytes)
        self._poison(span)
        return span

    def give(self, span: Span, last_use: Event | None = None) -> None:
        """Take a span back. Its bytes mean nothing any more.

        Args:
            span: one that `take` returned, not given back before.
            last_use: the event behind the last work that uses the span; None if there is none under way.
        """
        with self._lock:
            assert self._spans.pop(span.offset, None) is span, "a span was given back twice, or to another arena"
            self._poison(span)
            size = _rounded(span.num_bytes, ALIGNMENT_BYTES)
            self._in_use_bytes -= size
            start, end = span.offset, span.offset + size
            events = [*span.free_events, *([] if last_use is None else [last_use])]
            self._free(_Gap(start, end, [(start, end, event) for event in events if not event.is_reached()]))

    def reserve(self, num_bytes: int) -> None:
        """Begin to commit memory, so that so many bytes are held in all. Does not wait for it, and takes what limits allow."""
        with self._lock, contextlib.suppress(HostMemoryError):
            missing = num_bytes - self._end
            if missing > 0:
                self._commit(missing, wait=False)

    def trim(self, num_bytes: int = 0) -> None:
        """Give free memory back to the system, from the high end down to `num_bytes`, in whole segments."""
        with self._lock:
            while self._segments and self._segments[-1].start >= num_bytes and self._is_free(self._segments[-1]):
                segment = self._segments.pop()
                self._cut_gaps(segment)
                if segment.pinned.exception() is None:
                    self._device.unpin(segment.bytes)
                if self._range is not None:
                    self._range.forget(segment.start, segment.end)
                self._end = segment.start

    def close(self) -> None:
        """Give all memory back. No span may be in use."""
        assert not self._spans, "an arena was closed while spans of it were in use"
        self.trim()

    # Gaps

    def _free(self, freed: _Gap) -> None:
        """Add a gap, as one with those that touch it."""
        for gap in [gap for gap in self._gaps if gap.end == freed.start or gap.start == freed.end]:
            freed.start, freed.end = min(freed.start, gap.start), max(freed.end, gap.end)
            freed.last_uses += [use for use in gap.last_uses if not use[2].is_reached()]
            self._gaps.remove(gap)
        self._gaps.append(freed)
        self._gaps.sort(key=lambda gap: gap.start)

    def _is_free(self, segment: _Segment) -> bool:
        """Tell whether nobody uses a segment, and no copy does."""
        gap = next((gap for gap in self._gaps if gap.start <= segment.start and segment.end <= gap.end), None)
        if gap is None:
            return segment.pinned.done() and segment.pinned.exception() is not None
        return all(event.is_reached() for start, end, event in gap.last_uses if start < segment.end and segment.start < end)

    def _cut_gaps(self, segment: _Segment) -> None:
        """Take a segment out of the gaps."""
        for gap in list(self._gaps):
            if gap.start < segment.end and segment.start < gap.end:
                self._gaps.remove(gap)
                for start, end in ((gap.start, segment.start), (segment.end, gap.end)):
                    if start < end:
                        self._free(_Gap(start, end, [use for use in gap.last_uses if use[0] < end and start < use[1]]))

    # Memory

    def _grow(self, size: int) -> _Gap:
        """Commit what is missing for a span of so many bytes; return the gap at the end that then holds it."""
        last = self._gaps[-1] if self._gaps and self._gaps[-1].end == self._end else None
        self._commit(size - (0 if last is None else last.end - last.start), wait=True)
        return next(gap for gap in self._gaps if gap.end == self._end)

    def _commit(self, num_bytes: int, *, wait: bool) -> None:
        """Touch and pin memory behind what is committed: at once, or in the background."""
        num_bytes = _rounded(num_bytes, PAGE_BYTES)
        self._check_limits(num_bytes)
        if self._range is None:
            self._range = _AddressRange()
        if self._end + num_bytes > self._range.num_bytes:
            raise HostMemoryError(f"the system gives no more than {format_mib(self._range.num_bytes)} of addresses at once")
        share = min(max(num_bytes // _NUM_THREADS, SMALLEST_SEGMENT_BYTES), LARGEST_SEGMENT_BYTES)
        edges = [*range(self._end, self._end + num_bytes, _rounded(share, PAGE_BYTES)), self._end + num_bytes]
        added = []
        with contextlib.ExitStack() as stack:
            threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="memkit-pin")
            stack.callback(threads.shutdown, wait=False)
            for start, end in itertools.pairwise(edges):
                piece = self._range.bytes[start:end]
                added.append(_Segment(start, end, piece, threads.submit(_touch_and_pin, self._device, piece)))
        failure = next(filter(None, (segment.pinned.exception() for segment in added)), None) if wait else None
        if failure is not None:
            for segment in added:
                if segment.pinned.exception() is None:
                    self._device.unpin(segment.bytes)
            raise failure
        self._segments += added
        self.num_pins += len(added)
        self._free(_Gap(self._end, self._end + num_bytes))
        self._end += num_bytes

    def _await_pins(self, start: int, end: int) -> None:
        """Wait until the segments of a range are pinned. Those that could not be are never handed out."""
        failure = None
        for segment in self._segments:
            if segment.start < end and start < segment.end and segment.pinned.exception() is not None:
                failure = segment.pinned.exception()
                self._cut_gaps(segment)
        if failure is not None:
            raise failure

    def _pieces(self, start: int, end: int) -> Iterator[Tensor]:
        for segment in self._segments:
            first, last = max(start, segment.start), min(end, segment.end)
            if first < last:
                yield segment.bytes[first - segment.start : last - segment.start]

    def _check_limits(self, num_bytes: int) -> None:
        limits = {"host_limit_bytes": None if self.limit_bytes is None else self.limit_bytes - self.held_bytes}
        limits["the container's memory limit"] = container_room_bytes()
        limits["the machine's available memory"] = available_bytes()
        for name, room_bytes in limits.items():
            if room_bytes is not None and num_bytes > room_bytes:
                raise HostMemoryError(
                    f"{format_mib(num_bytes)} more of host memory is needed; {name} leaves {format_mib(max(room_bytes, 0))}. "
                    "Offload less, or raise the limit."
                )

    def _poison(self, span: Span) -> None:
        for piece in span.pieces:
            self._device.note_host_free(piece)


class _AddressRange:
    """Addresses without memory behind them, until they are touched."""

    def __init__(self) -> None:
        num_bytes = max(4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 64 * 2**30)
        while True:
            try:
                self._map = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
                break
            except OSError as error:  # the system counts addresses as memory
                num_bytes //= 2
                if num_bytes < PAGE_BYTES:
                    raise HostMemoryError(f"the system gives no addresses for host memory: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the kernel may have been built without
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._skipped = -whole.data_ptr() % PAGE_BYTES
        self.num_bytes = num_bytes
        self.bytes = whole[self._skipped : self._skipped + num_bytes]

    def forget(self, start: int, end: int) -> None:
        """Give the memory behind some addresses back to the system."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, self._skipped + start, end - start)


def _touch_and_pin(device: Device, piece: Tensor) -> None:
    piece[:: mmap.PAGESIZE].zero_()  # without the GIL, so that threads do it side by side
    device.pin(piece)


def _unpin_all(device: Device, segments: list[_Segment]) -> None:
    for segment in segments:
        if segment.pinned.exception() is None:
            device.unpin(segment.bytes)
    segments.clear()


def _rounded(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to


def container_room_bytes() -> int | None:
    """Return how much more memory the container may use; None if there is no limit to be found (cgroups version 2, then 1)."""
    for limit, used in (
        (CGROUP / "memory.max", CGROUP / "memory.current"),
        (CGROUP / "memory" / "memory.limit_in_bytes", CGROUP / "memory" / "memory.usage_in_bytes"),
    ):
        try:
            return int(limit.read_text()) - int(used.read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None


def available_bytes() -> int | None:
    """Return how much memory the machine can give without swapping, less what is left for others; None where unknown."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] - _SPARE_BYTES if found else None
