"""When a backward is over: to who has registered for that, and to who waits for it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.core import backwards
from tests.engine import LateThread


class At(torch.autograd.Function):
    """Calls a function in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.function()
        return grad, None


def _backward_at(*functions: Any) -> None:
    """Call functions in a backward, the last one first."""
    x = torch.ones(1, requires_grad=True)
    y = x
    for function in functions:
        y = At.apply(y, function)  # type: ignore[no-untyped-call]
    y.sum().backward()


def _fail() -> None:
    raise ArithmeticError("the test's own")


def _note(told: list[Any], ends: set[backwards.BackwardEnd]) -> Any:
    return lambda: told.append(backwards.on_end(told.append, among=ends))


@pytest.mark.parametrize("fails", [False, True])
def test_ends_are_among_those_to_come_until_they_are_told(fails: bool) -> None:
    told, ends, seen = list[Any](), set[backwards.BackwardEnd](), list[int]()

    def look() -> None:
        backwards.join(ends)  # nobody waits within a backward for itself
        seen.append(len(ends))

    functions = [look, _note(told, ends)]
    if fails:
        with pytest.raises(ArithmeticError):
            _backward_at(_fail, *functions)
    else:
        _backward_at(*functions)

    assert seen == [1]
    assert told[1:] == [fails]
    assert told[0].is_over
    assert not ends
    told[0].join()


def test_who_joins_waits_for_a_thread_that_is_at_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    late, told, ends = LateThread(monkeypatch), list[Any](), set[backwards.BackwardEnd]()
    with pytest.raises(ArithmeticError):
        _backward_at(_fail, _note(told, ends))
    assert len(told) == len(ends) == 1
    assert not told[0].is_over

    late.leave(lambda: told.append("left"), after_s=0.02)
    backwards.join(ends)

    assert told[1:] == ["left", True]
    assert not ends
    late.join()


def test_who_joins_waits_for_a_hook_that_another_thread_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    late, ends, begun = LateThread(monkeypatch), list[backwards.BackwardEnd](), threading.Event()
    told = list[bool]()

    def slow(has_failed: bool) -> None:
        begun.set()
        time.sleep(0.02)
        told.append(has_failed)

    with pytest.raises(ArithmeticError):
        _backward_at(_fail, lambda: ends.append(backwards.on_end(slow)))
    late.leave()
    assert begun.wait(300)
    assert ends[0].is_over
    ends[0].join()

    assert told == [True]
    late.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_hook_that_was_broken_off_is_not_called_once_someone_has_waited() -> None:
    ends, told = set[backwards.BackwardEnd](), list[bool]()

    def breaks(has_failed: bool) -> None:
        told.append(has_failed)
        raise ArithmeticError("the hook's")

    with pytest.raises(ArithmeticError, match="the hook's"):
        _backward_at(lambda: backwards.on_end(breaks, among=ends))
    assert told == [False, True]
    (end,) = ends
    backwards.join(ends)

    end._tell(True)
    assert told == [False, True]
    assert not ends


def test_interrupts_traceback_keeps_no_backward_from_being_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(set[backwards.BackwardEnd]):
        def add(self, end: backwards.BackwardEnd) -> None:
            super().add(end)
            raise KeyboardInterrupt

    told, ends = list[bool](), Interrupting()
    with pytest.raises(KeyboardInterrupt) as held:
        _backward_at(lambda: backwards.on_end(told.append, among=ends))

    backwards.join(ends)
    assert told == [True]
    del held


def test_backward_within_another_leaves_that_one_alone() -> None:
    x = torch.arange(3.0, requires_grad=True)
    y = At.apply(x * x, lambda: backwards.pass_through(torch.device("cpu")))  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.inference_mode():
        backwards.pass_through(torch.device("cpu"))
    y.sum().backward()

    assert torch.equal(x.grad, torch.arange(3.0) * 2)  # type: ignore[arg-type]  # there is one


# What the engine's thread for a device does beside the host's


class _TwoThreads:
    """A backward whose node on a device begins, and takes a while, while its node on the host fails."""

    def __init__(self, on_host: Any) -> None:
        self.log, self.ends, self._begun = list[Any](), set[backwards.BackwardEnd](), threading.Event()
        self._on_host = on_host
        here, there = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True, device="cuda")
        self._leaves = here, there
        self._loss = At.apply(here, self._at_host) + At.apply(there, self._at_device).cpu()  # type: ignore[no-untyped-call]

    def _at_device(self) -> None:
        backwards.on_end(self.log.append, among=self.ends)
        self._begun.set()
        time.sleep(0.2)
        self.log.append("device")

    def _at_host(self) -> None:
        assert self._begun.wait(300)
        self._on_host(self.log)
        _fail()

    def run(self) -> None:
        with pytest.raises(ArithmeticError):
            self._loss.sum().backward()


@pytest.mark.gpu
def test_failed_backward_on_a_gpu_is_over_once_joined() -> None:
    case = _TwoThreads(lambda log: log.append("host"))
    case.run()
    assert case.log == ["host"]
    backwards.join(case.ends)

    assert case.log == ["host", "device", True]


@pytest.mark.gpu
def test_backward_within_another_comes_behind_the_node_that_a_gpus_thread_is_at() -> None:
    def on_host(log: list[Any]) -> None:
        backwards.pass_through(torch.device("cuda", 0))
        log.append("host")

    case = _TwoThreads(on_host)
    case.run()
    backwards.join(case.ends)

    assert case.log == ["device", "host", True]
