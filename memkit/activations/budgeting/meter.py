"""`Meter` measures one step: seconds, and the allocator's peak at each op of the forward and between requests of the backward.
Bytes are the plain step's: those freed for the budget are added, memkit's own subtracted, so a step can be measured under a
budget."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.activations.saved.records import ON_DEVICE, Handle, Record
from memkit.core import torch_private
from memkit.core.compiled import AHEAD_OF_COMPILED_S
from memkit.core.torch_state import dynamo_is_loaded
from memkit.plan import NO_OP, Lifetime, OpKind, OpWork, Step, StepTrace, ends_of
from memkit.recording.recorded import tensors_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memkit.activations.budgeting.planned_forward import PlannedForward
    from memkit.device.base import Device, Event, MemoryCounter
    from memkit.plan import GpuSpec

_OPAQUE = "a compiled block"
_PYTHONS = 1
"""A storage's own Python object counts for so many users."""


class Meter:
    def __init__(self, device: Device, counter: MemoryCounter | None, forward: PlannedForward) -> None:
        self._device, self._counter = device, counter
        self._forward = weakref.proxy(forward)
        self._window = window = forward.window
        self.lend, self.change = window.lend, window.change
        self.base_bytes = 0 if counter is None else counter.allocated_bytes()
        self.live_bytes: list[int] = []
        """Bytes beyond the base, in the plain step: the peak during each op of the forward, then up to the first request of the
        backward, then from each request to the next, or to the end."""
        self.names: list[str] = []
        self.op_places: list[int] = []
        self.save_places: list[int] = []
        self.released: dict[int, int] = {}
        """For each value made by an op, the first op during which only autograd and memkit hold it."""
        self.is_whole = False
        self.num_forward_ops = 0
        self.uses: tuple[int, ...] = ()
        self.use_ends: tuple[int, ...] = ()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._events: list[tuple[Event, Event]] = []
        self._begun: Event | None = None
        self._may_be_opaque = dynamo_is_loaded()
        self._last = self._begin_opaque()
        """The end of the last op. An unrecorded region, such as a compiled block, may begin here."""
        self._opaque = set[int]()
        self._opaque_times: list[tuple[int, list[tuple[Event, Event]]]] = []
        self._since: list[tuple[Event, Event]] = []
        """Start and end of spans since the last op, without the time of saves."""
        self._beside_bytes = 0
        if counter is not None:
            counter.reset_peak()

    # Forward

    def _begin_opaque(self) -> Event:
        return self._device.record_begin(AHEAD_OF_COMPILED_S) if self._may_be_opaque else self._device.record_event()

    def begin_op(self) -> None:
        self._note_released()
        if self._counter is not None:
            self._counter.reset_peak()  # bytes that a save has dropped by now count once

    def _note_released(self) -> None:
        for value, reference in [*self._alive.items()]:
            storage = reference()
            if storage is None or self._is_released(value, storage):
                self.released[value] = len(self.live_bytes)
                del self._alive[value]
        self._note_beside()

    def end_op(self, name: str, results: Any) -> None:
        recording = self._forward.recording
        place, num_calls = len(self.live_bytes), len(self.op_places)
        self._note_peak()
        self.names.append(name)
        self.op_places += [place] * (len(recording.calls) - num_calls)
        for tensor in tensors_in(results):
            found = recording.current.get(torch_private.storage_address(tensor.untyped_storage()))
            if found is not None and found[1] not in self._alive and found[1] not in recording.roots:
                self._alive[found[1]] = found[0]
        self._since = []
        self._last = self._begin_opaque()

    def begin_save(self) -> None:
        if self._may_be_opaque:
            self._since.append((self._last, self._device.record_event()))

    def end_save(self) -> None:
        forward = self._forward
        value = forward.saves[-1]
        if value in forward.recording.roots and value not in self._opaque:
            self._opaque.add(value)
            self._end_opaque(value, forward)
        self.save_places.append(len(self.live_bytes))
        if self._may_be_opaque:
            self._last = self._begin_opaque()

    def _end_opaque(self, value: int, forward: PlannedForward) -> None:
        """Count the unrecorded maker of a saved value, such as a compiled block, as an op."""
        self._note_released()
        self._opaque_times.append((len(self.live_bytes), self._since))
        self._note_peak()
        self.names.append(_OPAQUE)
        self._since = []
        if (record := forward.record_of(value)) is not None:
            self._alive[value] = record.original

    def end_forward(self) -> None:
        place = len(self.live_bytes)
        for value in self._alive:
            self.released.setdefault(value, place + 1)
        self._alive.clear()
        self.num_forward_ops = place
        self._note_beside()
        if self._counter is not None:
            self._counter.reset_peak()  # what was let go behind the last op counts once
        self._begun = self._device.record_begin()

    def _is_released(self, value: int, storage: torch.UntypedStorage) -> bool:
        record = self._forward.record_of(value)
        if record is None:
            return False
        held = sum(handle.geometry is None for handle in record.live_handles()) + (record.storage is not None)
        return held > 0 and torch_private.num_storage_users(torch_private.storage_address(storage)) <= held + _PYTHONS

    # Backward

    def unpack(self, handle: Handle) -> Tensor:
        is_asked = torch_private.backward_task() != -1
        if is_asked and self._begun is not None:
            self._note_peak()
            self._events.append((self._begun, self._device.record_event()))
            self._begun = None
        tensor = self._window.unpack(handle)
        if is_asked and self._begun is None and not self.is_whole:
            self._note_beside()
            if self._counter is not None:
                self._counter.reset_peak()
            self._begun = self._device.record_begin()
        return tensor

    def end_backward(self) -> None:
        if self._begun is not None and self._events:
            self._note_peak()
            self._events.append((self._begun, self._device.record_event()))
            self.uses, self.use_ends = tuple(self._forward.uses), ends_of(self._forward.use_nodes)
            self._begun, self.is_whole = None, len(self.uses) + 1 == len(self._events)

    def seconds(self, step: Step) -> list[float]:
        """Return the seconds of all ops of the forward, to the first request, and between requests. The host waits."""
        self._device.synchronize()
        found = [0.0] * self.num_forward_ops
        for place, taken_s in zip(self.op_places, step.lineage.seconds, strict=True):
            found[place] += taken_s
        for place, times in self._opaque_times:
            found[place] += sum(begin.elapsed_s(end) for begin, end in times)
        return found + [begin.elapsed_s(end) for begin, end in self._events]

    # Bytes

    def _note_peak(self) -> None:
        counter = self._counter
        if counter is None:
            forward = self._forward
            there_bytes = sum(record.num_bytes for record in forward.records() if _is_there(record)) + forward.extra_bytes
            self.live_bytes.append(there_bytes + self._beside_bytes)
            return
        self.live_bytes.append(max(counter.peak_bytes() - self.base_bytes + self._beside_bytes, 0))
        counter.reset_peak()

    def _note_beside(self) -> None:
        """Note the bytes that only the plain step would have on the device, less those that only memkit holds."""
        forward = self._forward
        gone_bytes = sum(record.num_bytes for record in forward.records() if not _is_there(record))
        self._beside_bytes = gone_bytes - forward.extra_bytes


def _is_there(record: Record) -> bool:
    return record.residency in ON_DEVICE or record.original() is not None


# The trace of a measured step


def observed_trace(meter: Meter, step: Step, names: Mapping[int, tuple[str, str]], *, target: str, min_bytes: int) -> StepTrace:
    """Return a measured step as a trace. Its backward has one op for each interval between two requests."""
    lineage, num_forward = step.lineage, meter.num_forward_ops
    num_ops = len(meter.live_bytes)
    first_request = num_forward + 1
    use_places = tuple(first_request + request for request in range(len(step.uses)))
    last_use = {value: request for request, value in enumerate(step.uses)}
    saved_at: dict[int, int] = {}
    for value, place in zip(step.saves, meter.save_places, strict=True):
        saved_at.setdefault(value, place)
    lifetimes: dict[int, Lifetime] = {}
    for value in (*saved_at, *(value for value in meter.released if value not in saved_at)):
        maker = lineage.maker[value]
        if maker == NO_OP and value not in saved_at:
            continue
        made = max(saved_at[value] - 1, 0) if maker == NO_OP else meter.op_places[maker]
        if value in saved_at:
            freed = min(first_request + step.use_end(last_use[value]), num_ops) if value in last_use else num_ops
            released = min(meter.released.get(value, first_request), freed)
        else:
            if lineage.num_bytes[value] < min_bytes:
                continue
            freed = released = meter.released[value]
        lifetimes[value] = Lifetime(made_at=made, released_at=max(released, made), freed_at=max(freed, made))
    names_of_ops = [*meter.names, *["backward"] * (num_ops - num_forward)]
    return StepTrace(
        model="",
        inputs="",
        target=target,
        min_bytes=min_bytes,
        ops=tuple(OpWork(name=name, kind=OpKind.POINTWISE, flops=0.0, num_bytes=0, dtype="") for name in names_of_ops),
        num_forward_ops=num_forward,
        step=step,
        op_places=tuple(meter.op_places),
        save_places=tuple(meter.save_places),
        use_places=use_places,
        lifetimes=lifetimes,
        live_bytes=tuple(meter.live_bytes),
        base_bytes=meter.base_bytes,
        trainable_numel=0,
        trainable_bytes=0,
        names=dict(names),
    )


def is_other_link(link: GpuSpec, found: tuple[float, float], least: float) -> bool:
    planned = link.d2h_bytes_per_s, link.h2d_bytes_per_s
    return any(max(rate / known, known / rate) - 1 > least for rate, known in zip(found, planned, strict=True) if rate > 0)
