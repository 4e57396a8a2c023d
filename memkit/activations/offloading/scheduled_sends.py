"""What a forward that follows a schedule holds on the device, its copies to the host, and when device memory is freed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from memkit import torch_private
from memkit.device.base import CopyBatch
from memkit.interrupts import mended
from memkit.labels import label

if TYPE_CHECKING:
    from memkit.activations.offloading.placement import Placement
    from memkit.activations.offloading.schedule import Schedule
    from memkit.activations.offloading.scheduled import ScheduledForward
    from memkit.activations.offloading.scheduled_saves import ScheduledSaves
    from memkit.activations.offloading.window import OffloadWindow
    from memkit.activations.saved.counts import Counts
    from memkit.activations.saved.traces import Trace

_NO_CONTEXT = nullcontext()


class Life:
    """Held by each handle of a forward, and by whoever takes its saves, so that its death says that the forward is over."""

    __slots__ = ("__weakref__", "forward")

    def __init__(self, forward: ScheduledForward) -> None:
        self.forward = forward


class ScheduledSends(ABC):
    """The forward's half of a `ScheduledForward`: `ScheduledSaves` notes the saves, and here they leave.

    Args:
        window: whose forward it is.
        schedule: what to do.
        placement: its copies, from and to the host memory that the forward holds; None where nothing leaves.
        trace: what it was made from.
        counts: what is done is counted there.
    """

    def __init__(
        self, window: OffloadWindow, schedule: Schedule, placement: Placement | None, trace: Trace, counts: Counts
    ) -> None:
        self.schedule = schedule
        self.trace = trace
        self.window = window
        self.device = device = window.device
        self.lock = window.lock
        self.out: list[CopyBatch] = [] if placement is None else placement.out
        """The batches that leave."""
        self.placement = placement
        self.counts = counts
        self.is_broken = False
        self.is_forward = True
        """Whether it takes saves."""
        self.life: Callable[[], Life | None] = lambda: None
        """Returns what the handles hold, for as long as any is alive or may be made: but for what no backward asks for."""
        self.rest: Callable[[], Life | None] = lambda: None
        """Returns what the handles of that hold."""
        self.saves: Callable[[], ScheduledSaves | None] = lambda: None
        """Returns who takes its saves."""
        self.was_stopped = False
        """Whether a save, or another, has said that it goes another way."""
        self.num_saves = 0
        """How many saves have followed the schedule."""
        self.began_at = 0
        """How many of these another schedule has seen to, which begins like this one."""
        self.tried: tuple[Trace, ...] = (trace,)
        """This trace, and others that it has turned out not to be there."""
        self.num_pauses = 0
        """How many times a region of `no_offload` has begun, or ended."""
        self.num_sent = self.num_released = 0
        """How many of the batches that leave are on the lane, and were let go of."""
        num_values = schedule.num_values
        self.held: list[torch.UntypedStorage | None] = [None] * num_values
        """For each value what is held of it on the device: what it was saved in, or what was fetched."""
        self.originals: list[Any] = [None] * num_values
        """For each value that leaves a weak reference to what it was saved in."""
        self.counters: list[Any] = [None] * num_values
        """For each of them a weak reference to what counts the writes to it, and the count."""
        self.use_orders: list[int] | None = None
        """For each value when in the forward it was saved; None where no others bring anything by the lanes."""
        if window.lanes.are_shared(window):
            self.use_orders = [0] * num_values
        self.nodes: dict[int, int] = {}
        """For values that were saved before they are written, the node."""
        self.alone: dict[int, CopyBatch] = {}
        """Values that have left by themselves, with their copies."""
        self.stream, self.home = device.stream_number(), device.current_stream()
        """What all that is held belongs to."""

    def at_home(self) -> AbstractContextManager[object]:
        """Return a context in which the stream that the held storages belong to is current: copies wait for its work, and freed
        memory goes back to it."""
        return _NO_CONTEXT if self.device.stream_number() == self.stream else self.device.on_stream(self.home)

    def keep_up(self, num_sent: int, num_released: int) -> None:
        """Start copies, and free what was copied, up to these numbers of batches."""
        schedule = self.schedule
        while self.num_sent < num_sent:
            values, batch = schedule.copies.out[self.num_sent], self.out[self.num_sent]
            if self.nodes and not self._are_written(values):
                break
            held: list[Any] = [self.held[value] for value in values]
            if torch_private.profiler_is_on():
                with label("evict"):
                    batch.start(held)
            else:
                batch.start(held)
            self.num_sent += 1
            self.counts.moved_out.batches.append(batch)
        while self.num_released < min(num_released, self.num_sent):
            self._release_next()

    def _are_written(self, values: tuple[int, ...]) -> bool:
        node, nodes = torch_private.node_number(), self.nodes
        return node not in map(nodes.get, values)

    def _release_next(self) -> None:
        schedule, number = self.schedule, self.num_released
        batch = self.out[number]
        wait_for(batch)
        self.counts.stall_out.batches.append(batch)
        for value in schedule.copies.out[number]:
            self.held[value] = None
        self.num_released = number + 1

    @abstractmethod
    def mend(self) -> object:
        """Put right what was broken off: see [Note: interrupts] in `memkit.interrupts`."""

    def take_no_more(self) -> None:
        self.is_forward, saves = False, self.saves()
        if saves is not None and saves.forward is self:
            saves.life = saves.rest = None

    @mended
    def stop(self) -> None:
        """Stop following the schedule. What was copied is freed on the device."""
        with self.at_home():
            if self.is_forward:
                self.take_no_more()
                self.was_stopped = True
                for value, storage in enumerate(self.held):
                    if storage is not None and self.nodes.get(value) != torch_private.node_number():
                        self._send_alone(value, storage)
                self.let_go_of_sent()

    def _send_alone(self, value: int, storage: torch.UntypedStorage) -> None:
        """Copy a value that was to be copied in a batch with others, which do not come, and free it."""
        number = self.schedule.batch_of[value]
        if number >= self.num_sent and value not in self.alone:
            batch = self.copy_alone(value, is_out=True)
            batch.start([storage])
            self.counts.moved_out.batches.append(batch)
            self.alone[value] = batch
            batch.wait()
            self.held[value] = None

    def copy_alone(self, value: int, *, is_out: bool) -> CopyBatch:
        """Return the copy of a single value, for a step that deviates."""
        assert self.placement is not None
        return self.placement.copy_alone(value, is_out=is_out)

    def let_go_of_sent(self) -> None:
        with self.at_home():
            while self.num_released < self.num_sent:
                self._release_next()

    def note_pause(self) -> bool:
        """Note that a region of `no_offload` begins or ends. Return whether the schedule has that here as well."""
        paused, number = self.trace.paused, self.num_pauses
        self.num_pauses = number + 1
        return number < len(paused) and paused[number] == self.num_saves

    @property
    def is_complete(self) -> bool:
        """Whether all saves of the schedule have come, and no others."""
        return self.num_saves == len(self.schedule.saves) and not self.was_stopped

    @property
    def is_over(self) -> bool:
        """Whether no graph can request anything any more."""
        return self.life() is None and self.rest() is None

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was done yet: all that was saved stays."""
        return self.is_over and not (self.num_sent or self.alone)

    @property
    def leaving(self) -> set[int]:
        """The values that have left, or are about to."""
        return {value for batch in self.schedule.copies.out[: self.num_sent] for value in batch} | set(self.alone)

    @property
    def num_values(self) -> int:
        """The number of distinct values that were saved so far."""
        return self.schedule.saves[self.num_saves - 1].num_values if self.num_saves else 0

    @property
    def num_live(self) -> int:
        """The number of values that a graph may still request, as far as is known."""
        return self.num_values if self.life() is not None else sum(value < self.num_values for value in self.schedule.rest)

    @mended
    def end_forward(self) -> None:
        """End the forward: no more saves belong to it."""
        with self.at_home():
            if self.num_saves < len(self.schedule.saves):
                self.stop()
            elif self.is_forward:
                copies = self.schedule.copies
                self.take_no_more()
                self.nodes = {}
                self.keep_up(copies.num_sent[-1], copies.num_released[-1])
                if self.placement is not None:
                    self.schedule.see_to_turns(self.placement)

    @property
    def live_bytes(self) -> int:
        """Bytes of the values that it holds on the device."""
        sizes_bytes = self.schedule.sizes_bytes
        return sum(sizes_bytes[value] for value, storage in enumerate(self.held) if storage is not None)


def wait_for(batch: CopyBatch) -> None:
    """Let the current stream wait for a batch of copies."""
    if torch_private.profiler_is_on():
        with label("wait"):
            batch.wait()
    else:
        batch.wait()


def settle_scheduled(window: OffloadWindow) -> None:
    """Close the forwards that are over; see `ScheduledForward.put_by` for one that is spent. The caller holds the lock."""
    over = [scheduled for scheduled in window.all_scheduled if scheduled.is_over]
    for scheduled in over:
        scheduled.close()
    if over:
        window.scheduled = None if window.scheduled in over else window.scheduled
        window.put_by = [scheduled for scheduled in window.put_by if scheduled not in over]
    if window.scheduled is not None and window.scheduled.is_spent:
        window.scheduled.put_by()
        window.put_by, window.scheduled = [*window.put_by, window.scheduled], None
