"""The user's word inside a budget: `memkit.keep`, `memkit.offload` and `memkit.recompute`, before a save and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import memkit
from memkit.device import Device
from tests.activations.chains import UNIT_BYTES, leaf_on
from tests.activations.conftest import open_test_device

Word = Callable[[Tensor], Tensor]
WORDS: tuple[Word, ...] = (memkit.keep, memkit.offload, memkit.recompute)


def _step(x: Tensor, context: Callable[[], memkit.MemoryBudget], before: Sequence[Word], after: Sequence[Word]) -> Tensor:
    with context():
        y = x * 2
        for word in before:
            word(y)
        z = y.sin()
        for word in after:
            word(y)
        loss = z.exp().cos().sum()
    del y, z
    loss.backward()
    grad, x.grad = x.grad, None
    return grad


@pytest.mark.parametrize(
    ("before", "after", "out", "back", "again"),
    [
        ((memkit.offload,), (), 1, 1, 0),
        ((memkit.recompute,), (), 0, 0, 1),
        ((memkit.keep,), (), 0, 0, 0),
        ((memkit.offload, memkit.keep), (), 0, 0, 0),
        ((memkit.recompute, memkit.offload), (), 1, 1, 0),
        ((memkit.offload,), (memkit.recompute,), 1, 0, 1),
        ((memkit.offload,), (memkit.offload,), 1, 1, 0),
        ((memkit.offload,), (memkit.keep,), 1, 0, 0),
    ],
)
def test_the_last_word_counts(
    before: Sequence[Word], after: Sequence[Word], out: int, back: int, again: int, device: Device
) -> None:
    x = torch.linspace(0, 1, 64, device=device.torch_device).requires_grad_()
    for _ in range(3):
        _step(x, lambda: memkit.MemoryBudget("1GiB", "last", min_bytes=0, device=device), before, after)
        stats = memkit.stats("last")

        assert (stats.num_copies_out, stats.num_copies_in, stats.num_replays) == (out, back, again)


def test_of_what_is_asked_to_leave_no_more_than_one_is_on_the_device_when_the_forward_ends() -> None:
    device = open_test_device("late")
    x = leaf_on(device.torch_device)
    for _ in range(4):
        with memkit.MemoryBudget("1GiB", "gone", min_bytes=0, device=device):
            y = x
            for _ in range(6):
                y = memkit.offload(y.clone()).sin()
        assert memkit.stats("gone").live_bytes == UNIT_BYTES
        y.sum().backward()
