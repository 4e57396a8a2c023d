"""Which module is running: a stack of open calls, kept by forward hooks, and by node hooks in the backward."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.hooks import HookSet
from memkit.profile.gauges import Gauge
from memkit.profile.misfits import misfit
from memkit.profile.tree import ModuleTree


class CallStack:
    """The calls that are open, innermost last; tells a gauge when one opens or closes.

    Modules under a compiled one are not hooked: their calls happen inside compiled code.
    """

    def __init__(self, tree: ModuleTree, gauge: Gauge) -> None:
        self._tree = tree
        self._gauge = gauge
        self._open: list[int] = []
        self._hooked: set[int] = set()
        self._raised: tuple[BaseException, int, tuple[Any, ...]] | None = None
        """An exception, the module that raised it, and what that was given."""
        self._backward_of: int | None = None
        self.in_backward = False
        self.num_calls: Counter[int] = Counter()
        # From which autograd sequence number on each module is the innermost: ascending, for `_owner_of_node`.
        self._first_numbers: list[int] = []
        self._owners: list[int] = []
        self.first_number = torch_private.node_number()
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

    def misfit(self, error: BaseException) -> str:
        """Return in words which shape the module that raised an exception needs, if it was given another; else ""."""
        if self._raised is None or self._raised[0] is not error:
            return ""
        _, index, args = self._raised
        return "" if index == self.outside else misfit(self._tree.nodes[index].module, args)

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
            self._leave(index, args)

    def backward(self, hooks: HookSet, graph: BackwardGraph, run: Callable[[], None]) -> None:
        """Run a backward, telling the gauge which module's operations it has reached. Module calls are ignored from here on:
        they belong to recomputes of checkpoints.

        An operation belongs to the module that was innermost when its node was made. Accumulating a gradient belongs to the
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
        position = bisect_right(self._first_numbers, torch_private.node_number_of(node)()) - 1
        return self._owners[position] if position >= 0 else self._tree.outside

    def _before(self, index: int) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not self.in_backward:
                self._enter(index)

        return before

    def _after(self, index: int) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self.in_backward:
                self._leave(index, args)

        return after

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
            if isinstance(node, torch_private.AccumulateGrad):
                self.leaves.append(node.variable)
            else:
                self.nodes.append(node)
