"""`RecordedForward`: the saved values of a recorded forward, on the device or to be recomputed."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Collection, Container, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.recomputing.sources import Anchors, Sources
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.records import (
    Contents,
    Forward,
    Handle,
    Ledger,
    NumberedSaves,
    Record,
    SavedResidency,
    Unpacker,
    contents_of,
)
from memkit.activations.saved.traces import OpTrace
from memkit.core import backwards, torch_private
from memkit.core.kept import KeptHandle
from memkit.core.sizes import format_mib
from memkit.core.tensors import counted_by
from memkit.device.base import Stream
from memkit.errors import note_on
from memkit.plan import NO_OP, Action, DTRScore, Walk, ends_of
from memkit.recording.module_calls import ModuleTrail, NotedCall
from memkit.recording.recording import Recording, rewritten_bytes
from memkit.recording.replay import Replay

_MOSTLY = 0.6  # of what a call has saved: if like calls in it have saved more, it consists of them


class RecordedForward(NumberedSaves):
    """The saved values of one forward. With `moves`, the same records move to host memory; otherwise, `moving` has other
    records for moved values. The score evicts values where saved values and replays would take more than `limit_bytes`."""

    moves = False

    def __init__(
        self, recording: Recording, window: OffloadWindow, score: DTRScore, limit_bytes: float, counts: Counts
    ) -> None:
        super().__init__(counts)
        self.lineage = recording.lineage
        self.walk = Walk(recording.lineage, score, limit_bytes, store=self)
        self.recording = recording
        self.trace: OpTrace | None = None
        self.window = window
        self.unpacker: Unpacker = window
        self.saves = recording.saved
        self.uses: list[int] = []
        self.save_nodes: list[int] = []
        self.use_nodes: list[int] = []
        self.moving: Forward | None = None
        self.marks = dict[int, Action]()
        self.offered_bytes = 0
        """Bytes of values that this context keeps and another context may move."""
        self.others: dict[int, weakref.ref[KeptHandle]] = {}
        """Small values, and values that another context may move."""
        self._offered: dict[Contents, tuple[weakref.ref[Tensor], int]] = {}
        """For the contents of each offered tensor: the tensor with its version counter, and the value."""
        self._dropped = set[int]()
        self._replay = Replay(recording)
        self._anchors = recording.anchors = Anchors(window)
        self._sources = Sources(recording, self, self._anchors)
        self._saved_at: dict[int, int] = {}
        self._streams: dict[Stream, None] = {}
        self._places: dict[int, list[int]] = {}
        self._awaited: list[int] = []
        self._pinned: list[int] = []  # before the backward, in order
        self._now = 0
        self._calls: Sequence[NotedCall] = ()
        self._ended: Sequence[int] = ()
        self._num_looked_at = 0
        self._inside: dict[int, list[NotedCall]] = {}

    @property
    def ledger(self) -> Ledger:
        return self.window.ledger

    @property
    def lock(self) -> AbstractContextManager[object]:
        return self.window.lock

    # Forward

    def watch(self, trail: ModuleTrail) -> None:
        """What calls of modules have saved is dropped first, where room is short."""
        self._calls, self._ended = trail.calls, trail.ended

    def settle_on(self, window: OffloadWindow) -> None:
        self.window = self.unpacker = self._anchors.window = window
        self.recording.device = window.device

    def note_save(self, value: int, node: int) -> None:
        self.walk.clock += 1
        self._saved_at[value] = len(self.saves)
        self.saves.append(value)
        self.recording.saved_at.append((len(self.recording.calls), len(self.recording.funcs)))
        self.save_nodes.append(node)

    def note_offer(self, value: int, tensor: Tensor) -> bool:
        contents, root = contents_of(tensor, tensor.untyped_storage()), counted_by(tensor)
        found = self._offered.get(contents)
        if found is None or found[0]() is not root:  # else another tensor had these addresses before
            found = self._offered[contents] = (weakref.ref(root), value)
        return found[1] == value

    def leave(self, record: Record, tensor: Tensor, storage: torch.UntypedStorage, node: int) -> None:
        raise AssertionError("what leaves has records of its own")

    def end_save(self, node: int) -> None:
        pass

    def is_saved(self, value: int) -> bool:
        return value in self._saved_at

    def note_record(self, value: int, record: Record) -> None:
        self.by_number[value] = weakref.ref(record)
        self._streams[record.stream] = None

    def open_moving(self) -> Forward:
        """Return the records that move. They don't refer to the recording, which a graph need not keep for moved tensors."""
        if self.moving is None:
            from memkit.activations.offloading.moving_stage import RatioDecider  # few forwards have any

            self.moving = Forward(RatioDecider(self.window.traces, 1.0, None), self.counts)
            self.window.open_forward(self.moving)
        return self.moving

    def change(self, record: Record, tensor: Tensor, storage: torch.UntypedStorage, action: Action) -> None:
        if action is Action.RECOMPUTE:
            self.walk.drop(record.value)
            return
        self.walk.evictable.pop(record.value, None)
        if action is Action.OFFLOAD and self.window.device.has_own_memory:
            self.window.adopt(self.open_moving(), record, tensor, storage)
        self.window.change(record, storage, action)

    def moved_values(self) -> frozenset[int]:
        handles = ((value, reference()) for value, reference in self.others.items())
        return frozenset(value for value, handle in handles if isinstance(handle, Handle) and handle.record.left is not None)

    # Backward

    def _begin_backward(self, task: int) -> None:
        is_first, self.task = self.task == -1, task
        if self.counts.trial is not None:
            self.counts.trial.begin_backward()
        backwards.on_end(functools.partial(_end_backward, self.window, weakref.ref(self), is_first))
        order = self.trace.step.uses if self.trace is not None and self.trace.has_order else None
        self._replay.compare_settings()
        self._now = 0
        self._places.clear()
        for place, value in enumerate(reversed(self.saves) if order is None else order):
            self._places.setdefault(value, []).append(place)
        for record in self.records():
            self.ledger.expect(record)
        self._awaited, self._pinned = sorted(self.by_number), sorted(self.recording.pinned)

    def note_request(self, record: Record, node: int) -> None:
        task = torch_private.backward_task()
        if task == -1:
            return
        if self.task != task:
            self._begin_backward(task)
        value = record.value
        self.walk.note_request(value, node)
        self.uses.append(value)
        self.use_nodes.append(node)
        while self._awaited and self.record_of(self._awaited[-1]) is None:
            self._awaited.pop()
        latest = self._awaited[-1] if self._awaited else -1
        while self._anchors.last > latest:
            self._anchors.release(self._anchors.last)  # no backward will ask for values made from it
        while self._pinned and self._pinned[-1] > latest:
            self.recording.pinned.pop(self._pinned.pop(), None)
        place = next((place for place in self._places.get(value, ()) if place >= self._now), None)
        self._now = self._now + 1 if place is None else place + 1

    def note_last_use(self, record: Record) -> None:
        self.walk.evictable.pop(record.value, None)

    def end_backward(self) -> None:
        pass

    def learn_order(self) -> None:
        trace = self.trace
        if trace is not None and not trace.has_order and next(self.records(), None) is None:
            rewritten = rewritten_bytes(self.recording.roots, self.recording.overwritten)
            trace.learn_order(tuple(self.uses), ends_of(self.use_nodes), rewritten)

    # The store of its walk: see `memkit.plan.eviction.ValueStore`

    @property
    def live_bytes(self) -> int:
        ledger = self.window.ledger
        return ledger.live_bytes - ledger.moving_bytes + self.recording.held_bytes

    def is_available(self, value: int) -> bool:
        record = self.record_of(value)
        if record is not None and (self._has_copy(record) or self._storage_of_record(record) is not None):
            return True
        if record is not None and record.residency is SavedResidency.DROPPED:
            return False
        if self.lineage.maker[value] == NO_OP or value in self.recording.pinned:
            return True
        return self._anchors.handle(value) is not None or self.other(value) is not None

    def is_wanted(self, value: int) -> bool:
        record = self.record_of(value)
        return record is not None and record.num_awaiting > 0 and record.residency is SavedResidency.DROPPED

    def distance(self, value: int) -> int:
        if self.task == -1:
            return len(self.saves) - self._saved_at.get(value, 0)
        for place in self._places.get(value, ()):
            if place >= self._now:
                return place - self._now + 1
        return len(self.saves) + 1

    def _has_copy(self, record: Record) -> bool:
        return record.span is not None and self._is_as_saved(record)

    def _storage_of_record(self, record: Record) -> torch.UntypedStorage | None:
        if record.residency is SavedResidency.BACK:
            storage = self.ledger.fetched_copy(record)
            # A mark has given the user's storage back; and one from the host has what was written over the value meanwhile.
            may_be_written = record.span is not None or (storage is not None and storage is record.original())
            return None if may_be_written and not self._is_as_saved(record) else storage
        if record.residency is SavedResidency.DROPPED or not self._is_as_saved(record):
            return None  # if the original lives on, that may end while a replay makes room
        handle = next(record.live_handles(), None)
        if handle is None:
            return None
        return handle.alias.untyped_storage() if handle.geometry is None else record.original()

    def _is_as_saved(self, record: Record) -> bool:
        """Tell whether a record's saved tensor was not written to since, by a recorded op or otherwise."""
        if record.value in self.recording.overwritten:
            return False
        return all(handle.is_unchanged() for handle in record.live_handles())

    def kept_source(self, value: int) -> KeptHandle | None:
        """Return a handle of a value without a record. The value can be found as long as the handle lives."""
        return None

    def other(self, value: int) -> KeptHandle | None:
        """Return the handle of a value that has no record here, if a graph may still request it."""
        reference = None if value in self.recording.overwritten else self.others.get(value)
        handle = None if reference is None else reference()
        return handle if handle is not None and handle.is_unchanged() else None

    def _storage(self, value: int) -> torch.UntypedStorage:
        storage = self._replay.made.get(value)
        if storage is not None:
            return storage
        record = self.record_of(value)
        if record is not None and self._has_copy(record):
            return self.window.lend(next(iter(record.live_handles())))
        storage = None if record is None else self._storage_of_record(record)
        if storage is not None:
            self.ledger.device.note_read(storage)
            return storage
        handle = self.recording.pinned.get(value)
        if handle is None and self.lineage.maker[value] == NO_OP:
            return self.recording.root_storage(value)
        storage = self._anchors.find(value)
        if storage is not None:
            return storage
        handle = handle or self.other(value)
        assert handle is not None
        return handle.unpacker.lend(handle) if isinstance(handle, Handle) else handle.unpack().untyped_storage()

    def secure(self, value: int) -> bool:
        return self._sources.secure(value)

    def drop(self, value: int) -> bool:
        if (record := self.record_of(value)) is None or record.residency is SavedResidency.DROPPED:
            return False
        if (origin := self._sources.origin_of(value)) is None:
            return False
        record.hold(origin)
        self.ledger.drop(record)
        if value not in self._dropped:
            self._dropped.add(value)
            self.counts.num_dropped += 1
            self.counts.dropped_bytes += record.num_bytes
        return True

    def drop_call(self, needed: Container[int] = ()) -> bool:
        """Drop what the next ended call of a module has made and saved, but not what it has returned. If it consists of like
        calls, such as layers, what one of them gives to the next stays."""
        walk, maker = self.walk, self.lineage.maker
        while self._num_looked_at < len(self._ended):
            place = self._ended[self._num_looked_at]
            self._num_looked_at += 1
            call, inside = self._calls[place], self._inside.pop(place, ())
            self._inside.setdefault(call.parent, []).append(call)
            if call.stop is None or _consists_of_alike(call, inside):
                continue
            self.recording.sync()
            saved = dict.fromkeys(self.saves[call.begin.save : call.stop[0]])
            kept, num_before = (call.made[1], needed, walk.given), len(walk.evictable)
            for value in saved:
                if value in walk.evictable and maker[value] >= call.begin.op and not any(value in each for each in kept):
                    walk.drop(value)
            if len(walk.evictable) < num_before:
                return True
        return False

    def keep(self, value: int) -> None:
        record = self.record_of(value)
        assert record is not None
        self.ledger.restore(record, self._replay.made.pop(value))

    def forget(self, value: int) -> None:
        self._replay.made.pop(value, None)

    def make_room(self) -> bool:
        self.recording.sync()
        return self.walk.make_room(0)

    def make(self, record: Record) -> None:
        """DROPPED -> BACK: recompute a value, for work on the current stream. It raises if a source was written to, or if there
        is no room even after dropping all other values."""
        replay, walk, ledger, counts = self._replay, self.walk, self.ledger, self.counts
        if torch_private.backward_task() == -1:
            replay.compare_settings()
        self.recording.sync()
        self.recording.see_versions()
        ledger.expect(record)
        device = ledger.device
        start = device.record_event()
        ops_before, seconds_before = walk.num_replayed_ops, walk.replayed_s
        here = device.current_stream()
        others = [stream for stream in self._streams if stream != here]
        self._streams[here] = None
        for stream in others:  # their earlier work and freed memory come first
            device.wait_event(here, device.record_event(stream, timed=False))
        try:
            replay.below_all(walk.rebuild, record.value)
        finally:
            replay.made.clear()
            walk.temp_bytes = 0
            for stream in others:  # they may reuse bytes that the replay has read
                device.wait_event(stream, device.record_event(here, timed=False))
        counts.num_replays += 1
        counts.num_replayed_ops += walk.num_replayed_ops - ops_before
        counts.replayed_s += walk.replayed_s - seconds_before
        counts.replayed.append((start, device.record_event()))
        counts.peak_bytes = max(counts.peak_bytes, walk.peak_bytes)

    def run(self, op: int, in_place: Collection[int]) -> None:
        replay = self._replay
        try:
            replay.run(op, in_place, self._storage)
            return
        except torch.OutOfMemoryError:
            pass  # after this line, the try's allocations are free
        for value in self.walk.evictable.keys() - self.walk.needed.keys() - self.walk.given:
            self.walk.drop(value)
        try:
            replay.run(op, in_place, self._storage)
        except torch.OutOfMemoryError as error:
            call = self.recording.calls[op]
            note_on(
                error,
                f"memkit: no room on the device to run {call.func} again ({replay.name_of(self.lineage.outs[op][0])}, "
                f"{format_mib(sum(call.outs_bytes))}), even after everything that Rematerialize may drop was dropped.",
            )
            raise


def _consists_of_alike(call: NotedCall, inside: Sequence[NotedCall]) -> bool:
    """Tell whether most of what a call has saved is that of several calls of one class in it."""
    num_saves, num_calls = Counter[type](), Counter[type]()
    for part in inside:
        if part.stop is not None:
            kind = type(part.module())
            num_saves[kind] += part.stop[0] - part.begin.save
            num_calls[kind] += 1
    assert call.stop is not None
    least = _MOSTLY * (call.stop[0] - call.begin.save)
    return any(count > 1 and num_saves[kind] > least for kind, count in num_calls.items())


def _end_backward(window: OffloadWindow, reference: weakref.ref[RecordedForward], is_first: bool, has_failed: bool) -> None:
    if not has_failed:
        with window.lock:
            forward = reference()  # before the sweep, after which nothing else may hold it
            window.settle()
            if forward is not None:
                forward.end_backward()
                if is_first:
                    forward.learn_order()
