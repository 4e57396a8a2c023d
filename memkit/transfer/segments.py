"""Committed host memory: segments of one range of addresses.

The range is set aside once; addresses cost nothing. Memory is committed (touched and pinned) from its low end upwards, many
segments side by side, which is several times faster than one after the other, and in exactly the size needed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from memkit.device.base import Device
from memkit.transfer.host_memory import PAGE_BYTES, Addresses, no_room
from memkit.transfer.spans import rounded

SMALLEST_SEGMENT_BYTES = 32 * 2**20
LARGEST_SEGMENT_BYTES = 256 * 2**20
_NUM_THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Memory that was committed as one. The future `pinned` is done once it is touched and pinned, or that has failed; without
    `is_pinned`, once it is touched."""

    start: int
    end: int
    bytes: Tensor
    pinned: Future[None]
    is_pinned: bool


class Segments:
    """The segments of one arena, lowest first. The caller holds the arena's lock; the threads that pin never take it.

    As [Note: interrupted arena] in `memkit.transfer.arena` has it, a segment is noted before it is pinned and until it is
    unpinned. After a call that was broken off, `mend` does the rest.
    """

    def __init__(self, device: Device) -> None:
        self.all: list[Segment] = []
        self.addresses: Addresses | None = None
        """Set aside with the first segment."""
        self.num_pins = 0
        """How many segments were given to `Device.pin` so far."""
        self._device = device
        self._dropping: list[Segment] = []
        """What is being given back to the system."""
        weakref.finalize(self, _unpin, device, self.all).atexit = False

    @property
    def num_bytes(self) -> int:
        return sum(segment.end - segment.start for segment in tuple(self.all))

    def add(self, sizes_bytes: Sequence[int], *, limit_bytes: int | None, is_pinned: bool) -> list[Segment]:
        """Begin to touch memory behind what is committed, and to pin it, in segments of these sizes: multiples of a page.

        Raises:
            HostMemoryError: all would be more than the limit, or than there are addresses.
        """
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
        """Give a segment that is not in use back to the system."""
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
        """Put right what a call has left that was broken off."""
        while self._dropping:
            self._finish_drop()
        for segment in [segment for segment in self.all if segment.pinned.cancel()]:
            self.drop(segment)  # no thread has begun to pin it, and perhaps none ever will


def _unpin(device: Device, segments: list[Segment]) -> None:
    """Undo what was pinned of segments, and keep from being pinned what was not yet."""
    for segment in segments:
        if not segment.pinned.cancel() and segment.pinned.exception() is None and segment.is_pinned:
            device.unpin(segment.bytes)


def _resolve(promise: Future[None], commit: Callable[[], None]) -> None:
    """Commit memory, and tell those who wait for it, unless none does any more."""
    if not promise.set_running_or_notify_cancel():
        return
    try:
        commit()
    except BaseException as error:
        promise.set_exception(error)
    else:
        promise.set_result(None)


def shares(num_bytes: int) -> list[int]:
    """Return the sizes of segments in which so many bytes are pinned side by side."""
    num_bytes = rounded(max(num_bytes, 0), PAGE_BYTES)
    share = rounded(min(max(num_bytes // _NUM_THREADS, SMALLEST_SEGMENT_BYTES), LARGEST_SEGMENT_BYTES), PAGE_BYTES)
    return [min(share, num_bytes - start) for start in range(0, num_bytes, share)]
