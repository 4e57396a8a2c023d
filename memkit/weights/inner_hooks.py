"""Hooks on the modules inside of a layer, which are called only while the layer itself does not run."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from itertools import repeat
from operator import setitem
from typing import Any

from torch import nn

from memkit.hooks import HookSet


class InnerHooks(HookSet):
    """Hooks around the forwards of modules that seldom run by themselves.

    At each step most are only taken off and put back. That goes through them without a call of a Python function for each, so
    that no interrupt comes in between, and what is behind a forward is there only from when that has begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dicts: list[OrderedDict[int, Any]] = []
        """What torch has the hooks in that are ahead of forwards."""
        self._numbers: list[int] = []
        """What they are there."""
        self._aside: list[Any] = []
        """Those that are set aside, in the same order; None for one that was not there."""
        self._behind: list[tuple[OrderedDict[int, Any], int, Any]] = []
        """The hooks behind forwards: where each belongs, as what, and which it is."""
        self._due: list[tuple[OrderedDict[int, Any], int]] = []
        """Those of them that are there."""

    def around_inner(self, module: nn.Module, *, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call `before(place, module, args)` as `around_forward` does, and `after(place, module, args, output)` too, but that
        only from `expect_end(place)` until `note_end(place)`."""
        place = len(self._behind)
        self.around_forward(module, before=partial(before, place), after=partial(after, place))
        handles: list[Any] = self._handles[-2:]
        (ahead, number), (behind, behind_number) = ((handle.hooks_dict_ref(), handle.id) for handle in handles)
        self._dicts.append(ahead)
        self._numbers.append(number)
        self._behind.append((behind, behind_number, behind.pop(behind_number)))

    def expect_end(self, place: int) -> None:
        """A forward is about to begin: call what is behind it."""
        hooks, number, hook = self._behind[place]
        self._due.append((hooks, number))
        hooks[number] = hook

    def note_end(self, place: int) -> None:
        """The forward is over. Not to be called where it has raised, since torch then goes through the hooks that there are:
        they stay until the layer runs."""
        hooks, number, _ = self._behind[place]
        hooks.pop(number, None)
        self._due = [due for due in self._due if due[1] != number]

    def set_aside(self) -> None:
        """Leave the hooks out of calls until `put_back`: torch then sees none there, and Dynamo neither breaks a graph because
        of one nor guards it."""
        taken = map(OrderedDict.pop, self._dicts, self._numbers, repeat(None))
        if not self._aside:  # in one call of C, so that an interrupt loses none
            self._aside[:] = taken
        else:
            deque(taken, maxlen=0)
        while self._due:
            hooks, number = self._due[-1]
            hooks.pop(number, None)
            self._due.pop()

    def put_back(self) -> None:
        """Have what was set aside called again, ahead of all other hooks. Calling it again does nothing."""
        if not self._aside:
            return
        if None not in self._aside:
            deque(map(setitem, self._dicts, self._numbers, self._aside), maxlen=0)
        else:  # the caller has removed some
            for hooks, number, hook in zip(self._dicts, self._numbers, self._aside, strict=True):
                if hook is not None:
                    hooks[number] = hook
        if max(map(len, self._dicts)) > 1:
            for hooks, number in zip(self._dicts, self._numbers, strict=True):
                if number in hooks:
                    hooks.move_to_end(number, last=False)
        self._aside.clear()

    def remove(self) -> None:
        """Remove every hook, also those that are set aside. Calling it again does nothing."""
        self._aside.clear()
        super().remove()
        self._dicts, self._numbers, self._behind, self._due = [], [], [], []
