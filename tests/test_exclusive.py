"""Contexts that know whether a thread is in them, hooks that are taken off when none is, and modes that an interrupt leaves."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import memkit
from memkit.core.hooks import HookSet, SavedTensorHooks, end_left, innermost_pack
from memkit.core.interrupts import Block, Exclusive
from memkit.core.kept import KeptHandle
from memkit.core.torch_state import leave_mode
from memkit.device import ReferenceDevice
from memkit.recording.recorder import QuietMode
from memkit.transfer.lanes import lanes_of
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.interrupts import count_lines, hooks_around, interrupt, interrupts


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


# Dispatch modes


class Loud(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Quiet(QuietMode):
    __torch_dispatch__ = Loud.__torch_dispatch__


def test_mode_is_left_whole_after_an_interrupt_at_any_line() -> None:
    modes: list[QuietMode] = []

    def step() -> None:
        modes.append(Quiet())
        with modes[-1]:
            torch.ones(1).sin()

    before, places = hooks_around(), []
    for place in interrupts(step, 1000):
        places.append(place)
        leave_mode(modes[-1])
        assert hooks_around() == before, place

    assert {place.split(" in ")[1].split(":")[0] for place in places} >= {"__enter__", "__exit__", "leave_mode"}
    assert any("_python_dispatch.py" in place for place in places)


def test_modes_above_stay_on_after_an_interrupt_at_any_line() -> None:
    below, above = Quiet(), Loud()

    def enter() -> None:
        for mode in (*_python_dispatch._get_current_dispatch_mode_stack(), below):
            leave_mode(mode)
        below.__enter__()
        above.__enter__()

    for place in interrupts(lambda: leave_mode(below), 1000, prepare=enter):
        leave_mode(below)
        assert _python_dispatch._get_current_dispatch_mode_stack() == [above], place
    leave_mode(above)

    assert torch._C._len_torch_dispatch_stack() == 0


def test_flags_around_other_modes_are_set_back() -> None:
    with Loud():
        before = hooks_around()
        with Quiet():
            pass
        assert hooks_around() == before

        with Quiet():
            with Loud():
                pass
            assert torch._C._len_torch_dispatch_stack() == 2
        assert hooks_around() == before


@pytest.mark.filterwarnings(NO_PLAN_FITS, "ignore:.*saved tensors for a backward, and none came")
def test_context_that_was_interrupted_in_torchs_own_lines_breaks_no_other() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    before = hooks_around()

    def step() -> None:
        with memkit.Rematerialize(0.5, "interrupted in torch", min_bytes=0):
            y = x.sin().exp().sin().exp().sin().exp()
        y.sum().backward()

    step()
    for name in ("__enter__", "__exit__"):
        for place in interrupts(step, 1000, within=name):
            with memkit.CPUOffload(1.0, "another", min_bytes=0, device=memkit.device.ReferenceDevice()):
                x.sin()
            step()
            assert hooks_around() == before, place
    memkit.reset("interrupted in torch")
    memkit.reset("another")


def test_step_is_stopped_ahead_of_each_of_its_lines() -> None:
    KeptHandle(torch.ones(1))  # the first looks up private names of torch
    seen: list[str] = []

    def step() -> None:
        seen.append("begins")
        KeptHandle(torch.ones(1))
        seen.append("ends")

    places = list(interrupts(step, 100))

    assert len(places) == count_lines(step) > 1
    assert all("kept.py" in place and "in __init__" in place for place in places)
    assert seen == ["begins", "ends", *["begins"] * len(places), "begins", "ends"]


def test_interrupt_that_is_kept_from_the_user_is_a_failure() -> None:
    def step() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            KeptHandle(torch.ones(1))

    with pytest.raises(AssertionError, match="nobody heard of the interrupt"):
        interrupt(step, 0)


def test_hooks_that_autograd_calls_are_interrupted() -> None:
    x = torch.ones(2, requires_grad=True)
    saved: list[weakref.ref[KeptHandle]] = []

    def pack(tensor: Tensor) -> KeptHandle:
        handle = KeptHandle(tensor)
        saved.append(weakref.ref(handle))
        return handle

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, KeptHandle.unpack):
            y = x.sin()
        y.sum().backward()

    places = list(interrupts(step, 100))

    assert {place.split(" in ")[1].split(":")[0] for place in places} >= {"__init__", "unpack"}


def test_blocks_are_not_kept_from_their_exit() -> None:
    """As Python does, which looks for signals after calls and at the begin of functions."""
    device = ReferenceDevice()

    places = list(interrupts(lambda: lanes_of(device), 100, prepare=lambda: lanes_of(device)))

    assert [place.split(": ")[1] for place in places] == ["with _lock:", "if device not in _lanes:", "return _lanes[device]"]


def test_hooks_that_are_left_show() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = hooks_around(model)

    with HookSet() as hooks:
        hooks.after_forward(model[0], lambda *_: None)
        assert hooks_around(model) != before
    context = memkit.CPUOffload(1.0, "left", device=ReferenceDevice())
    context.__enter__()
    assert hooks_around(model) != before
    context.__exit__(None, None, None)
    memkit.reset("left")

    assert hooks_around(model) == before
