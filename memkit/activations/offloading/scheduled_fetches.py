"""What a forward that follows a schedule fetches ahead of its requests, backward by backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit import torch_private
from memkit.activations.offloading.scheduled_sends import ScheduledSends, wait_for
from memkit.device.base import CopyBatch
from memkit.labels import label

if TYPE_CHECKING:
    from memkit.activations.offloading.placement import Placement
    from memkit.activations.offloading.schedule import Schedule
    from memkit.activations.offloading.window import OffloadWindow
    from memkit.activations.saved.counts import Counts
    from memkit.activations.saved.traces import Trace


class ScheduledFetches(ScheduledSends):
    """The half of a `ScheduledForward` that knows what is due in its backwards."""

    def __init__(
        self, window: OffloadWindow, schedule: Schedule, placement: Placement | None, trace: Trace, counts: Counts
    ) -> None:
        super().__init__(window, schedule, placement, trace, counts)
        num_values = schedule.num_values
        self._has_left = False
        """Whether a backward has gone another way than the schedule has it."""
        self._is_asking = False
        """Whether one has begun, and is not over."""
        self._go_along(0)
        self._fetched = bytearray(num_values)
        """Whether what is held was fetched."""
        self._coming: dict[int, int] = {}
        """For each value that is being fetched, and that the stream has not waited for, its batch."""
        self._ready: list[Tensor | None] = [None] * num_values
        """For each value that is being fetched for one request alone, the tensor."""
        self._behind = -1
        """The last batch of those that leave that the lane back has waited for."""

    def _go_along(self, number: int) -> None:
        """Begin with the fetches that are due in one of the backwards, by its number."""
        schedule = self.schedule
        self._copies, self._behind_of = schedule.parts[number], schedule.behind[number]
        self._back: list[CopyBatch] = [] if self.placement is None else self.placement.back[number]
        self._cursor = self._num_fetched = 0
        """The request that comes next, and how many of the batches that come back are on the lane."""
        self._asked = bytearray(schedule.num_values)
        self._awaiting = list(schedule.num_requests[number])
        """For each value how often the backward is yet to ask for it."""

    def _leave(self) -> None:
        """Stop fetching ahead since a backward deviates: the next forward goes save by save, and its backwards are learned
        anew."""
        self._has_left, self.trace.requests = True, None

    def _note_request(self, value: int) -> None:
        """Fetch what is due at the first request of a value."""
        self._asked[value] = 1
        if self._has_left or self.was_stopped:
            return
        copies, cursor = self._copies, self._cursor
        if cursor == len(copies.requests) or copies.requests[cursor] != value:
            self._leave()
            return
        self._cursor = cursor + 1
        while self._num_fetched < copies.num_fetched[cursor]:
            if (
                self.use_orders is not None
                and self._can_wait(value)
                and not self.window.bring_sooner(self._next_use_order(self.use_orders))
            ):
                return  # what is left of it comes at a later request
            if not self._fetch_next():
                return

    def _can_wait(self, value: int) -> bool:
        """Tell whether what is fetched next is not needed for the value that is requested now."""
        return self.held[value] is not None or value not in self.schedule.batch_of

    def _next_use_order(self, use_orders: list[int]) -> int:
        return max(use_orders[value] for value in self._copies.back[self._num_fetched])

    def bring_until(self, use_order: int) -> bool:
        """Fetch what is needed sooner than what was left at `use_order`: see `memkit.transfer.lanes.Prefetcher`."""
        copies, use_orders = self._copies, self.use_orders
        if use_orders is None or not self._is_asking or self._cursor == 0 or self.device.stream_number() != self.stream:
            return True
        while not self._has_left and self._num_fetched < len(copies.back) and self._next_use_order(use_orders) > use_order:
            if self._num_fetched == copies.num_fetched[self._cursor - 1]:
                return False  # there is no room for it yet
            self._fetch_next()
        return True

    def _fetch_next(self) -> bool:
        """Put the next batch of copies to the device on the lane. Return False if there was no room."""
        if self.device.stream_number() != self.stream:  # each request gets its own there
            self._has_left = True
            return False
        schedule, number = self.schedule, self._num_fetched
        values = self._copies.back[number]
        device, held, storages, made = self.device, self.held, [], []
        for value in values:
            if held[value] is not None or self._awaiting[value] <= 0:
                self._has_left = True
                return False
            whole, tensor = schedule.whole[value], None
            try:
                if whole is None:
                    storage = device.allocate(schedule.sizes_bytes[value])
                else:
                    tensor = device.allocate_tensor(*whole)
                    storage = tensor.untyped_storage()
            except torch.OutOfMemoryError:
                self._has_left = True  # it may be needed less soon than what took the room
                return False
            storages.append(storage)
            made.append(tensor)
        batch, behind = self._back[number], self._behind_of[number]
        for value, storage in zip(values, storages, strict=True):
            held[value] = storage
        after = self.out[behind] if behind > self._behind else None
        if torch_private.profiler_is_on():
            with label("fetch"):
                batch.start(storages, after)
        else:
            batch.start(storages, after)
        if after is not None:
            self._behind = behind
        for value, tensor in zip(values, made, strict=True):
            self._coming[value] = number
            self._fetched[value] = 1
            self._ready[value] = tensor  # last: it is given as it is
        self._num_fetched = number + 1
        self.counts.moved_in.batches.append(batch)
        return True

    def _await(self, number: int) -> None:
        """Let the current stream wait for a batch of copies to the device, once for all of it."""
        wait_for(self._back[number])
        self.counts.stall_in.batches.append(self._back[number])
        for value in self._copies.back[number]:
            self._coming.pop(value, None)
