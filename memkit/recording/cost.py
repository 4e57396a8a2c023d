"""Host seconds that recording takes."""

from __future__ import annotations

import functools
import time
from statistics import median

import torch

from memkit import torch_private
from memkit.device import CpuDevice, default_generator
from memkit.plan import HostCosts
from memkit.recording.ops import op_kinds
from memkit.recording.recording import Recording

_NUM_MEASURED = 100
_OP, _SAVED, _REPLAYED, _REGION = 2.5, 4.0, 3.0, 10.0
"""Multiples of the cost of recording an op: an op with its module and its launch, a save, a replayed op, a region."""


@functools.cache
def recording_cost_s() -> float:
    """Return the host seconds to record a small op, without running it: measured once, on a chain of such ops."""
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
    """Return the host seconds for ops and regions on a device, as multiples of the cost of recording an op, since all of it is
    Python."""
    recorded_s = recording_cost_s()
    return HostCosts(
        op_s=_OP * recorded_s,
        recorded_s=recorded_s,
        saved_s=_SAVED * recorded_s,
        replayed_s=_REPLAYED * recorded_s,
        region_s=_REGION * recorded_s,
        is_device=torch_device.type == "cpu",
    )
