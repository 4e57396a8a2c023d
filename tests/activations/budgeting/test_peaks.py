"""Peaks of whole steps, with a counter of all results of ops: read as the backward ends, and predicted for regions too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.budgeting.limits import StepPeak
from memkit.activations.budgeting.state import budget_states
from memkit.activations.saved.settled import Way
from tests.activations.budgeting.allocator import Allocator, CountingDevice
from tests.activations.budgeting.conftest import make_up_times
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.activations.remat.conftest import dear_ops as dear_ops

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("any_times")]
of_made_up_times = pytest.mark.usefixtures("dear_ops", "moving", "quick_link")


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight)


class Block(nn.Module):
    """A layer as Llama has it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 6 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, *, num_words: int, num_layers: int = 4, dim: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm, self.head = Norm(dim), nn.Linear(dim, num_words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Seen(NamedTuple):
    """One step's figures."""

    way: Way
    is_decided: bool
    peak_bytes: int
    stats: memkit.SavedTensorStats


def _steps(
    num_steps: int,
    *,
    num_words: int = 200,
    has_loss_inside: bool = True,
    budget: float | str = 0.6,
    between: Callable[[Allocator], None] = lambda _: None,
    within: Callable[[Allocator], None] = lambda _: None,
) -> Iterator[Seen]:
    """Yield the figures of steps under a budget, with another's work between any two, and within each backward."""
    device, model = CountingDevice(), Llama(num_words=num_words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ids = torch.randint(0, num_words, (4, 64))
    with device.counting(model) as allocator:
        model.blocks[0].register_full_backward_hook(lambda *_: within(allocator))
        for _ in range(num_steps):
            allocator.begin()
            with memkit.MemoryBudget(budget, "peaks", optimizer=optimizer, min_bytes=1, device=device):
                logits = model(ids)
                loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) if has_loss_inside else None
            if loss is None:
                loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            del logits
            loss.backward()
            state = budget_states["peaks"]
            is_decided = state.ways is not None and state.ways.is_decided
            yield Seen(state.way, is_decided, allocator.step_peak_bytes, memkit.stats("peaks"))
            optimizer.step()
            optimizer.zero_grad()
            between(allocator)


@of_made_up_times
@pytest.mark.slow
@pytest.mark.parametrize("way", [Way.REGIONS, Way.REGIONS_AND_COPIES])
@pytest.mark.parametrize(
    ("num_words", "has_loss_inside", "budget"), [(200, True, 0.6), (200, False, 0.7), (1000, True, 0.75), (1000, False, 0.75)]
)
def test_predicted_peak_is_that_of_the_regions_that_are_followed(
    way: Way, num_words: int, has_loss_inside: bool, budget: float, fastest: Callable[[Way], None]
) -> None:
    """From their first step on; with copies beside them, once these follow a schedule."""
    fastest(way)
    num_seen = 0
    for seen in _steps(40, num_words=num_words, has_loss_inside=has_loss_inside, budget=budget):
        if seen.way is Way.REGIONS or (seen.way is Way.REGIONS_AND_COPIES and seen.is_decided):
            num_seen += 1
            assert abs(seen.stats.predicted_peak_bytes - seen.peak_bytes) <= 0.03 * seen.peak_bytes
            assert seen.stats.step_peak_bytes == seen.peak_bytes

    assert num_seen


@of_made_up_times
@pytest.mark.slow
@pytest.mark.parametrize("way", list(Way))
def test_steps_are_the_same_where_somebody_resets_the_peak_between_them(way: Way, fastest: Callable[[Way], None]) -> None:
    fastest(way)
    found = []
    for between in (lambda _: None, Allocator.reset_peak):
        found.append([(*seen[:3], seen.stats.predicted_peak_bytes) for seen in _steps(40, between=between)])
        memkit.reset("peaks")

    assert found[0] == found[1]


@of_made_up_times
@pytest.mark.slow
@pytest.mark.parametrize("way", list(Way))
def test_peak_is_the_users_once_steps_teach_nothing_more(way: Way, fastest: Callable[[Way], None]) -> None:
    fastest(way)
    allocators, peaks, resets = list[Allocator](), list[int](), list[int]()
    for seen in _steps(60, between=allocators.append):
        peaks.append(seen.peak_bytes)
        resets.append(allocators[-1].num_resets if allocators else 0)

    assert resets[45:] == [resets[45]] * 15
    assert allocators[-1].peak_bytes() >= max(peaks[45:])


@of_made_up_times
@pytest.mark.slow
def test_reading_below_what_is_alive_is_none(fastest: Callable[[Way], None]) -> None:
    """Somebody resets the peak within each backward: regions are given up, since their memory is not known."""
    fastest(Way.REGIONS)
    found = [(seen.peak_bytes, seen.stats.budget_bytes) for seen in _steps(90, within=Allocator.reset_peak)]

    assert all(peak_bytes <= budget_bytes for peak_bytes, budget_bytes in found[-10:])


@of_made_up_times
def test_reading_is_of_this_step_and_of_all_that_is_alive() -> None:
    counter = Allocator()

    def read(*, resets: bool, before: int, held: int, then: int, is_reset_behind: bool) -> int | None:
        counter._peak_bytes = before
        peak = StepPeak(counter, resets=resets)
        counter._now_bytes = held
        peak.end_forward()
        counter._peak_bytes = max(counter._peak_bytes, held, then)
        if is_reset_behind:
            counter._peak_bytes = then
        peak.end_backward()
        return peak.num_bytes

    assert read(resets=True, before=900, held=50, then=70, is_reset_behind=False) == 70
    assert read(resets=True, before=900, held=50, then=40, is_reset_behind=True) is None  # below what was alive
    assert read(resets=False, before=900, held=50, then=70, is_reset_behind=False) is None  # not the highest
    assert read(resets=False, before=60, held=50, then=70, is_reset_behind=False) == 70


def test_step_that_has_grown_is_noticed_where_all_fitted_and_somebody_resets_the_peak() -> None:
    """In a `with` block, the shapes of inputs are not known."""
    device, model = CountingDevice(), nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    optimizer, recorded, peaks = torch.optim.SGD(model.parameters()), [], []
    budget_bytes = 620 * 2**10
    with device.counting(model) as allocator:
        for number in range(16):
            x = torch.randn(64 if number < 6 else 512, 32)
            allocator.begin()
            with memkit.MemoryBudget(f"{budget_bytes}B", "grows", optimizer=optimizer, min_bytes=1, device=device):
                loss = model(x).square().mean()
            loss.backward()
            recorded.append(memkit.stats("grows").is_recorded)
            peaks.append(allocator.step_peak_bytes)
            optimizer.zero_grad()
            allocator.reset_peak()

    assert recorded[:6] == [True] * 3 + [False] * 3
    assert max(peaks[:6]) < budget_bytes < peaks[6]  # nothing has told of it ahead
    assert max(peaks[10:]) <= budget_bytes


NUM_SETTLED = 20


@pytest.fixture(params=[pytest.param(False, id="as timed"), pytest.param(True, id="regions")])
def must_be_regions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether regions are the fastest way, whatever the clock says; peaks are counted as ever."""
    if request.param:
        make_up_times(monkeypatch)(Way.REGIONS)
    return bool(request.param)


def _gpu_peaks(*, resets: bool, num_steps: int = 90) -> tuple[list[int], list[memkit.SavedTensorStats], list[bool]]:
    """Return each step's peak by PyTorch's count, memkit's stats of it, and whether regions were followed. If nobody resets the
    peak, each of the last steps has the highest one since these began, including the time between them."""
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
        regions.append(budget_states["gpu"].way is not Way.OPS)
        optimizer.step()
        optimizer.zero_grad()
        if resets:
            torch.cuda.reset_peak_memory_stats()
    memkit.reset("gpu")
    return peaks, found, regions


@pytest.mark.gpu
@pytest.mark.usefixtures("own_clock")
@pytest.mark.parametrize("resets", [False, True])
def test_gpu_keeps_to_the_budget_as_predicted_whoever_resets_the_peak(resets: bool, must_be_regions: bool) -> None:
    peaks, found, regions = _gpu_peaks(resets=resets)
    budget_bytes = found[-1].budget_bytes

    assert max(peaks[-NUM_SETTLED:]) <= budget_bytes
    assert any(regions[-NUM_SETTLED:]) or not must_be_regions
    settled = zip(peaks[-NUM_SETTLED:], found[-NUM_SETTLED:], regions[-NUM_SETTLED:], strict=True)
    for peak_bytes, stats, has_regions in settled:
        if has_regions:
            assert abs(stats.predicted_peak_bytes - peak_bytes) <= 0.03 * peak_bytes
