"""`OffloadWindow`: steps that are decided save by save: when device memory is freed, and what is fetched ahead.

The device may hold `limit_bytes` of saved tensors: the ratio's share and a little more, or the window. A record that leaves is
copied at once, and its device memory is freed when others need room, the oldest copy first. In the backward, free room is
filled with the next needed records. A steady step does the same by a schedule (see `scheduled`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit.activations.saved.records import Forward, Handle, Ledger, Record, SavedResidency, mend
from memkit.activations.saved.traces import Traces
from memkit.core import backwards, torch_private
from memkit.core.interrupts import mended
from memkit.core.sizes import format_mib
from memkit.core.torch_state import is_saved_by_compiled_code
from memkit.device.base import Device
from memkit.errors import HostMemoryError, note_no_room, warn_user
from memkit.plan import Action
from memkit.transfer.host_memory import Arena
from memkit.transfer.lanes import lanes_of

if TYPE_CHECKING:
    from memkit.activations.offloading.scheduled import ScheduledForward


_PASSED_OVER = 8  # a fetched record that so many others have overtaken is given back: the backward goes another way


class OffloadWindow:
    """The saved tensors of one tag on one device, beside those of scheduled forwards. May be used from several threads."""

    def __init__(
        self,
        device: Device,
        name: str,
        tag: str,
        lock: AbstractContextManager[object],
        warn: Callable[[], Callable[[str, str], None] | None],
    ) -> None:
        self.device = device
        self.arena = Arena(device)
        self.traces = Traces()
        self.name = f'{name} (tag "{tag}")'
        self.tag, self.lock, self._warn = tag, lock, warn
        self.lanes = lanes_of(device)
        self.ledger = Ledger(device, self.lanes, self.arena)
        self._forwards: list[weakref.ref[Forward]] = []
        self.scheduled: ScheduledForward | None = None
        self.put_by: list[ScheduledForward] = []
        self._counter = device.memory_counter()
        self._most_forwards = 1
        self._needed_bytes = 0
        self.is_retired = self.has_schedule = False
        self.is_broken = False
        self._is_asking = False

    def mend(self) -> None:
        for forward in self.live():
            forward.break_off()
        mend(self.ledger, [span for scheduled in self.all_scheduled for span in scheduled.mend()])
        self._is_asking = self.is_broken = False

    @property
    def all_scheduled(self) -> list[ScheduledForward]:
        return self.put_by if self.scheduled is None else [*self.put_by, self.scheduled]

    @mended
    def open_forward(self, forward: Forward) -> None:
        self.ledger.sweep()
        self.ledger.release_dead(wait=False)
        if self.scheduled is not None:
            self.scheduled.let_go_of_sent()
        self.lanes.join(self)
        self._forwards.append(weakref.ref(forward))
        self._most_forwards = max(self._most_forwards, len(self.live()))
        needed_bytes = forward.share.most_offload_bytes
        if needed_bytes or forward.share.ratio == 0:  # else nothing is known yet
            self.fit_arena(needed_bytes)

    def fit_arena(self, needed_bytes: int) -> None:
        if needed_bytes != self._needed_bytes and self.arena.in_use_bytes == 0:
            self._needed_bytes = needed_bytes
            self.arena.trim(needed_bytes * self._most_forwards)
        self.arena.reserve(needed_bytes)

    @property
    def is_active(self) -> bool:
        return self.scheduled is not None or bool(self.ledger.records)

    # Saving: the caller holds the lock, and has mended what was broken off

    def pack(self, forward: Forward, tensor: Tensor, storage: torch.UntypedStorage, asked: Action | None) -> Handle | None:
        """Return the handle of a tensor that may leave, None if moving it would free nothing; `asked` overrules the decider."""
        ledger, node = self.ledger, torch_private.node_number()
        if ledger.deaths or ledger.orphans:
            ledger.sweep()
        if forward.unwritten:
            self._send_written(forward, but_for=node)
        contents, root, record = forward.look_up(storage, tensor)
        if record is not None:
            if self.device.current_stream() != record.stream:
                return None  # later work on this stream reads it at an unknown time: it stays until the backward
            return ledger.add_handle(record, tensor, self, node)
        share, counts = forward.share, forward.counts
        if forward.is_broken or (action := share.action(tensor, storage, asked)) is None:
            return None
        handle = ledger.open(tensor, storage, self, node, forward, len(share.follower.keys) - 1)
        record = handle.record
        forward.note_record(record, contents, root, self.lanes.next_use())
        counts.unique_bytes += record.num_bytes
        if action is Action.KEEP:
            counts.kept_bytes += record.num_bytes
        elif tensor.requires_grad or is_saved_by_compiled_code():
            self.leave(forward, record, storage)
        else:
            forward.unwritten.append((record, node))
        if ledger.backlog:
            self.make_room(forward)
        return handle

    @mended
    def adopt(self, forward: Forward, record: Record, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        if record.owner is None:
            contents, root, _ = forward.look_up(storage, tensor)
            forward.share.action(tensor, storage, Action.OFFLOAD)
            record.owner, record.index = forward, len(forward.share.follower.keys) - 1
            self.ledger.count_moves(record, forward.counts)
            forward.note_record(record, contents, root, self.lanes.next_use())

    @mended
    def change(self, record: Record, storage: torch.UntypedStorage, action: Action) -> None:
        ledger, forward = self.ledger, record.owner
        ledger.sweep()
        if action is Action.RECOMPUTE:
            ledger.drop(record)
            return
        if record.residency is SavedResidency.DROPPED or (action is Action.KEEP and record.residency is SavedResidency.HOST):
            ledger.restore(record, storage)
        if forward is None:
            return
        is_waiting = any(waiting is record for waiting, _ in forward.unwritten)
        if action is Action.KEEP and (is_waiting or record.left is not None):  # it was to leave
            forward.unwritten = [waiting for waiting in forward.unwritten if waiting[0] is not record]
            forward.share.stays_after_all(record.num_bytes)
            if record.residency is SavedResidency.LEAVING:
                ledger.stay(record)
        elif action is Action.OFFLOAD and record.left is None and not is_waiting:
            forward.share.stays_after_all(-record.num_bytes)
            self.leave(forward, record, storage)
            self.make_room(forward)

    def _send_written(self, forward: Forward, *, but_for: int | None = None) -> None:
        """Start copies that waited for the op that saved them, except those saved by the node `but_for`.

        [Note: saved before it is written] Autograd saves the inputs of an op before the op runs. Writes to tensors that carry a
        gradient are noticed; but an op may fill a tensor without one that it has saved already, as `rrelu` does with its noise.
        A copy put on its lane at the save would take the old contents. So a tensor that requires no grad leaves with the next
        save of another node, when the op has been launched. Code that was compiled with its backward saves once all of it has
        been launched.
        """
        waited, forward.unwritten = forward.unwritten, []
        for record, node in waited:
            storage = record.original()
            if node == but_for:
                forward.unwritten.append((record, node))
            elif record.num_handles > 0 and record.residency is SavedResidency.DEVICE and storage is not None:
                self.leave(forward, record, storage)

    def leave(self, forward: Forward, record: Record, storage: torch.UntypedStorage) -> None:
        try:
            self.ledger.leave(record, storage)
        except HostMemoryError as error:
            forward.share.stays_after_all(record.num_bytes)
            forward.counts.kept_bytes += record.num_bytes
            self.warn_no_host(record.num_bytes, error)

    def warn_no_host(self, num_bytes: int, error: HostMemoryError) -> None:
        if (warn := self._warn()) is not None:
            warn("host", f"it leaves {format_mib(num_bytes)} on the device: {error}")

    def make_room(self, forward: Forward) -> None:
        ledger, limit_bytes = self.ledger, self._limit_with(forward)
        while ledger.moving_bytes > limit_bytes and ledger.backlog:
            ledger.release(ledger.backlog[0])

    def live(self) -> list[Forward]:
        forwards = [forward for reference in self._forwards if (forward := reference()) is not None]
        if len(forwards) < len(self._forwards):
            self._forwards = [weakref.ref(forward) for forward in forwards]
        return forwards

    def _limit_with(self, forward: Forward) -> int:
        shares = [forward.share] if len(self._forwards) == 1 else [live.share for live in self.live()]
        if len(shares) == 1:
            return shares[0].limit_bytes
        return sum(share.kept_bytes for share in shares) + max((share.window_bytes for share in shares), default=0)

    @mended
    def end_forward(self, forward: Forward, *, learn: bool) -> None:
        self._send_written(forward)
        self.make_room(forward)
        if forward.is_forward and forward.finish_forward(learn=learn):
            warn_user(
                f'the report under the tag "{self.tag}" is of another model, or of other shapes: what was saved does not '
                "follow it. This forward is taken as the new measure. Profile again, or use another tag."
            )

    # Giving back

    def unpack(self, handle: Handle) -> Tensor:
        with self.lock:
            if self.is_broken:
                self.mend()
            try:
                return self._unpack(handle)
            except BaseException:  # as `mended` does, at less cost
                self.is_broken = True
                raise

    def _unpack(self, handle: Handle) -> Tensor:
        ledger, record = self.ledger, handle.record
        if ledger.deaths or ledger.orphans:
            ledger.sweep()
        forward, maker = record.owner, record.maker
        if maker is not None:
            maker.note_request(record, handle.node)
        if forward is not None:
            self._note_request(forward, record)
        tensor = handle.in_place()
        if tensor is not None:
            ledger.serve(handle)
        else:
            self._bring(record)
        if forward is not None and forward.task != -1:
            self._fetch_ahead(forward)
        if maker is not None and (handle.geometry is None or (tensor is None and record.num_awaiting <= 1)):
            maker.note_last_use(record)
        return ledger.hand_out(handle) if tensor is None else tensor

    @mended
    def lend(self, handle: Handle) -> torch.UntypedStorage:
        """Return a storage with the bytes of a handle that is still to be unpacked, to be read on the current stream."""
        ledger, record = self.ledger, handle.record
        ledger.sweep()
        if record.owner is not None:
            self._note_request(record.owner, record)
        tensor = handle.in_place()
        if tensor is not None:
            return tensor.untyped_storage()
        self._bring(record)
        if record.residency is SavedResidency.COMING:
            ledger.land(record)
        storage = ledger.fetched_copy(record)
        assert storage is not None
        self.device.note_read(storage)
        return storage

    def _bring(self, record: Record) -> None:
        ledger = self.ledger
        if record.residency is SavedResidency.LEAVING:
            ledger.release(record)  # it was recomputed before it left
        ledger.fetched_copy(record)  # gives up one that was written to
        if record.span is not None:
            self._fetch_now(record)
        elif record.residency is SavedResidency.DROPPED:
            assert record.maker is not None
            record.maker.make(record)

    def _note_request(self, forward: Forward, record: Record) -> None:
        task = torch_private.backward_task()
        if task == -1:
            return
        if forward.task != task:
            if forward.task == -1:
                self.end_forward(forward, learn=True)
                forward.judge_waste()
            self._take_back(forward, until=None)
            forward.begin_backward(task)
            backwards.on_end(lambda has_failed: None if has_failed else self._end_backward(forward, task))
        forward.requests.append(record.index)
        if record.index in forward.used:
            return
        ledger, counter = self.ledger, self._counter
        forward.used[record.index] = 0 if counter is None else counter.allocated_bytes() - ledger.moving_bytes
        if record.left is not None and (record.residency is SavedResidency.LEAVING or record.original() is not None):
            forward.counts.served_bytes += record.num_bytes
        if ledger.coming:
            self._take_back(forward, until=forward.place_of(record) - _PASSED_OVER)

    def _fetch_now(self, record: Record) -> None:
        ledger = self.ledger
        if record.residency in (SavedResidency.COMING, SavedResidency.BACK):
            if ledger.fetched_copy(record) is not None and record.fetched_on == self.device.current_stream():
                return
            if record.residency is SavedResidency.COMING:
                ledger.take_back(record)
        try:
            ledger.fetch(record)
        except torch.OutOfMemoryError:
            for forward in self.live():  # values fetched ahead make room for those that cannot wait
                self._take_back(forward, until=None)
            self.settle(wait=True)
            try:
                ledger.fetch(record)
            except torch.OutOfMemoryError as error:
                note_no_room(error, format_mib(record.num_bytes), self.name)
                raise

    def _take_back(self, forward: Forward, *, until: int | None) -> None:
        for record in list(self.ledger.coming):
            if record.owner is forward:
                if until is not None and forward.place_of(record) >= until:
                    return  # later fetches are for later places
                self.ledger.take_back(record)

    def _fetch_ahead(self, forward: Forward, use_order: int | None = None) -> bool:
        while (record := forward.next_record()) is not None:
            if record.residency is SavedResidency.HOST and record.original() is None:
                if use_order is not None and record.use_order <= use_order:
                    return True
                if not self._has_room(forward, record):
                    self.ledger.release_dead(wait=True)
                    if not self._has_room(forward, record):
                        return False
                if use_order is None and not self.bring_sooner(record.use_order):
                    return False
                try:
                    self.ledger.fetch(record)
                except torch.OutOfMemoryError:
                    return False  # the fetches that took the room may be needed sooner
            forward.cursor += 1
        return True

    def bring_sooner(self, use_order: int) -> bool:
        self._is_asking = True
        is_turn = self.lanes.bring_sooner(self, use_order)
        self._is_asking = False
        return is_turn

    def bring_until(self, use_order: int) -> bool:
        # unless another thread is at it, perhaps waiting for the asking one
        return self._is_asking or self.is_broken or self._bring_until(use_order)

    @mended
    def _bring_until(self, use_order: int) -> bool:
        is_done = self.scheduled is None or self.scheduled.bring_until(use_order)
        return is_done and all(self._fetch_ahead(forward, use_order) for forward in self.live() if forward.task != -1)

    def _has_room(self, forward: Forward, record: Record) -> bool:
        """Tell whether there is room for a record until its use (if known), so that it does not raise the step's peak."""
        live_bytes, limit_bytes = self.ledger.moving_bytes + record.num_bytes, self._limit_with(forward)
        forecast = forward.forecast if self._counter is not None and len(self._forwards) == 1 else None
        if live_bytes > limit_bytes or forecast is None:
            return live_bytes <= limit_bytes
        return forecast.level_bytes(len(forward.used) - 1, forward.place_of(record), live_bytes) <= forecast.peak_bytes

    @mended
    def _end_backward(self, forward: Forward, task: int) -> None:
        self.ledger.sweep()
        if forward.task == task:
            self._take_back(forward, until=None)
            forward.end_backward()
            self.ledger.release_dead(wait=True)  # the copy of a served record was made in the forward, and is long done
        self.settle()

    @mended
    def settle(self, *, wait: bool = False) -> None:
        self.ledger.sweep()
        over = [scheduled for scheduled in self.all_scheduled if scheduled.is_over]
        for scheduled in over:
            scheduled.close()
        if over:
            self.scheduled = None if self.scheduled in over else self.scheduled
            self.put_by = [scheduled for scheduled in self.put_by if scheduled not in over]
        if self.scheduled is not None and self.scheduled.is_spent:
            self.scheduled.close(keeps_rest=True)
            self.put_by, self.scheduled = [*self.put_by, self.scheduled], None
        self.ledger.release_dead(wait=wait)
        if wait:
            self.ledger.settle(wait=True)
        if self.is_retired and self.arena.in_use_bytes == 0:
            self.arena.close()

    def retire(self) -> None:
        self.is_retired = True
        self.settle(wait=True)
