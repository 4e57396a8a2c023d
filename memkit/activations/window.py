"""The byte window: who leaves, when the device's bytes are let go, and what is fetched ahead.

The device may hold `limit_bytes` of saved tensors: what the ratio keeps and a little more, or the window. A record that leaves
is copied at once, and stays on the device for as long as there is room; then the oldest copy is waited for and its bytes go. In
the backward, whatever falls free is filled with what is needed next.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from memkit import backwards, torch_private
from memkit.activations.forward import Forward, SaveKey, Traces, trace_of
from memkit.activations.ledger import Ledger
from memkit.activations.records import Handle, Record, Residency
from memkit.device.base import Device
from memkit.errors import HostMemoryError, note_on, warn_user
from memkit.interrupts import mended
from memkit.plan import Action
from memkit.profile import MemoryReport
from memkit.sizes import format_mib
from memkit.transfer.arena import Arena
from memkit.transfer.lanes import lanes_of

_PASSED_OVER = 8
"""A fetched record that so many others have overtaken is given back: the backward goes another way."""

_DTYPE_NAMES: dict[torch.dtype, str] = {}


class OffloadWindow:
    """The saved tensors of one tag on one device: what every pack and unpack does. May be used from several threads."""

    def __init__(self, device: Device, tag: str, lock: AbstractContextManager[object]) -> None:
        self.device = device
        self.arena = Arena(device)
        self.traces = Traces()
        self.tag = tag
        self.lock = lock
        self._lanes = lanes_of(device)
        self.ledger = Ledger(device, self._lanes, self.arena)
        """The records, for whoever reads figures from them."""
        self._forwards: list[weakref.ref[Forward]] = []
        self._counter = device.memory_counter()
        self._most_forwards = 1
        self._needed_bytes = 0
        """Host memory that the plans needed when the arena was made to fit last."""
        self._has_warned = False
        self.is_broken = False
        """Whether a call was broken off."""
        self._is_asking = False
        """Whether others are asked to bring what is theirs."""

    def mend(self) -> None:
        """Put right what was broken off: see [Note: interrupts] in `memkit.interrupts`."""
        for forward in self._live_forwards():
            forward.break_off()
        self.ledger.mend()
        self._is_asking = self.is_broken = False

    @property
    def limit_bytes(self) -> int:
        """The bytes of records that the device may hold."""
        forwards = self._live_forwards()
        if len(forwards) == 1:
            return forwards[0].so_far.limit_bytes
        shares = [forward.so_far for forward in forwards]
        return sum(share.kept_bytes for share in shares) + max((share.window_bytes for share in shares), default=0)

    def _live_forwards(self) -> list[Forward]:
        forwards = [forward for forward in (reference() for reference in self._forwards) if forward is not None]
        if len(forwards) < len(self._forwards):
            self._forwards = [weakref.ref(forward) for forward in forwards]
        return forwards

    @mended
    def open_forward(self, forward: Forward) -> None:
        """Begin a forward: free what is done with, and pin ahead what its plan will need."""
        self.ledger.sweep()
        self.ledger.release_dead(wait=False)
        self._lanes.join(self)
        self._forwards.append(weakref.ref(forward))
        self._most_forwards = max(self._most_forwards, len(self._live_forwards()))
        self._size_arena(forward)

    def _size_arena(self, forward: Forward) -> None:
        needed_bytes = max(
            (trace.plan(forward.ratio, forward.so_far.window_bytes).offload_bytes for trace in self.traces), default=0
        )
        if not needed_bytes and forward.ratio > 0:
            return  # nothing is known yet
        if needed_bytes != self._needed_bytes and self.arena.in_use_bytes == 0:
            self._needed_bytes = needed_bytes
            self.arena.trim(needed_bytes * self._most_forwards)
        self.arena.reserve(needed_bytes)

    def seed_from(self, report: MemoryReport, min_bytes: int) -> None:
        """Plan the first forward by a report."""
        with self.lock:
            self.traces.add(trace_of(report, min_bytes))

    # Saving

    @mended
    def pack(
        self, forward: Forward, tensor: Tensor, storage: torch.UntypedStorage, *, action: Action | None = None
    ) -> Handle | None:
        """Return the handle of a tensor that may leave; None if it is to be left alone, as to move it would free nothing.

        Args:
            action: what the user, or the context inside, has said; by default the forward decides.
        """
        self.ledger.sweep()
        node = torch_private.node_number()
        self._send_written(forward, but_for=node)
        record = forward.find(storage, tensor)
        if record is None:
            decided = forward.decide(_key_of(tensor, storage), action)
            if decided is None:
                return None
            record = self.ledger.open_record(
                storage, torch_private.version_of(tensor), owner=forward, index=forward.num_saves - 1, counts=forward.counts
            )
            record.tick = self._lanes.tick()
            forward.note_record(record, storage, tensor)
            forward.counts.unique_bytes += record.num_bytes
            handle = self.ledger.add_handle(record, tensor, self, node)
            if decided is Action.KEEP:
                forward.counts.kept_bytes += record.num_bytes
            elif tensor.requires_grad:
                self._leave(forward, record, storage)
            else:
                forward.unwritten.append((record, node))
            self._make_room()
        elif self.device.current_stream() != record.stream:
            return None  # the work to come reads it there, and nothing tells when: it stays until the backward
        else:
            handle = self.ledger.add_handle(record, tensor, self, node)
        return handle

    @mended
    def change(self, record: Record, storage: torch.UntypedStorage, action: Action) -> None:
        """Do something else with a record, whose bytes are also in a storage of the user's."""
        ledger, forward = self.ledger, record.owner
        ledger.sweep()
        if action is Action.RECOMPUTE:
            ledger.drop(record)
            return
        if record.residency is Residency.DROPPED or (action is Action.KEEP and record.residency is Residency.HOST):
            ledger.restore(record, storage)
        if forward is None:
            return
        is_waiting = any(waiting is record for waiting, _ in forward.unwritten)
        if action is Action.KEEP and (is_waiting or record.left is not None):  # it was to leave
            forward.unwritten = [waiting for waiting in forward.unwritten if waiting[0] is not record]
            forward.so_far.stays_more_bytes += record.num_bytes
            if record.residency is Residency.LEAVING:
                ledger.stay(record)
        elif action is Action.OFFLOAD and record.left is None and not is_waiting:
            forward.so_far.stays_more_bytes -= record.num_bytes
            self._leave(forward, record, storage)
            self._make_room()

    @mended
    def adopt(self, forward: Forward, record: Record, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """A record that could only be dropped is one of a forward's from now on, and may leave."""
        if record.owner is None:
            forward.decide(_key_of(tensor, storage), Action.OFFLOAD)
            self.ledger.adopt(record, owner=forward, index=forward.num_saves - 1, counts=forward.counts)
            record.tick = self._lanes.tick()
            forward.note_record(record, storage, tensor)

    def pass_over(self, forward: Forward, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Take note of a tensor that is known to be the caller's."""
        with self.lock:
            forward.pass_over(_key_of(tensor, storage))

    def _send_written(self, forward: Forward, *, but_for: int | None = None) -> None:
        """Let go what waited for the op that saved it, but what the node `but_for` saves.

        [Note: saved before it is written] Autograd saves the inputs of an op before the op runs. What carries a gradient is not
        written to unnoticed; but an op may fill a tensor without one that it has saved already, as `rrelu` does with its noise.
        A copy that is put on its lane at the save would take what was there before. So what requires no grad leaves with the
        next save of another node, when the op has been launched.
        """
        waited, forward.unwritten = forward.unwritten, []
        for record, node in waited:
            storage = record.original()
            if node == but_for:
                forward.unwritten.append((record, node))
            elif record.num_handles > 0 and record.residency is Residency.DEVICE and storage is not None:
                self._leave(forward, record, storage)

    def _leave(self, forward: Forward, record: Record, storage: torch.UntypedStorage) -> None:
        try:
            self.ledger.leave(record, storage)
        except HostMemoryError as error:
            forward.so_far.stays_more_bytes += record.num_bytes
            forward.counts.kept_bytes += record.num_bytes
            if not self._has_warned:
                self._has_warned = True
                warn_user(f'CPUOffload (tag "{self.tag}") leaves {format_mib(record.num_bytes)} on the device: {error}')

    def _make_room(self) -> None:
        ledger, limit_bytes = self.ledger, self.limit_bytes
        while ledger.moving_bytes > limit_bytes and ledger.backlog:
            ledger.release_oldest()

    @mended
    def end_forward(self, forward: Forward, *, learn: bool) -> None:
        """The context has been left, or the backward has begun: no more saves belong to it."""
        self._send_written(forward)
        self._make_room()
        if forward.is_forward and forward.finish_forward(learn=learn):
            warn_user(
                f'the report under the tag "{self.tag}" is of another model, or of other shapes: what was saved does not '
                "follow it. This forward is taken as the new measure. Profile again, or use another tag."
            )

    # Giving back

    @mended
    def unpack(self, handle: Handle) -> Tensor:
        """Return a saved tensor, for work on the current stream; fetch what is needed after it."""
        ledger, record = self.ledger, handle.record
        ledger.sweep()
        forward, maker = record.owner, record.maker
        if maker is not None:
            maker.note_request(record, handle.node)
        if forward is not None:
            self._note_request(forward, record)
        tensor = self._in_place(handle)
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
        """Return a storage with the bytes that a handle stands for, to be read by work on the current stream. The handle waits
        for its tensor as before, and what was fetched for this stays until then."""
        ledger, record = self.ledger, handle.record
        ledger.sweep()
        if record.owner is not None:
            self._note_request(record.owner, record)
        tensor = self._in_place(handle)
        if tensor is not None:
            return tensor.untyped_storage()
        self._bring(record)
        if record.residency is Residency.COMING:
            ledger.land(record)
        storage = ledger.fetched_copy(record)
        assert storage is not None
        self.device.note_read(storage)
        return storage

    def _note_request(self, forward: Forward, record: Record) -> None:
        if self._follow_backward(forward) and not forward.is_used(record):
            self._note_use(forward, record)

    def _bring(self, record: Record) -> None:
        """Have the bytes of a record on the device, or on their way there, for work on the current stream."""
        ledger = self.ledger
        if record.residency is Residency.LEAVING:
            ledger.release(record)  # it was made again before it left
        ledger.fetched_copy(record)  # gives up one that was written to
        if record.span is not None:
            self._fetch_now(record)
        elif record.residency is Residency.DROPPED:
            assert record.maker is not None
            record.maker.make(record)

    def _follow_backward(self, forward: Forward) -> bool:
        """Notice that a backward has begun, for the first time or again; tell whether one is running at all."""
        task = torch_private.backward_task()
        if task == -1:
            return False
        if forward.task != task:
            if forward.task == -1:
                self.end_forward(forward, learn=True)
                self._judge_waste(forward)
            self._take_back(forward, until=None)
            forward.begin_backward(task)
            backwards.on_end(lambda has_failed: None if has_failed else self._end_backward(forward, task))
        return True

    def _judge_waste(self, forward: Forward) -> None:
        """The forward's frame is gone: what is still alive after we let go is held by somebody else."""
        for record in forward.records():
            if record.residency is Residency.HOST and record.original() is not None:
                forward.counts.wasted_bytes += record.num_bytes
                forward.note_held(record)

    def _note_use(self, forward: Forward, record: Record) -> None:
        forward.note_use(record, 0 if self._counter is None else self._counter.allocated_bytes() - self.ledger.moving_bytes)
        if record.left is not None and (record.residency is Residency.LEAVING or record.original() is not None):
            forward.counts.served_bytes += record.num_bytes
        self._take_back(forward, until=forward.place_of(record) - _PASSED_OVER)

    def _in_place(self, handle: Handle) -> Tensor | None:
        """Return the tensor from the storage that it was saved from, if that is still there."""
        if handle.geometry is None:
            return handle.alias
        original = handle.record.original()
        return None if original is None else handle.over_original(original)

    def _fetch_now(self, record: Record) -> None:
        """Make a fetched copy of the record available to the current stream, whatever room there is."""
        ledger = self.ledger
        if record.residency in (Residency.COMING, Residency.BACK):
            if ledger.fetched_copy(record) is not None and record.fetched_on == self.device.current_stream():
                return
            if record.residency is Residency.COMING:
                ledger.take_back(record)
        try:
            ledger.fetch(record)
        except torch.OutOfMemoryError:
            self._drop_fetched()
            try:
                ledger.fetch(record)
            except torch.OutOfMemoryError as error:
                note_on(
                    error,
                    f'memkit: no room on the device for {format_mib(record.num_bytes)} that CPUOffload (tag "{self.tag}") '
                    "had moved to the host, also after all that was fetched ahead was dropped. Use a higher offload_ratio.",
                )
                raise

    def _drop_fetched(self) -> None:
        """Give up all that was fetched ahead, to make room for what cannot wait."""
        for forward in self._live_forwards():
            self._take_back(forward, until=None)
        self.ledger.release_dead(wait=True)
        self.ledger.settle_all()

    def _take_back(self, forward: Forward, *, until: int | None) -> None:
        """Drop what was fetched for places before `until` (None: any) and not asked for."""
        for record in list(self.ledger.coming):
            if record.owner is forward and (until is None or forward.place_of(record) < until):
                self.ledger.take_back(record)

    def _fetch_ahead(self, forward: Forward) -> None:
        """Fetch what the backward needs next, while there is room for it all the way to its use."""
        for record in forward.upcoming():
            if record.residency is Residency.HOST and record.original() is None:
                if not self._make_room_for(forward, record) or not self._is_turn_of(record):
                    return
                if not self._try_to_fetch(record):
                    return
            forward.advance()

    def _is_turn_of(self, record: Record) -> bool:
        self._is_asking = True
        is_turn = self._lanes.is_turn_of(self, record.tick)
        self._is_asking = False
        return is_turn

    def bring_until(self, tick: int) -> bool:
        """Fetch what is needed sooner than what was left at `tick`: see `memkit.transfer.lanes.Prefetcher`."""
        if self._is_asking or self.is_broken:
            return True  # another thread is at it, and perhaps waits for the one that asks
        return self._bring_until(tick)

    @mended
    def _bring_until(self, tick: int) -> bool:
        for forward in self._live_forwards():
            for record in forward.upcoming() if forward.task != -1 else ():
                if record.residency is Residency.HOST and record.original() is None:
                    if record.tick <= tick:
                        break
                    if not self._make_room_for(forward, record) or not self._try_to_fetch(record):
                        return False
                forward.advance()
        return True

    def _make_room_for(self, forward: Forward, record: Record) -> bool:
        """Tell whether a record may be fetched ahead of its use, if need be once what is dead is gone."""
        if not self._has_room(forward, record):
            self.ledger.release_dead(wait=True)
        return self._has_room(forward, record)

    def _try_to_fetch(self, record: Record) -> bool:
        try:
            self.ledger.fetch(record)
        except torch.OutOfMemoryError:
            return False  # it may be needed less soon than what took the room
        return True

    def _has_room(self, forward: Forward, record: Record) -> bool:
        """Tell whether a record may be fetched ahead of its use.

        Where the levels of the backward are known, it may if that does not raise the step's peak, and then a window more may be
        on the device than in the forward.
        """
        live_bytes, limit_bytes = self.ledger.moving_bytes + record.num_bytes, self.limit_bytes
        forecast = forward.forecast if self._counter is not None and len(self._live_forwards()) == 1 else None
        if forecast is None:
            return live_bytes <= limit_bytes
        if live_bytes > limit_bytes + forward.so_far.window_bytes:
            return False
        return forecast.level_bytes(forward.num_used - 1, forward.place_of(record), live_bytes) <= forecast.peak_bytes

    @mended
    def _end_backward(self, forward: Forward, task: int) -> None:
        """A backward has ended well."""
        self.ledger.sweep()
        if forward.task == task:
            self._take_back(forward, until=None)
            forward.end_backward()
            self.ledger.release_dead(wait=True)  # what was served: its copy was made in the forward, and is long done
        self.settle()

    @mended
    def settle(self) -> None:
        """Take up what has died, and free what waited for copies that are done."""
        self.ledger.sweep()
        self.ledger.release_dead(wait=False)
        if self in _retired and self.arena.in_use_bytes == 0:
            self.arena.close()
            if self.arena.held_bytes == 0:
                _retired.discard(self)

    @mended
    def retire(self) -> None:
        """Give the host memory back, at once or when the last graph and the last copy that need it are gone."""
        _retired.add(self)
        self.ledger.sweep()
        self.ledger.release_dead(wait=True)
        self.ledger.settle_all()
        self.settle()


_retired: set[OffloadWindow] = set()
"""Windows without a tag whose host memory somebody still uses, perhaps only a copy."""


def settle_retired() -> None:
    """Give back what has become free since."""
    for window in tuple(_retired):
        window.settle()


def _key_of(tensor: Tensor, storage: torch.UntypedStorage) -> SaveKey:
    return SaveKey(storage.nbytes(), tuple(tensor.shape), _dtype_name(tensor.dtype))


def _dtype_name(dtype: torch.dtype) -> str:
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name
