"""One engine for all saved tensors must keep the counts and memories of each context, also on a device that it finds late."""

from __future__ import annotations

import gc
import math
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace, TracebackType

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import memkit
from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.recomputing.recorded_forward import RecordedForward
from memkit.activations.saved import state
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.records import Record
from memkit.activations.saved.state import offload_states, remat_states
from memkit.device import CpuDevice, ReferenceDevice
from memkit.plan import DTRScore
from memkit.recording.recording import Recording
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import without_collector as without_collector
from tests.contracts.conftest import open_found_late

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


def test_iterations_under_one_tag_count_once_with_hooks_of_others_in_between() -> None:
    x, device = _leaf(), ReferenceDevice()
    for _ in range(3):
        with _offload("both", device), save_on_cpu(), memkit.Rematerialize(0.5, "both", min_bytes=0, device=device):
            y = _chain(x)
        y.sum().backward()

        with _offload("once", device):
            y = _chain(x, memkit.recompute)
        y.sum().backward()

    assert memkit.stats("both").num_iterations == memkit.stats("once").num_iterations == 3
    assert memkit.stats("once").num_dropped > 0


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


@pytest.mark.usefixtures("without_collector")
def test_a_warning_that_is_raised_leaves_no_forward_behind() -> None:
    x, offload = _leaf(), memkit.CPUOffload(0.5, "raised", min_bytes="1GiB", device=ReferenceDevice())
    with warnings.catch_warnings(), suppress(UserWarning):
        warnings.simplefilter("error")
        with offload:
            entry = weakref.ref(offload._entry)
            _chain(x)
    assert entry() is None


# Locks


Edges = set[tuple[int, int]]


class WatchedLock:
    """A lock that notes which others its thread holds when it is taken."""

    edges: Edges = set()  # noqa: RUF012  # set anew by the test
    held: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.edges |= {(other, id(self)) for other in self.held if other != id(self)}
        self._lock.acquire()
        self.held.append(id(self))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.held.pop()
        self._lock.release()


def test_what_is_to_be_made_again_after_it_was_offered_takes_locks_as_a_save_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedLock, "edges", set())
    monkeypatch.setattr(WatchedLock, "held", [])
    monkeypatch.setattr(state, "threading", SimpleNamespace(RLock=WatchedLock))
    device = ReferenceDevice()
    x = _leaf()

    def forward() -> Tensor:
        outer = memkit.CPUOffload(1.0, "outer lock", min_bytes=0, window_bytes=0, device=device)
        with outer, memkit.Rematerialize(1.0, "inner lock", policy="dtr", min_bytes=0, device=device):
            y = x
            for _ in range(6):
                hidden = y.clone()
                y = hidden.sin()
                memkit.recompute(hidden)  # it was saved, and has left
            return y.sum()

    make, are_held = RecordedForward.make, []

    def watched(recorded: RecordedForward, record: Record) -> None:
        are_held.append(id(recorded.window.lock) in WatchedLock.held)
        make(recorded, record)

    monkeypatch.setattr(RecordedForward, "make", watched)
    for _ in range(2):
        forward().backward()

    assert are_held
    assert all(are_held)

    assert memkit.stats("inner lock").num_replays > 0
    edges = WatchedLock.edges
    assert edges
    assert not [edge for edge in edges if edge[::-1] in edges]
    for tag in ("outer lock", "inner lock"):
        memkit.reset(tag)
    assert torch.isfinite(x.grad).all()


def test_what_another_context_was_given_is_known_though_addresses_are_used_again() -> None:
    """Storages that leave are freed, and the next tensor may take their address: it is another value."""
    device = CpuDevice()
    window = OffloadWindow(device, "Rematerialize", "offered", threading.RLock(), lambda *_: None)
    forward = RecordedForward(Recording(device), window, DTRScore(), math.inf, Counts())

    for value in range(20):
        tensor = torch.empty(8)  # its storage and object take the last one's addresses
        assert forward.note_offer(value, tensor)
        assert not forward.note_offer(value + 100, tensor)  # written to where this tensor does not count it
        del tensor


# A device that is found late


def _remat(device: str | None = None) -> memkit.Rematerialize:
    return memkit.Rematerialize(0.2, "late", min_bytes=0, device=device)


@pytest.mark.filterwarnings("ignore:.*as little as can be")
@pytest.mark.parametrize("is_found_late", [False, True])
def test_device_is_known_once_a_step_saves(is_found_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier steps have saved nothing: the first was not recorded, the second failed."""
    if is_found_late:
        open_found_late(monkeypatch)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def gradients(x: Tensor, context: object) -> list[Tensor]:
        with context:  # type: ignore[attr-defined]  # either is a context
            loss = net(x.add(1).mul_(2)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in net.parameters()]

    plain = gradients(torch.ones(6, 4), torch.enable_grad())
    net.zero_grad()
    with _remat(), torch.no_grad():
        net(torch.ones(6, 4))
    with _remat():
        torch.ones(4).add(1)
    with pytest.raises(ZeroDivisionError), _remat():
        1 / 0  # noqa: B018

    assert_same_bits(gradients(torch.ones(6, 4), _remat()), plain)


@pytest.mark.filterwarnings("ignore:.*as little as can be")
def test_later_contexts_share_one_window_of_the_cpu() -> None:
    for _ in range(2):
        with _remat("cpu"):
            loss = nn.Sequential(nn.Linear(4, 8), nn.Tanh())(torch.ones(6, 4)).sum()
        loss.backward()

    assert len(remat_states["late"].windows()) == 1
