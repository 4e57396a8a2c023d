"""`CPUOffload` on the CPU does nothing and says so, however it was told to be there."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import memkit
from memkit.device import CpuDevice, Device


def _step(device: str | torch.device | Device | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16), nn.GELU()] * 3)
    with memkit.CPUOffload(1.0, "here", min_bytes=0, window_bytes=0, device=device):
        loss = model(torch.randn(4, 16)).sum()
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), CpuDevice(), None])
def test_nothing_moves_on_the_cpu_with_one_warning(device: str | torch.device | Device | None) -> None:
    with pytest.warns(UserWarning, match=r"saw only tensors on the CPU, where there is nothing.*Move the model") as caught:
        first = _step(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = _step(device)

    stats = memkit.stats("here")
    assert [warning.filename for warning in caught] == [__file__]
    assert (stats.seen_bytes, stats.moved_out_bytes, stats.host_held_bytes) == (0, 0, 0)
    assert all(map(torch.equal, first, second))
