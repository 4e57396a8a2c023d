"""How many calls of Python functions of memkit a piece takes in a steady step on the host: the cores are idle meanwhile."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.device import ReferenceDevice
from memkit.plan import states as state_pieces
from tests.states.cases import offload

PACKAGE = str(Path(memkit.__file__).parent)
DEVICE = str(Path(PACKAGE) / "device")
NUM_PIECES = 16


def _num_calls(step: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many functions a step calls, in the thread that steps and in this one."""
    found = Counter[str]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        filename = frame.f_code.co_filename
        if event == "call" and filename.startswith(PACKAGE) and not filename.startswith(DEVICE):
            found[threading.current_thread().name.split("_")[0]] += 1

    def within(run: Any, *args: Any) -> None:
        sys.setprofile(profile)
        try:
            run(*args)
        finally:
            sys.setprofile(None)

    with monkeypatch.context() as patch:
        run = memkit.states.host_steps.HostSteps._step
        patch.setattr(memkit.states.host_steps.HostSteps, "_step", lambda *args: within(run, *args))
        within(step)
    return found


@pytest.mark.parametrize(
    ("is_cut", "in_thread", "beside"),
    [(False, 32, 115), (True, 42, 115)],
    ids=["whole", "in windows"],
)
@pytest.mark.parametrize("master", [None, torch.float32])
def test_a_steady_step_takes_few_calls(
    is_cut: bool, in_thread: int, beside: int, master: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32 if master is None else torch.bfloat16
    if is_cut:
        for name, value in (("PIECE_BYTES", 2**12), ("_LARGEST_PIECE_BYTES", 2**12), ("WINDOW_NUMEL", 64)):
            monkeypatch.setattr(state_pieces, name, value)
    sizes = [(NUM_PIECES * 32, 16)] if is_cut else [(32, 32)] * NUM_PIECES
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()

    with offload(optimizer, ReferenceDevice(), update="host", master=master) as states:
        for _ in range(4):
            step()
        num_parts = sum(len(piece.parts) for piece in states.plan.pieces)
        found = _num_calls(step, monkeypatch)

    assert num_parts >= NUM_PIECES
    assert found["memkit-step"] <= in_thread * num_parts
    assert found["MainThread"] <= beside * num_parts
