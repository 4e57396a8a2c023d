"""Systems that pin no more host memory, from any moment on: tensors stay, with one warning, whatever moves them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.saved.settled import Way
from memkit.device import Device, ReferenceDevice
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.activations.remat.conftest import dear_ops as dear_ops
from tests.activations.remat.test_steady import blocks, train
from tests.contracts.contexts import Around

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)

Make = Callable[[Device], AbstractContextManager[object]]


class Stingy(ReferenceDevice):
    """Pins so many ranges, and none beyond."""

    left = 0

    def pin(self, host: Tensor) -> None:
        if not self.left:
            raise memkit.errors.HostMemoryError("injected: the system pins no more")
        self.left -= 1
        super().pin(host)


def _offload(device: Device, ratio: object = 1.0, tag: str = "pins") -> AbstractContextManager[object]:
    return memkit.CPUOffload(ratio, tag, min_bytes=0, window_bytes=0, device=device)


MAKE: dict[str, Make] = {
    "offload": _offload,
    "by a schedule": lambda device: _offload(device, lambda step: [0.3, 1.0, 0.6][step % 3]),
    "nested": lambda device: Around(_offload(device), _offload(device, 0.5, "inner")),
    "around recompute": lambda device: Around(_offload(device), memkit.Rematerialize(0.5, "inner", min_bytes=0, device=device)),
    "budget": lambda device: memkit.MemoryBudget(0.5, "pins", min_bytes=0, device=device),
}


@contextmanager
def _one_warning() -> object:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught if "injected" in str(warning.message)]
    assert len(messages) == len({message.split('"')[1] for message in messages}), messages  # one for each tag


@pytest.mark.covering(1)
@pytest.mark.usefixtures("quick_link")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_steps_are_exact_from_whatever_step_on_nothing_is_pinned(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, model, drawn = Stingy(seed=seed), blocks()[:6], random.Random(seed)
    for size in ("SMALLEST_SEGMENT_BYTES", "LARGEST_SEGMENT_BYTES"):
        monkeypatch.setattr(f"memkit.transfer.host_memory.{size}", 2**21)
    last = drawn.randrange(7)
    with _one_warning():
        for number in range(9):
            device.left = 1000 if number < last else 0
            x = torch.randn(2048 if number > 4 else 512, 32)
            assert_same_bits(train(model, x, lambda: MAKE[name](device)), train(model, x, nullcontext))
    device.synchronize()


def test_budget_of_a_system_that_pins_nothing_recomputes() -> None:
    device, model, x = Stingy(), blocks()[:6], torch.randn(8, 32)
    optimizer = torch.optim.SGD(model.parameters())
    plain = train(model, x, nullcontext)
    with _one_warning():
        for _ in range(7):
            make = lambda: memkit.MemoryBudget(0.5, "none", optimizer=optimizer, min_bytes=0, device=device)  # noqa: E731
            assert_same_bits(train(model, x, make), plain)
    stats = memkit.stats("none")

    assert (stats.follows_plan, stats.num_copies_out) == (True, 0)
    assert stats.num_dropped > 0
    assert stats.step_peak_bytes <= stats.budget_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("any_times", "dear_ops", "moving", "quick_link")
@pytest.mark.parametrize("last", [0, 3, 12, 30])
def test_copies_beside_regions_stay_with_one_warning(last: int, fastest: Callable[[Way], None]) -> None:
    fastest(Way.REGIONS_AND_COPIES)
    device, model, x = Stingy(), blocks()[:12], torch.randn(8, 32)
    optimizer = torch.optim.SGD(model.parameters())
    plain = train(model, x, nullcontext)
    with _one_warning():
        for number in range(40):
            device.left = 1000 if number < last else 0
            make = lambda: memkit.MemoryBudget(0.6, "pins", optimizer=optimizer, min_bytes=1, device=device)  # noqa: E731
            assert_same_bits(train(model, x, make), plain)
