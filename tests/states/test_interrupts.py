"""Ctrl-C at any line of a step: each parameter is as before or as after it, or an error names what is half written."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from memkit.device import ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.transfer import ReferenceDisk
from tests.interrupts import interrupts
from tests.states.cases import WAYS, assert_same, cut
from tests.states.test_faults import Compared
from tests.states.test_layered import Ahead
from tests.threads import num_own_threads

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. states of .* were put elsewhere")
NUM_LINES = [5, pytest.param(40, marks=pytest.mark.slow)]


@contextmanager
def lost_is_named() -> Iterator[None]:
    """Let an error pass that names a half-written parameter and the remedy."""
    try:
        yield
    except StateOffloadError as error:
        said = str(error)
        assert re.search(r"within parameter \d+\.\d+: a part of the parameter.* Load a checkpoint of the model", said)


@pytest.mark.parametrize("num_lines", NUM_LINES)
@pytest.mark.parametrize("is_cut", [False, True], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_step(way: str, is_cut: bool, num_lines: int) -> None:
    threads, held = num_own_threads(), set()
    compared = Compared(ReferenceDevice(), way, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))

    def step() -> None:
        compared.backward()
        compared.optimizer.step()
        if "overlap_forward" in WAYS[way]:
            compared.states.wait()  # by which the step ends; elsewhere it is over by then, and one more would be the next

    for place in interrupts(step, num_lines, prepare=compared.begin_anew):
        with lost_is_named():
            compared.assert_whole(place)
            compared.step()  # which ends the step
            compared.assert_whole(place)
            compared.assert_goes_on(place)
        held.add(compared.states.stats().host_bytes)
    compared.begin_anew()
    step()
    compared.assert_new()
    assert len(held) == 1
    compared.plain.load_state_dict(compared.model.state_dict())
    compared.plain_optimizer.load_state_dict(copy.deepcopy(compared.optimizer.state_dict()))
    compared.close()
    assert num_own_threads() == threads


@pytest.mark.parametrize("num_lines", NUM_LINES)
@pytest.mark.parametrize("way", ["device", "disk", "backward, disk"])
def test_saving(way: str, num_lines: int) -> None:
    compared = Compared(ReferenceDevice(), way)
    for place in interrupts(compared.optimizer.state_dict, num_lines):
        assert_same(compared.optimizer.state_dict(), compared.begin[1], place)
    compared.assert_goes_on()
    compared.close()


@pytest.mark.parametrize("num_lines", [2, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", [{}, {"has_master": True}, {"disk": ReferenceDisk(is_late=False)}], ids=["", "master", "disk"]
)
def test_backward_of_streamed_layers(options: dict[str, Any], num_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch)
    trained = Ahead(ReferenceDevice(), **options)
    for _ in interrupts(trained.step, num_lines, prepare=trained.begin_anew):
        with lost_is_named():
            trained.assert_whole()
            trained.assert_goes_on()
    trained.begin_anew()
    trained.assert_goes_on()
    assert trained.layers.stats().num_overflows == 0
    trained.close()
