"""The two queues of a device on which bytes leave and come back, beside its work and beside each other."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memkit.device.base import Device, Event, Stream
from memkit.sizes import byte_view
from memkit.transfer.arena import Span


@dataclass(frozen=True, slots=True)
class Passage:
    """One copy over the link. `done` is what others wait for; from `started` to it the lane was busy."""

    num_bytes: int
    started: Event
    done: Event


class Lanes:
    """One queue from a device to the host and one back. Everything that memkit moves goes through these.

    A copy waits for the events that it is given, and nothing waits for it by itself. Whoever asks for one keeps the storage
    alive until the stream that the storage goes back to has waited for `Passage.done`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._out = device.new_stream("D2H")
        self._back = device.new_stream("H2D")

    def copy_out(self, storage: torch.UntypedStorage, span: Span, *, after: Event) -> Passage:
        """Copy a storage into a span, once `after` is reached and the span's last users are done with it.

        The storage may be larger than the span: its first bytes are copied.
        """
        return self._copy(self._out, storage, span, is_out=True, after=(after, *span.free_events))

    def copy_back(self, span: Span, storage: torch.UntypedStorage, *, after: Iterable[Event]) -> Passage:
        """Copy a span into a storage, or to the start of a larger one, once the events are reached."""
        return self._copy(self._back, storage, span, is_out=False, after=after)

    def _copy(
        self, lane: Stream, storage: torch.UntypedStorage, span: Span, *, is_out: bool, after: Iterable[Event]
    ) -> Passage:
        device = self._device
        if span.staging is not None:
            started = device.record_event(lane)
            return Passage(span.num_bytes, started, span.staging.copy(lane, storage, span.pieces, is_out=is_out, after=after))
        for event in after:
            device.wait_event(lane, event)
        started = device.record_event(lane)
        on_device, offset = byte_view(storage), 0
        for piece in span.pieces:
            part = on_device.narrow(0, offset, piece.numel())
            offset += piece.numel()
            destination, source = (piece, part) if is_out else (part, piece)
            device.copy(destination, source, lane)
        return Passage(span.num_bytes, started, device.record_event(lane))


_lanes: dict[Device, Lanes] = {}
_lock = threading.Lock()


def lanes_of(device: Device) -> Lanes:
    """Return the lanes of a device: the same ones for everybody."""
    with _lock:
        if device not in _lanes:
            _lanes[device] = Lanes(device)
        return _lanes[device]
