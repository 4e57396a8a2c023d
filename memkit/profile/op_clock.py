"""`OpClock`: numbers the ops of a traced step: what each does, the bytes on the device, and when storages are freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.modes import Mode
from memkit.plan import OpWork
from memkit.profile.op_work import work_of
from memkit.profile.storage_log import StorageLog
from memkit.profile.watch import LiveStorages, tensors_in
from memkit.recording.recording import Recording
from memkit.storages import storage_key, storages_of

if TYPE_CHECKING:
    from memkit.torch_private import OpOverload

_THERE_BEFORE = -1


class OpClock:
    """Numbers ops, and the storages that they make, from 0.

    Ops that return views are not counted: they neither compute nor move anything. The clock holds no tensor.

    Args:
        live: counts the bytes on the device.
        before: storages that exist before the step.
        recording: the recording of the forward's ops, if there is one. The clock's mode must be inside the recorder's.
        log: gets a moment for each op, if given; it is the observer of `live`.
    """

    def __init__(
        self,
        live: LiveStorages,
        before: Iterable[torch.UntypedStorage],
        recording: Recording | None = None,
        log: StorageLog | None = None,
    ) -> None:
        self._live = live
        self._log = log
        self._recording = recording
        self._before = list(before)  # held, so that no other storage can have their keys
        self._numbers: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {
            storage_key(storage): (weakref.ref(storage), _THERE_BEFORE) for storage in self._before
        }
        self._value_in: dict[int, int] = {}
        self.base_bytes = live.allocated_bytes()
        """Bytes on the device before the first op."""
        self.works: list[OpWork] = []
        self.live_bytes: list[int] = []
        """Bytes beyond `base_bytes` just after each op."""
        self.made_at: list[int] = []
        """For each storage, the op that made it."""
        self.freed_at: dict[int, int] = {}
        """For each freed storage, how many ops had run by then."""
        self.op_places: list[int] = []
        """For each op of the recording, its index among all ops."""
        self.values: dict[int, tuple[int, int]] = {}
        """For each value of the recording in a storage made here: the storage's number, and the op that made the value."""
        self.overwritten_at: dict[int, int] = {}
        """For each overwritten value, the op that wrote over it."""

    @property
    def now(self) -> int:
        """How many ops have run."""
        return len(self.works)

    def close(self) -> None:
        """Called at the end of the step."""
        self._before.clear()

    def end_forward(self) -> None:
        """Called at the end of the forward: later ops are not recorded."""
        self._recording = None

    def saw(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
        """Note an op that has run."""
        live, recording = self._live, self._recording
        before_bytes = live.allocated_bytes()
        live.saw(op, args, outputs)
        if self._log is not None:
            self._log.see_casts(op, args, outputs)
        num_made = len(self.made_at)
        for storage in _storages_in(outputs):
            self._number(storage)
        num_recorded = 0 if recording is None else len(recording.calls) - len(self.op_places)
        has_made = len(self.made_at) > num_made or live.allocated_bytes() > before_bytes
        if not (has_made or num_recorded or torch_private.schema_of(op).is_mutable):
            return
        if recording is not None:
            self.op_places += [self.now] * num_recorded
            for storage in _storages_in([args, list(kwargs.values()), outputs]):
                value = recording.find(storage)
                if value is not None:
                    self.note_value(value, storage)
        self.works.append(work_of(op, args, kwargs, outputs))
        self.live_bytes.append(live.allocated_bytes() - self.base_bytes)
        if self._log is not None:
            self._log.note_op(str(op))

    def see_saved(self, tensor: Tensor) -> None:
        """Note a tensor that autograd saves, since perhaps no op has shown it, as for one made from a list."""
        self._live.add(tensor)
        if self._log is not None:
            self._log.note_saved(tensor)

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage that an op has made; None for all others."""
        found = self._numbers.get(storage_key(storage))
        is_known = found is not None and found[0]() is storage and found[1] != _THERE_BEFORE
        return found[1] if is_known and found is not None else None

    def _number(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        found = self._numbers.get(key)
        if found is None or found[0]() is not storage:
            number = len(self.made_at)
            self.made_at.append(self.now)
            self._numbers[key] = (weakref.ref(storage, self._note_end(number)), number)

    def _note_end(self, number: int) -> Callable[[Any], None]:
        weak_self = weakref.ref(self)  # the callbacks live as long as the storages, which may outlive the trace

        def note(_: Any) -> None:
            clock = weak_self()
            if clock is not None:
                clock.freed_at[number] = clock.now

        return note

    def note_value(self, value: int, storage: torch.UntypedStorage) -> None:
        """Note that a storage has a value of the recording now."""
        number = self.number_of(storage)
        if number is None:
            return
        before = self._value_in.get(number)
        if before == value:
            return
        if before is not None:
            self.overwritten_at[before] = self.now
        self._value_in[number] = value
        self.values[value] = (number, self.made_at[number] if before is None else self.now)


class ClockMode(Mode):
    """The dispatch mode that reports each op to a clock, after it ran."""

    def __init__(self, clock: OpClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._clock = clock

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = op(*args, **(kwargs or {}))
        self._clock.saw(op, args, kwargs or {}, outputs)
        return outputs


def _storages_in(nested: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(nested):
        yield from storages_of(tensor)
