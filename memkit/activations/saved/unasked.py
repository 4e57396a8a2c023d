"""Notices forwards whose saved tensors no backward asks for, as in an evaluation without `torch.no_grad()`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memkit.errors import warn_user
from memkit.hooks import HookPair

_MOST = 4
"""Graphs that may go before the first backward without a word. The one of the last step is often still alive."""


class Unasked:
    """Watches the forwards under a tag until the first backward: what their graphs hold tells when it asks, or is let go.

    Args:
        title: of the context, for the warning.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self.is_over = False
        """Whether a backward has asked, or the user was warned: from then on this costs nothing."""
        self.num_unasked = 0
        """Graphs that went before."""

    @property
    def was_asked(self) -> bool:
        """Whether a backward has asked, before the user was warned."""
        return self.is_over and self.num_unasked < _MOST

    def watching(self, pair: HookPair) -> HookPair:
        """Return hooks for a forward that do the same and watch; warn if too many went unasked before it."""
        if self.num_unasked >= _MOST:
            self.is_over = True
            warn_user(
                f"{self._title}: {self.num_unasked} forwards saved tensors for a backward, and none came. What is done with "
                "these tensors only costs time then. Call loss.backward() on what the forward returns; put forwards that only "
                "evaluate under torch.no_grad(), where nothing is saved"
            )
            return pair
        (pack, unpack), graph = pair, _Graph(self)

        def watched_pack(tensor: Tensor) -> _Held:
            return _Held(pack(tensor), graph)

        def watched_unpack(held: _Held) -> Tensor:
            self.is_over = True
            found: Tensor = unpack(held.packed)
            return found

        return watched_pack, watched_unpack


class _Graph:
    """Dies with all that a graph holds of a forward."""

    def __init__(self, among: Unasked) -> None:
        self._among = among
        self.is_used = False
        """Whether anything was saved."""

    def __del__(self) -> None:
        self._among.num_unasked += self.is_used and not self._among.is_over


class _Held:
    """What a graph holds in place of a tensor."""

    __slots__ = ("_graph", "packed")

    def __init__(self, packed: Any, graph: _Graph) -> None:
        self.packed = packed
        self._graph = graph
        graph.is_used = True
