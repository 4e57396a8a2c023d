"""`Aftermath`: what happens in a forward after a module call has returned, as far as it forbids running the call again."""

from __future__ import annotations

from collections.abc import Iterable

from memkit.recording.recording import Recording


class Aftermath:
    """Which op was the last to read each value of a finished forward, and which ops wrote to each storage.

    Args:
        recording: the forward.
        given: for each module call, the number of ops before it and its input values: reads by compiled modules are not
            recorded.
    """

    def __init__(self, recording: Recording, given: Iterable[tuple[int, frozenset[int]]]) -> None:
        recording.sync()
        self._last_read = {value: op for op, ins in enumerate(recording.lineage.ins) for value in ins}
        self._writes: dict[int, list[int]] = {}
        for func, address, _ in recording.effects:
            self._writes.setdefault(address, []).append(func)
        for op, values in given:
            for value in values:
                self._last_read[value] = max(op, self._last_read.get(value, op))

    def reads(self, values: Iterable[int], after: int) -> bool:
        """Tell whether one of these values is read by op number `after`, or a later one.

        Args:
            values: the values.
            after: the first op that counts.
        """
        last_read = self._last_read
        return any(last_read.get(value, -1) >= after for value in values)

    def writes(self, address: int, after: int) -> list[int]:
        """Return the ops that write to a storage, by their numbers among all ops, counted from 1.

        Args:
            address: the address of the storage.
            after: the last op that does not count.
        """
        return [func for func in self._writes.get(address, ()) if func > after]
