"""Seconds of ops, measured in an earlier forward or guessed, and the host seconds of recording."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from memkit.core import torch_private
from memkit.device import CpuDevice, Device, default_generator
from memkit.device.ceilings import GUESSED
from memkit.plan import HostCosts
from memkit.recording.ops import op_kinds
from memkit.recording.recorded import CostKey, cost_key
from memkit.recording.recording import Recording

_MAX_COSTS = 8192


class OpCosts:
    def __init__(self) -> None:
        self.device: Device | None = None
        self.known_s: dict[CostKey, float] = {}  # measured, or guessed until then

    def estimate_s(self, func: Any, args: Sequence[Any], results: Any) -> float:
        key = cost_key(func, args, results)
        seconds = self.known_s.get(key)
        if seconds is None:
            seconds = GUESSED.estimate_s(func, args, results)  # a measurement would take room in the first forward
            self.learn({key: seconds})
        return seconds

    def learn(self, found: dict[CostKey, float]) -> None:
        self.known_s.update(found)
        while len(self.known_s) > _MAX_COSTS:
            del self.known_s[next(iter(self.known_s))]


_NUM_MEASURED = 100
_OP, _SAVED, _REPLAYED, _REGION = 2.5, 4.0, 3.0, 10.0  # times recording an op; an op is with its module and its launch


@functools.cache
def recording_cost_s() -> float:
    from memkit.recording.recorder import Recorder  # a dispatch mode: its base is a private class of torch

    recording = Recording(CpuDevice(), known_s=[0.0] * _NUM_MEASURED)
    x, taken_s = torch.ones(1), []
    with torch_private.without_dispatch_modes(), torch.no_grad():
        for _ in range(5):
            start_s = time.perf_counter()
            for _ in range(_NUM_MEASURED):
                x.sin()
            plain_s = time.perf_counter() - start_s
            with Recorder(recording, op_kinds(), default_generator, lambda *_: 0.0):
                start_s = time.perf_counter()
                for _ in range(_NUM_MEASURED):
                    x.sin()
                taken_s.append(time.perf_counter() - start_s - plain_s)
    return max(0.0, median(taken_s) / _NUM_MEASURED)


def host_costs(torch_device: torch.device) -> HostCosts:
    recorded_s = recording_cost_s()
    return HostCosts(
        op_s=_OP * recorded_s,
        recorded_s=recorded_s,
        saved_s=_SAVED * recorded_s,
        replayed_s=_REPLAYED * recorded_s,
        region_s=_REGION * recorded_s,
        is_device=torch_device.type == "cpu",
    )
