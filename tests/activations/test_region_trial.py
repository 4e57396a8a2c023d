"""What one plain forward shows of modules that cannot be regions."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.activations.region_trial import RegionTrial


class Run(nn.Module):
    """A computation as a module, which is called with it."""

    def __init__(self, computation: Callable[..., Tensor]) -> None:
        super().__init__()
        self.computation = computation
        self.num_calls, self.seen, self.sizes = 0, [], {}

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.computation(self, x, *args)


def counts(module: Run, x: Tensor) -> Tensor:
    module.num_calls += 1
    return x.sin()


def collects(module: Run, x: Tensor) -> Tensor:
    module.seen.append(x)
    return x.sin()


def caches(module: Run, x: Tensor) -> Tensor:
    module.cached = x
    return x.sin()


def sizes(module: Run, x: Tensor) -> Tensor:
    module.sizes["x"] = len(x)
    return x.sin()


UNFIT: dict[str, tuple[nn.Module, str]] = {
    "in place": (nn.ReLU(inplace=True), "its forward writes to one of its inputs"),
    "in place on a part": (Run(lambda _, x: x[:1].zero_()), "its forward writes to one of its inputs"),
    "counts": (Run(counts), 'its forward changes the attribute "num_calls" of a Run'),
    "collects": (Run(collects), 'its forward changes the attribute "seen" of a Run'),
    "caches": (Run(caches), 'its forward changes the attribute "cached" of a Run'),
    "sizes": (Run(sizes), 'its forward changes the attribute "sizes" of a Run'),
    "inside": (nn.Sequential(Run(counts)), 'its forward changes the attribute "num_calls" of a Run'),
    "python": (Run(lambda _, x: x * random.random()), "its forward draws from a generator of Python or NumPy"),
    "numpy": (
        Run(lambda _, x: x * numpy.random.rand()),
        "its forward draws from a generator of Python or NumPy",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_says_why_a_module_cannot_be_a_region(name: str) -> None:
    module, why = UNFIT[name]
    with RegionTrial([module]) as trial:
        module(torch.ones(4, 4))

    assert trial.why_not == {module: why}
    assert not module._forward_hooks


def test_says_that_an_argument_may_be_changed() -> None:
    module = Run(lambda _, x, cache: x.sin())
    with RegionTrial([module]) as trial:
        module(torch.ones(4, 4), iter([]))

    assert trial.why_not == {module: "it is called with a list_iterator, which its forward may change"}


def test_says_that_an_input_is_written_to_later() -> None:
    module, x = nn.Dropout(0.5), torch.ones(4, 4)
    with RegionTrial([module]) as trial:
        module(x)
        assert trial.why_not == {}
        x.add_(1)

    assert trial.why_not == {module: "one of its inputs is written to before the backward"}


def test_finds_nothing_against_others_and_holds_nothing() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4))
    x = torch.ones(4, 4)
    with RegionTrial(net) as trial:
        y = net[3](net[2](net[1](net[0](x))))
        net[4](y, y, y)
        net[5](y)
        storage = weakref.ref(y.untyped_storage())
        del y
        assert storage() is None

    assert trial.why_not == {}
