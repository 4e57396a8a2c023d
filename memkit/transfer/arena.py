"""Host memory for bytes that leave a device: pinned, of the exact size, and used again in the same places.

Where the system does not pin it, an arena may go on with memory that is not: `staging` says how copies go then.

One range of addresses is set aside once; addresses cost nothing. Memory is committed (touched and pinned) from its low end
upwards, many segments side by side, which is several times faster than one after the other, and in exactly the size needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from torch import Tensor

from memkit.device.base import Device, Event
from memkit.errors import HostMemoryError
from memkit.transfer.host_memory import PAGE_BYTES, Addresses, PinError, no_room
from memkit.transfer.staging import CHUNK_BYTES, NUM_BUFFERS, Staging, describe_refusal

ALIGNMENT_BYTES = 512
SMALLEST_SEGMENT_BYTES = 32 * 2**20
LARGEST_SEGMENT_BYTES = 256 * 2**20
LOOSE_BYTES = 2**30
"""Up to here an arena rather grows than cut a span into more pieces; above, it does so within `_SLACK`."""
_SLACK = 1.05
_NUM_THREADS = 8

_Taken = TypeVar("_Taken")
_Args = ParamSpec("_Args")
_Range = tuple[int, int]
"""Where bytes start and end in the arena's addresses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """Host memory that was taken: `num_bytes` at `offset`, or scattered over several `ranges` of which that is the first.

    `pieces` are its bytes, in order: tensors of dtype uint8, cut where pinned segments meet, since one copy must not cross such
    an edge. Work that writes to the span waits for `free_events` first: copies that may still read what was there before.
    """

    offset: int
    num_bytes: int
    pieces: tuple[Tensor, ...]
    free_events: tuple[Event, ...]
    ranges: tuple[_Range, ...]
    whole: Tensor | None
    """All its bytes as one tensor, also across such edges: for the host. None if it is scattered."""
    staging: Staging | None
    """What copies from and to it, None if it is pinned. `Lanes` see to that."""

    def part(self, start: int, end: int) -> Span:
        """Return some bytes of a span that was pinned as one, as a span. Only the whole is given back."""
        assert self.whole is not None
        assert len(self.pieces) == 1
        piece = self.whole[start:end]
        return replace(self, offset=self.offset + start, num_bytes=end - start, pieces=(piece,), ranges=(), whole=piece)


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Memory that was committed as one. `pinned` is done once it is touched and pinned, or could not be; where it is not to be
    pinned, once it is touched."""

    start: int
    end: int
    bytes: Tensor
    pinned: Future[None]
    is_pinned: bool


def _mended(call: Callable[Concatenate[Arena, _Args], _Taken]) -> Callable[Concatenate[Arena, _Args], _Taken]:
    """Hold the arena's lock during a call, after what an earlier one has left that was broken off has been put right."""

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

    A span goes to the lowest gap that it fits into, or else the arena grows by what is missing. So the same sequence of spans
    finds the same places again, and pins nothing from the second time on.

    What is held stays within 1.05 times the most that was ever in use, or 1 GiB if that is more; only `reserve` goes beyond.
    Spans that are given back in reverse order leave one gap. Another order may leave gaps that are each too small for the next
    span: rather than grow past the bound or fail at a limit, the arena then scatters the span over the largest of them. Its
    copies have more pieces, and the next equal sequence may still grow, within the bound.

    [Note: interrupted arena] As all of memkit, the arena is left as it is at whatever line Ctrl-C comes (see [Note: interrupts]
    in `memkit.interrupts`). What counts is what the segments and the spans say. If a call was broken off, the next one
    puts the gaps and the sums right, and frees the spans that nobody was given. So that this can be, a segment is noted before
    it is pinned and until it is unpinned, and a last use before its span is free. Of a call that has come to its end nobody may
    hear, if the interrupt comes when it gives the lock back: whoever takes spans gives back those that it does not know of when
    it mends (`give_all`).

    Args:
        device: whose copies use the memory.
        limit_bytes: the most to hold. The limits of the container, and what the machine has available, are respected as well.
        must_pin: whether to raise where the system does not pin memory. Else `refusal` says so, and all that is committed from
            then on is not pinned.
    """

    def __init__(self, device: Device, *, limit_bytes: int | None = None, must_pin: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.refusal: str | None = None
        """What the system did not pin, what that costs, and what to do."""
        self.peak_in_use_bytes = 0
        self.num_pins = 0
        """How many segments were given to `Device.pin` so far."""
        self._device = device
        self._lock = threading.RLock()  # the threads that pin never take it: whoever holds it may wait for them
        self._addresses: Addresses | None = None
        self._segments: list[_Segment] = []
        self._gaps: list[_Range] = []
        """Committed memory that nobody uses, lowest first; no two touch."""
        self._last_uses: deque[tuple[_Range, Event]] = deque()
        """What was given back before its last use was reached, oldest first; also while somebody has taken it again."""
        self._spans: dict[int, Span] = {}
        self._in_use_bytes = 0
        self._broken_at: int | None = None
        """How many spans were taken before the call that was broken off: see [Note: interrupted arena]."""
        self._dropping: list[_Segment] = []
        """What is being given back to the system."""
        self._must_pin = must_pin
        self._staging: Staging | None = None
        """Made when the system does not pin memory, for all that is not."""
        self._buffer_spans: list[Span] = []
        weakref.finalize(self, _unpin, device, self._segments).atexit = False

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the spans that are taken, each rounded up to 512."""
        return self._in_use_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are pinned, or being pinned; and those that are not to be. What could not be pinned counts until `take` or
        `trim` meets it."""
        return sum(segment.end - segment.start for segment in tuple(self._segments))

    @_mended
    def take(self, num_bytes: int) -> Span:
        """Return a span of at least one byte.

        Raises:
            HostMemoryError: a limit is met, or the system does not pin as much. The arena stays usable.
        """
        assert num_bytes > 0
        return self._taken_by(partial(self._take, num_bytes), num_bytes)

    def _take(self, num_bytes: int) -> Span:
        ranges = self._find(_rounded(num_bytes, ALIGNMENT_BYTES))
        self._await_pins(self._under(ranges))
        return self._span(ranges, num_bytes)

    @_mended
    def take_pinned_as_one(self, sizes_bytes: Sequence[int]) -> list[Span]:
        """Return spans each of which is pinned as one, so that any copy from and to it may be: all are pinned side by side.

        They are never where other spans were, and take whole pages: for what stays. Where this arena goes on with memory that
        is not pinned, they are one piece each as well.

        Raises:
            HostMemoryError: there is no room for all of them, or the system does not pin as much. None is taken then.
        """
        return self._taken_by(partial(self._take_apart, sizes_bytes), sum(sizes_bytes))

    def _take_apart(self, sizes_bytes: Sequence[int], *, is_buffer: bool = False) -> list[Span]:
        committed = self._commit([_rounded(num_bytes, PAGE_BYTES) for num_bytes in sizes_bytes], is_buffer=is_buffer)
        self._await_pins(committed, all_or_none=True)
        ranges = [
            (segment.start, segment.start + _rounded(num_bytes, ALIGNMENT_BYTES))
            for segment, num_bytes in zip(committed, sizes_bytes, strict=True)
        ]
        return [self._span((byte_range,), num_bytes) for byte_range, num_bytes in zip(ranges, sizes_bytes, strict=True)]

    def _taken_by(self, take: Callable[[], _Taken], num_bytes: int) -> _Taken:
        """Return what `take` takes, so many bytes in all; where the system does not pin those, of memory that is not pinned.

        Such memory comes before buffers for it: without room for both, there are none.
        """
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
        chunk_bytes = min(_rounded(max(span.num_bytes for span in self._spans.values()), ALIGNMENT_BYTES), CHUNK_BYTES)
        with contextlib.suppress(HostMemoryError):
            self._buffer_spans = self._take_apart([chunk_bytes] * NUM_BUFFERS, is_buffer=True)
        staging.add_buffers([buffer.pieces[0] for buffer in self._buffer_spans])
        self.refusal = describe_refusal(num_bytes, chunk_bytes, reason, has_buffers=bool(self._buffer_spans))
        return taken

    def _span(self, ranges: tuple[_Range, ...], num_bytes: int) -> Span:
        for byte_range in ranges:
            self._cut(byte_range)
        span = Span(
            offset=ranges[0][0],
            num_bytes=num_bytes,
            pieces=self._pieces(ranges, num_bytes),
            free_events=self._pending_on(ranges),
            ranges=ranges,
            whole=self._whole(ranges, num_bytes),
            staging=None if all(segment.is_pinned for segment in self._under(ranges)) else self._staging,
        )
        self._spans[span.offset] = span
        self._in_use_bytes += _rounded(num_bytes, ALIGNMENT_BYTES)
        self.peak_in_use_bytes = max(self.peak_in_use_bytes, self._in_use_bytes)
        if not span.free_events:
            self._note_free(span)
        return span

    def has(self, span: Span) -> bool:
        """Tell whether a span is taken, and not given back."""
        return self._spans.get(span.offset) is span

    @_mended
    def give(self, span: Span, last_use: Event | None = None) -> None:
        """Take a span back. Its bytes mean nothing any more, once `last_use` is reached.

        `Device.note_host_free` hears of it now, or when the bytes are taken again after that. It never hears of bytes that a
        copy may still read: who takes those is told by `Span.free_events`.

        Args:
            span: one that `take` returned, not given back before.
            last_use: the event behind the last work that uses the span; None if there is none under way.
        """
        assert self.has(span), "a span was given back twice, or to another arena"
        if last_use is not None:
            self._last_uses.extend((byte_range, last_use) for byte_range in span.ranges)
        del self._spans[span.offset]
        self._in_use_bytes -= _rounded(span.num_bytes, ALIGNMENT_BYTES)
        if not self._pending_on(span.ranges):
            self._note_free(span)
        for byte_range in span.ranges:
            self._free(byte_range)

    @_mended
    def give_all(self, *, but_for: Iterable[Span] = ()) -> None:
        """Take back all spans that are taken, where the caller needs none of them any more, and the host has waited for all
        copies: also those of which an interrupt has kept the taker from hearing.

        Args:
            but_for: those that are needed.
        """
        needed = {*but_for, *self._buffer_spans}
        for span in [span for span in self._spans.values() if span not in needed]:
            self._note_free(span)
            del self._spans[span.offset]
        self._recount()

    @_mended
    def reserve(self, num_bytes: int) -> None:
        """Begin to commit memory in the background, so that so many bytes are held in all, or what `limit_bytes` allows.

        Does not wait, and raises nothing: `take` raises when it meets what failed.
        """
        with contextlib.suppress(HostMemoryError):
            if self.limit_bytes is not None:
                num_bytes = min(num_bytes, self.limit_bytes // PAGE_BYTES * PAGE_BYTES)
            self._commit(_shares(num_bytes - self.held_bytes))

    @_mended
    def trim(self, num_bytes: int = 0) -> None:
        """Give free memory back to the system: whole segments, from the high end down to `num_bytes`.

        Stops at the first one that is in use, or that a copy may still read.
        """
        while self._segments and (last := self._segments[-1]).start >= num_bytes and self._is_free(last):
            self._drop(last)

    @_mended
    def trim_gaps(self) -> None:
        """Give all free memory back to the system, also what lies between spans in use: for what is not needed again."""
        for segment in self._segments[::-1]:
            if self._is_free(segment):
                self._drop(segment)

    def _is_free(self, segment: _Segment) -> bool:
        """Tell whether nobody uses a segment, and no copy may still read it."""
        is_gap = any(start <= segment.start and segment.end <= end for start, end in self._gaps)
        return is_gap and not self._pending_on([(segment.start, segment.end)])

    @_mended
    def close(self) -> None:
        """Give all memory back. No span may be in use.

        Does not wait: what a copy may still read goes back with the next call, or with the arena itself. Only copies from and
        to memory that is not pinned are waited for.
        """
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
        """Make the host wait until each copy from and to memory that is not pinned is on its lane, or has failed."""
        if self._staging is not None:
            self._staging.drain()

    def _mend(self) -> None:
        """Put right what a call has left that was broken off: see [Note: interrupted arena]."""
        assert self._broken_at is not None
        while len(self._spans) > self._broken_at:
            self._spans.popitem()  # those that the call has taken, and nobody was given
        while self._dropping:
            self._finish_drop()
        for segment in [segment for segment in self._segments if segment.pinned.cancel()]:
            self._drop(segment)  # nobody has begun to pin it, and perhaps nobody ever will
        self._recount()
        self._broken_at = None

    def _recount(self) -> None:
        """Find the gaps, and what is in use, by the segments and the spans."""
        self._in_use_bytes = sum(_rounded(span.num_bytes, ALIGNMENT_BYTES) for span in self._spans.values())
        self._gaps = []
        for segment in self._segments:
            self._free((segment.start, segment.end))
        for span in self._spans.values():
            for byte_range in span.ranges:
                self._cut(byte_range)

    # Free memory

    def _find(self, size: int) -> tuple[_Range, ...]:
        """Return free ranges for so many bytes; grow if there are none."""
        if not any(end - start >= size for start, end in self._gaps):
            is_tail_free = self._gaps and self._gaps[-1][1] == self._segments[-1].end
            tail_bytes = self._gaps[-1][1] - self._gaps[-1][0] if is_tail_free else 0
            whole_bytes = _rounded(size - tail_bytes, PAGE_BYTES)
            least_bytes = _rounded(size - sum(end - start for start, end in self._gaps), PAGE_BYTES)
            most_in_use_bytes = max(self.peak_in_use_bytes, self._in_use_bytes + size)
            is_bounded = self.held_bytes + whole_bytes <= max(_SLACK * most_in_use_bytes, LOOSE_BYTES)
            try:
                self._await_pins(self._commit(_shares(whole_bytes if is_bounded else least_bytes)), all_or_none=True)
            except HostMemoryError:
                if not is_bounded or whole_bytes == least_bytes:
                    raise
                self._await_pins(self._commit(_shares(least_bytes)), all_or_none=True)
        fitting = next((gap for gap in self._gaps if gap[1] - gap[0] >= size), None)
        ranges = []
        for start, end in [fitting] if fitting else sorted(self._gaps, key=lambda gap: gap[0] - gap[1]):
            end = min(end, start + size)
            size -= end - start
            ranges += [(start, end)] if start < end else []
        return tuple(sorted(ranges))

    def _free(self, byte_range: _Range) -> None:
        """Add a gap, as one with those that touch it."""
        start, end = byte_range
        at = bisect_left(self._gaps, byte_range)
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end = self._gaps.pop(at)[1]
        if at > 0 and self._gaps[at - 1][1] == start:
            at -= 1
            start = self._gaps.pop(at)[0]
        self._gaps.insert(at, (start, end))

    def _cut(self, byte_range: _Range) -> None:
        """Leave no gap within a range."""
        start, end = byte_range
        parts = (part for gap in self._gaps for part in ((gap[0], min(gap[1], start)), (max(gap[0], end), gap[1])))
        self._gaps = [part for part in parts if part[0] < part[1]]

    def _pending_on(self, ranges: Iterable[_Range]) -> tuple[Event, ...]:
        """Return the last uses of these bytes that are not reached, each once."""
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

    def _commit(self, sizes_bytes: Sequence[int], *, is_buffer: bool = False) -> list[_Segment]:
        """Begin to touch and pin memory behind what is committed, in segments of these sizes, which are multiples of a page. It
        is a gap at once: who takes it waits for the pins.

        Args:
            is_buffer: pin it also where everything else is not pinned any more.
        """
        if not sizes_bytes:
            return []
        num_bytes, start = sum(sizes_bytes), self._segments[-1].end if self._segments else 0
        if self.limit_bytes is not None and self.held_bytes + num_bytes > self.limit_bytes:
            raise no_room(num_bytes, self.limit_bytes - self.held_bytes, "host_limit_bytes")
        self._addresses = self._addresses or Addresses()
        if start + num_bytes > self._addresses.num_bytes:
            raise no_room(num_bytes, self._addresses.num_bytes - start, "the system's limit on addresses")
        edges = list(itertools.accumulate(sizes_bytes, initial=start))
        threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="memkit-pin")
        is_pinned = is_buffer or self._staging is None
        commit = partial(self._addresses.commit, self._device) if is_pinned else self._addresses.touch
        added = [
            _Segment(first, last, self._addresses.bytes[first:last], Future(), is_pinned)
            for first, last in itertools.pairwise(edges)
        ]
        self._segments += added
        for segment in added:
            threads.submit(_resolve, segment.pinned, partial(commit, segment.start, segment.end))
        threads.shutdown(wait=False)
        self.num_pins += len(added) if is_pinned else 0
        self._free((start, start + num_bytes))
        return added

    def _await_pins(self, segments: list[_Segment], *, all_or_none: bool = False) -> None:
        """Wait until free segments are pinned. Drop those that could not be, so that nobody meets them again, and raise why."""
        failed = [segment for segment in segments if segment.pinned.exception() is not None]
        if failed:
            for segment in segments if all_or_none else failed:
                self._drop(segment)
            failed[0].pinned.result()

    def _drop(self, segment: _Segment) -> None:
        """Give a segment that nobody uses back to the system."""
        self._dropping.append(segment)
        self._finish_drop()

    def _finish_drop(self) -> None:
        segment = self._dropping[-1]
        if segment in self._segments:
            self._segments.remove(segment)
        self._cut((segment.start, segment.end))
        _unpin(self._device, [segment])
        assert self._addresses is not None
        self._addresses.forget(segment.start, segment.end)
        self._dropping.pop()

    def _under(self, ranges: Iterable[_Range]) -> list[_Segment]:
        return [segment for byte_range in ranges for segment in self._segments_under(byte_range)]

    def _segments_under(self, byte_range: _Range) -> Iterable[_Segment]:
        at = bisect_right(self._segments, byte_range[0], key=lambda segment: segment.start) - 1
        return itertools.takewhile(lambda segment: segment.start < byte_range[1], itertools.islice(self._segments, at, None))

    def _whole(self, ranges: tuple[_Range, ...], num_bytes: int) -> Tensor | None:
        assert self._addresses is not None
        start = ranges[0][0]
        return self._addresses.bytes[start : start + num_bytes] if len(ranges) == 1 else None

    def _pieces(self, ranges: tuple[_Range, ...], num_bytes: int) -> tuple[Tensor, ...]:
        pieces = []
        for start, end in ranges:
            end = min(end, start + num_bytes)  # the last one is not rounded up
            num_bytes -= end - start
            for segment in self._segments_under((start, end)):
                pieces.append(segment.bytes[max(start - segment.start, 0) : end - segment.start])
        return tuple(pieces)


def _unpin(device: Device, segments: list[_Segment]) -> None:
    for segment in segments:
        if not segment.pinned.cancel() and segment.pinned.exception() is None and segment.is_pinned:
            device.unpin(segment.bytes)


def _resolve(promise: Future[None], commit: Callable[[], None]) -> None:
    """Commit memory, and tell those who wait for it, unless nobody does any more."""
    if not promise.set_running_or_notify_cancel():
        return
    try:
        commit()
    except BaseException as error:
        promise.set_exception(error)
    else:
        promise.set_result(None)


def _shares(num_bytes: int) -> list[int]:
    """Return the sizes of segments in which so many bytes are pinned side by side."""
    num_bytes = _rounded(max(num_bytes, 0), PAGE_BYTES)
    share = _rounded(min(max(num_bytes // _NUM_THREADS, SMALLEST_SEGMENT_BYTES), LARGEST_SEGMENT_BYTES), PAGE_BYTES)
    return [min(share, num_bytes - start) for start in range(0, num_bytes, share)]


def _rounded(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to
