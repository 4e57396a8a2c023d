from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.core.hooks import HookSet
from memkit.core.kept import KeptHandle
from memkit.device import ReferenceDevice
from memkit.transfer.lanes import lanes_of
from tests.interrupts import count_lines, hooks_around, interrupt, interrupts


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
