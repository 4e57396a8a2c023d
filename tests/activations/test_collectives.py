"""Collectives write to tensors, and neither their schemas nor a version counter tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import memkit
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings(NO_PLAN_FITS),
]

Write = Callable[[Tensor], None]


@pytest.fixture
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _gather(table: Tensor) -> None:
    dist.all_gather([table], table * 0.5)


def _reduce(table: Tensor) -> None:
    """With one process this leaves what is there."""
    dist.all_reduce(table)


def _later(table: Tensor) -> None:
    dist.all_gather([table], table * 0.5, async_op=True).wait()


def _receive(table: Tensor) -> None:
    outputs = [table]
    dist.scatter(outputs[0], [table * 0.5], src=0)


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("write", [_gather, _reduce, _later, _receive], ids=lambda write: write.__name__)
def test_what_is_made_from_a_buffer_is_so_from_what_it_was(write: Write, device: Device) -> None:
    weight = torch.linspace(1, 2, 2**17, device=device.torch_device).requires_grad_()

    def train(context: object) -> list[Tensor]:
        table = torch.linspace(0, 1, 2**17, device=device.torch_device)
        with context:  # type: ignore[attr-defined]  # either is a context
            loss = (weight * (table + 1).sin()).square().sum()
            write(table)
        loss.backward()
        grad, weight.grad = weight.grad, None
        assert grad is not None
        return [loss.detach(), grad, table]

    plain, dropped = train(nullcontext()), 0
    for _ in range(4):
        assert_same_bits(train(memkit.Rematerialize("1B", "collectives", device=device, policy="ops", min_bytes=1)), plain)
        dropped += memkit.stats("collectives").num_dropped
    assert dropped
