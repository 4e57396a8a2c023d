"""What happens in a recorded forward once a call of a module has returned, as far as it forbids to run that a second time."""

from __future__ import annotations

from collections.abc import Iterable

from memkit.recording.recording import Recording


class Aftermath:
    """Which op was the last to read each value of a forward that is over, and which ones wrote to each storage.

    Args:
        recording: the forward.
        given: the values that calls of modules were given, and how many ops were before each call: compiled ones show no reads.
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
        """Tell whether one of some values is read.

        Args:
            values: which.
            after: the first op that counts.
        """
        last_read = self._last_read
        return any(last_read.get(value, -1) >= after for value in values)

    def writes(self, address: int, after: int) -> list[int]:
        """Return the ops that write to a storage, by their numbers among those of any kind, counted from 1.

        Args:
            address: of the storage.
            after: the last op that does not count.
        """
        return [func for func in self._writes.get(address, ()) if func > after]
