"""Spans of a `Sequential` in a recorded forward: neighboring children, looked at as the call of one module."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from memkit.plan import ModuleCall, find_spans
from memkit.recording.aftermath import Aftermath
from memkit.recording.module_calls import NO_GRAD, WRITES, Alike, NotedCall
from memkit.recording.recording import Recording
from memkit.sequentials import SpanReference, calls_in_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanCall:
    """Neighboring calls in a call of a `Sequential`, as the call of one module."""

    call: ModuleCall
    """The call. Its parent is the Sequential's call, by its index among the noted ones."""
    calls: tuple[int, int]
    """The index of the first noted call in it, and of the first one after it."""
    reference: SpanReference
    children: tuple[weakref.ref[nn.Module], ...]
    """The modules that it calls."""


class _NotedSpan(NotedCall):
    """Neighboring calls in a call of a `Sequential`, as one `NotedCall`.

    Args:
        whole: the call of the Sequential.
        name: the name of the span.
        parent: the index of the Sequential's call.
        calls: the calls in the span.
        recording: the recording of their ops.
    """

    __slots__ = ("_calls",)

    def __init__(self, whole: NotedCall, name: str, parent: int, calls: Sequence[NotedCall], recording: Recording) -> None:
        first, last = calls[0], calls[-1]
        self._calls = calls
        self.module, self.name, self.number, self.parent = whole.module, name, whole.number, parent
        self._first, self._given, self.shapes = first._first, first._given, first.shapes
        self.stop, self._made, self._weights, self.needs_grad = last.stop, last._made, last._weights, last.needs_grad
        read = {value for call in calls for value in call.inputs if value < self._first[-1]}
        self.inputs = tuple(sorted(read | self._given))
        self.why_no_part = ""
        modules = [module for call in calls if (module := call.module()) is not None]
        self.why_not = self._why_not_alone(modules, read, recording)

    def is_rewritten(self, aftermath: Aftermath, alike: Alike) -> bool:
        return any(call.is_rewritten(aftermath, alike) for call in self._calls)


def span_calls(noted: Sequence[NotedCall], recording: Recording, aftermath: Aftermath, alike: Alike) -> tuple[SpanCall, ...]:
    """Return the spans that may be regions, in the order in which they begin, enclosing ones first.

    Args:
        noted: the calls of a forward, in the order in which they begin.
        recording: the forward.
        aftermath: the reads and writes of the forward.
        alike: the calls of each module.
    """
    inside: list[list[int]] = [[] for _ in noted]
    ends = [0] * len(noted)
    for place, call in enumerate(noted):
        if call.parent >= 0:
            inside[call.parent].append(place)
    for place in reversed(range(len(noted))):
        ends[place] = ends[inside[place][-1]] if inside[place] else place + 1
    places = dict[int, list[int]]()
    for place, call in enumerate(noted):
        if inside[place] and call.why_not != NO_GRAD:
            places.setdefault(id(call.module), []).append(place)
    found = list[SpanCall]()
    for wholes in places.values():
        module = noted[wholes[0]].module()
        if module is None or not calls_in_turn(module):
            continue
        rows = [[noted[place] for place in inside[place]] for place in wholes]
        if not _are_in_turn(module, [noted[place] for place in wholes], rows):
            continue
        for first, stop in _spans_of(module, rows):
            children = tuple(call.module for call in rows[0][first:stop])
            reference = SpanReference(noted[wholes[0]].module, children, first, len(rows[0]))
            for parent, row in zip(wholes, rows, strict=True):
                calls = row[first:stop]
                name = f"{calls[0].name.rpartition('.')[0]}.{first}:{stop}".lstrip(".")
                span = _NotedSpan(noted[parent], name, parent, calls, recording).as_planned(recording, aftermath, alike)
                if not span.why_not:
                    bounds = inside[parent][first], ends[inside[parent][stop - 1]]
                    found.append(
                        SpanCall(call=replace(span, is_span=True), calls=bounds, reference=reference, children=children)
                    )
    return tuple(sorted(found, key=lambda span: (span.calls[0], -span.calls[1])))


def _are_in_turn(module: nn.Module, wholes: Sequence[NotedCall], rows: Sequence[Sequence[NotedCall]]) -> bool:
    """Tell whether each call of a `Sequential` has ended and called each of its children once, in order."""
    children = list(module.children())  # each once: one that it has twice is called more often
    return all(call.stop is not None for call in wholes) and all([call.module() for call in row] == children for row in rows)


def _spans_of(module: nn.Module, rows: Sequence[Sequence[NotedCall]]) -> Iterator[tuple[int, int]]:
    """Yield the first child of each span of a `Sequential`, and the first one after it.

    They are the same for all of its calls, so that two spans are either nested or disjoint.

    Args:
        module: the Sequential.
        rows: the calls of its children in each of its calls.
    """
    kinds = list(map(type, module.children()))
    size = len(kinds)
    is_free = [not any(row[place].why_no_part for row in rows) for place in range(size)]
    is_joined = [any(row[place].why_not == WRITES for row in rows) for place in range(size)]
    first = 0
    for is_part, group in groupby(is_free):
        stop = first + len(list(group))
        for start, end in find_spans(kinds[first:stop], is_joined[first:stop]) if is_part else ():
            if end - start < size:  # else it is the Sequential itself
                yield first + start, first + end
        first = stop
