"""`Sources`: what dropped values can be recomputed from: held roots, and kept values that no op recomputes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

from memkit.kept import KeptHandle
from memkit.plan import NO_OP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memkit.activations.recomputing.anchors import Anchors
    from memkit.activations.recomputing.recorded_forward import RecordedForward
    from memkit.recording.recorded import Call
    from memkit.recording.recording import Recording


class MadeFrom(NamedTuple):
    """What a dropped value was recomputed from in a forward with known ops."""

    reads: tuple[tuple[int, tuple[int, ...]], ...]
    """The ops that make it, and what each reads: in the next forward, the same op may read something else."""
    leaves: tuple[int, ...]
    """The values that they start from."""


class Sources:
    """Holds what the dropped values of one forward are recomputed from.

    Args:
        recording: the recording of the forward.
        forward: its saved values.
        anchors: the values that the plan holds.
    """

    def __init__(self, recording: Recording, forward: RecordedForward, anchors: Anchors) -> None:
        self._recording, self._forward, self._anchors = recording, weakref.proxy(forward), anchors
        self._secured: dict[int, bool] = {}
        self._secured_in = -1
        self.only_held = set[int]()
        """Anchors that could not be recomputed if they were released."""

    def secure(self, value: int) -> bool:
        """Hold all roots that a value is made from; tell whether it can be recomputed."""
        recording, secured = self._recording, self._secured
        recording.sync()
        if self._secured_in != self._forward.task:  # what was secured may have been written to before this backward
            self._secured_in = self._forward.task
            secured.clear()
        if recording.expected is not None:
            return self._handles_where_unmade(value, {}) is not None
        lineage = recording.lineage
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
                counts = self._forward.record_of(value_here) is None
                secured[value_here] = recording.hold(value_here, counts=counts) or self._pin(value_here)
            else:
                secured[value_here] = all(secured[source] or self._pin(source) for source in lineage.ins[maker])
        return secured[value]

    def handles_for(self, value: int, known: dict[int, MadeFrom] | None = None) -> list[KeptHandle] | None:
        """Secure a value; return the handles that must be held for it, since their values can't be recomputed; None if it can't
        be.

        Args:
            known: for values of an earlier forward with the same ops, what they were recomputed from.
        """
        if self._recording.expected is None:
            return [] if self.secure(value) else None
        return self._handles_where_unmade(value, {} if known is None else known)

    def _handles_where_unmade(self, value: int, known: dict[int, MadeFrom]) -> list[KeptHandle] | None:
        recording, expected = self._recording, self._recording.expected
        assert expected is not None
        before, calls = known.get(value), recording.calls
        if before is not None and all(op < len(calls) and ins == _read_by(calls[op]) for op, ins in before.reads):
            found = [(source, self._handle(source)) for source in before.leaves]
            if all(handle is not None or s in recording.roots or s in expected.unmade for s, handle in found):
                return self._handles_of(found)
        recording.sync()
        if recording.lineage.maker[value] == NO_OP:
            return None
        ops: list[int] = []
        found = list(self._leaves(value, ops))
        known[value] = MadeFrom(tuple((op, _read_by(calls[op])) for op in ops), tuple(source for source, _ in found))
        return self._handles_of(found)

    def _handles_of(self, leaves: Iterable[tuple[int, KeptHandle | None]]) -> list[KeptHandle] | None:
        recording, expected = self._recording, self._recording.expected
        assert expected is not None
        unmade, sources = expected.unmade, expected.sources
        handles: list[KeptHandle] = []
        for source, handle in leaves:
            if handle is not None or source in unmade:
                sources.add(source)
            if handle is not None:
                handles.append(handle)
            elif not (source in recording.roots and recording.hold(source)) and not self._pin(source):
                return None
        return handles

    def _leaves(self, value: int, ops: list[int]) -> Iterator[tuple[int, KeptHandle | None]]:
        """Yield what a value is made from: saved values that are not dropped, with a handle; held values; and values without a
        recorded op. The ops in between are added to `ops`."""
        lineage, found, pending = self._recording.lineage, {value}, [value]
        while pending:
            maker = lineage.maker[pending.pop()]
            ops.append(maker)
            for source in lineage.ins[maker]:
                if source in found:
                    continue
                found.add(source)
                handle = self._handle(source)
                if handle is not None or lineage.maker[source] == NO_OP:
                    yield source, handle
                else:
                    pending.append(source)

    def _is_anchor(self, value: int) -> bool:
        anchor = self._anchors.handle(value)
        return anchor is not None and anchor.version == 0

    def _handle(self, value: int) -> KeptHandle | None:
        if value in self._recording.overwritten:
            return None
        return self._forward.handle_of(value) or self._anchors.handle(value) or self._forward.kept_source(value)

    def _pin(self, value: int) -> bool:
        """Hold a value that can't be recomputed, if it is still there."""
        recording, forward = self._recording, self._forward
        if value in recording.pinned:
            return True
        if self._is_anchor(value):  # what an op has just made: no write to it goes unseen
            self.only_held.add(value)
            return True
        handle = forward.other(value)
        record = None if value in recording.overwritten else forward.record_of(value)
        if handle is None and record is not None:
            held = next((held for held in record.live_handles() if held.geometry is None and held.is_unchanged()), None)
            handle = None if held is None else KeptHandle(held.alias)  # the handle itself holds the forward
        if handle is None:
            return False
        recording.pinned[value] = handle
        return True


def _read_by(call: Call) -> tuple[int, ...]:
    return tuple(source[1] for source in call.sources)
