"""What is reported is what happened."""

from __future__ import annotations

import re
import statistics
import time

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import memkit
from memkit.device import CpuDevice

_NUM_OPS = 300


class Empty(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        return func(*args, **(kwargs or {}))


def _sines_s(x: Tensor) -> float:
    """Return what many small ops take the host."""
    with torch.no_grad():
        start_s = time.perf_counter()
        for _ in range(_NUM_OPS):
            x.sin()
        return time.perf_counter() - start_s


def _seconds(tag: str) -> list[tuple[float, float, float]]:
    """Return for some steps what recording is reported to have taken, and what many ops took with and without."""
    x, found = torch.randn(16, requires_grad=True), []
    for _ in range(3):
        with Empty():
            plain_s = _sines_s(x)
        with memkit.Rematerialize(1.0, tag, min_bytes=0, device=CpuDevice()):
            recorded_s = _sines_s(x)
            loss = x.clone().exp().sum()
        found.append((memkit.stats(tag).recorder_s, recorded_s, plain_s))
        loss.backward()
    return found


@pytest.mark.parametrize("number", [1, 2])
def test_seconds_of_the_recorder_are_about_what_it_takes(number: int) -> None:
    steps = [_seconds(f"seconds {count}")[number] for count in range(9)]

    reported_s = statistics.median(reported_s for reported_s, _, _ in steps)
    taken_s = statistics.median(recorded_s - plain_s for _, recorded_s, plain_s in steps)  # machines are busy at times
    assert 1 / 10 < reported_s / taken_s < 10


def test_error_of_an_op_is_its_own() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(3, 3)
    with memkit.Rematerialize(1.0, "error", min_bytes=0, device=CpuDevice()) as context:
        x.mm(x)
        num_ops = len(context._entry._run.tape.calls)
        for _ in range(6):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                x.mm(w)
        assert len(context._entry._run.tape.calls) == num_ops
        x.mm(x)


def test_small_sizes_are_printed() -> None:
    x = torch.randn(16, requires_grad=True)
    with memkit.Rematerialize(1.0, "small", min_bytes=0, device=CpuDevice()):
        x.clone().exp().sin()

    assert ["saved", "64 bytes"] in [re.split(r"  +", line) for line in str(memkit.stats("small")).splitlines()]
