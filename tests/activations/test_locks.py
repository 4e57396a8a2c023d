"""Whatever asks for a replay holds the lock of what is replayed, and locks are taken in one order: no two threads get into each
other's way, or wait for each other."""

from __future__ import annotations

import threading
from types import SimpleNamespace, TracebackType

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.recomputing.recorded_forward import RecordedForward
from memkit.activations.saved import state
from memkit.activations.saved.records import Record
from memkit.device import ReferenceDevice
from tests.activations.chains import leaf_on

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
    x = leaf_on(device.torch_device)

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
