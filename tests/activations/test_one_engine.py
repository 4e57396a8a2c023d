"""What one engine for all saved tensors must not lose: who counts, what is remembered, and what interrupts leave."""

from __future__ import annotations

import gc
import math
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import memkit
from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.recomputing.recorded_forward import RecordedForward
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.state import offload_states, remat_states
from memkit.device import CpuDevice, ReferenceDevice
from memkit.plan import DTRScore
from memkit.recording.recording import Recording
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.interrupts import hooks_around, interrupts

UNIT_BYTES = 64 * 64 * 4


def _leaf() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(64, 64, requires_grad=True)


def _offload(tag: str, device: ReferenceDevice, ratio: float = 1.0) -> memkit.CPUOffload:
    return memkit.CPUOffload(ratio, tag, min_bytes=0, window_bytes=0, device=device)


def _chain(x: Tensor, word: Callable[[Tensor], Tensor] = lambda y: y, length: int = 8) -> Tensor:
    for _ in range(length):
        x = word(x.sin())
    return x


def test_iterations_of_a_recorded_offload_count_once() -> None:
    x, device = _leaf(), ReferenceDevice()
    for _ in range(4):
        with _offload("once", device):
            y = _chain(x, memkit.recompute)
        y.sum().backward()

    stats = memkit.stats("once")
    assert (stats.num_iterations, stats.num_dropped > 0) == (4, True)


def test_iterations_under_one_tag_count_once_with_hooks_of_others_in_between() -> None:
    x, device = _leaf(), ReferenceDevice()
    for _ in range(3):
        with _offload("both", device), save_on_cpu(), memkit.Rematerialize(0.5, "both", min_bytes=0, device=device):
            y = _chain(x)
        y.sum().backward()

    assert memkit.stats("both").num_iterations == 3


def test_a_device_that_was_asked_for_once_is_not_that_of_later_contexts() -> None:
    x = _leaf()
    for device in (ReferenceDevice(), None):
        with memkit.Rematerialize("1GiB", "default", min_bytes=0, device=device):
            y = _chain(x)
        y.sum().backward()

    assert CpuDevice in {type(window.device) for window in remat_states["default"].windows()}


def test_a_forward_that_took_too_much_is_told_of_when_another_is_planned() -> None:
    x, device = _leaf(), ReferenceDevice()

    def remat() -> memkit.Rematerialize:
        return memkit.Rematerialize(4 * UNIT_BYTES, "told", min_bytes=0, device=device)

    for _ in range(2):
        with remat():
            y = _chain(x)
        y.sum().backward()
    with remat():
        _chain(x.cos(), memkit.keep).sum().backward()
        with pytest.warns(UserWarning, match="was exceeded: the last step took"):
            y = _chain(x)
    y.sum().backward()


def test_the_order_of_a_backward_is_learned_where_nothing_else_holds_the_forward() -> None:
    x, device = _leaf(), ReferenceDevice()
    with memkit.Rematerialize("1GiB", "order", min_bytes=0, device=device):
        y = _chain(x)
        y = y.sin() * y.cos()
    y.sum().backward()
    del y

    trace = remat_states["order"].traces.latest
    assert trace is not None
    assert trace.ops is not None
    assert trace.ops.has_order


def test_a_window_without_a_tag_goes_with_its_last_graph() -> None:
    device = ReferenceDevice()
    with _offload("forgotten", device):
        y = _chain(_leaf())
    window = weakref.ref(offload_states["forgotten"].window(device))
    memkit.reset("forgotten")
    y.sum().backward()
    del y
    device.synchronize()
    with _offload("other", device):
        pass
    gc.collect()

    assert window() is None


def test_a_warning_that_is_raised_leaves_no_forward_behind() -> None:
    x, device = _leaf(), ReferenceDevice()
    gc.collect()
    gc.disable()
    try:
        offload = memkit.CPUOffload(0.5, "raised", min_bytes="1GiB", device=device)
        with warnings.catch_warnings(), suppress(UserWarning):
            warnings.simplefilter("error")
            with offload:
                entry = weakref.ref(offload._entry)
                _chain(x)
        assert entry() is None
    finally:
        gc.enable()


def test_what_is_saved_after_an_interrupt_stays() -> None:
    x, device = _leaf(), ReferenceDevice()
    places = list[str]()

    def forward() -> None:
        with _offload("broken", device):
            try:
                _chain(x)
            except KeyboardInterrupt:
                num_copies = memkit.stats("broken").num_copies_out
                _chain(x)
                assert memkit.stats("broken").num_copies_out == num_copies
                raise

    for place in interrupts(forward, 6, within="leave", prepare=lambda: memkit.reset("broken")):
        places.append(place)
        with _offload("broken", device):
            y = _chain(x)
        assert memkit.stats("broken").num_copies_out >= 7, place
        x.grad = None
        y.sum().backward()
    assert len(places) == 6


class _Loop:
    """Steps whose `CPUOffload` gives its recording up to a context inside, and goes on where an interrupt has come."""

    def __init__(self) -> None:
        self.device = ReferenceDevice()
        self.x = _leaf()

    def step(self) -> Tensor:
        self.x.grad = None
        with _offload("outside", self.device):
            y, has_come = memkit.recompute(self.x.sin()).exp(), False
            try:
                with memkit.Rematerialize(2 * UNIT_BYTES, "inside", min_bytes=0, device=self.device):
                    z = _chain(y)
            except KeyboardInterrupt:
                has_come = True
                z = _chain(memkit.keep(y))
            loss = _chain(z).sum()
        loss.backward()
        if has_come:
            raise KeyboardInterrupt
        return self.x.grad


@pytest.mark.full
@pytest.mark.filterwarnings(NO_PLAN_FITS, "ignore:.*was exceeded")
def test_an_interrupt_where_a_recording_is_given_up() -> None:
    loop = _Loop()
    plain = torch.autograd.grad(_chain(_chain(loop.x.sin().exp())).sum(), loop.x)[0]
    for _ in range(2):
        assert torch.equal(loop.step(), plain)
    around = hooks_around()

    for function in ("stop_recording", "take_off", "end"):
        for place in interrupts(loop.step, 30, within=function):
            assert loop.x.grad is None or torch.equal(loop.x.grad, plain), place
            assert torch.equal(loop.step(), plain), place
            assert hooks_around() == around, place


def test_what_another_context_was_given_is_known_though_addresses_are_used_again() -> None:
    """What leaves is freed, and the next tensor may be where it was: that is another value."""
    device = CpuDevice()
    window = OffloadWindow(device, "Rematerialize", "offered", threading.RLock(), lambda *_: None)
    forward = RecordedForward(Recording(device), window, DTRScore(), math.inf, Counts())

    for value in range(20):
        tensor = torch.empty(8)  # its storage, and itself, where those of the last one were
        assert forward.note_offer(value, tensor)
        assert not forward.note_offer(value + 100, tensor)  # written to where this tensor does not count it
        del tensor
