"""What every test runs under."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from memkit.profile import registry

torch.set_num_threads(1)  # tests run side by side, and on small tensors several threads only get in each other's way


_WITH_FEW_LAYERS = ("weights", "bench", "profile")
"""Where tests stream so few layers that all of them fit the slots. What `LayerOffload` says to that is tested in
tests/weights/test_no_use.py."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.parent.name in _WITH_FEW_LAYERS:
        item.add_marker(pytest.mark.filterwarnings("ignore:LayerOffload frees no memory on the device"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or what is frozen shows as leaked
    # what a failed backward has left in torch's queue goes with the next one; after Python has gone, its hooks would crash
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Take what is alive by now, torch above all, out of what each collection of a test looks through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    torch.manual_seed(0)
    num_modes = torch._C._len_torch_dispatch_stack()  # CUDA's stream sanitizer is one
    yield
    for tag in list(registry._reports):
        registry.forget_report(tag)
    assert torch.is_grad_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_dispatch_stack() == num_modes
    assert torch._C._len_torch_function_stack() == 0
