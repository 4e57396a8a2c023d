"""Host memory of exact size, pinned and used again in the same places (`Arena`), copies of what can't be pinned (`Staging`).

[Note: why threads cannot wait for each other in a circle] One thread per direction takes copies in the order of the requests. A
copy waits for events; events that a thread has yet to record belong to earlier copies. So the oldest unfinished copy waits for
nothing but the device, and the device for nothing but recorded events.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import sys
import threading
import traceback
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from memkit.core.forks import OwnThreads, forked
from memkit.core.sizes import ALIGNMENT_BYTES, HOST_PAGE_BYTES, format_bytes, format_mib, rounded
from memkit.core.tensors import byte_view
from memkit.device.base import Device, Event, Stream
from memkit.errors import HostMemoryError

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
            with suppress(OSError):  # the kernel may be too old, or built without
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
            with suppress(OSError, ValueError):  # no such file, or "max"
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
    whole: Any  # all its bytes as one tensor, also across such edges: for the host. None if it is scattered
    staging: Staging | None  # `Lanes` copies an unpinned span through it; None if the span is pinned

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


CHUNK_BYTES = 16 * 2**20  # a buffer: one is filled while another is on its way, and fewer bytes reach full speed
NUM_BUFFERS = 4


class PromisedEvent(Event):
    """An event that a thread has yet to record. If the thread has failed, waiting raises why."""

    __slots__ = ("_recording", "_thread", "_which")

    def __init__(self, recording: Future[tuple[Event, Event]], which: int, thread: OwnThreads) -> None:
        self._recording, self._which, self._thread = recording, which, thread

    def recorded(self) -> Event:
        if not (self._thread.are_here or self._recording.done()):
            raise forked("a feature of memkit")
        return self._recording.result()[self._which]

    def elapsed_s(self, end: Event) -> float:
        return self.recorded().elapsed_s(end)

    def is_reached(self) -> bool:
        recording = self._recording
        return recording.done() and (recording.exception() is not None or self.recorded().is_reached())


class Staging:
    """Copies of unpinned host memory, beside the work of the host, through buffers; straight until `add_buffers`. The event
    of a copy to the device is recorded once the host memory was read, that of a copy to the host once it was written."""

    def __init__(self, device: Device) -> None:
        self._sides = {is_out: _Side(device, is_out=is_out) for is_out in (False, True)}

    def add_buffers(self, buffers: Sequence[Tensor]) -> None:
        for is_out, side in self._sides.items():
            side.buffers.extend((buffer, None) for buffer in buffers[is_out::2])

    def copy(
        self,
        lane: Stream,
        storage: torch.UntypedStorage,
        pieces: Sequence[Tensor],
        *,
        is_out: bool,
        after: Iterable[Event],
        start: int = 0,
    ) -> tuple[Event, Event]:
        """Request a copy between a storage and pieces of host memory. Return its begin and end, for which the caller waits."""
        side = self._sides[is_out]
        # A weak reference, since a slot counts the holders of its storage.
        recording = side.thread.submit(side.copy, lane, weakref.ref(storage), pieces, tuple(after), start)
        return PromisedEvent(recording, 0, side.thread), PromisedEvent(recording, 1, side.thread)

    def drain(self) -> None:
        for side in self._sides.values():
            side.drain()

    def close(self) -> None:
        for side in self._sides.values():
            side.close()


class _Side:
    def __init__(self, device: Device, *, is_out: bool) -> None:
        self._device, self._is_out = device, is_out
        self.thread = OwnThreads(1, "memkit-staging", device.enter_thread)
        self._is_closed = False
        self.buffers: deque[tuple[Tensor, Event | None]] = deque()

    def drain(self) -> None:
        if not self._is_closed:
            self.thread.submit(int).result()  # behind all of them, also one whose asking was broken off

    def close(self) -> None:
        self.thread.shutdown()
        self._is_closed = True
        for _, last_use in self.buffers:
            if last_use is not None:
                self._device.synchronize(last_use)
        self.buffers.clear()

    def copy(
        self,
        lane: Stream,
        held: weakref.ref[torch.UntypedStorage],
        pieces: Sequence[Tensor],
        after: Sequence[Event],
        start: int,
    ) -> tuple[Event, Event]:
        for event in [event.recorded() for event in after]:  # the other thread may be writing to these pieces
            self._device.wait_event(lane, event)
        started, storage = self._device.record_event(lane), held()
        assert storage is not None, "a storage was freed before a copy from or to it was on its lane"
        try:
            staged = self._copy_out if self._is_out else self._copy_back
            copy, most_bytes = (staged, self.buffers[0][0].numel()) if self.buffers else (self._copy_straight, None)
            copy(lane, _chunks(pieces, byte_view(storage)[start:], most_bytes))
            return started, self._device.record_event(lane)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the storage
            with suppress(Exception):
                self._device.synchronize(self._device.record_event(lane, timed=False))
            raise
        finally:
            del storage

    def _copy_back(self, lane: Stream, chunks: Iterator[tuple[Tensor, Tensor]]) -> None:
        for host, part in chunks:
            buffer, last_use = self.buffers[0]
            if last_use is not None:
                self._device.synchronize(last_use)
            staged = buffer[: host.numel()]
            staged.copy_(host)
            self._device.copy(part, staged, lane)
            self.buffers[0] = (buffer, self._device.record_event(lane, timed=False))
            self.buffers.rotate(-1)

    def _copy_out(self, lane: Stream, chunks: Iterator[tuple[Tensor, Tensor]]) -> None:
        landing: deque[tuple[Tensor, Tensor, Event]] = deque()
        for host, part in chunks:
            if len(landing) == len(self.buffers):
                self._empty(*landing.popleft())
            staged = self.buffers[0][0][: host.numel()]
            self.buffers.rotate(-1)
            self._device.copy(staged, part, lane)
            landing.append((host, staged, self._device.record_event(lane, timed=False)))
        for entry in landing:
            self._empty(*entry)

    def _empty(self, host: Tensor, staged: Tensor, landed: Event) -> None:
        self._device.synchronize(landed)
        host.copy_(staged)

    def _copy_straight(self, lane: Stream, chunks: Iterator[tuple[Tensor, Tensor]]) -> None:
        for host, part in chunks:
            destination, source = (host, part) if self._is_out else (part, host)
            self._device.copy_pageable(destination, source, lane)


def _chunks(pieces: Sequence[Tensor], on_device: Tensor, most_bytes: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    offset = 0
    for piece in pieces:
        for host in piece.split(most_bytes or piece.numel()):
            yield host, on_device.narrow(0, offset, host.numel())
            offset += host.numel()


def describe_refusal(num_bytes: int, chunk_bytes: int, reason: str, *, has_buffers: bool) -> str:
    buffers = f"{NUM_BUFFERS} buffers of {format_bytes(chunk_bytes)}"
    if has_buffers:
        how = f"copies go through {buffers}, and the host copies each byte once more"
    else:
        how = f"copies go straight from and to it, several times slower, since {buffers} could not be pinned either"
    return (
        f"the system did not pin {format_bytes(num_bytes)} of host memory ({reason}), so it is ordinary memory: {how}. Raise "
        "the limit on locked memory (ulimit -l; a container's --ulimit memlock; memory= in .wslconfig), or offload less."
    )


LOOSE_BYTES = 2**30  # up to here an arena grows rather than cut a span into more pieces; above, it does so within `_SLACK`
_SLACK = 1.05
_Taken = TypeVar("_Taken")
_Args = ParamSpec("_Args")


def _mended(call: Callable[Concatenate[Arena, _Args], _Taken]) -> Callable[Concatenate[Arena, _Args], _Taken]:
    @functools.wraps(call)
    def locked(arena: Arena, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Taken:
        with arena._lock:
            if arena._broken_at is not None:
                arena._mend()
            num_spans = len(arena._spans)
            try:
                return call(arena, *args, **kwargs)
            except HostMemoryError:
                raise  # nothing was broken off
            except BaseException:
                arena._broken_at = num_spans
                raise

    return locked


class Arena:
    """Pinned host memory for one device. Its methods may be called from several threads, but not from finalizers.

    A span goes to the lowest gap that it fits into, or else the arena grows by the missing bytes: an equal sequence of spans
    finds the same places again. The arena holds at most 1.05 times the most that was ever in use, or 1 GiB; only `reserve` goes
    beyond. Where gaps are too small for that, it scatters a span over the largest of them.

    [Note: interrupted arena] The segments and the spans are the truth: the call after one that was broken off derives the gaps
    and sums from them, and frees the spans that no caller got. For this, a segment is noted before it is pinned and until it is
    unpinned, and a last use before its span is free. See [Note: interrupts] in `memkit.core.interrupts`.

    `limit_bytes` is the most to hold. With `must_pin`, the arena raises if the system does not pin memory. Else `refusal` says
    so, and all later memory is not pinned.
    """

    def __init__(self, device: Device, *, limit_bytes: int | None = None, must_pin: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.refusal: str | None = None
        self.peak_in_use_bytes = 0
        self._device = device
        self._lock = threading.RLock()  # the threads that pin never take it: its holder may wait for them
        self._committed = PinnedSegments(device)
        self._segments = self._committed.all
        self._gaps = Gaps()
        self._last_uses: deque[tuple[Range, Event]] = deque()  # freed ranges still in use, oldest first, taken again or not
        self._spans: dict[int, Span] = {}
        self.in_use_bytes = 0
        self._broken_at: int | None = None  # spans taken before the call that was broken off: see [Note: interrupted arena]
        self._must_pin = must_pin
        self._staging: Staging | None = None
        self._buffer_spans: list[Span] = []

    @property
    def held_bytes(self) -> int:
        """Bytes that are pinned or being pinned, and unpinned ones. Failed pins count until `take` or `trim` meets them."""
        return self._committed.num_bytes

    @property
    def num_pins(self) -> int:
        return self._committed.num_pins

    @property
    def is_staged(self) -> bool:
        return self._staging is not None

    @_mended
    def take(self, num_bytes: int) -> Span:
        assert num_bytes > 0
        return self._taken_by(partial(self._take, num_bytes), num_bytes)

    def _take(self, num_bytes: int) -> Span:
        ranges = self._find(rounded(num_bytes, ALIGNMENT_BYTES))
        segments = self._under(ranges)
        try:
            self._await_pins(segments)
        except BaseException:
            self._recount()
            raise
        return self._span(ranges, num_bytes, segments)

    @_mended
    def take_pinned_as_one(self, sizes_bytes: Sequence[int]) -> list[Span]:
        """Allocate neighboring new spans in whole pages, each of one range (pinned as one, if at all), for long use."""
        return self._taken_by(partial(self._take_apart, sizes_bytes), sum(sizes_bytes))

    def _take_apart(self, sizes_bytes: Sequence[int], *, is_buffer: bool = False) -> list[Span]:
        committed = self._commit([rounded(num_bytes, HOST_PAGE_BYTES) for num_bytes in sizes_bytes], is_buffer=is_buffer)
        self._await_pins(committed, all_or_none=True)
        spans = []
        for segment, num_bytes in zip(committed, sizes_bytes, strict=True):
            byte_range = (segment.start, segment.start + rounded(num_bytes, ALIGNMENT_BYTES))
            self._gaps.cut(byte_range)
            spans.append(self._span((byte_range,), num_bytes, [segment]))
        return spans

    def _taken_by(self, take: Callable[[], _Taken], num_bytes: int) -> _Taken:
        """Return the `num_bytes` that `take` allocates: unpinned, with staging buffers, if the system does not pin them."""
        try:
            return take()
        except PinError as error:
            if self._must_pin or self._staging is not None:
                raise
            reason = str(error)
        staging = self._staging = Staging(self._device)
        try:
            taken = take()
        except BaseException:
            self._staging = None
            raise
        chunk_bytes = min(rounded(max(span.num_bytes for span in self._spans.values()), ALIGNMENT_BYTES), CHUNK_BYTES)
        with suppress(HostMemoryError):
            self._buffer_spans = self._take_apart([chunk_bytes] * NUM_BUFFERS, is_buffer=True)
        staging.add_buffers([buffer.pieces[0] for buffer in self._buffer_spans])
        self.refusal = describe_refusal(num_bytes, chunk_bytes, reason, has_buffers=bool(self._buffer_spans))
        return taken

    def _span(self, ranges: tuple[Range, ...], num_bytes: int, segments: list[Segment]) -> Span:
        addresses = self._committed.addresses
        assert addresses is not None
        span = Span(
            offset=ranges[0][0],
            num_bytes=num_bytes,
            pieces=_pieces(ranges, num_bytes, segments),
            free_events=self._pending_on(ranges),
            ranges=ranges,
            whole=addresses.bytes[ranges[0][0] : ranges[0][0] + num_bytes] if len(ranges) == 1 else None,
            staging=None if all(segment.is_pinned for segment in segments) else self._staging,
        )
        self._spans[span.offset] = span
        self.in_use_bytes += sum(end - start for start, end in ranges)
        self.peak_in_use_bytes = max(self.peak_in_use_bytes, self.in_use_bytes)
        if not span.free_events:
            self._note_free(span)
        return span

    def has(self, span: Span) -> bool:
        return self._spans.get(span.offset) is span

    @_mended
    def give(self, span: Span, last_use: Event | None = None) -> None:
        """Free a span once `last_use` is reached: the next user of bytes still to be read waits for `Span.free_events`."""
        assert self.has(span), "a span was given back twice, or to another arena"
        if last_use is not None:
            self._last_uses.extend((byte_range, last_use) for byte_range in span.ranges)
        del self._spans[span.offset]
        self.in_use_bytes -= sum(end - start for start, end in span.ranges)
        if not self._pending_on(span.ranges):
            self._note_free(span)
        for byte_range in span.ranges:
            self._gaps.free(byte_range)

    @_mended
    def give_all(self, *, but_for: Iterable[Span] = ()) -> None:
        """Free all spans but some, also those that an interrupt has lost. The host has waited for all copies."""
        needed = {*but_for, *self._buffer_spans}
        for span in [span for span in self._spans.values() if span not in needed]:
            self._note_free(span)
            del self._spans[span.offset]
        self._recount()

    @_mended
    def reserve(self, num_bytes: int) -> None:
        """Begin to commit memory in the background up to so many bytes in all; `take` raises what has failed."""
        with suppress(HostMemoryError):
            if self.limit_bytes is not None:
                num_bytes = min(num_bytes, self.limit_bytes // HOST_PAGE_BYTES * HOST_PAGE_BYTES)
            self._commit(shares(num_bytes - self.held_bytes))

    @_mended
    def trim(self, num_bytes: int = 0) -> None:
        """Give free segments back to the system, from the high end down to `num_bytes`, or to the first that may be in use."""
        while self._segments and (last := self._segments[-1]).start >= num_bytes and self._is_free(last):
            self._drop(last)

    @_mended
    def trim_gaps(self) -> None:
        for segment in self._segments[::-1]:
            if self._is_free(segment):
                self._drop(segment)

    def _is_free(self, segment: Segment) -> bool:
        is_gap = any(start <= segment.start and segment.end <= end for start, end in self._gaps.ranges)
        return is_gap and not self._pending_on([(segment.start, segment.end)])

    @_mended
    def close(self) -> None:
        assert set(self._spans.values()) <= set(self._buffer_spans), "an arena was closed while spans of it were in use"
        if self._staging is not None:
            self._staging.close()
            while self._buffer_spans:
                if self.has(self._buffer_spans[-1]):
                    self.give(self._buffer_spans[-1])
                self._buffer_spans.pop()
            self._staging = None
        self.trim()

    def drain(self) -> None:
        if self._staging is not None:
            self._staging.drain()

    def _mend(self) -> None:
        assert self._broken_at is not None
        while len(self._spans) > self._broken_at:
            self._spans.popitem()  # spans that the call has taken and not returned
        self._committed.mend()
        self._recount()
        self._broken_at = None

    def _recount(self) -> None:
        self.in_use_bytes = sum(rounded(span.num_bytes, ALIGNMENT_BYTES) for span in self._spans.values())
        self._gaps.ranges = []
        for segment in self._segments:
            self._gaps.free((segment.start, segment.end))
        for span in self._spans.values():
            for byte_range in span.ranges:
                self._gaps.cut(byte_range)

    # Free memory

    def _find(self, size: int) -> tuple[Range, ...]:
        ranges = self._gaps.take(size)
        if ranges:
            return ranges
        is_tail_free = self._gaps.ranges and self._gaps.ranges[-1][1] == self._segments[-1].end
        tail_bytes = self._gaps.ranges[-1][1] - self._gaps.ranges[-1][0] if is_tail_free else 0
        whole_bytes = rounded(size - tail_bytes, HOST_PAGE_BYTES)
        least_bytes = rounded(size - self._gaps.num_bytes, HOST_PAGE_BYTES)
        most_in_use_bytes = max(self.peak_in_use_bytes, self.in_use_bytes + size)
        is_bounded = self.held_bytes + whole_bytes <= max(_SLACK * most_in_use_bytes, LOOSE_BYTES)
        try:
            self._await_pins(self._commit(shares(whole_bytes if is_bounded else least_bytes)), all_or_none=True)
        except HostMemoryError:
            if not is_bounded or whole_bytes == least_bytes:
                raise
            self._await_pins(self._commit(shares(least_bytes)), all_or_none=True)
        return self._gaps.take(size, scatters=True)

    def _pending_on(self, ranges: Iterable[Range]) -> tuple[Event, ...]:
        while self._last_uses and self._last_uses[0][1].is_reached():
            self._last_uses.popleft()
        events = dict.fromkeys(
            event for (first, last), event in self._last_uses if any(first < end and start < last for start, end in ranges)
        )
        return tuple(event for event in events if not event.is_reached())

    def _note_free(self, span: Span) -> None:
        for piece in span.pieces:
            self._device.note_host_free(piece)

    # Committed memory

    def _commit(self, sizes_bytes: Sequence[int], *, is_buffer: bool = False) -> list[Segment]:
        is_pinned = is_buffer or self._staging is None
        added = self._committed.add(sizes_bytes, limit_bytes=self.limit_bytes, is_pinned=is_pinned)
        if added:
            self._gaps.free((added[0].start, added[-1].end))
        return added

    def _await_pins(self, segments: list[Segment], *, all_or_none: bool = False) -> None:
        """Wait until free segments are pinned. Drop the failed ones, so that none is met again, and raise why."""
        failed = [segment for segment in segments if segment.pinned.exception() is not None]
        if failed:
            for segment in segments if all_or_none else failed:
                self._drop(segment)
            failed[0].pinned.result()

    def _drop(self, segment: Segment) -> None:
        self._gaps.cut((segment.start, segment.end))
        self._committed.drop(segment)

    def _under(self, ranges: Iterable[Range]) -> list[Segment]:
        found: dict[Segment, None] = {}
        for start, end in ranges:
            at = bisect_right(self._segments, start, key=lambda segment: segment.start) - 1
            while at < len(self._segments) and self._segments[at].start < end:
                found[self._segments[at]] = None
                at += 1
        return list(found)


def _pieces(ranges: tuple[Range, ...], num_bytes: int, segments: list[Segment]) -> tuple[Tensor, ...]:
    pieces = []
    for start, end in ranges:
        end = min(end, start + num_bytes)
        num_bytes -= end - start
        for segment in segments:
            if start < segment.end and segment.start < end:
                pieces.append(segment.bytes[max(start - segment.start, 0) : end - segment.start])
    return tuple(pieces)
