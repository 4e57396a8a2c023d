"""Which threads run a model to see all that autograd saves: what would take it from them is refused there."""

from __future__ import annotations

from memkit.errors import ProfileError
from memkit.interrupts import Block, Blocks, Exclusive

_profiled = Blocks()


class Profiled(Exclusive):
    """A context in which this thread runs a model to see all that autograd saves: see `refuse_in_profile`."""

    def __enter__(self) -> Block:
        block = self.claim("this profile is going on already")
        self.is_entered = True
        _profiled.blocks.append(block)
        return block

    def end_block(self, *, has_failed: bool) -> None:
        _profiled.leave(self._block)


def refuse_in_profile(name: str) -> None:
    """Raise if a model is profiled that is about to enter a context which would take what the profile must see.

    Raises:
        ProfileError: it is.
    """
    if _profiled.are_any():
        raise ProfileError(
            f"a profile needs to see all that autograd saves; found {name}, which the model enters in its forward and which "
            "would take it. Profile the model before memkit.attach, or after its handle's remove(), and without a context in "
            "its own code"
        )
