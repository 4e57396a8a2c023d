"""Keeps track of threads that profile a model, in which contexts that would hide saved tensors from the profile are refused."""

from __future__ import annotations

from memkit.errors import ProfileError
from memkit.interrupts import Block, Blocks, Exclusive

_profiled = Blocks()


class Profiled(Exclusive):
    """A context in which this thread profiles a model: see `refuse_in_profile`."""

    def __enter__(self) -> Block:
        block = self.claim("this profile is going on already")
        self.is_entered = True
        _profiled.blocks.append(block)
        return block

    def end_block(self, *, has_failed: bool) -> None:
        _profiled.leave(self._block)


def refuse_in_profile(name: str) -> None:
    """Raise if a model that is being profiled is about to enter a context that would hide saved tensors from the profile.

    Raises:
        ProfileError: it is.
    """
    if _profiled.are_any():
        raise ProfileError(
            f"a profile needs to see all that autograd saves; found {name}, which the model enters in its forward and which "
            "would take it. Profile the model before memkit.attach, or after its handle's remove(), and without a context in "
            "its own code"
        )
