"""Contexts that know whether a thread is in them, and hooks that are taken off when none is."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memkit.core.hooks import SavedTensorHooks, end_left, innermost_pack
from memkit.core.interrupts import Block, Exclusive
from memkit.core.torch_state import leave_mode


class Context(Exclusive):
    """Sets hooks, and may be interrupted in its exit."""

    def __init__(self) -> None:
        self.hooks: SavedTensorHooks | None = None
        self.num_ends = 0
        self.is_interrupted = False

    def __enter__(self) -> Context:
        end_left()
        block: Block = self.claim("somebody is in")
        self.is_entered = True
        self.hooks = SavedTensorHooks(_same, _same, owner=self, block=block)
        self.hooks.__enter__()
        return self

    def end_block(self, *, has_failed: bool) -> None:
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        self.end(has_failed=has_failed)

    def end(self, *, has_failed: bool) -> None:
        self.num_ends += 1
        assert self.hooks is not None
        self.hooks.__exit__()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _leave_by_interrupt(context: Context) -> None:
    context.is_interrupted = True
    with contextlib.suppress(KeyboardInterrupt), context:
        pass


def test_hooks_that_an_interrupt_has_left_are_taken_off_by_the_next_context() -> None:
    left, following = Context(), Context()
    _leave_by_interrupt(left)
    assert innermost_pack() is _same

    with following:
        assert left.num_ends == 1
    assert innermost_pack() is None


def test_context_is_entered_again_after_an_interrupt_ahead_of_its_end() -> None:
    context = Context()
    _leave_by_interrupt(context)
    context.is_entered = True  # as where the interrupt came ahead of all

    with context:
        pass

    assert not context.is_entered
    assert innermost_pack() is None


@pytest.mark.parametrize("by_hand", [False, True])
def test_context_that_somebody_is_in_is_refused_and_stays_on(by_hand: bool) -> None:
    context = Context()

    with contextlib.ExitStack() if by_hand else context as entered:
        if isinstance(entered, contextlib.ExitStack):
            entered.enter_context(context)
        with pytest.raises(ValueError, match="somebody is in"), context:
            pass
        end_left()

        assert context.num_ends == 0
        assert innermost_pack() is _same
    assert innermost_pack() is None


def test_mode_is_left_from_below_others() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    below, above = Mode(), Mode()
    below.__enter__()
    with above:
        leave_mode(below)
        leave_mode(below)
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [above]

    assert torch._C._len_torch_dispatch_stack() == 0
