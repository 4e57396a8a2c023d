"""`PlannedForward`: a recorded forward that moves, fetches and recomputes values by a schedule, at each save and request."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit.activations.recomputing.recorded_forward import RecordedForward
from memkit.activations.saved.records import Record, SavedResidency
from memkit.core.kept import KeptHandle
from memkit.core.torch_state import is_saved_by_compiled_code
from memkit.errors import HostMemoryError
from memkit.plan import Action

if TYPE_CHECKING:
    from memkit.activations.budgeting.learning import Planned
    from memkit.activations.budgeting.meter import Meter
    from memkit.activations.offloading.window import OffloadWindow
    from memkit.activations.saved.counts import Counts
    from memkit.plan import DTRScore
    from memkit.recording.recording import Recording

_NONE: frozenset[int] = frozenset()


class PlannedForward(RecordedForward):
    """The saved values of one forward, which stay, move or are dropped by a schedule. Without one, or after deviating from it,
    values are fetched when they are requested, and the score evicts within what `limit_bytes` returns."""

    moves = True

    def __init__(
        self,
        recording: Recording,
        window: OffloadWindow,
        score: DTRScore,
        counts: Counts,
        *,
        planned: Planned | None,
        limit_bytes: Callable[[PlannedForward | None], float],
        note_no_host: Callable[[HostMemoryError], None],
    ) -> None:
        super().__init__(recording, window, score, limit_bytes(None), counts)
        self.planned = planned
        self._limit_bytes, self._note_no_host = limit_bytes, note_no_host
        self.waiting: list[tuple[weakref.ref[Record], int]] = []
        self._let_go: list[weakref.ref[torch.UntypedStorage]] = []
        self._asked: weakref.ref[Record] | None = None
        """The last record that the user asked to move: the schedule doesn't free it."""
        self._lent: dict[int, tuple[torch.UntypedStorage, list[KeptHandle]]] = {}
        """Storages that a backward was given and that replays still read, by value, with handles that tell of writes."""
        self._kept_sources: dict[int, list[weakref.ref[KeptHandle]]] = {}
        self._stays: frozenset[int] | None = None
        """During a scheduled recompute, the intermediate values that are kept."""
        self.on_end: Callable[[], None] | None = None
        self.meter: Meter | None = None
        self.num_passed = 0
        """Counted saves without a note, since they stay."""
        self.requests: Sequence[int] | None = None
        self._request = -1
        if planned is not None:
            window.fit_arena(planned.plan.moved_bytes)

    @property
    def extra_bytes(self) -> int:
        """Bytes held for replays beyond the plain step's."""
        pinned = self.recording.pinned.items()
        alone = (handle.alias for value, handle in pinned if self.record_of(value) is None)  # others are saved as well
        return self.recording.held_bytes + sum(alias.untyped_storage().nbytes() for alias in alone)

    # Forward

    def leave(self, record: Record, tensor: Tensor, storage: torch.UntypedStorage, node: int) -> None:
        self.walk.evictable.pop(record.value, None)
        self.ledger.count_moves(record, self.counts)
        if tensor.requires_grad or is_saved_by_compiled_code():
            self._send(record, storage)
        else:  # see [Note: saved before it is written] in `memkit.activations.offloading.window`
            self.waiting.append((weakref.ref(record), node))

    def keep_source(self, value: int, tensor: Tensor) -> KeptHandle:
        """Return the handle of a value that stays and that replays read. Values recomputed from it hold the handle."""
        handle = KeptHandle(tensor)
        self._kept_sources.setdefault(value, []).append(weakref.ref(handle))
        self._streams[self.ledger.device.current_stream()] = None
        return handle

    def kept_source(self, value: int) -> KeptHandle | None:
        """Return the handle of a value that replays read, if no save of it was written to since."""
        if value in self._kept_sources and value not in self.recording.overwritten:
            handles = [handle for reference in self._kept_sources[value] if (handle := reference()) is not None]
            if handles and all(handle.is_unchanged() and handle.version == handles[0].version for handle in handles):
                return handles[0]
        return None

    def other(self, value: int) -> KeptHandle | None:
        return self.kept_source(value) or super().other(value)

    def end_save(self, node: int) -> None:
        if self.meter is not None:
            self.meter.end_save()
        self.pass_save(node, len(self.saves) - 1 + self.num_passed)

    def pass_save(self, node: int, save: int) -> None:
        """Act on other values as scheduled at save number `save`, by the graph node `node`; -1 if it does not count."""
        if self.waiting:
            self._send_waiting(but_for=node)
        planned = self.planned
        if planned is not None and save >= 0:
            for value in planned.copies.get(save, ()):
                self._send_anchor(value)
            for value in planned.lets_go.get(save, ()):
                self._release_record(self._record_that_moves(value))

    def change(self, record: Record, tensor: Tensor, storage: torch.UntypedStorage, action: Action) -> None:
        if action is Action.RECOMPUTE or record.counts is None or record.owner is not None:
            super().change(record, tensor, storage, action)
            return
        self.walk.evictable.pop(record.value, None)
        is_waiting = any(reference() is record for reference, _ in self.waiting)
        if record.residency is SavedResidency.DROPPED or (action is Action.KEEP and record.residency is SavedResidency.HOST):
            self.ledger.restore(record, storage)
        if action is Action.KEEP:
            self.waiting = [waiting for waiting in self.waiting if waiting[0]() is not record]
            if record.residency is SavedResidency.LEAVING:
                self.ledger.stay(record)
        elif record.left is None and not is_waiting:
            self._send(record, storage)

    def _send(self, record: Record, storage: torch.UntypedStorage) -> None:
        try:
            self.ledger.leave(record, storage)
        except HostMemoryError as error:
            self._note_no_host(error)
            return
        if self.marks.get(record.value) is Action.OFFLOAD:
            self._release_asked(weakref.ref(record))

    def _release_asked(self, last: weakref.ref[Record] | None = None) -> None:
        before, self._asked = self._asked, last
        self._release_record(None if before is None else before())

    def _send_waiting(self, *, but_for: int | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        for reference, node in waiting:
            record = reference()
            storage = None if record is None or record.num_handles == 0 else record.original()
            if node == but_for:
                self.waiting.append((reference, node))
            elif record is not None and storage is not None and record.residency is SavedResidency.DEVICE:
                self._send(record, storage)

    def _send_anchor(self, value: int) -> None:
        handle = self._anchors.handle(value)
        if handle is not None and handle.geometry is None and handle.is_unchanged():
            self.ledger.count_moves(handle.record, self.counts)
            self._send(handle.record, handle.alias.untyped_storage())

    def _record_that_moves(self, value: int) -> Record | None:
        record = self.record_of(value)
        if record is None:
            handle = self._anchors.handle(value)
            record = None if handle is None else handle.record
        return record

    def _release_record(self, record: Record | None) -> None:
        if record is not None and record.residency is SavedResidency.LEAVING:
            self.ledger.release(record)

    def make_room(self) -> bool:
        if super().make_room():
            return True
        if self.planned is not None:
            return False
        stays = self._just_saved() if self.task == -1 else self.walk.given
        return self.move_out(lambda: self.live_bytes <= self.walk.limit_bytes, stays)

    def move_out(self, is_enough: Callable[[], bool], stays: Collection[int] = ()) -> bool:
        if is_enough():
            return True
        for record in self.records():
            storage = record.original()
            may_leave = record.counts is None and record.owner is None and record.residency is SavedResidency.DEVICE
            if not may_leave or storage is None or record.value in stays or self._is_held(record.value):
                continue
            self.walk.evictable.pop(record.value, None)
            self.ledger.count_moves(record, self.counts)
            self._send(record, storage)
            if record.residency is not SavedResidency.LEAVING:  # there is no host memory for it
                break
            self._release_record(record)
            self._let_go.append(weakref.ref(storage))
            if is_enough():
                return True
        return False

    def _is_held(self, value: int) -> bool:
        root = self.recording.roots.get(value)
        is_root_held = root is not None and root.alias is not None
        return is_root_held or value in self.recording.pinned or self.marks.get(value) is Action.KEEP

    @property
    def lingering_bytes(self) -> int:
        """Bytes that were moved and whose storage others still hold, such as a compiled block that has not returned."""
        return sum(storage.nbytes() for reference in self._let_go if (storage := reference()) is not None)

    def _just_saved(self) -> set[int]:
        """Return the values saved by the last graph node. Its op may not have written them yet."""
        saves = zip(reversed(self.saves), reversed(self.save_nodes), strict=True)
        return {value for value, _ in takewhile(lambda save: save[1] == self.save_nodes[-1], saves)}

    # Backward

    def note_request(self, record: Record, node: int) -> None:
        num_before = len(self.uses)
        super().note_request(record, node)
        request = len(self.uses) - 1
        if request < num_before:
            return  # no backward asks
        planned = self.planned
        if self.requests is not None:
            request = self.requests[request] if request < len(self.requests) else self.requests[-1] + 1
        self._request = request
        if request == 0:
            self._send_waiting()
            if self._asked:
                self._release_asked()
        if planned is None:
            self.walk.limit_bytes = self._limit_bytes(self)
            if self.live_bytes > self.walk.limit_bytes:
                self.make_room()
            return
        if request == 0:
            for value in planned.lets_go.get(len(planned.plan.step.saves), ()):
                self._release_record(self._record_that_moves(value))
        for value in planned.releases.get(request, ()):
            self._lent.pop(value, None)
            if value not in self._sources.only_held:
                self._anchors.release(value)
        for value in planned.fetches.get(request, ()):
            if not self._fetch(value):
                break

    def _fetch(self, value: int) -> bool:
        record = self._record_that_moves(value)
        if record is None or record.residency is not SavedResidency.HOST or record.original() is not None:
            return True
        try:
            self.ledger.fetch(record)
        except torch.OutOfMemoryError:
            return False  # it comes when it is asked for
        return True

    def note_last_use(self, record: Record) -> None:
        super().note_last_use(record)
        planned = self.planned
        if planned is None or planned.held_until.get(record.value, -1) <= self._request:
            return
        if record.value in self.recording.overwritten:
            return  # the saved value is whole, but a later write may have replaced it
        if record.residency in (SavedResidency.COMING, SavedResidency.BACK):
            storage = self.ledger.fetched_copy(record)
            if storage is not None:
                self._lent[record.value] = storage, record.lent
            return
        for handle in record.live_handles():
            if handle.geometry is None and handle.is_unchanged():
                self._lent[record.value] = handle.alias.untyped_storage(), [KeptHandle(handle.alias)]
                return

    def _lent_storage(self, value: int) -> torch.UntypedStorage | None:
        lent = self._lent.get(value) if self._lent else None
        return lent[0] if lent is not None and all(mark.is_unchanged() for mark in lent[1]) else None

    def is_available(self, value: int) -> bool:
        return self._lent_storage(value) is not None or super().is_available(value)

    def is_wanted(self, value: int) -> bool:
        return super().is_wanted(value) and (self._stays is None or value in self._stays)

    def _storage(self, value: int) -> torch.UntypedStorage:
        storage = None if value in self._replay.made else self._lent_storage(value)
        if storage is None and value not in self._replay.made and (handle := self.kept_source(value)) is not None:
            storage = handle.unpack().untyped_storage()
        if storage is None:
            return super()._storage(value)
        self.ledger.device.note_read(storage)
        return storage

    def run(self, op: int, in_place: Collection[int]) -> None:
        try:
            super().run(op, in_place)
            return
        except torch.OutOfMemoryError:
            num_before = self.counts.moved_out.num_copies
            self.move_out(lambda: False, self.walk.needed.keys() | self.walk.given)
            if self.counts.moved_out.num_copies == num_before:
                raise
        super().run(op, in_place)  # after the error is gone, which holds the allocations

    def make(self, record: Record) -> None:
        if self.planned is not None:
            self._stays = self.planned.stays.get(record.value, _NONE) | {record.value}
        try:
            super().make(record)
        finally:
            self._stays = None

    def end_backward(self) -> None:
        self._lent.clear()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        if self.meter is not None:
            self.meter.end_backward()
