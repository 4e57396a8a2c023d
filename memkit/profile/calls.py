"""The running module: a stack of open calls, kept by hooks. Gauges read memory and time at the ends of calls."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.hooks import HookSet
from memkit.device.base import Device, Event, MemoryCounter
from memkit.profile.tree import ModuleTree

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SPACE = ("depth", "height", "width")


class Gauge:
    """Read when a module's call begins or ends. This one reads nothing: for warm-up runs, and if memory can't be counted."""

    def __init__(self) -> None:
        self.before_bytes: int | None = None
        self.highest_reserved_bytes: int | None = None
        self.forward_peaks: dict[int, int] = {}
        self.backward_peaks: dict[int, int] = {}

    def open(self, index: int) -> None: ...  # a call of the module at `index` begins
    def close(self, index: int) -> None: ...  # the innermost call, one of the module at `index`, ends
    def start_backward_of(self, index: int | None) -> None: ...  # the backward reaches operations of a module, or None: it ends

    def take_highest(self) -> int | None:
        """Return the peak of allocated bytes since the last `take_highest`, and start again."""
        return None


class PeakGauge(Gauge):
    """The most bytes allocated in each module's calls, above those at entry, by the allocator's one peak counter."""

    def __init__(self, counter: MemoryCounter) -> None:
        super().__init__()
        self._counter = counter
        self._calls: list[list[int]] = []  # [bytes at entry, highest bytes so far] of each open call
        self._backward_of: int | None = None
        counter.reset_peak()
        self._before_bytes = self._highest_bytes = counter.allocated_bytes()
        self.before_bytes = self._before_bytes
        self.highest_reserved_bytes = counter.peak_reserved_bytes()

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
            above = highest - self._before_bytes
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
        self._fold()
        highest, self._highest_bytes = self._highest_bytes, self._counter.allocated_bytes()
        return highest


class TimeGauge(Gauge):
    """The time of each module's calls, from events on the device: nothing waits until `read`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
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


def _misfit(module: nn.Module, args: tuple[Any, ...]) -> str:
    """Return in words the shape that a module, or else its first convolution, needs, if the first argument does not fit."""
    if not args or not isinstance(args[0], Tensor):
        return ""
    found, needed = tuple(args[0].shape), _needed(module)
    if needed:
        is_fine = _fits(found, needed) or (isinstance(module, _CONVOLUTIONS) and _fits(found, needed[1:]))
    else:
        needed = next((_needed(inner) for inner in module.modules() if isinstance(inner, _CONVOLUTIONS)), ())
        is_fine = not needed or len(found) == len(needed)
    return "" if is_fine else f"it needs ({', '.join(map(str, needed))}), and was given ({', '.join(map(str, found))})"


def _needed(module: nn.Module) -> tuple[int | str, ...]:
    if isinstance(module, nn.Linear):
        return "...", module.in_features
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return "...", *module.normalized_shape
    if isinstance(module, nn.RNNBase):
        return "...", module.input_size
    if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
        return "batch", module.num_features, *_SPACE[-(2 if isinstance(module, nn.BatchNorm2d) else 3) :]
    if isinstance(module, _CONVOLUTIONS):
        return "batch", module.in_channels, *_SPACE[-len(module.kernel_size) :]
    return ()


def _fits(found: tuple[int, ...], needed: tuple[int | str, ...]) -> bool:
    if needed[0] == "...":
        needed, found = needed[1:], found[1 - len(needed) :]
    pairs = zip(found, needed, strict=False)
    return len(found) == len(needed) and all(isinstance(need, str) or size == need for size, need in pairs)


class CallStack:
    """The open calls, innermost last; modules under a compiled one are not hooked: their calls happen inside compiled code."""

    def __init__(self, tree: ModuleTree, gauge: Gauge) -> None:
        self._tree, self.outside = tree, tree.outside
        self._gauge = gauge
        self._open: list[int] = []
        self._hooked: set[int] = set()
        self._raised: tuple[BaseException, int, tuple[Any, ...]] | None = None  # of which module, with its arguments
        self._backward_of: int | None = None
        self.in_backward = False
        self.num_calls: Counter[int] = Counter()
        # The autograd sequence numbers from which on each module is the innermost, ascending, for `_owner_of_node`.
        self._first_numbers: list[int] = []
        self._owners: list[int] = []
        self.first_number = torch_private.node_number()  # nodes with lower autograd sequence numbers are older than the run

    @property
    def current(self) -> int:
        """The innermost open module, or the tree's `outside`; in the backward, the module whose operation runs."""
        if self._backward_of is not None:
            return self._backward_of
        return self._open[-1] if self._open else self.outside

    @property
    def row(self) -> str:
        return self._tree.fqn(self.current)

    def explain(self, error: BaseException) -> tuple[str, str]:
        """Return the module that raised an exception in words, and the shape that it needs, if it was given another."""
        _, index, args = self._raised if self._raised is not None and self._raised[0] is error else (None, self.current, ())
        module = None if index == self.outside else self._tree.nodes[index].module
        name = "the loss" if module is None else f"{self._tree.fqn(index)} ({type(module).__name__})"
        return f"the backward of {name}" if self.in_backward else name, "" if module is None else _misfit(module, args)

    def hook(self, hooks: HookSet) -> None:
        for index, node in self._tree.hookable():
            hooks.around_forward(node.module, before=partial(self._before, index), after=partial(self._after, index))
            self._hooked.add(index)

    def call(self, index: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if index in self._hooked:
            return function(*args, **kwargs)
        self._enter(index)
        try:
            return function(*args, **kwargs)
        finally:
            self._leave(index, args)

    def backward(self, hooks: HookSet, graph: BackwardGraph, run: Callable[[], None]) -> None:
        """Run a backward; a node belongs to the module that was innermost when it was made, or to the node before."""
        self.in_backward = True
        for node in graph.nodes:
            hooks.before_backward(node, partial(self._before_node, self._owner_of_node(node)))
        graph.nodes.clear()
        self._before_node(self.outside)
        run()
        self._gauge.start_backward_of(None)

    def _before_node(self, owner: int) -> None:
        self._backward_of = owner
        self._gauge.start_backward_of(owner)

    def _owner_of_node(self, node: torch.autograd.graph.Node) -> int:
        position = bisect_right(self._first_numbers, torch_private.node_number_of(node)()) - 1
        return self._owners[position] if position >= 0 else self.outside

    def _before(self, index: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.in_backward:
            self._enter(index)

    def _after(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.in_backward:
            self._leave(index, args)

    def _enter(self, index: int) -> None:
        self.num_calls[index] += 1
        self._open.append(index)
        self._gauge.open(index)
        self._note_owner()

    def _leave(self, index: int, args: tuple[Any, ...]) -> None:
        error = sys.exc_info()[1]
        if error is not None and (self._raised is None or self._raised[0] is not error):
            self._raised = (error, index, args)
        self._open.pop()
        self._gauge.close(index)
        self._note_owner()

    def _note_owner(self) -> None:
        self._first_numbers.append(torch_private.node_number())
        self._owners.append(self.current)


class BackwardGraph:
    """The autograd nodes that a backward from `roots` can reach, and the leaves that get gradients from it."""

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
            if isinstance(node, torch_private.AccumulateGrad):
                self.leaves.append(node.variable)
            else:
                self.nodes.append(node)
