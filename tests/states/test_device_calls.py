"""How many calls a piece takes in a steady step on the device, where the optimizer's own calls bind the host already."""

from __future__ import annotations

import sys
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
from tests.states.cases import EightBit, Make, offload

PACKAGE = str(Path(memkit.__file__).parent)
DEVICE = str(Path(PACKAGE) / "device")
NUM_PIECES = 16
MAKES_VIEWS = ("as_strided", "detach", "empty", "empty_strided", "narrow", "set_", "split", "unbind", "view")


def _calls(step: Callable[[], object]) -> tuple[int, Counter[str], Counter[str]]:
    """Return how many of memkit's functions a step calls, what it asks of the device, and by which calls it makes views."""
    num_calls, asked, made = 0, Counter[str](), Counter[str]()

    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal num_calls
        filename, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        if event == "c_call" and filename.startswith(PACKAGE) and not _is_within_device(frame):
            name = getattr(called, "__name__", "")
            made.update([name] if name in MAKES_VIEWS else [])
        elif event == "call" and filename.startswith(DEVICE):
            asked.update([frame.f_code.co_name] if not caller.startswith(DEVICE) else [])
        elif event == "call" and filename.startswith(PACKAGE) and not _is_within_device(frame):
            num_calls += 1

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return num_calls, asked, made


def _is_within_device(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_filename.startswith(DEVICE):
            return True
        frame = frame.f_back
    return False


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


@pytest.mark.parametrize(
    ("make", "master", "overlaps", "most", "views"),
    [
        (_fused, None, False, 98, 0),
        (_fused, None, True, 111, 1),
        (_fused, torch.float32, False, 103, 4),
        (_fused, torch.float32, True, 116, 5),
        (EightBit, None, False, 99, 0),
        (EightBit, None, True, 112, 1),
    ],
    ids=["plain", "plain, beside", "float32 copies", "float32 copies, beside", "8 bits", "8 bits, beside"],
)
def test_a_steady_step_takes_few_calls(make: Make, master: torch.dtype | None, overlaps: bool, most: int, views: int) -> None:
    dtype = torch.float32 if master is None else torch.bfloat16
    parameters = [nn.Parameter(torch.ones(64, 32, dtype=dtype)) for _ in range(NUM_PIECES)]
    optimizer = make(parameters)

    def give() -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)

    with offload(optimizer, ReferenceDevice(), overlap_forward=overlaps, master=master) as states:
        for _ in range(4):
            give()
            optimizer.step()
            states.wait()
        num_pieces = len(states.plan.pieces)
        give()
        num_calls, asked, made = _calls(optimizer.step)

    assert num_pieces >= NUM_PIECES
    assert num_calls <= most * num_pieces
    assert asked["copy"] == 2 * num_pieces
    assert asked["record_event"] <= (3 + overlaps) * num_pieces + 4
    assert asked["wait_event"] <= 4 * num_pieces + 2
    assert asked["current_stream"] <= num_pieces + 1
    assert sum(made.values()) <= views * num_pieces
