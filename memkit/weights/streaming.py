"""Brings the weights of layers to the device, when they are used and ahead of that.

[Note: interrupts of streaming] Ctrl-C may come ahead of any line. If the training loop goes on, its results are exact.

- *Open before begun, forgotten last*: a call of a layer, a backward, the users of a slot (`LayerChunk.uses`). The next forward,
  `state_dict`, `gather` or `close` ends all that an interrupt has left open.
- *Held before issued.* The memory that a copy reads or writes is held, and marked as in flight, before the copy is put on a
  lane. If no event was noted behind it, the host waits for the whole device before the memory goes.
- *A slot that is written to is the truth from before the write on*, until the write to the host copy is noted. So a stepped
  parameter has its new weights in host memory, and any other has the old ones.
- *Constructors set no hooks.* `LayerOffload` knows the object before it `begin`s, so that its `close` undoes all of it.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkit.core import backwards, torch_private
from memkit.core.hooks import HookPair, SavedTensorHooks
from memkit.core.kept import FlattenedHandle, ForwardedHandle, KeptHandle, modified_error, nothing
from memkit.core.owners import StreamedWeights
from memkit.core.tensors import PLAIN_TYPES, Geometry, parts_of
from memkit.core.torch_state import NO_LABEL, has_own_dispatch, label, sharing_counters, unseen
from memkit.device.base import Device, Event, Stream
from memkit.errors import LayerOffloadError
from memkit.plan.chunks import Residency
from memkit.transfer.lanes import Transfer, lanes_of
from memkit.weights.chunks import LayerChunk
from memkit.weights.host_copies import DiskCopies
from memkit.weights.slots import Slot, SlotRing

_STRIDED = torch.strided
_DIRTY = Residency.DIRTY
_MOST_VIEWS = 1024  # at most this many views of a slot are kept for the next use
_MOST_NOTED, _MOST_PENDING = 4096, 256
_MOST_KNOWN_AHEAD = 512


class StreamedHandle(KeptHandle):
    """A saved parameter in a slot, or a view of one. It does not keep the slot: unpacking fetches the layer again."""

    def __init__(self, streamer: Streamer, tensor: Tensor) -> None:
        super().__init__(tensor)
        slot = streamer.ring.at(tensor.untyped_storage())
        assert slot is not None
        assert slot.chunk is not None
        self._streamer = streamer
        if streamer.handles is not None:
            streamer.handles.add(self)
        self._chunk = slot.chunk
        self._num_changes = slot.chunk.num_changes
        self._geometry = Geometry.of(tensor)
        self.alias.data = nothing(tensor.dtype, tensor.device)

    @property
    def size(self) -> torch.Size:
        return self._geometry.size

    @property
    def version_now(self) -> int:
        return super().version_now + self._chunk.num_changes - self._num_changes

    def unpack(self) -> Tensor:
        self.check_version()
        return self._geometry.over(self._streamer.use(self._chunk).storage)


class SavedWeight(tuple[Any, ...]):
    """A weight in a slot, as autograd saves it: (layer, parameter, its version plus `num_changes`, geometry)."""

    __slots__ = ()


class Lying(NamedTuple):
    chunk: LayerChunk
    slot: Slot
    stream_number: int
    state: object  # the slot's `state` when this was made: while that is the identical object, the slot was not filled again


class _HandedOn(tuple[Any, ...]):
    """(unpack hook, result of the pack hook) for a tensor that was given to outer hooks."""

    __slots__ = ()


class _Saves:
    """Pack and unpack hooks of streamed layers' forwards; `outer` hooks get weights as well if `hands_on_weights`."""

    def __init__(self, streamer: Streamer, outer: HookPair | None, *, hands_on_weights: bool) -> None:
        self._streamer = streamer
        self._ring = streamer.ring
        self._outer = outer
        self._hands_on_weights = outer is not None and hands_on_weights
        self._stream_number, self._takes_notes = streamer.device.stream_number, streamer.device.takes_notes

    def pack(self, tensor: Tensor) -> Any:
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not _STRIDED:
            return self._pack_any(tensor)
        address, slot = tensor.data_ptr(), None  # 0 where there are no bytes
        if not address or bisect(self._ring.bounds, address) % 2:
            slot = self._ring.slots.get(torch_private.storage_address(tensor.untyped_storage()))
        if slot is None:
            if self._outer is None:
                return tensor.detach(), torch_private.version_of(tensor)
            pack, unpack = self._outer
            return _HandedOn((unpack, pack(tensor)))
        chunk, parameter = slot.chunk, torch_private.base_of(tensor)
        if parameter is None:
            parameter = tensor
        is_any = self._hands_on_weights or self._streamer.handles is not None
        if is_any or chunk is None or id(parameter) not in chunk.binding.known:
            return self._pack_any(tensor)
        version = torch_private.version_of(parameter) + chunk.num_changes
        place = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
        return SavedWeight((chunk, parameter, version, place))

    def unpack(self, packed: Any) -> Any:
        kind = type(packed)
        if kind is tuple:
            alias, version = packed
            if torch_private.version_of(alias) != version:
                raise modified_error(alias, version)
            return alias
        if kind is _HandedOn:
            return packed[0](packed[1])
        if kind is not SavedWeight:
            return packed.unpack()
        chunk, parameter, version, place = packed
        version_now, streamer = torch_private.version_of(parameter) + chunk.num_changes, self._streamer
        if version_now != version:
            alias = nothing(place[3], streamer.device.torch_device)
            raise modified_error(alias, version, lambda: place[0], version_now)
        with streamer.lock:
            lying = streamer.lying
            if lying is not None and lying.chunk is chunk and not torch_private.num_dispatch_modes():
                slot = lying.slot
                if lying.stream_number == self._stream_number() and (
                    chunk.residency is _DIRTY or slot.state is lying.state or slot.state == chunk.state()
                ):
                    view = slot.tensors.get(place)
                    if view is not None or len(slot.tensors) < _MOST_VIEWS:
                        if self._takes_notes and (slot.stepped is None or chunk.residency is _DIRTY):
                            streamer.device.note_read(slot.storage)  # else no step writes to these bytes
                        return (slot.view(Geometry(*place)) if view is None else view).data
            return Geometry(*place).over(streamer.use(chunk).storage)

    def _pack_any(self, tensor: Tensor) -> KeptHandle:
        is_plain = type(tensor) in PLAIN_TYPES or not has_own_dispatch(tensor)
        parts = [tensor] if is_plain else parts_of(tensor) if torch_private.is_wrapper(tensor) else []
        if any(part.layout is _STRIDED and self._ring.at(part.untyped_storage()) is not None for part in parts):
            if not self._hands_on_weights:
                if not is_plain:
                    return FlattenedHandle(tensor, self._pack_any)
                with torch_private.without_python_dispatch():  # it is no part of the forward
                    return StreamedHandle(self._streamer, tensor)
            tensor = tensor.detach()  # the parameter itself leaves the slot before this is used
        if self._outer is not None:
            return ForwardedHandle(tensor, *self._outer, is_checked=False)
        return KeptHandle(tensor)


class WeightHooks(SavedTensorHooks):
    def __init__(self, streamer: Streamer, outer: HookPair | None = None, *, hands_on_weights: bool = False) -> None:
        saves = _Saves(streamer, outer, hands_on_weights=hands_on_weights)
        super().__init__(saves.pack, saves.unpack, owner=saves, hands_on=True)


class Stalls:
    """Seconds that the device has waited for each layer, read from events, as far as they are reached."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._seconds = list(seconds)
        self.pending: list[tuple[int, Event, Event]] = []

    def seconds(self) -> tuple[float, ...]:
        waiting = []
        for layer, start, end in self.pending:
            if end.is_reached():
                self._seconds[layer] += start.elapsed_s(end)
            else:
                waiting.append((layer, start, end))
        self.pending = waiting
        return tuple(self._seconds)


class UsePhase(Enum):
    FORWARD = "forward"  # in a forward that a backward may follow
    SAMPLING = "sampling"  # in a forward without grad mode
    BACKWARD = "backward"


class LayerOrder:
    """The order of one phase; `turns_back` says whether the layers are used again afterwards, in reverse."""

    def __init__(self, guess: Sequence[int], *, turns_back: bool) -> None:
        self._known = list(guess)
        self._turns_back = turns_back
        self.noted: list[int] = []
        self._place = -1
        self._ahead: dict[tuple[int, int], dict[int, int]] = {}

    def begin(self) -> None:
        if self.noted and self.noted != self._known:
            self._known, self._ahead = self.noted, {}
        self.noted, self._place = [], -1

    def expect(self, order: list[int]) -> None:
        if sorted(self._known) != sorted(order):
            self._known, self._ahead = order, {}

    def note(self, layer: int) -> Mapping[int, int]:
        if len(self.noted) < _MOST_NOTED:
            self.noted.append(layer)
        known, following = self._known, self._place + 1
        if following < len(known) and known[following] == layer:
            self._place = following
        else:
            places = (*range(following, len(known)), *range(min(following, len(known))))
            self._place = next((place for place in places if known[place] == layer), self._place)
        return self._ahead.get((self._place, layer)) or self.ahead(layer)

    def ahead(self, current: int) -> Mapping[int, int]:
        key = self._place, current
        found = self._ahead.get(key)
        if found is None:
            upcoming = self._known[self._place + 1 :]
            if self._turns_back:
                upcoming += reversed(self._known)
            layers = [layer for layer in dict.fromkeys(upcoming) if layer != current]
            if len(self._ahead) >= _MOST_KNOWN_AHEAD:
                self._ahead.clear()
            found = self._ahead[key] = {layer: place for place, layer in enumerate(layers)}
        return found

    def is_next(self, layer: int) -> bool:
        return self._known[self._place + 1 : self._place + 2] == [layer]


class Streamer:
    """Brings layers into slots, and owns the slots' storages. See [Note: interrupts of streaming].

    The layers expected next are fetched ahead, as far as slots are free that no layer needs sooner. A slot's bytes are good for
    the pass and its backward: before each new pass the slots forget, since not every write to a host copy can be seen.
    """

    is_active = True

    def __init__(
        self, device: Device, chunks: Sequence[LayerChunk], slot_bytes: Sequence[int], disk: DiskCopies | None = None
    ) -> None:
        self.device = device
        self.chunks = tuple(chunks)
        self.lock = threading.RLock()
        self.ring = SlotRing(device, slot_bytes, self)
        self.stalls = Stalls(0.0 for _ in self.chunks)
        self.transfers: list[Transfer] | None = None
        self.handles: weakref.WeakSet[StreamedHandle] | None = None
        self.h2d_bytes = 0
        self.num_fetches = 0
        self.num_demand_fetches = 0
        self._disk, self._lanes = disk, lanes_of(device)
        self._lanes.join(self)
        order = range(len(self.chunks))
        self._orders = {
            phase: LayerOrder(order[::-1] if phase is UsePhase.BACKWARD else order, turns_back=phase is UsePhase.FORWARD)
            for phase in UsePhase
        }
        self._current: LayerChunk | None = None
        self._phase = UsePhase.FORWARD
        self._ahead: Mapping[int, int] = {}
        self._in_backward: LayerChunk | None = None
        self.lying: Lying | None = None
        self._backward, self.backwards = -1, set[backwards.BackwardEnd]()  # the last whose end is seen, the ends to come
        self.is_closed = False

    def count_on(self, before: Streamer) -> None:
        self.h2d_bytes, self.num_fetches = before.h2d_bytes, before.num_fetches
        self.num_demand_fetches, self.ring.num_overflows = before.num_demand_fetches, before.ring.num_overflows
        waited_s = dict(zip(before.chunks, before.stalls.seconds(), strict=True))
        self.stalls = Stalls(waited_s.get(chunk, 0.0) for chunk in self.chunks)

    def counts(self) -> dict[str, Any]:
        return {
            "num_streamed": len(self.chunks),
            "streamed_bytes": sum(chunk.num_bytes for chunk in self.chunks),
            "slot_bytes": self.ring.num_bytes,
            "h2d_bytes": self.h2d_bytes,
            "num_fetches": self.num_fetches,
            "num_demand_fetches": self.num_demand_fetches,
            "num_overflows": self.ring.num_overflows,
            "stall_s": dict(zip((chunk.name for chunk in self.chunks), self.stalls.seconds(), strict=True)),
        }

    def is_continued_by(self, first: LayerChunk | None) -> bool:
        return first is not None and self._current is not None and self._orders[self._phase].is_next(first.position)

    def begin_pass(self) -> None:
        with torch_private.without_python_dispatch(), self.lock:
            self.rest()
            self.invalidate()
            self._current = None
            if len(self.stalls.pending) > _MOST_PENDING:
                self.stalls.seconds()  # reads those that are reached
            for phase in (UsePhase.FORWARD, UsePhase.SAMPLING):
                self._orders[phase].begin()
            self._phase = UsePhase.FORWARD if torch.is_grad_enabled() else UsePhase.SAMPLING
            self._ahead = self._orders[self._phase].ahead(-1)
            self._prefetch()

    def use(self, chunk: LayerChunk) -> Slot:
        with unseen(self.lock) if torch_private.num_dispatch_modes() else self.lock:
            if self.is_closed:
                raise LayerOffloadError(
                    f'the weights of "{chunk.name}" do not stream any more: its LayerOffload is closed. Run the backward before'
                )
            if torch_private.backward_task() == -1:
                phase = UsePhase.FORWARD if torch.is_grad_enabled() else UsePhase.SAMPLING
            else:
                phase = UsePhase.BACKWARD
                if self._phase is not phase:  # a backward begins, which expects the layers in reverse
                    self._orders[phase].begin()
                    self._orders[phase].expect(self._orders[self._phase].noted[::-1])
            if chunk is not self._current or phase is not self._phase:
                if self._in_backward is not None:
                    self.rest()
                self._current, self._phase = chunk, phase
                self._ahead = self._orders[phase].note(chunk.position)
                if len(self.ring.slots) > self.ring.num_planned:
                    self.ring.sweep(chunk)
            slot = chunk.slot
            if slot is None or slot.state != (chunk.num_changes, *chunk.binding.versions()) or slot.chunk is not chunk:
                slot = self.ring.holding(chunk) or self._demand(chunk)
            stream = self.device.current_stream()
            if stream not in slot.users:
                self._wait(slot, chunk, stream)
            slot.users[stream] = None
            if slot.stepped is not None and chunk.residency is not Residency.DIRTY:
                slot.await_steps(stream)
            self.device.note_read(slot.storage)
            self._prefetch()
            return slot

    def begin_backward(self, chunk: LayerChunk) -> None:
        """Begin the backward of a layer: its parameters lie in the slot, for functions and checkpoints that need them."""
        with torch_private.without_python_dispatch(), self.lock:
            if self.is_closed or self._in_backward is chunk or not chunk.is_on_host:
                return
            if self._backward != torch_private.backward_task():
                backwards.on_end(lambda _: self.rest(), among=self.backwards)
                self._backward = torch_private.backward_task()
            slot = self.use(chunk)
            self._in_backward = chunk
            slot.lend(chunk, use=self)
            self.lying = Lying(chunk, slot, self.device.stream_number(), slot.state)

    def is_in_forward(self, chunk: LayerChunk) -> bool:
        return len(chunk.uses) > (self in chunk.uses)

    def rest(self) -> None:
        with torch_private.without_python_dispatch(), self.lock:
            chunk, lying, self.lying = self._in_backward, self.lying, None
            if chunk is not None:
                is_there = lying is not None and lying.slot.state == (chunk.num_changes, *chunk.binding.versions())
                if not is_there and chunk.uses == {self} and self.ring.holding(chunk) is None:  # the parameters were written to
                    chunk.write_back()
                self.leave(chunk, use=self)
                self._in_backward = None

    def leave(self, chunk: LayerChunk, *, use: object) -> None:
        with unseen(self.lock) if torch_private.num_dispatch_modes() else self.lock:
            if torch_private.backward_task() == -1:
                chunk.use_order = self._lanes.next_use()
            chunk.uses.discard(use)
            if chunk.uses:  # it runs on
                return
            device, stream = self.device, self.device.current_stream()
            for slot in self.ring.slots.values():  # the host copy may be written to from now on: no copy may be reading it
                if slot.chunk is chunk and not (slot.is_ready or slot.ready is None or slot.ready.is_reached()):
                    device.synchronize(slot.ready)
            binding = chunk.binding
            if binding.wrappers or torch_private.num_dispatch_modes() or torch.is_inference_mode_enabled():
                binding.unbind()
            else:
                deque(binding.set_data(binding.host_copies), maxlen=0)
            for slot in self.ring.slots.values():
                if slot.chunk is chunk:  # a held slot may be used until its holder lets go, which gives no event
                    if slot.stepped is None:
                        device.note_read(slot.storage)
                    is_held = torch_private.num_storage_users(slot.key) > 1 + len(slot.tensors)
                    slot.users[stream] = None if is_held else device.record_event(stream, timed=False)

    def _wait(self, slot: Slot, chunk: LayerChunk, stream: Stream) -> None:
        assert slot.ready is not None
        slot.is_ready = slot.ready.is_reached()
        start = None if slot.is_ready else self.device.record_event(stream)
        try:
            ready = slot.ready.recorded()
            if start is not None or torch_private.num_dispatch_modes():  # a mode may look for missing waits
                self.device.wait_event(stream, ready)
        except Exception:  # the copy has failed, and is not under way any more
            slot.fail()
            raise
        if chunk.residency is Residency.IN_FLIGHT:
            chunk.residency = Residency.DEVICE
        if start is not None:
            self.stalls.pending.append((chunk.position, start, self.device.record_event(stream)))

    def _demand(self, chunk: LayerChunk) -> Slot:
        slot = self.ring.find_idle(chunk, self._ahead, 0, None)
        if slot is None:
            self.ring.await_copies()
            slot = self.ring.find_idle(chunk, self._ahead, 0, None) or self.ring.overflow(chunk)
        self.num_demand_fetches += 1
        self._fetch(chunk, slot)
        return slot

    def bring_until(self, use_order: int) -> bool:
        is_free = False
        try:
            is_free = self.lock.acquire(blocking=False)
            if not is_free:
                return True  # another thread is at it, and perhaps waits for the one that asks
            with torch_private.without_python_dispatch():
                return self.is_closed or self._phase is not UsePhase.BACKWARD or self._prefetch(until=use_order)
        finally:
            if is_free:
                self.lock.release()

    def _prefetch(self, *, until: int | None = None) -> bool:
        """Fetch the layers expected next, with `until` those needed before that use. Return whether all had a slot."""
        current, ring, ahead, disk = self._current, self.ring, self._ahead, self._disk
        most = len(ahead)
        if disk is not None:
            disk.read_ahead(chunk for chunk in map(self.chunks.__getitem__, ahead) if ring.holding(chunk) is None)
        if until is None:  # as many as there are slots; without overflow slots, one is the current layer's
            most = ring.num_planned - (current is not None and len(ring.slots) == ring.num_planned)
        for position, place in ahead.items():
            chunk = self.chunks[position]
            if place == most or (until is not None and chunk.use_order <= until):
                return True
            there = chunk.slot  # whether it was written to since is asked when it is used
            if there is not None and there.chunk is chunk and (there.state is not None or chunk.residency is Residency.DIRTY):
                continue
            is_alone = until is not None or self._phase is not UsePhase.BACKWARD or len(self._lanes.prefetchers) == 1
            if not is_alone and not self._lanes.bring_sooner(self, chunk.use_order):
                return False
            slot = ring.find_idle(chunk, ahead, place, current)
            if slot is None or (disk is not None and not disk.is_here(chunk)):
                return False
            self._fetch(chunk, slot)
        return True

    def _fetch(self, chunk: LayerChunk, slot: Slot) -> None:
        span = chunk.span if self._disk is None else self._disk.bring(chunk)
        assert span is not None
        with label(f"fetch ({chunk.name})") if torch_private.profiler_is_on() else NO_LABEL:
            done = slot.fill(chunk, span, self._lanes, self.transfers)
        if self._disk is not None:
            self._disk.note_sent(done)
        self.h2d_bytes += chunk.num_bytes
        self.num_fetches += 1

    def write_back(self, chunk: LayerChunk) -> Event:
        def copy(storage: torch.UntypedStorage, after: Event) -> Event:
            assert chunk.span is not None
            return self._lanes.copy_out(storage, chunk.span, after=after).done

        with self.lock:
            slot = next(slot for slot in self.ring.slots.values() if slot.chunk is chunk and slot.is_dirty)
            chunk.written = slot.write_back(copy)
            return chunk.written

    def flush(self) -> None:
        with torch_private.without_python_dispatch(), self.lock:
            for slot in self.ring:
                if slot.is_dirty and slot.chunk is not None:
                    with suppress(Exception):  # if a copy fails, the slot's bytes are lost, and the step raises it
                        self.write_back(slot.chunk)
                    slot.chunk.become(Residency.DEVICE)
            for chunk in self.chunks:
                if not chunk.uses and any(self.ring.at(tensor.untyped_storage()) for tensor in chunk.binding.tensors):
                    chunk.binding.unbind()
                if chunk.span is not None and chunk.span.staging is not None:
                    chunk.span.staging.drain()
            if self._disk is not None:
                self._disk.drain()
            self.device.synchronize()

    def invalidate(self) -> None:
        with self.lock:
            self.ring.invalidate()
            if self._disk is not None:
                self._disk.invalidate()

    def lend(self, tensor: Tensor) -> Callable[[], Tensor]:
        with sharing_counters(), torch_private.without_python_dispatch(), torch.no_grad():
            return StreamedHandle(self, tensor).unpack

    def streamed(self) -> StreamedWeights:
        items = [item for chunk in self.chunks for item in chunk.parameters]
        with self.lock:
            return StreamedWeights(
                layers=tuple(chunk.module for chunk in self.chunks),
                parameters=tuple(parameter for item in items for parameter in item.current_parameters()),
                slots=tuple(slot.storage for slot in self.ring if not slot.is_overflow),
            )

    def close(self) -> None:
        backwards.join(self.backwards)
        with self.lock:
            self.is_closed = True
            self.rest()
            self.device.synchronize()
            self.ring.close()
