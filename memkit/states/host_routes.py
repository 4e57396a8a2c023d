"""Where gradients and parameters of a piece lie on their way to the host and back: in a slot, and alike in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memkit.plan import aligned
from memkit.states.fingerprints import WORD_BYTES, take_fingerprint
from memkit.states.packing import MASTER, PackedTensor, local_packed, may_leave, storage_of_part
from memkit.states.pieces import Layout, Piece, stand_in_of
from memkit.states.records import StateRecord, version_of
from memkit.states.shards import local_gradient
from memkit.storages import byte_view, tensor_over
from memkit.torch_state import local_of
from memkit.transfer.spans import Span, rounded

Traits = tuple[int, torch.dtype, torch.Size, tuple[int, ...], tuple[int, ...], bool]
"""What a route depends on of a parameter that is due: which it is, how it lies, and whether a copy is stepped in its place."""

_BETWEEN_BYTES = 16
"""Parameters with float32 copies begin at multiples of so much: a kernel reads as many bytes at once."""


def traits_of(record: StateRecord) -> Traits:
    """Return what a route depends on of a parameter."""
    parameter, grad = local_of(record.parameter), local_gradient(record.parameter)
    assert grad is not None
    return id(record), parameter.dtype, parameter.size(), parameter.stride(), grad.stride(), record.has_master


@dataclass(frozen=True, slots=True)
class Way:
    """How many bytes of a slot are for what, one behind the other.

    First float32 gradients on their way down, and float32 copies of parameters on their way up; then two fingerprints; then
    parameters that are stepped themselves, and their gradients. Last the parameters that there are copies of: they go down
    only where somebody may have written to them.
    """

    wide_bytes: int
    marks_bytes: int
    plain_bytes: int
    narrow_bytes: int

    @classmethod
    def of(cls, piece: Piece) -> Way:
        """Return how what is due of a piece goes."""
        copied = [local_of(record.parameter) for record in piece.due if record.has_master]
        narrow = sum(rounded(parameter.nbytes, _BETWEEN_BYTES) for parameter in copied)
        # the copies of all its parameters come back, also of those that are not due; and fingerprints need some scratch
        wide = sum(aligned(4 * local_of(record.parameter).numel()) for record in piece.records if record.has_master)
        return cls(
            wide_bytes=aligned(max(wide, 2 * narrow)) if copied else 0,
            marks_bytes=aligned(2 * WORD_BYTES) if copied else 0,
            plain_bytes=sum(aligned(local_of(record.parameter).nbytes) for record in piece.due if not record.has_master),
            narrow_bytes=narrow,
        )

    @property
    def marks(self) -> int:
        """Where the fingerprints begin."""
        return self.wide_bytes

    @property
    def plain(self) -> int:
        """Where parameters begin that are stepped themselves."""
        return self.marks + self.marks_bytes

    @property
    def narrow(self) -> int:
        """Where those begin that have float32 copies, behind all that always goes down."""
        return self.plain + 2 * self.plain_bytes

    @property
    def num_bytes(self) -> int:
        """All bytes that may go down."""
        return max(1, self.narrow + self.narrow_bytes)


@dataclass(slots=True)
class Place:
    """Tensors over one storage, in the order in which parameters are due."""

    parameters: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    @classmethod
    def over(cls, storage: torch.UntypedStorage, due: list[StateRecord], way: Way) -> Place:
        """Return parameters and gradients that lie in a storage as a way says."""
        found = cls()
        wide, narrow, plain = 0, way.narrow, way.plain
        for record in due:
            parameter, grad = local_of(record.parameter), local_gradient(record.parameter)
            assert grad is not None
            numel = parameter.numel()
            if record.has_master:
                found.parameters.append(_like(parameter, storage, narrow, parameter.dtype))
                found.grads.append(_like(grad, storage, wide, torch.float32))
                narrow += rounded(parameter.nbytes, _BETWEEN_BYTES)
                wide += aligned(4 * numel)
            else:
                found.parameters.append(_like(parameter, storage, plain, parameter.dtype))
                found.grads.append(_like(grad, storage, plain + way.plain_bytes, parameter.dtype))
                plain += aligned(parameter.nbytes)
        return found


def _like(tensor: Tensor, storage: torch.UntypedStorage, start: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a storage that lies as another one, or contiguous if that one is not dense."""
    stride = tensor.stride() if may_leave(tensor) else torch.empty(tensor.size(), device="meta").stride()
    return tensor_over(storage, dtype, offset=start // dtype.itemsize, size=tensor.size(), stride=stride)


@dataclass(frozen=True, slots=True)
class Leg:
    """Bytes that are copied between a slot and host memory.

    Attributes:
        span: the host memory.
        start: where they begin in the slot.
        parts: the bytes of the slot, cut as the span is.
    """

    span: Span
    start: int
    parts: Sequence[Tensor]

    @classmethod
    def of(cls, storage: torch.UntypedStorage, span: Span, start: int = 0) -> Leg:
        """Return what a span and a slot have from a byte on."""
        with torch.inference_mode(False):
            whole = byte_view(storage).narrow(0, start, span.num_bytes)
            return cls(span, start, whole.split(list(map(len, span.pieces))))


class Route:
    """Where what is due of a piece lies on its way.

    Args:
        piece: whose it is.
        due: what is due of it.
        way: how it lies.
        storage: of the slot.
        room: what was set aside in host memory, of which it takes the first bytes.
        stepped: where on the device the fingerprint of the parameters is kept, as they were stepped last; None if none has a
            float32 copy.
    """

    def __init__(
        self, piece: Piece, due: list[Traits], way: Way, storage: torch.UntypedStorage, room: Span, stepped: Tensor | None
    ) -> None:
        assert room.whole is not None
        self.storage, self.room, self.due, self.way = storage, room, due, way
        self._stepped = stepped
        self._known: tuple[Layout, list[int]] | None = None
        """For which float32 copies that is their parameters' fingerprint, and how often these were written to by others."""
        self.is_known = False
        """Whether the fingerprints on their way down tell if a parameter was written to."""
        self.has_parameters = True
        """Whether parameters that have float32 copies go down as well."""
        self.brought_bytes = 0
        """What the thread has had come of them behind that."""
        self._records = list(piece.due)
        self._numbers = [piece.records.index(record) for record in piece.due]
        self._layout: Layout | None = None
        self._masters: list[Tensor | None] = []
        self._down: dict[bool, Leg] = {}
        self._up_in: Layout | None = None
        self._up: list[Leg] = []
        self._staying_in: Layout | None = None
        self._staying: list[tuple[int, Tensor | None]] = []
        self.copies: Span | None = None
        """The host memory of the float32 copies of which `masters` was asked last; None if none come up."""
        with torch.inference_mode(False):
            self.on_device = Place.over(storage, piece.due, way)
            self.on_host = Place.over(storage_of_part(room.whole), piece.due, way)
            self.stand_ins: list[nn.Parameter] = [
                stand_in_of(record, torch.empty(0) if record.has_master else view)
                for record, view in zip(piece.due, self.on_host.parameters, strict=True)
            ]
            self.has_copies = way.wide_bytes > 0
            num_words = way.narrow_bytes // WORD_BYTES
            self._words = _words(storage, way.narrow, num_words)
            self._scratch = _words(storage, 0, num_words), _words(storage, way.narrow_bytes, num_words)
            self._marks = _words(storage, way.marks, 2 if self.has_copies else 0)
            self._host_marks = _words(storage_of_part(room.whole), way.marks, 2 if self.has_copies else 0)
            self._gaps = list(self._gaps_between(storage))

    def _gaps_between(self, storage: torch.UntypedStorage) -> list[Tensor]:
        """Return the bytes between parameters: the slot has others' there."""
        gaps, end = [], self.way.narrow
        for record, parameter in zip(self._records, self.on_device.parameters, strict=True):
            if record.has_master:
                start, end = end + parameter.nbytes, end + rounded(parameter.nbytes, _BETWEEN_BYTES)
                if start < end:
                    gaps.append(tensor_over(storage, torch.uint8, offset=start, size=(end - start,), stride=(1,)))
        return gaps

    # On its way

    def down(self) -> Leg:
        """Return what goes down: all, or without the parameters that have float32 copies."""
        leg = self._down.get(self.has_parameters)
        if leg is None:
            num_bytes = self.way.num_bytes if self.has_parameters else self.way.narrow
            leg = self._down[self.has_parameters] = Leg.of(self.storage, self.room.part(0, num_bytes))
        return leg

    def up(self, layout: Layout | None) -> list[Leg]:
        """Return what comes up: float32 copies from where they stay, parameters from where they were sent."""
        staying = self.staying(layout)
        if layout is None or layout is not self._up_in:
            way, ranges = self.way, [(self.way.plain, self.way.plain_bytes)]
            if staying:
                ranges.append((way.narrow, way.narrow_bytes))
            spans = [(self.room.part(start, start + num_bytes), start) for start, num_bytes in ranges if num_bytes]
            if self.copies is not None:
                spans.append((self.copies, 0))
            self._up = [Leg.of(self.storage, span, start) for span, start in spans]
            self._up_in = layout
        return self._up

    # On the device

    def compare(self, layout: Layout | None) -> None:
        """The parameters are in the slot, and gradients are not yet: have it be found out whether anybody has written to them.

        Args:
            layout: where the states are.
        """
        self.is_known = self._known is not None and layout is self._known[0] and self._versions(layout) == self._known[1]
        if self.is_known and self._stepped is not None:
            self._take(self._marks[:1])
            self._marks[1:].copy_(self._stepped)

    def note_stepped(self, layout: Layout | None) -> None:
        """The parameters in the slot are what the user's have become."""
        if self._stepped is not None and self.has_copies and layout is not None:
            self._take(self._stepped)
            self._known = layout, self._versions(layout)

    def _take(self, found: Tensor) -> None:
        for gap in self._gaps:
            gap.zero_()
        take_fingerprint(self._words, self._scratch, found)

    def _versions(self, layout: Layout) -> list[int]:
        """Return how often float32 copies were written to: the optimizer does so by others, whose writes count apart."""
        masters = [layout.host[number].get(MASTER) for number in self._numbers]
        return [-1 if master is None else version_of(master) for master in masters]

    def masters(self, layout: Layout | None) -> list[Tensor | None]:
        """Return the float32 copies in the slot once they have come up, each in the place of its parameter. None where a
        parameter has none, or one that doesn't come by itself: a number, or one that has no room."""
        if layout is None or layout is not self._layout:
            span = None if layout is None else layout.masters()
            fits = span is not None and span.num_bytes <= self.way.wide_bytes
            found = [self._master(layout, number) if layout is not None and fits else None for number in self._numbers]
            self._layout, self._masters = layout, found
            self.copies = span if any(master is not None for master in found) else None
        return self._masters

    def _master(self, layout: Layout, number: int) -> Tensor | None:
        packed = [one for one in map(local_packed, layout.tensors[number]) if one.name == MASTER]
        with torch.inference_mode(False):
            return packed[0].over(self.storage) if packed and isinstance(packed[0], PackedTensor) else None

    def staying(self, layout: Layout | None) -> list[tuple[int, Tensor | None]]:
        """Return which of the parameters have a float32 copy that doesn't come up by itself, so that they come rounded; and
        where it is if that is among the states that could leave."""
        masters = self.masters(layout)
        if layout is None or layout is not self._staying_in:
            hosts = self.rows_of(layout)
            self._staying_in = layout
            self._staying = [
                (number, None if hosts is None else hosts[number].get(MASTER))
                for number, (record, master) in enumerate(zip(self._records, masters, strict=True))
                if record.has_master and master is None
            ]
        return self._staying

    def rows_of(self, layout: Layout | None) -> list[dict[str, Any]] | None:
        """Return the states that a layout has of what is due; None if there are none."""
        return None if layout is None else [layout.host[number] for number in self._numbers]

    # On the host

    def is_unwritten(self) -> bool:
        """Tell whether nobody has written to the parameters since they were stepped: what has come down says so."""
        if not self.is_known:
            return not self.has_copies
        now, before = self._host_marks.tolist()
        return bool(now == before)

    def forget(self) -> None:
        """The parameters are not yet what the states say, or not any more."""
        self._known = None


def _words(storage: torch.UntypedStorage, start: int, num_words: int) -> Tensor:
    return tensor_over(storage, torch.int64, offset=start // WORD_BYTES, size=(num_words,), stride=(1,))
