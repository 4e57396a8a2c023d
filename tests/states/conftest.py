"""Devices that the tests of streamed optimizer states run on, and nothing left behind by one test for the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.optim import optimizer as torch_optimizer

from tests.weights.conftest import device

__all__ = ["device"]


@pytest.fixture(autouse=True)
def _own_step_hooks() -> Iterator[None]:
    """Take away what was left in torch's hooks on all steps by what was dropped without `close()`: it costs calls."""
    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    before = [set(each) for each in hooks]
    yield
    for each, known in zip(hooks, before, strict=True):
        for number in set(each) - known:
            del each[number]
