"""Which module is running: a stack of open calls, kept by forward hooks, and what is measured at its edges."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memkit.device.base import Device, Event, MemoryCounter
from memkit.hooks import HookSet
from memkit.profile.tree import ModuleTree

Shapes = tuple[tuple[int, ...], ...]


class Gauge(Protocol):
    """Something that is read whenever the work changes hands."""

    def open(self, index: int) -> None:
        """A call of the module at `index` begins."""

    def close(self, index: int) -> None:
        """The innermost call, one of the module at `index`, ends."""

    def start_backward_of(self, index: int | None) -> None:
        """The backward goes on with operations of the module at `index`; None: it ends."""


class CallStack:
    """The calls that are open, innermost last; tells a gauge when one opens or closes.

    Modules under a compiled one are not hooked: their calls happen inside compiled code.
    """

    def __init__(self, tree: ModuleTree, gauge: Gauge) -> None:
        self._tree = tree
        self._gauge = gauge
        self._open: list[int] = []
        self._hooked: set[int] = set()
        self._raised: tuple[BaseException, int] | None = None
        self._backward_of: int | None = None
        self.in_backward = False
        self.num_calls: Counter[int] = Counter()
        # From which autograd sequence number on each module is the innermost: ascending, for `_owner_of_node`.
        self._first_numbers: list[int] = []
        self._owners: list[int] = []
        self.first_number = torch._C._autograd._get_sequence_nr()
        """Nodes with lower autograd sequence numbers were made before."""

    @property
    def current(self) -> int:
        """The innermost open module, or the tree's `outside`; in the backward, the module whose operation runs."""
        if self._backward_of is not None:
            return self._backward_of
        return self._open[-1] if self._open else self._tree.outside

    @property
    def outside(self) -> int:
        """The index that stands for work outside of any module."""
        return self._tree.outside

    def where(self, error: BaseException) -> str:
        """Return in words which module raised an exception: "layer1.0.conv1 (Conv2d)", "the backward of ..."."""
        raised_in = self._raised[1] if self._raised is not None and self._raised[0] is error else self.current
        if raised_in == self.outside:
            name = "the loss"
        else:
            name = f"{self._tree.fqn(raised_in)} ({type(self._tree.nodes[raised_in].module).__name__})"
        return f"the backward of {name}" if self.in_backward else name

    def hook(self, hooks: HookSet) -> None:
        """Hook every module whose calls can be seen."""
        for index, node in self._tree.hookable():
            hooks.around_forward(node.module, before=self._before(index), after=self._after(index))
            self._hooked.add(index)

    def call(self, index: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, run as a call of the module at `index`."""
        if index in self._hooked:
            return function(*args, **kwargs)
        self._enter(index)
        try:
            return function(*args, **kwargs)
        finally:
            self._leave(index)

    def backward(self, hooks: HookSet, graph: BackwardGraph, run: Callable[[], None]) -> None:
        """Run a backward, telling the gauge which module's operations it has come to. From here on calls are not taken
        notice of: they recompute what a checkpoint dropped.

        An operation belongs to the module that was innermost when its node was made; accumulating a gradient belongs to the
        operation before it.
        """
        self.in_backward = True
        for node in graph.nodes:
            hooks.before_backward(node, self._before_node(self._owner_of_node(node)))
        graph.nodes.clear()
        self._before_node(self._tree.outside)()
        run()
        self._gauge.start_backward_of(None)

    def _before_node(self, owner: int) -> Callable[[], None]:
        def before() -> None:
            self._backward_of = owner
            self._gauge.start_backward_of(owner)

        return before

    def _owner_of_node(self, node: torch.autograd.graph.Node) -> int:
        position = bisect_right(self._first_numbers, node._sequence_nr()) - 1
        return self._owners[position] if position >= 0 else self._tree.outside

    def _before(self, index: int) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not self.in_backward:
                self._enter(index)

        return before

    def _after(self, index: int) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self.in_backward:
                self._leave(index)

        return after

    def _enter(self, index: int) -> None:
        self.num_calls[index] += 1
        self._open.append(index)
        self._gauge.open(index)
        self._note_owner()

    def _leave(self, index: int) -> None:
        error = sys.exc_info()[1]
        if error is not None and (self._raised is None or self._raised[0] is not error):
            self._raised = (error, index)
        self._open.pop()
        self._gauge.close(index)
        self._note_owner()

    def _note_owner(self) -> None:
        self._first_numbers.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self.current)


class NoGauge:
    """Reads nothing: for warm-up runs, and where memory cannot be counted."""

    before_bytes = None
    highest_reserved_bytes = None
    forward_peaks: Mapping[int, int] = {}
    backward_peaks: Mapping[int, int] = {}

    def open(self, index: int) -> None:
        pass

    def close(self, index: int) -> None:
        pass

    def start_backward_of(self, index: int | None) -> None:
        pass

    def take_highest(self) -> None:
        return None


class PeakGauge:
    """The most bytes allocated during each module's calls, above what was allocated when the call opened.

    The allocator has one peak for everybody, so at each edge it is folded into every open call and started again.
    """

    def __init__(self, counter: MemoryCounter) -> None:
        self._counter = counter
        self._calls: list[list[int]] = []  # [bytes at entry, highest bytes so far] of each open call
        self._backward_of: int | None = None
        counter.reset_peak()
        self.before_bytes = counter.allocated_bytes()
        self._highest_bytes = self.before_bytes
        self.highest_reserved_bytes = counter.peak_reserved_bytes()
        self.forward_peaks: dict[int, int] = {}
        self.backward_peaks: dict[int, int] = {}

    def open(self, index: int) -> None:
        self._fold()
        current = self._counter.allocated_bytes()
        self._calls.append([current, current])

    def close(self, index: int) -> None:
        self._fold()
        entry_bytes, highest_bytes = self._calls.pop()
        self.forward_peaks[index] = max(self.forward_peaks.get(index, 0), highest_bytes - entry_bytes)

    def start_backward_of(self, index: int | None) -> None:
        highest = self._fold()
        if self._backward_of is not None:
            above = highest - self.before_bytes
            self.backward_peaks[self._backward_of] = max(self.backward_peaks.get(self._backward_of, 0), above)
        self._backward_of = index

    def _fold(self) -> int:
        highest = self._counter.peak_bytes()
        reserved = self._counter.peak_reserved_bytes()
        for call in self._calls:
            call[1] = max(call[1], highest)
        self._highest_bytes = max(self._highest_bytes, highest)
        if reserved is not None:
            self.highest_reserved_bytes = max(self.highest_reserved_bytes or 0, reserved)
        self._counter.reset_peak()
        return highest

    def take_highest(self) -> int:
        """Return the most bytes allocated at once since the last `take_highest`, and start again."""
        self._fold()
        highest, self._highest_bytes = self._highest_bytes, self._counter.allocated_bytes()
        return highest


class TimeGauge:
    """The time of each module's calls, from events on the device: nothing waits until `read`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._calls: list[Event] = []
        self._depths: Counter[int] = Counter()
        self._forward_spans: list[tuple[int, Event, Event]] = []
        self._backward_marks: list[tuple[int | None, Event]] = []

    def open(self, index: int) -> None:
        self._depths[index] += 1
        self._calls.append(self._device.record_event())

    def close(self, index: int) -> None:
        start = self._calls.pop()
        self._depths[index] -= 1
        if not self._depths[index]:  # a module that calls itself is already in the outer call's time
            self._forward_spans.append((index, start, self._device.record_event()))

    def start_backward_of(self, index: int | None) -> None:
        self._backward_marks.append((index, self._device.record_event()))

    def read(self) -> tuple[dict[int, float], dict[int, float]]:
        """Wait for the device; return seconds per module: forward (with the modules it called) and backward (its own)."""
        self._device.synchronize()
        forward: dict[int, float] = {}
        for index, start, end in self._forward_spans:
            forward[index] = forward.get(index, 0.0) + start.elapsed_s(end)
        backward: dict[int, float] = {}
        for (index_or_none, start), (_, end) in zip(self._backward_marks, self._backward_marks[1:], strict=False):
            if index_or_none is not None:
                backward[index_or_none] = backward.get(index_or_none, 0.0) + start.elapsed_s(end)
        return forward, backward


class Signatures:
    """What goes in and out of each module: shapes and dtype at its first call, and how many kinds of call there were."""

    def __init__(self) -> None:
        self._kinds: dict[int, dict[tuple[Shapes, Shapes], str]] = {}

    def hook(self, tree: ModuleTree, hooks: HookSet) -> None:
        """Note the calls of every module that `CallStack.hook` hooks."""
        for index, node in tree.hookable():
            hooks.after_forward(node.module, self._after(index))

    def note(self, index: int, inputs: Any, output: Any) -> None:
        """Note one call of the module at `index`."""
        kind = (shapes_of(inputs), shapes_of(output))
        self._kinds.setdefault(index, {}).setdefault(kind, first_dtype(output))

    def first(self, index: int) -> tuple[Shapes, Shapes, str]:
        """Return the input shapes, output shapes and output dtype of the first call; empty if there was none."""
        for (inputs, outputs), dtype in self._kinds.get(index, {}).items():
            return inputs, outputs, dtype
        return (), (), ""

    def num_kinds(self, index: int) -> int:
        """Return how many different pairs of input and output shapes the module was called with."""
        return len(self._kinds.get(index, {}))

    def _after(self, index: int) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.note(index, (args, kwargs), output)

        return after


class BackwardGraph:
    """The autograd nodes that a backward from `roots` can reach, and the leaves that get gradients from it.

    The inside of a reentrant checkpoint is one node.
    """

    def __init__(self, roots: Iterable[Tensor]) -> None:
        self.nodes: list[torch.autograd.graph.Node] = []
        self.leaves: list[Tensor] = []
        seen: set[torch.autograd.graph.Node] = set()
        pending = [root.grad_fn for root in roots if root.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions if following is not None)
            if isinstance(node, torch._C._functions.AccumulateGrad):
                self.leaves.append(node.variable)
            else:
                self.nodes.append(node)


def shapes_of(tree: Any) -> Shapes:
    """Return the shapes of the tensors in a nested structure, in its order; -1 for sizes that vary within a tensor."""
    return tuple(_shape_of(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_nested and tensor.layout == torch.strided:
        return (-1,) * tensor.dim()
    return tuple(size if type(size) is int else -1 for size in tensor.shape)


def first_dtype(tree: Any) -> str:
    """Return the dtype ("float32") of the first tensor in a nested structure, or "" if there is none."""
    return next((dtype_name(leaf.dtype) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)), "")


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
