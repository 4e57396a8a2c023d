"""In which order layers are used: as they were the last time. A wrong guess costs time, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

_MOST_NOTED = 4096


class Phase(Enum):
    """When a layer is used. Each phase has an order of its own."""

    FORWARD = "forward"
    """In a forward that a backward may follow."""
    SAMPLING = "sampling"
    """In a forward without grad mode."""
    BACKWARD = "backward"
    """In a backward, also where that runs a forward again."""


class LayerOrder:
    """The order of one phase.

    Args:
        guess: what to expect the first time.
    """

    def __init__(self, guess: Sequence[int]) -> None:
        self._known = list(guess)
        self._noted: list[int] = []
        self._place = -1

    @property
    def known(self) -> Sequence[int]:
        """What was used in the last pass."""
        return self._known

    @property
    def noted(self) -> Sequence[int]:
        """What was used in this pass."""
        return self._noted

    def begin(self) -> None:
        """A pass begins: expect what the last one has done."""
        if self._noted:
            self._known = self._noted
        self._noted, self._place = [], -1

    def expect(self, order: Sequence[int]) -> None:
        """Expect another order, unless the one that is known is one of the same layers."""
        if sorted(self._known) != sorted(order):
            self._known = list(order)

    def note(self, layer: int) -> None:
        """A layer is used that was not the last one used."""
        if len(self._noted) < _MOST_NOTED:
            self._noted.append(layer)
        known = self._known
        for place in (*range(self._place + 1, len(known)), *range(min(self._place + 1, len(known)))):
            if known[place] == layer:
                self._place = place
                return

    def upcoming(self) -> Sequence[int]:
        """Return what is expected next, in order."""
        return self._known[self._place + 1 :]

    def is_next(self, layer: int) -> bool:
        """Tell whether a layer is what is expected next."""
        return self._known[self._place + 1 : self._place + 2] == [layer]
