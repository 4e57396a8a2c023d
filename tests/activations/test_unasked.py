"""Forwards whose saved tensors no backward asks for: a warning, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.context import ForwardContext
from memkit.device import ReferenceDevice

MESSAGE = r'\(tag "unasked"\): 4 forwards saved tensors for a backward, and none came'
MAKE: dict[str, Callable[[], ForwardContext]] = {
    "CPUOffload": lambda: memkit.CPUOffload(0.5, "unasked", min_bytes=0, device=ReferenceDevice()),
    "Rematerialize": lambda: memkit.Rematerialize(0.5, "unasked", min_bytes=0, device=ReferenceDevice()),
    "MemoryBudget": lambda: memkit.MemoryBudget("1MiB", "unasked", min_bytes=0, device=ReferenceDevice()),
}


@pytest.fixture(params=list(MAKE))
def make(request: pytest.FixtureRequest) -> Callable[[], ForwardContext]:
    return MAKE[request.param]


@pytest.fixture
def step() -> Callable[[Callable[[], ForwardContext]], Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))), torch.randn(4, 16)

    def run(make: Callable[[], ForwardContext]) -> Tensor:
        with make():
            return model(x).sum()

    return run


Step = Callable[[Callable[[], ForwardContext]], Tensor]


def test_six_steps_without_a_backward_warn_once(make: Callable[[], ForwardContext], step: Step) -> None:
    def steps(number: int) -> Tensor:
        for _ in range(number):
            loss = step(make)  # as in a loop of a training: the last graph is still alive
        return loss

    with pytest.warns(UserWarning, match=MESSAGE) as seen:
        steps(6)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(10).backward()
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_evaluations", [0, 3])
def test_steps_with_a_backward_are_fine(make: Callable[[], ForwardContext], step: Step, num_evaluations: int) -> None:
    for _ in range(num_evaluations):
        step(make)
    for _ in range(8):
        step(make).backward()
    for _ in range(8):
        step(make)


@pytest.mark.filterwarnings("error")
def test_many_forwards_with_one_backward_are_fine(make: Callable[[], ForwardContext], step: Step) -> None:
    torch.stack([step(make) for _ in range(8)]).sum().backward()


@pytest.mark.filterwarnings("error")
def test_forwards_that_save_nothing_are_fine(make: Callable[[], ForwardContext], step: Step) -> None:
    for _ in range(8):
        with torch.no_grad():
            step(make)


def test_attached_models_warn_as_well(make: Callable[[], ForwardContext]) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    memkit.attach(model, make())
    for _ in range(4):
        model(torch.randn(4, 16))

    with pytest.warns(UserWarning, match=MESSAGE):
        output = model(torch.randn(4, 16))

    output.sum().backward()
