"""How many calls from one file of memkit into another a saved tensor takes, in a steady step: each is time of the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import CodeType, FrameType

import torch
from torch import Tensor, nn

import memkit
from memkit.activations.saved import entry
from memkit.device import ReferenceDevice

PACKAGE = str(Path(memkit.__file__).parent)
DEVICE = str(Path(PACKAGE) / "device")


def _is_counted(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    return filename.startswith(PACKAGE) and not filename.startswith(DEVICE)


def _caller_in_package(frame: FrameType) -> FrameType | None:
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
        caller = caller.f_back
    return caller


def _calls_across_files(within: CodeType, run: Callable[[], object]) -> list[int]:
    """Return for each outermost call of a function how many calls that come of it cross from one file of memkit, but for those
    of its devices, into another."""
    found: list[int] = []
    outermost: list[FrameType] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is within and not outermost:
            outermost.append(frame)
            found.append(0)
        elif event == "call" and outermost and _is_counted(frame):
            caller = _caller_in_package(frame)
            if caller is not None and _is_counted(caller) and caller.f_code.co_filename != frame.f_code.co_filename:
                found[-1] += 1
        elif event == "return" and outermost and frame is outermost[0]:
            outermost.clear()

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def _steady() -> tuple[Callable[[], Tensor], ReferenceDevice]:
    """Return a forward whose saved tensors all move, after a few steps of it."""
    device = ReferenceDevice()
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])

    def forward() -> Tensor:
        with memkit.CPUOffload(1.0, "calls", min_bytes=0, window_bytes=0, device=device):
            return model(torch.randn(32, 64)).sum()

    for _ in range(3):
        forward().backward()
    return forward, device


def test_packing_a_tensor_crosses_few_files() -> None:
    forward, device = _steady()

    calls = _calls_across_files(entry.Entry.pack.__code__, forward)

    assert len(calls) > 12
    assert memkit.stats("calls").num_copies_out == 12
    assert median(moved := [count for count in calls if count > 5]) <= 15
    assert len(moved) >= 12
    device.synchronize()


def test_unpacking_a_tensor_crosses_few_files() -> None:
    forward, device = _steady()
    loss = forward()

    calls = _calls_across_files(entry._unpack.__code__, loss.backward)

    assert len(calls) > 12
    assert memkit.stats("calls").num_copies_in == 12
    assert median(moved := [count for count in calls if count > 5]) <= 20
    assert len(moved) >= 12
    device.synchronize()
