"""Peaks of whole steps on a GPU, as PyTorch counts them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import memkit
from memkit.activations.budgeting import learning
from memkit.activations.budgeting.state import budget_states
from memkit.activations.budgeting.ways import Ways
from memkit.activations.saved.settled import Way
from memkit.device import Event, open_device
from tests.activations.budgeting.test_peaks import Llama
from tests.activations.chains import leaf_on, step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("any_times", "own_clock")]
NUM_SETTLED = 20


class _Moment(Event):
    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_s(self, end: Event) -> float:
        assert isinstance(end, _Moment)
        return end.at_s - self.at_s

    def is_reached(self) -> bool:
        return True


@pytest.fixture(params=[pytest.param(False, id="as timed"), pytest.param(True, id="regions")])
def must_be_regions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Say whether regions are the fastest way whatever the clock says; peaks are counted as ever."""
    if request.param:
        note = Ways._note

        def note_made_up(ways: Ways, _: Event, __: Event, peak_bytes: int | None) -> None:
            note(ways, _Moment(0.0), _Moment(1.0 if ways.way is Way.REGIONS else 2.0), peak_bytes)

        monkeypatch.setattr(Ways, "_note", note_made_up)
        monkeypatch.setattr(learning, "_AS_PREDICTED", 0.0)  # plans of single ops are slower than predicted
        for name in ("_OTHER_LINK", "_QUITE_OTHER_LINK"):
            monkeypatch.setattr(learning, name, math.inf)
    return bool(request.param)


def _gpu_peaks(*, resets: bool, num_steps: int = 90) -> tuple[list[int], list[memkit.SavedTensorStats], list[bool]]:
    """Return the peak of each step, as PyTorch counts it, what memkit tells of it, and whether regions were followed.

    Where nobody resets the peak, that of each of the last steps is the highest since these began, with what is between them.
    """
    torch.manual_seed(0)
    model = Llama(num_words=8000, num_layers=12, dim=512).cuda()
    optimizer, ids = torch.optim.AdamW(model.parameters()), torch.randint(0, 8000, (8, 512), device="cuda")
    peaks, found, regions = [], [], []
    for number in range(num_steps):
        if resets or number == num_steps - NUM_SETTLED:
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
def test_gpu_keeps_to_the_budget_as_predicted_whoever_resets_the_peak(resets: bool, must_be_regions: bool) -> None:
    peaks, found, regions = _gpu_peaks(resets=resets)
    budget_bytes = found[-1].budget_bytes

    assert budget_bytes is not None
    assert max(peaks[-NUM_SETTLED:]) <= budget_bytes
    assert any(regions[-NUM_SETTLED:]) or not must_be_regions
    settled = zip(peaks[-NUM_SETTLED:], found[-NUM_SETTLED:], regions[-NUM_SETTLED:], strict=True)
    for peak_bytes, stats, has_regions in settled:
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
