"""Ops that are known ahead. Those that nothing is recomputed from need not be recorded, but their values are numbered, so that
the numbers in a plan stay valid. From the first unexpected op on, everything is recorded."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.plan import NO_OP
from memkit.recording.recorded import tensors_in

if TYPE_CHECKING:
    from memkit.recording.recording import Recording


class ExpectedOp(NamedTuple):
    func: Any
    is_skipped: bool
    first: int  # the next value's number before it runs
    made: int  # the next value's number after the roots that it reads are numbered
    is_view: bool = False
    ins: tuple[int, ...] = ()
    roots: frozenset[int] = frozenset()  # the roots among `ins`


class Expected:
    def __init__(self, ops: Sequence[ExpectedOp], num_values: int) -> None:
        self.ops = ops  # empty once an unexpected op has run
        self._num_values = num_values
        self.unmade = set[int]()
        self.sources = set[int]()  # values that are copied before a write: for dropped values, or read where they were saved

    def end(self, recording: Recording) -> None:
        """Record all ops from here on. If any were skipped, later values have other numbers than expected."""
        if not self.ops:
            return
        self.ops, recording.known_s = (), recording.known_s[: len(recording.calls)]
        num_values = max(recording.num_values, self._num_values)
        if self.unmade:
            recording.num_values = num_values
        else:
            recording.expected = None

    def add_unmade(self, recording: Recording, results: Any) -> None:
        current, lent = recording.current, recording.lent
        for tensor in (results,) if type(results) is Tensor and results.layout is torch.strided else tensors_in(results):
            storage = tensor.untyped_storage()
            address = torch_private.storage_address(storage)
            before = current.get(address) or lent.get(address)  # `Recording.was_there`, in place
            if before is None or before[0]() is not storage:
                value = recording.num_values
                recording.num_values = value + 1  # first, as in `Recording.add_root`
                self.unmade.add(value)
                current[address] = (weakref.ref(storage), value)

    def begin_op(
        self,
        recording: Recording,
        op: ExpectedOp | None,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        *,
        is_plain: bool,
    ) -> None:
        if op is not None and op.func is func and not op.is_skipped and is_plain and recording.num_values <= op.first:
            recording.num_values = op.made  # first: so no other value has one of these numbers, whatever comes
            try:
                if not op.ins or self._number_roots(recording, (*args, *(kwargs or {}).values()), op):
                    return
            except RuntimeError:  # an argument is no range of bytes
                pass
        self.end(recording)

    def _number_roots(self, recording: Recording, args: Iterable[Any], op: ExpectedOp) -> bool:
        numbers = iter(op.ins)
        for tensor in tensors_in(args):
            number = next(numbers, -1)
            if number >= 0 and recording.find(tensor.untyped_storage()) is None:
                if number in recording.roots or number in self.unmade or number not in op.roots:
                    return False
                recording.add_root(tensor, tensor.untyped_storage(), is_inside=False, number=number)
        return True


def num_writes(recording: Recording, value: int) -> float:
    """Return how often ops have written to a value's storage; infinity for a value from before the forward."""
    recording.sync()
    expected, found = recording.expected, 0
    while True:
        maker = recording.lineage.maker[value]
        if maker == NO_OP:
            return math.inf if expected is None or value not in expected.unmade else found
        call = recording.calls[maker]
        place = value - call.first - len(call.places)
        if place < 0:
            return found
        found, value = found + 1, call.written[place]
