"""The forwards that are going on, and what must be undone when one ends, however that is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from torch import nn


@dataclass(slots=True, eq=False)
class Call:
    """A forward of a module that is going on."""

    module: nn.Module
    frame: FrameType | None
    """Where it is called from: once that is off the stack, the call is over."""
    end: Callable[[bool], None] | None = None
    """What to do then, told whether it has returned; None where it did not come to begin."""


class Calls(threading.local):
    """A thread's calls that are going on, the innermost last."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, module: nn.Module, *, depth: int) -> Call:
        """Note a call.

        Args:
            depth: how many frames above this function's the module is called.
        """
        self.end_interrupted()
        call = Call(module, sys._getframe(depth + 1))
        self._calls.append(call)
        return call

    def end(self, module: nn.Module) -> None:
        """A call has returned or raised: to be called from its hook."""
        self.end_interrupted()
        # One that has raised may be over by now. Then the last call of the module is one further outside, which goes on.
        if self._calls and self._calls[-1].module is module and self._calls[-1].frame is sys._getframe(2):
            self._end_last(has_returned=True)

    def end_interrupted(self) -> None:
        """End the calls that were left by an interrupt: torch runs hooks after exceptions, but not after those."""
        if not self._calls:
            return
        stack = set[FrameType]()
        frame = sys._getframe().f_back  # not its own: that would hold itself, and with it what all others have in their hands
        while frame is not None:
            stack.add(frame)
            frame = frame.f_back
        while self._calls and self._calls[-1].frame not in stack:
            self._end_last(has_returned=False)

    def _end_last(self, *, has_returned: bool) -> None:
        call = self._calls.pop()
        if call.end is not None:
            call.end(has_returned)
