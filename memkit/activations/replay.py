"""Runs ops of a recording again, exactly: the saved values of one forward that are on the device or can be made again.

A replay runs in the backward, on its stream and device, without grad mode, modes, hooks, autocast or transforms (as the `vmap`
of batched gradients is): what was recorded lies below all of these. Random ops draw from the state that their generator had in
the forward, and leave no trace in it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.activations.counts import Counts
from memkit.activations.eligibility import counted_by
from memkit.activations.forward import Forward
from memkit.activations.ledger import Ledger
from memkit.activations.recorded import Call, tensor_of, tensors_in
from memkit.activations.recording import Recording
from memkit.activations.records import Handle, Record, Residency
from memkit.activations.settings import current_settings, with_settings
from memkit.activations.window import OffloadWindow
from memkit.device.base import Stream
from memkit.errors import ReplayMismatchError, note_on
from memkit.kept import KeptHandle
from memkit.labels import label
from memkit.plan import NO_OP, Action, DTRScore, Walk
from memkit.sizes import format_mib
from memkit.storages import byte_view, storage_key


@functools.cache
def _vmap_mode() -> Any:
    """Return the layer that is on while gradients are batched: it refuses every random op, whatever that is given."""
    return torch_private.DispatchKeySet(torch_private.key_named("VmapMode"))


class Run:
    """The saved values of one forward.

    Args:
        recording: what made them.
        window: where their records are.
        score: who goes when room is short.
        limit_bytes: what they and the replays may take on the device.
        counts: what is done is counted there.
        begin: told when a backward begins to ask: which run, and autograd's number of the backward.
    """

    def __init__(
        self,
        recording: Recording,
        window: OffloadWindow,
        score: DTRScore,
        limit_bytes: float,
        counts: Counts,
        begin: Callable[[Run, int], None],
    ) -> None:
        self.lineage = recording.lineage
        self.walk = Walk(recording.lineage, score, limit_bytes, store=self)
        self.recording = recording
        self.counts = counts
        self.trace: object = None
        """What is known of forwards like this one."""
        self.window = window
        self._begin = begin
        self.is_forward = True
        self.saves: list[int] = []
        """The value of each save that counts."""
        self.uses: list[int] = []
        """The value of each request of the first backward."""
        self.save_nodes: list[int] = []
        self.use_nodes: list[int] = []
        """The numbers of the nodes that save, and that ask."""
        self.forward: Forward | None = None
        """What leaves for host memory, in their order; None as long as nothing does."""
        self.marks = dict[int, Action]()
        """What the user has asked to do with values."""
        self.offered_bytes = 0
        """Bytes of what may leave for host memory, since this context does not drop it."""
        self.task = -1
        """Autograd's number of the backward that asks now; -1 before the first."""
        self._records: dict[int, weakref.ref[Record]] = {}
        self.others: dict[int, weakref.ref[KeptHandle]] = {}
        """What else is saved: small values, and those that may leave for host memory."""
        self._offered: dict[tuple[int, int, int], int] = {}
        """Which value another context was given: by the storage's key, the tensor that counts writes to it, and its count."""
        self._secured: dict[int, bool] = {}
        self._dropped = set[int]()
        self._temps: dict[int, torch.UntypedStorage] = {}
        self._saved_at: dict[int, int] = {}
        self._streams: dict[Stream, None] = {}
        self._places: dict[int, list[int]] = {}
        self._awaited: list[int] = []
        """Saved values, up to the latest that may still be asked for."""
        self._now = 0
        self._has_other_settings = False

    @property
    def ledger(self) -> Ledger:
        """The records."""
        return self.window.ledger

    # Forward

    def note_save(self, value: int, node: int) -> None:
        """Note one more save of a value that counts, by a node of the graph."""
        self.walk.clock += 1
        self._saved_at[value] = len(self.saves)
        self.saves.append(value)
        self.save_nodes.append(node)

    def note_offer(self, value: int, tensor: Tensor) -> bool:
        """Note that a tensor may leave for host memory; tell whether all bytes of the value in its storage do so with it.

        They may have left before, when this tensor was as it is and other parts of the storage were not: see `counted_by`.
        """
        key = storage_key(tensor.untyped_storage()), id(counted_by(tensor)), torch_private.version_of(tensor)
        return self._offered.setdefault(key, value) == value

    def record_of(self, value: int) -> Record | None:
        """Return the record of a value, if a graph may still ask for it."""
        reference = self._records.get(value)
        record = None if reference is None else reference()
        return record if record is not None and record.num_handles > 0 else None

    def is_saved(self, value: int) -> bool:
        """Tell whether a value that counts was saved before."""
        return value in self._saved_at

    def note_record(self, value: int, record: Record) -> None:
        """A value has a record from now on."""
        self._records[value] = weakref.ref(record)
        self._streams[record.stream] = None

    def moved_values(self) -> frozenset[int]:
        """Return the values that have left for host memory by the context outside."""
        handles = ((value, reference()) for value, reference in self.others.items())
        return frozenset(value for value, handle in handles if isinstance(handle, Handle) and handle.record.left is not None)

    def records(self) -> Iterator[tuple[int, Record]]:
        """Yield the values that a graph may still ask for, with their records."""
        for value in list(self._records):
            record = self.record_of(value)
            if record is not None:
                yield value, record

    # Backward

    def begin_backward(self, task: int, order: Sequence[int] | None) -> None:
        """A backward begins to ask, in an order that is known or guessed as the reverse of the saves."""
        self.task = task
        self.compare_settings()
        self._now = 0
        self._places.clear()
        for place, value in enumerate(reversed(self.saves) if order is None else order):
            self._places.setdefault(value, []).append(place)
        for _, record in self.records():
            self.ledger.expect(record)
        self._awaited = sorted(self._records)

    def compare_settings(self) -> None:
        """Tell replays whether they must change what is set for the process: looked at once for each backward."""
        self._has_other_settings = current_settings() != self.recording.settings

    def note_request(self, record: Record, node: int) -> None:
        """A node of the graph asks for a record."""
        task = torch_private.backward_task()
        if task == -1:
            return
        if self.task != task:
            self._begin(self, task)
        self._note_use(record.value, node)

    def note_last_use(self, record: Record) -> None:
        """The backward is about to be given a record that it will not ask for again, as far as is known."""
        self.walk.evictable.pop(record.value, None)

    def _note_use(self, value: int, node: int) -> None:
        self.walk.clock += 1
        self.uses.append(value)
        self.use_nodes.append(node)
        while self._awaited and self.record_of(self._awaited[-1]) is None:
            self._awaited.pop()
        anchors = self.recording.anchors
        while anchors and (not self._awaited or next(reversed(anchors)) > self._awaited[-1]):
            self.recording.release(next(reversed(anchors)))  # nothing that is made from it will be asked for
        place = next((place for place in self._places.get(value, ()) if place >= self._now), None)
        self._now = self._now + 1 if place is None else place + 1

    # As the store of its walk

    @property
    def live_bytes(self) -> int:
        ledger = self.window.ledger
        return ledger.live_bytes - ledger.moving_bytes + self.recording.held_bytes

    def is_available(self, value: int) -> bool:
        record = self.record_of(value)
        if record is not None and (self._has_copy(record) or self._storage_of_record(record) is not None):
            return True
        if record is not None and record.residency is Residency.DROPPED:
            return False
        if self.lineage.maker[value] == NO_OP or value in self.recording.pinned:
            return True
        anchor = self.recording.anchors.get(value)
        if anchor is not None and anchor.is_unchanged():
            return True
        return self.other(value) is not None

    def is_wanted(self, value: int) -> bool:
        record = self.record_of(value)
        return record is not None and record.num_awaiting > 0 and record.residency is Residency.DROPPED

    def distance(self, value: int) -> int:
        if self.task == -1:
            return len(self.saves) - self._saved_at.get(value, 0)
        for place in self._places.get(value, ()):
            if place >= self._now:
                return place - self._now + 1
        return len(self.saves) + 1

    def _has_copy(self, record: Record) -> bool:
        """Tell whether a record's bytes are in host memory, or on their way."""
        return record.span is not None and record.value not in self.recording.overwritten

    def _storage_of_record(self, record: Record) -> torch.UntypedStorage | None:
        """Return a storage that has the bytes of a record, None if none has."""
        if record.residency is Residency.BACK:
            return self.ledger.fetched_copy(record)
        if record.residency is Residency.DROPPED or record.value in self.recording.overwritten:
            return None  # if the original lives on, that may end while a replay makes room
        for handle in record.live_handles():
            if handle.is_unchanged():
                return handle.alias.untyped_storage() if handle.geometry is None else record.original()
        return None

    def other(self, value: int) -> KeptHandle | None:
        """Return the handle of a value that was saved and is no record of this context's, if a graph may still ask for it."""
        reference = None if value in self.recording.overwritten else self.others.get(value)
        handle = None if reference is None else reference()
        return handle if handle is not None and handle.is_unchanged() else None

    def _storage(self, value: int) -> torch.UntypedStorage:
        """Return a storage that has the bytes of a value that is available, or that the replay has made."""
        storage = self._temps.get(value)
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
        anchor = self.recording.anchors.get(value)
        if anchor is not None:
            return anchor.alias.untyped_storage()
        handle = handle or self.other(value)
        assert handle is not None
        return handle.unpacker.lend(handle) if isinstance(handle, Handle) else handle.unpack().untyped_storage()

    def secure(self, value: int) -> bool:
        """Hold all roots that a value is made from; tell whether it can be made again."""
        self.recording.sync()
        lineage, secured = self.lineage, self._secured
        found, pending = set[int](), [value]
        while pending:
            value_here = pending.pop()
            if value_here in found or value_here in secured:
                continue
            found.add(value_here)
            if lineage.maker[value_here] != NO_OP:
                pending.extend(lineage.ins[lineage.maker[value_here]])
        for value_here in sorted(found):  # what a value is made from comes before it
            maker = lineage.maker[value_here]
            if maker == NO_OP:
                secured[value_here] = self.recording.hold(value_here, counts=self.record_of(value_here) is None) or self._pin(
                    value_here
                )
            else:
                secured[value_here] = all(secured[source] or self._pin(source) for source in lineage.ins[maker])
        return secured[value]

    def _pin(self, value: int) -> bool:
        """Hold a value that cannot be made again, if it is there."""
        if value in self.recording.pinned:
            return True
        handle = self.other(value)
        record = None if value in self.recording.overwritten else self.record_of(value)
        if handle is None and record is not None:
            held = next((held for held in record.live_handles() if held.geometry is None and held.is_unchanged()), None)
            handle = None if held is None else KeptHandle(held.alias)  # the handle itself holds the record, and that the run
        if handle is None:
            return False
        self.recording.pinned[value] = handle
        return True

    def drop(self, value: int) -> bool:
        record = self.record_of(value)
        if record is None or record.residency is Residency.DROPPED or not self.secure(value):
            return False
        self.ledger.drop(record)
        if value not in self._dropped:
            self._dropped.add(value)
            self.counts.num_dropped += 1
            self.counts.dropped_bytes += record.num_bytes
        return True

    def keep(self, value: int) -> None:
        record = self.record_of(value)
        assert record is not None
        storage = self._temps.pop(value)
        if storage.nbytes() != record.num_bytes:
            raise ReplayMismatchError(
                f"a saved tensor had {record.num_bytes} bytes, and made again it has {storage.nbytes()} ({self._name(value)})"
            )
        self.ledger.restore(record, storage)

    def forget(self, value: int) -> None:
        self._temps.pop(value, None)

    def make_room(self) -> bool:
        """Drop values until the limit is kept to; tell whether it is."""
        self.recording.sync()
        return self.walk.make_room(0)

    # Running ops

    def make(self, record: Record) -> None:
        """DROPPED -> BACK: make a value again, for work on the current stream.

        Raises:
            RuntimeError: what it is made from was written to.
            torch.OutOfMemoryError: there is no room, also after all was dropped that can be.
            ReplayMismatchError: with verification, an op has made something else than in the forward.
        """
        if torch_private.backward_task() == -1:
            self.compare_settings()
        self.recording.sync()
        self.recording.see_versions()
        ledger, counts, walk = self.ledger, self.counts, self.walk
        ledger.expect(record)
        device = ledger.device
        start = device.record_event()
        ops_before, seconds_before = walk.num_replayed_ops, walk.replayed_s
        here = device.current_stream()
        others = [stream for stream in self._streams if stream != here]
        self._streams[here] = None
        for stream in others:  # what was made on them, and what was freed on them, comes before
            device.wait_event(here, device.record_event(stream, timed=False))
        try:
            settings = with_settings(self.recording.settings) if self._has_other_settings else nullcontext()
            with (  # an op is run as it was recorded: below autograd, autocast, transforms, modes and hooks
                torch_private.without_functions(),
                torch_private.without_dispatch_modes(),
                torch.no_grad(),
                torch_private.without_autocast(),
                torch_private.without_functorch(),
                torch_private.excluding_keys(_vmap_mode()),
                torch_private.without_autograd(),
                settings,
                label("replay"),
            ):
                walk.rebuild(record.value)
        finally:
            self._temps.clear()
            walk.temp_bytes = 0
            for stream in others:  # they may use the bytes again that the replay has read
                device.wait_event(stream, device.record_event(here, timed=False))
        counts.num_replays += 1
        counts.num_replayed_ops += walk.num_replayed_ops - ops_before
        counts.replayed_s += walk.replayed_s - seconds_before
        counts.replayed.add(start, device.record_event())
        counts.peak_bytes = max(counts.peak_bytes, walk.peak_bytes)

    def run(self, op: int, in_place: Collection[int]) -> None:
        call = self.recording.calls[op]
        try:
            self._repeat(call, op, in_place)
        except torch.OutOfMemoryError:
            for value in [value for value in self.walk.evictable if value not in self.walk.needed]:
                self.walk.drop(value)
            try:
                self._repeat(call, op, in_place)
            except torch.OutOfMemoryError as error:
                note_on(
                    error,
                    f"memkit: no room on the device to run {call.func} again ({self._name(self.lineage.outs[op][0])}, "
                    f"{format_mib(sum(call.outs_bytes))}), also after all that Rematerialize may drop was dropped.",
                )
                raise
        if self.recording.originals is not None:
            self._verify(op)

    def _repeat(self, call: Call, op: int, in_place: Collection[int]) -> None:
        """Run a call; what it makes is in `_temps` then."""
        notes = call.notes
        over = self._to_be_written(call, in_place) if notes is not None and notes.written else {}
        args = [_copied(argument) for argument in call.args]
        kwargs = {name: _copied(argument) for name, argument in (call.kwargs or {}).items()}
        for source in call.sources:
            key, value = source[0], source[1]
            storage = over.get(value)
            tensor = tensor_of(source, self._storage(value) if storage is None else storage)
            group: Any = args if isinstance(key, int) else kwargs
            if isinstance(key, tuple):
                name, key = key
                group = (args if isinstance(name, int) else kwargs)[name]
            group[key] = tensor
        draws = notes is not None and notes.generator is not None
        results = _draw(call, args, kwargs) if draws else call.func(*args, **kwargs)
        temps, outs = self._temps, self.lineage.outs[op]
        if notes is None:
            self._note_made(call, outs[0], results.untyped_storage())
            return
        made = tensors_in(results)
        for value, place in zip(outs, notes.places, strict=False):
            self._note_made(call, value, made[place].untyped_storage())
        for value, written in zip(outs[len(notes.places) :], notes.written, strict=True):
            if written in in_place:
                temps.pop(written, None)
            temps[value] = over[written]

    def _note_made(self, call: Call, value: int, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() != call.outs_bytes[value - call.first]:
            raise ReplayMismatchError(
                f"{self._name(value)} has made {call.outs_bytes[value - call.first]} bytes in the forward, and "
                f"{storage.nbytes()} when it was run again. Has a setting of torch changed meanwhile?"
            )
        self._temps[value] = storage

    def _to_be_written(self, call: Call, in_place: Collection[int]) -> dict[int, torch.UntypedStorage]:
        """Return the storages that a call writes to: those that the replay may write over, or copies, or new ones."""
        notes = call.notes
        assert notes is not None
        over: dict[int, torch.UntypedStorage] = {}
        sizes = call.outs_bytes[len(notes.places) :]
        for value, num_bytes in zip(notes.written, sizes, strict=True):
            if notes.is_whole:
                over[value] = self.ledger.device.allocate(num_bytes)
            elif value in in_place:
                over[value] = self._temps[value]
            else:
                over[value] = byte_view(self._storage(value)).clone().untyped_storage()
        return over

    def _verify(self, op: int) -> None:
        """Compare what an op has made with what it made in the forward."""
        originals = self.recording.originals
        assert originals is not None
        for value in self.lineage.outs[op]:
            if value in originals and not torch.equal(byte_view(self._temps[value]).cpu(), originals[value]):
                raise ReplayMismatchError(
                    f"{self._name(value)} has made something else than in the forward when it was run again (value {value} "
                    "of the step). Is it deterministic, and is all that writes to its inputs a torch op? If not, mark what it "
                    "makes with memkit.keep."
                )

    def _name(self, value: int) -> str:
        """Return what a person would call a value."""
        maker = self.lineage.maker[value]
        if maker == NO_OP:
            return "a root"
        module = self.recording.modules.get(maker)
        op = str(self.recording.calls[maker].func)
        return f"{op} in {module}" if module else op


def _copied(argument: Any) -> Any:
    """Return an argument that may be filled with tensors."""
    return list(argument) if type(argument) is list else argument


def _draw(call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a random op with what its generator gave in the forward, and leave the generator as it is."""
    notes = call.notes
    assert notes is not None
    generator, state = notes.generator, notes.state
    assert generator is not None
    assert state is not None
    now, is_as_before = generator.get_state(), False
    try:
        try:
            generator.set_state(state)
            return call.func(*args, **kwargs)
        finally:
            generator.set_state(now)
            is_as_before = True
    finally:
        if not is_as_before:  # an interrupt came in between
            generator.set_state(now)
