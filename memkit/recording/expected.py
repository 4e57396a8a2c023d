"""Ops that are known ahead: what a forward needs not record of them, since nothing will be made again by them.

What they make is numbered all the same, and roots have the numbers that they had: so values are known by the numbers that a
plan goes by. With the first op that is another one, all is recorded again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from memkit import torch_private
from memkit.recording.recorded import tensors_in

if TYPE_CHECKING:
    from memkit.recording.recording import Recording


class ExpectedOp(NamedTuple):
    """An op that is known ahead."""

    func: Any
    is_skipped: bool
    """Whether it is not recorded."""
    first: int
    """The number of the next value, before it runs."""
    made: int
    """The number of the next value once the roots that it reads are numbered."""
    is_view: bool = False
    ins: tuple[int, ...] = ()
    """The values that it reads."""
    roots: frozenset[int] = frozenset()
    """Which of these are roots, that nothing makes."""


class Expected:
    """What is known ahead of a recording.

    Args:
        ops: all of its ops, by their places among those that are seen.
        num_values: how many values they make and read.
    """

    def __init__(self, ops: Sequence[ExpectedOp], num_values: int) -> None:
        self.ops = ops
        """Empty as soon as another one has run."""
        self._num_values = num_values
        self.unmade = set[int]()
        """What ops have made that were not recorded."""
        self.sources = set[int]()
        """What dropped values are made from that no recorded op makes, or that is read where it was saved: a write to it has it
        copied first."""

    def end(self, recording: Recording) -> None:
        """Record all ops from here on. If any were skipped, what comes has other numbers than what was expected."""
        if not self.ops:
            return
        self.ops, recording.known_s = (), recording.known_s[: len(recording.calls)]
        if self.unmade:
            recording.num_values = max(recording.num_values, self._num_values)
        else:
            recording.expected = None

    def add_unmade(self, recording: Recording, results: Any) -> None:
        """Note what an op has returned that is not recorded."""
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
        """An op is about to run that is to be recorded: number the roots that it reads as expected, if this is the one.

        Args:
            op: what is expected, if anything is.
            is_plain: whether its tensors are of no class with ops of its own.
        """
        if op is not None and op.func is func and is_plain and recording.num_values <= op.first:
            recording.num_values = op.made  # first: so no other value has one of these numbers, whatever comes
            try:
                if not op.ins or self._number_roots(recording, (*args, *(kwargs or {}).values()), op):
                    return
            except RuntimeError:  # an argument is no range of bytes
                pass
        self.end(recording)

    def _number_roots(self, recording: Recording, args: Iterable[Any], op: ExpectedOp) -> bool:
        """Number the roots among the arguments of an op; tell whether they are what is expected."""
        numbers = iter(op.ins)
        for tensor in tensors_in(args):
            number, storage = next(numbers, -1), tensor.untyped_storage()
            if number >= 0 and recording.find(storage) is None:
                if number in recording.roots or number in self.unmade or number not in op.roots:
                    return False
                recording.add_root(tensor, storage, is_inside=False, number=number)
        return True
