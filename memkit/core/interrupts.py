"""memkit's state after an exception inside it, Ctrl-C included, and the tools that several parts use for it.

[Note: interrupts] A `KeyboardInterrupt` may come ahead of any line, and the training loop may go on after it. No number is
wrong then, and contexts end:

- *Poisoned, then rebuilt.* An exception that breaks off a call under a lock marks the lock's object as broken. The next call
  waits for the device, gives back whatever nothing holds, derives sums, queues and counts from the objects themselves (records
  and handles, segments and spans), and goes on. A part that cannot be rebuilt raises by name. See `mended`.
- *Held before issued.* A copy is put on a lane only when the holders of its storage and its host memory are noted. They let go
  only when a stream has waited for the event recorded after the copy, or the host for the device.
- *Deaths are noted without a line of Python,* by weak references that put themselves into a queue.
- *Contexts end.* An interrupt in `__enter__` undoes it at once. After one in `__exit__`, the next context to be entered in the
  thread finishes that. See `Exclusive`, and `memkit.core.hooks.end_left`.
- *A lock is held by `with` alone.* An interrupt may come right after the lock was given back, and the call's result is lost. So
  whatever the caller would lose can be found otherwise: by a weak reference that dies with it, or by `Arena.give_all`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def mended(call: Callable[Concatenate[Any, _Args], _Result]) -> Callable[Concatenate[Any, _Args], _Result]:
    """Hold the `lock` of a method's object while the method runs, after `mend` of what an earlier call has left half done."""

    @functools.wraps(call)
    def locked(held: Any, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with held.lock:
            if held.is_broken:
                held.mend()
            try:
                return call(held, *args, **kwargs)
            except BaseException:
                held.is_broken = True
                raise

    return locked


def do_at_once(*steps: functools.partial[Any]) -> None:
    """Call functions written in C in one C call: an interrupt comes before all of them, or after."""
    deque(map(functools.partial.__call__, steps), maxlen=0)


Block = weakref.ref[Any]  # to an object that lives while a thread is in a context: held by `with`, or the context


class Blocks(threading.local):
    def __init__(self) -> None:
        self.blocks: list[Block] = []  # possibly with some that an interrupt kept from being removed: ask `are_any`

    def are_any(self) -> bool:
        blocks = self.blocks
        while blocks and blocks[-1]() is None:
            blocks.pop()
        return bool(blocks)

    def leave(self, block: Block | None) -> None:
        self.blocks[:] = [other for other in self.blocks if other is not block]


class _HeldExit:
    """An `__exit__` whose death means that the block was left: `with` holds it, and each look-up makes a new one."""

    def __get__(self, context: Exclusive | None, _: type[Any]) -> Callable[..., None]:
        if context is None:
            return Exclusive.exit
        leave = functools.partial(Exclusive.exit, context)
        context._looked_up = weakref.ref(leave)
        return leave


class Exclusive(ABC):
    """A context that can't be entered twice at once, and copes with an interrupt that hides its exit."""

    _looked_up: Block | None = None
    _block: Block | None = None
    is_entered = False

    __exit__ = _HeldExit()

    def claim(self, refusal: str) -> Block:
        found, self._looked_up = self._looked_up, None
        if self.is_entered:
            if self._block is None or self._block() is not None:
                raise ValueError(refusal)
            self.leave(has_failed=True)
        self._block = block = weakref.ref(self) if found is None or found() is None else found
        return block

    def exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave(has_failed=kind is not None)

    def leave(self, *, has_failed: bool) -> None:
        try:
            self.end_block(has_failed=has_failed)
        finally:
            self.is_entered = False

    @abstractmethod
    def end_block(self, *, has_failed: bool) -> None:
        """Undo what was done on entry, unless that was already done."""
