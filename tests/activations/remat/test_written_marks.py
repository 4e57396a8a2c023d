"""Writes to what a mark has kept, or has sent to host memory: what is made again from it is made from what was there before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import memkit
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = pytest.mark.filterwarnings("ignore:.*moving bytes to the host frees nothing", NO_PLAN_FITS)

CONTEXTS: dict[str, Callable[[Device], AbstractContextManager[Any]]] = {
    "dtr": lambda device: memkit.Rematerialize("1B", "written", policy="dtr", device=device, min_bytes=0),
    "plan": lambda device: memkit.Rematerialize("1B", "written", device=device, min_bytes=0),
    "budget": lambda device: memkit.MemoryBudget("1B", "written", device=device, min_bytes=0),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("mark", [memkit.keep, memkit.offload])
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("is_used_first", [True, False])
def test_values_made_from_what_is_written_to_later(
    name: str, mark: Callable[[Tensor], Tensor], is_inside: bool, is_used_first: bool, device: Device
) -> None:
    def step(context: AbstractContextManager[Any]) -> Tensor:
        x = torch.linspace(-1, 1, 16, device=device.torch_device).requires_grad_()
        with context:
            h = x.tanh() if is_used_first else mark(x.tanh())
            y = x * h.detach().sin()
            if is_used_first:
                mark(h)
            if is_inside:
                h.detach().add_(1)
        if not is_inside:
            h.detach().add_(1)
        y.sum().backward()
        return x.grad

    plain = step(nullcontext())
    for _ in range(3):
        assert_same_bits([step(CONTEXTS[name](device))], [plain])
