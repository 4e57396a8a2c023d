"""Peaks of whole steps on a GPU, as PyTorch counts them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.device import open_device
from tests.activations.budgeting.test_peaks import Llama
from tests.activations.chains import leaf_on, step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("any_times", "own_clock")]


def _gpu_peaks(*, resets: bool, num_steps: int = 90) -> tuple[list[int], list[memkit.SavedTensorStats], list[bool]]:
    """Return the peak of each step, as PyTorch counts it, what memkit tells of it, and whether regions were followed."""
    torch.manual_seed(0)
    model = Llama(num_words=8000, num_layers=12, dim=512).cuda()
    optimizer, ids = torch.optim.AdamW(model.parameters()), torch.randint(0, 8000, (8, 512), device="cuda")
    peaks, found, regions = [], [], []
    for number in range(num_steps):
        if resets or number >= num_steps - 20:  # at the end each step is looked at
            torch.cuda.reset_peak_memory_stats()
        with memkit.MemoryBudget(0.6, "gpu", optimizer=optimizer):
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        found.append(memkit.stats("gpu"))
        regions.append(budget_states["gpu"].regions_tag is not None)
        optimizer.step()
        optimizer.zero_grad()
        if resets:
            torch.cuda.reset_peak_memory_stats()
    memkit.reset("gpu")
    return peaks, found, regions


@pytest.mark.parametrize("resets", [False, True])
def test_gpu_keeps_to_the_budget_as_predicted_whoever_resets_the_peak(resets: bool) -> None:
    peaks, found, regions = _gpu_peaks(resets=resets)
    budget_bytes = found[-1].budget_bytes

    assert budget_bytes is not None
    assert max(peaks[-20:]) <= budget_bytes
    for peak_bytes, stats, has_regions in zip(peaks[-20:], found[-20:], regions[-20:], strict=True):
        assert stats.predicted_peak_bytes is not None
        if has_regions:
            assert abs(stats.predicted_peak_bytes - peak_bytes) <= 0.03 * peak_bytes


def test_gpu_that_shares_the_hosts_memory_warns() -> None:
    device = open_device("cuda")
    assert device.has_own_memory
    device.has_own_memory = False
    x = leaf_on(device.torch_device)
    with pytest.warns(UserWarning, match=r"\"cuda:0\" \(.*\) has no memory apart from the host's"):
        step(x, [1] * 4, lambda: memkit.MemoryBudget("1GiB", "shared", device=device))
