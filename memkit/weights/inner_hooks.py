"""Hooks on the modules inside of a layer, which are there only while the layer does not run."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import repeat
from operator import setitem
from typing import Any

from memkit.hooks import HookSet


class InnerHooks(HookSet):
    """Hooks that `around_forward`, and nothing else, has set, and that can be left out of calls for a while."""

    def __init__(self) -> None:
        super().__init__()
        self._places: tuple[tuple[OrderedDict[int, Any], ...], tuple[int, ...]] | None = None
        """In which dict each hook is, and its number there, once that was asked for. A step goes through them without a call of
        a Python function for each, so that no interrupt comes in between."""
        self._aside: list[Any] = []
        """The hooks that are set aside, in the same order; None for one that was not there."""

    def set_aside(self) -> None:
        """Leave the hooks out of calls until `put_back`: torch then sees none there, and Dynamo neither breaks a graph because
        of one nor guards it."""
        if self._places is None:
            handles: list[Any] = list(self._handles)
            dicts = tuple(_or_empty(handle.hooks_dict_ref()) for handle in handles)
            self._places = dicts, tuple(handle.id for handle in handles)
        dicts, numbers = self._places
        if not self._aside:  # ahead: an interrupt loses none
            self._aside[:] = map(dict.get, dicts, numbers)
        deque(map(OrderedDict.pop, dicts, numbers, repeat(None)), maxlen=0)

    def put_back(self) -> None:
        """Have what was set aside called again, outside of all other hooks. Calling it again does nothing."""
        if not self._aside:
            return
        assert self._places is not None
        dicts, numbers = self._places
        if None not in self._aside:
            deque(map(setitem, dicts, numbers, self._aside), maxlen=0)
        else:  # the caller has removed some
            for hooks, number, hook in zip(dicts, numbers, self._aside, strict=True):
                if hook is not None:
                    hooks[number] = hook
        if max(map(len, dicts)) > 1:
            for place, (hooks, number) in enumerate(zip(dicts, numbers, strict=True)):
                if number in hooks:
                    hooks.move_to_end(number, last=place % 2 == 1)  # as `put_outside` does
        self._aside.clear()

    def remove(self) -> None:
        """Remove every hook, also those that are set aside. Calling it again does nothing."""
        self._aside.clear()
        self._places = None
        super().remove()


def _or_empty(hooks: OrderedDict[int, Any] | None) -> OrderedDict[int, Any]:
    """Return the hooks of a module, none where it is no more."""
    return OrderedDict() if hooks is None else hooks
