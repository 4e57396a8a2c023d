"""The order in which layers are expected to be used: as in the last pass. A wrong guess costs time, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

_MOST_NOTED = 4096
_MOST_KNOWN_AHEAD = 512


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
        turns_back: whether what is used in this phase is used again afterwards, in reverse.
    """

    def __init__(self, guess: Sequence[int], *, turns_back: bool) -> None:
        self._known = list(guess)
        self._turns_back = turns_back
        self._noted: list[int] = []
        self._place = -1
        self._ahead: dict[tuple[int, int], dict[int, int]] = {}
        """What `ahead` has returned, by the place in the order and by what was used there."""

    @property
    def known(self) -> Sequence[int]:
        """The layers of the last pass, in order."""
        return self._known

    @property
    def noted(self) -> Sequence[int]:
        """The layers of this pass so far, in order."""
        return self._noted

    def begin(self) -> None:
        """Begin a pass: expect the order of the last one."""
        if self._noted and self._noted != self._known:
            self._know(self._noted)
        self._noted, self._place = [], -1

    def expect(self, order: Sequence[int]) -> None:
        """Expect this order, unless the known one is of the same layers."""
        if sorted(self._known) != sorted(order):
            self._know(list(order))

    def _know(self, order: list[int]) -> None:
        self._ahead.clear()
        self._known = order

    def note(self, layer: int) -> Mapping[int, int]:
        """Note the use of a layer other than the last one; return what `ahead` returns for it."""
        if len(self._noted) < _MOST_NOTED:
            self._noted.append(layer)
        known, following = self._known, self._place + 1
        if following < len(known) and known[following] == layer:
            self._place = following
        else:
            places = (*range(following, len(known)), *range(min(following, len(known))))
            self._place = next((place for place in places if known[place] == layer), self._place)
        return self._ahead.get((self._place, layer)) or self.ahead(layer)

    def ahead(self, current: int) -> Mapping[int, int]:
        """Return the layers that are expected next, in order, each with how many others come before it.

        Args:
            current: the layer that is in use, which is left out; -1 if there is none.
        """
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
        """Tell whether a layer is what is expected next."""
        return self._known[self._place + 1 : self._place + 2] == [layer]
