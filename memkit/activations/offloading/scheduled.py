"""`ScheduledForward`: a forward that goes like an earlier one, and its backwards, by the arrays of a `Schedule`.

Nothing is searched for here. When a save or a request is not the one that is due, the forward goes on save by save in the
window; what was saved until then is still served from here.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import backwards, torch_private
from memkit.activations.offloading.scheduled_fetches import ScheduledFetches
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.traces import Trace
from memkit.device.base import CopyBatch
from memkit.errors import note_no_room
from memkit.interrupts import mended
from memkit.kept import KeptHandle, modified_error
from memkit.labels import label
from memkit.sizes import format_mib
from memkit.transfer.host_memory import Span

if TYPE_CHECKING:
    from memkit.activations.offloading.placement import Placement
    from memkit.activations.offloading.schedule import Schedule, ScheduledSave
    from memkit.activations.offloading.window import OffloadWindow

_NO_BACKWARD = -1


class ScheduledForward(ScheduledFetches):
    """One forward that follows a schedule, and its backwards.

    Args:
        window: the window that it belongs to.
        schedule: what to do.
        placement: the prepared copies, from and to `spans`.
        spans: the host memory: for what leaves and is requested by backwards, and for the rest; None where none is needed.
        trace: the trace that the schedule was made from.
        counts: the counters of the iteration.
    """

    def __init__(
        self,
        window: OffloadWindow,
        schedule: Schedule,
        placement: Placement | None,
        spans: Sequence[Span | None],
        trace: Trace,
        counts: Counts,
    ) -> None:
        super().__init__(window, schedule, placement, trace, counts)
        self.task = _NO_BACKWARD
        """Autograd's number of the backward that asks; -1 before the first."""
        self._num_backwards = 0
        self._spans = list(spans)
        self._lent: dict[int, list[KeptHandle]] = {}
        """For values that are asked for again, what was handed out over what was fetched."""
        self.on_end: Callable[[], None] | None = None
        """Called once, when a backward has ended well."""
        self._leaving: deque[tuple[torch.UntypedStorage, CopyBatch]] = deque()
        """What is held for a copy alone, which may be under way."""

    def unpack(self, handle: tuple[Any, ScheduledSave, Tensor, int]) -> Tensor:
        """Return a saved tensor, for work on the current stream, and fetch what is due."""
        with self.lock:
            if self.is_broken:
                self.mend()
            try:
                return self._unpack(*handle)
            except BaseException:
                self.is_broken = True
                raise

    def _unpack(self, _: object, save: ScheduledSave, alias: Tensor, version: int) -> Tensor:
        now = torch_private.version_of(alias)
        if now != version:
            shape = save.shape
            raise modified_error(alias, version, lambda: shape or torch.Size())
        task, value = torch_private.backward_task(), save.value
        if task != _NO_BACKWARD:
            if task != self.task:
                self._turn(task)
            if not self._asked[value]:
                self._note_request(value)
        if not save.is_moved:
            return alias
        if self._leaving and self._leaving[0][1].done.is_reached():
            self._let_go_of_served(wait=False)
        ready = self._ready[value]
        if ready is not None and task != _NO_BACKWARD and self.device.stream_number() == self.stream:
            return self._give_ready(value, ready)
        storage = self._storage_of(value)
        if storage is not self.originals[value]():
            self.device.note_read(storage)
            tensor = self._over(storage, save)
            if self._awaiting[value] > 1 or value in self._lent:
                lent = KeptHandle(tensor)
                lent.alias.data = save.nothing  # type: ignore[assignment]  # of one that leaves
                self._lent.setdefault(value, []).append(lent)
        else:  # writes to it count as writes to what was saved
            tensor = alias.detach()
            tensor.data = self._over(storage, save)
        if task != _NO_BACKWARD:
            self._awaiting[value] -= 1
            if self._awaiting[value] <= 0:
                self._serve_last(value, storage)
        return tensor

    def _give_ready(self, value: int, tensor: Tensor) -> Tensor:
        """Return what was fetched for a single request, and drop the reference to it."""
        number = self._coming.get(value)
        if number is not None:
            self._await(number)
        self.device.note_read(tensor.untyped_storage())
        self._awaiting[value] -= 1
        self._ready[value] = self.held[value] = None
        self._fetched[value] = 0
        return tensor

    def _over(self, storage: torch.UntypedStorage, save: ScheduledSave) -> Tensor:
        if torch_private.num_dispatch_modes() or save.is_conj or save.is_neg:
            assert save.geometry is not None
            return save.geometry.over(storage)
        made = torch.empty(0, dtype=save.dtype, device=storage.device)
        return made.set_(storage, save.offset, save.shape, save.stride)  # type: ignore[arg-type]  # known of one that leaves

    def _turn(self, task: int) -> None:
        """Begin to serve another backward, or the first one."""
        number, num_known = self._num_backwards, len(self.schedule.parts)
        if number == 0:
            self.end_forward()
            self._release_late()
        else:
            self._has_left = self._has_left or self._is_asking
            self._give_up_fetched()
            self._go_along(min(number, num_known - 1))
        if number >= num_known and not (self._has_left or self.was_stopped):
            self._leave()
        self.task, self._num_backwards, self._is_asking = task, number + 1, True
        me = weakref.ref(self)
        backwards.on_end(lambda has_failed: _end_backward(me, task, has_failed=has_failed))

    def _release_late(self) -> None:
        """Free what the schedule frees before the first request of a backward."""
        late = self.schedule.copies.num_released_at_request
        if late > self.num_released and not self.was_stopped:
            with self.at_home():
                self.keep_up(self.num_sent, late)

    def _storage_of(self, value: int) -> torch.UntypedStorage:
        """Return the storage with the bytes of a value, for work on the current stream."""
        storage = self.held[value]
        if storage is not None and self._fetched[value]:
            if self.device.stream_number() != self.stream:
                return self._fetch_one(value)
            if value in self._coming:
                self._await(self._coming[value])
            if value in self._lent and not all(lent.is_unchanged() for lent in self._lent[value]):
                del self._lent[value]
                storage = None
        if storage is None:
            original = self.originals[value]()
            if original is not None:
                return original  # type: ignore[no-any-return]
            storage = self._fetch_one(value)
        return storage

    def _fetch_one(self, value: int) -> torch.UntypedStorage:
        """Fetch a value that is needed now."""
        schedule, batch = self.schedule, self.copy_alone(value, is_out=False)
        storage = self._allocate_now(schedule.sizes_bytes[value])
        if self.device.stream_number() == self.stream:
            self.held[value], self._fetched[value] = storage, 1
        else:  # it is for this request alone
            self._leaving.append((storage, batch))
        with label("fetch"):
            batch.start([storage], self.alone.get(value) or self.out[schedule.batch_of[value]])
            batch.wait()
        self.counts.moved_in.batches.append(batch)
        self.counts.stall_in.batches.append(batch)
        return storage

    def _allocate_now(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage for a value that is needed now; if there is no room, values that were fetched ahead are freed."""
        try:
            return self.device.allocate(num_bytes)
        except torch.OutOfMemoryError:
            self._has_left = True
            self._let_go_of_served(wait=True)
            self._give_up_fetched()
        try:
            return self.device.allocate(num_bytes)
        except torch.OutOfMemoryError as error:
            note_no_room(error, format_mib(num_bytes), self.window.name)
            raise

    def _serve_last(self, value: int, storage: torch.UntypedStorage) -> None:
        """Drop the reference to a value whose last tensor was unpacked, unless its bytes are nowhere else."""
        if self._fetched[value]:
            self.held[value] = self._ready[value] = None
            self._fetched[value] = 0
            self._lent.pop(value, None)
            return
        number = self.schedule.batch_of[value]
        if self.held[value] is None or number >= self.num_sent:
            return  # it was not copied
        self.held[value] = None
        if number >= self.num_released:
            self._leaving.append((storage, self.out[number]))
            self.counts.served_bytes += storage.nbytes()

    def _let_go_of_served(self, *, wait: bool) -> None:
        """Free values that were requested while they were being copied out, if the copy is done; with `wait`, let the stream
        wait for it."""
        device = self.device
        while self._leaving and (wait or self._leaving[0][1].done.is_reached()):
            device.wait_event(self.home, self._leaving[0][1].done)
            self._leaving.popleft()

    @mended
    def end_backward(self, task: int, *, has_failed: bool) -> None:
        """End a backward: free what was fetched and not requested."""
        self._has_left = self._has_left or has_failed
        if self.task == task:
            self._is_asking = False
            self._let_go_of_served(wait=True)
            self._give_up_fetched()
            if self.is_spent:
                self.window.settle()
        if self.on_end is not None and not has_failed:
            on_end, self.on_end = self.on_end, None
            on_end()

    def _give_up_fetched(self) -> None:
        for number in dict.fromkeys(self._coming.values()):
            self.device.wait_event(self.home, self._back[number].done)
        self._coming.clear()
        for value, is_fetched in enumerate(self._fetched):
            if is_fetched:
                self.held[value] = self._ready[value] = None
        self._fetched = bytearray(len(self._fetched))
        self._lent.clear()

    # The end

    @property
    def has_backward(self) -> bool:
        """Whether a backward has requested anything."""
        return self.task != _NO_BACKWARD

    @mended
    def close(self) -> None:
        """Free the host memory. No graph may request anything any more."""
        self._give_back(self._spans)

    @property
    def is_spent(self) -> bool:
        """Whether all that is left are values that no backward has requested so far."""
        return not self.is_forward and self.life() is None

    @mended
    def put_by(self) -> None:
        """Keep only the host memory of values that no backward requests, since another forward begins."""
        self._give_back(self._spans[:1])

    def _give_back(self, spans: Sequence[Span | None]) -> None:
        held = [span for span in spans if span is not None and self.window.arena.has(span)]  # perhaps not, after an interrupt
        if not any(self._spans):
            return
        self.let_go_of_sent()
        self._let_go_of_served(wait=True)
        self._give_up_fetched()
        self.held = [None] * len(self.held)
        # by now it has waited for all copies, also for those that left by themselves
        last = self.device.record_event(self.home, timed=False) if self.num_sent or self.alone else None
        for span in held:
            self.window.arena.give(span, last)
        self._spans = [None if span in spans else span for span in self._spans]

    @mended
    def push_out(self) -> None:
        """Free on the device all that was copied, since another forward begins."""
        self.let_go_of_sent()

    def mend(self) -> list[Span]:
        """Repair what an interrupt left (see [Note: interrupts] in `memkit.interrupts`). Return the host memory that it
        holds."""
        self.device.synchronize()
        self.was_stopped = self.was_stopped or self.is_forward
        self.take_no_more()
        self._has_left = True
        for value in self.leaving:
            self.held[value] = None
        self.num_released = self.num_sent
        for value, is_fetched in enumerate(self._fetched):
            if is_fetched:
                self.held[value] = None
        self._ready = [None] * len(self._ready)
        self._fetched = bytearray(len(self._fetched))
        self._coming.clear()
        self._lent.clear()
        self._leaving.clear()
        self.is_broken = False
        return [span for span in self._spans if span is not None]


def _end_backward(forward: weakref.ref[ScheduledForward], task: int, *, has_failed: bool) -> None:
    found = forward()
    if found is not None:
        found.end_backward(task, has_failed=has_failed)
