"""Spans: neighboring children of a `Sequential`, called as one module.

[Note: spans] A flat `Sequential` has no module between its children and itself. A `SequentialSpan` makes neighbors callable as
one module, which can have hooks, be recomputed, and be nested in other spans: while spans are called, an instance attribute
`forward` of the Sequential replaces its class's. Hooks, children, the `state_dict` and module names stay the same, and a copy
runs the forward of its class. So does the Sequential itself if a child was replaced, removed or added since.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, TypeGuard

from torch import nn

from memkit.core import torch_private
from memkit.core.calls import Around, Code, within
from memkit.core.hooks import HookSet


class SequentialSpan(nn.Sequential):
    def __init__(self, whole: nn.Sequential, first: int, stop: int) -> None:
        super().__init__(*tuple(whole)[first:stop])
        self.whole = weakref.ref(whole)
        self.place = first, stop


class SpanReference:
    """Refers to a span as a weak reference does to a module, as long as its Sequential and children exist."""

    def __init__(
        self, whole: weakref.ref[nn.Module], children: Sequence[weakref.ref[nn.Module]], first: int, size: int
    ) -> None:
        self._whole, self.children = whole, tuple(children)
        self._first, self._size = first, size
        self._made: weakref.ref[SequentialSpan] | None = None

    def find(self) -> nn.Sequential | None:
        whole, first = self._whole(), self._first
        if whole is None or not calls_in_turn(whole):
            return None
        children = tuple(whole)
        there = children[first : first + len(self.children)]
        is_same = len(children) == self._size and all(map(is_, there, map(weakref.ref.__call__, self.children)))
        return whole if is_same else None

    def __call__(self) -> nn.Module | None:
        whole = self.find()
        if whole is None:
            return None
        span = None if self._made is None else self._made()
        if span is None:
            span = SequentialSpan(whole, self._first, self._first + len(self.children))
            self._made = weakref.ref(span)
        return span


class SpannedForward:
    def __init__(self, whole: nn.Sequential, spans: Iterable[SequentialSpan]) -> None:
        self._whole, self.children = whole, tuple(whole)
        waiting = sorted(spans, key=lambda span: (-span.place[0], span.place[1]))
        self._parts = self._arranged(0, len(self.children), waiting)

    def _arranged(self, first: int, stop: int, waiting: list[SequentialSpan]) -> list[nn.Module]:
        found: list[nn.Module] = []
        while first < stop:
            if waiting and waiting[-1].place[0] == first:
                span = waiting.pop()
                found.append(span)
                start, first = span.place
                if waiting and waiting[-1].place[0] < first:
                    inside = self._arranged(start, first, waiting)
                    if list(span) != inside:
                        del span[:]
                        span.extend(inside)
            else:
                found.append(self.children[first])
                first += 1
        return found

    def put(self, hooks: HookSet) -> None:
        around = _AroundForward(self._whole, "forward", self._run)
        hooks.add(around)  # ahead: removing it before it is put does nothing
        around.put()

    def _run(self, module: nn.Module, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        children = tuple(self._whole)
        is_same = len(children) == len(self.children) and all(map(is_, children, self.children))
        if not is_same or len(args) != 1 or kwargs:
            return code(*args, **kwargs)
        (found,) = args
        for part in self._parts:
            found = part(found)
        return found


class _AroundForward(Around):
    """Replaces the forward of a module's class. A copied or saved module has the forward of the class."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, (self._module, self._place)


def spanned_forwards(modules: Iterable[nn.Module]) -> dict[nn.Module, SpannedForward]:
    wholes = dict[nn.Sequential, list[SequentialSpan]]()
    for module in modules:
        if isinstance(module, SequentialSpan) and (whole := module.whole()) is not None:
            wholes.setdefault(whole, []).append(module)
    forwards = dict[nn.Module, SpannedForward]()
    for whole, spans in wholes.items():
        forwards.update(dict.fromkeys(spans, SpannedForward(whole, spans)))
    return forwards


def kind_of(module: nn.Module) -> str:
    return nn.Sequential.__name__ if isinstance(module, SequentialSpan) else type(module).__name__


def calls_in_turn(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Tell whether a module only calls its children in order, as `Sequential` does, or a forward that calls spans."""
    if not isinstance(module, nn.Sequential) or isinstance(module, SequentialSpan):
        return False
    kind = type(module)
    forward: Any = module.forward
    if isinstance(forward, Around):
        forward = within(forward)
    is_own = getattr(forward, "__func__", None) is nn.Sequential.forward and forward.__self__ is module
    is_plain = kind.__iter__ is nn.Sequential.__iter__ and kind.__call__ is nn.Module.__call__
    return is_own and is_plain and vars(module).get(torch_private.COMPILED_CALL) is None
