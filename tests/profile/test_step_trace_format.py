"""Traces in JSON, and what cannot be traced."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.core import torch_private
from memkit.errors import ProfileError, ReportFormatError
from memkit.profile import MemoryReport
from tests.profile.traced import Weighted, profile, trace

# JSON


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("save_places", 0), 10**6),
        (("step", "saves", 0), 10**6),
        (("live_bytes", 0), ...),
        (("ops", 0, 1), 99),  # its kind
        (("ops", 0, 0), -1),  # its name
        (("step", "ins", 0), [10**6]),
        (("lifetimes", 0, 1), 10**6),
        (("base_bytes",), "many"),
        (("step", "uses"), ...),
    ],
)
def test_damaged_trace(place: tuple[Any, ...], value: Any) -> None:
    content = json.loads(profile(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), torch.randn(4, 8)).to_json())
    part, *inside = content["trace"], *place
    for key in inside[:-1]:
        part = part[key]
    if value is ...:
        del part[inside[-1]]
    else:
        part[inside[-1]] = value

    with pytest.raises(ReportFormatError, match="not a whole memkit report"):
        MemoryReport.from_json(json.dumps(content))


# What is refused


def test_trace_needs_a_run_without_data() -> None:
    with pytest.raises(ValueError, match=r'^trace=True needs device="meta".* found a run on cpu\. Pass device="meta"$'):
        memkit.profile_memory(nn.Linear(2, 2), torch.randn(2, 2), backward=True, trace=True)


def test_trace_needs_a_backward() -> None:
    with pytest.raises(ValueError, match=r"^trace=True needs a whole step; found backward=False\. Pass backward=True$"):
        memkit.profile_memory(nn.Linear(2, 2), torch.randn(2, 2), device="meta", trace=True)


def test_forward_that_changes_is_refused() -> None:
    calls = itertools.count(1)

    def change(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(next(calls)):
            x = x @ w
        return x

    with pytest.raises(ProfileError, match="a trace needs a step that does the same each time"):
        profile(Weighted(change), torch.randn(4, 32))


def test_random_numbers_of_python_are_the_same_in_both_runs() -> None:
    def drop(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(8):
            if random.random() < 0.5:
                x = x @ w
        return x @ w

    assert trace(Weighted(drop), torch.randn(4, 32)).step.saves


def test_backward_in_the_forward_is_refused() -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).sin()
        (grad,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        return y + x @ grad

    with pytest.raises(ProfileError, match="found a forward that runs a backward of its own"):
        profile(Weighted(call), torch.randn(4, 32))


def test_forward_that_fails_leaves_nothing_on() -> None:
    for fails_at in (1, 2):  # the whole step, then the forward alone
        calls = itertools.count(1)

        def fail(x: Tensor, w: Tensor, calls: Iterator[int] = calls, fails_at: int = fails_at) -> Tensor:
            if next(calls) == fails_at:
                raise RuntimeError("no more")
            return x @ w

        model = Weighted(fail)
        with pytest.raises(RuntimeError, match="no more"):
            profile(model, torch.randn(4, 32))

        assert torch_private.num_dispatch_modes() == 0
        assert not model._forward_hooks
        assert all(not parameter.is_meta for parameter in model.parameters())
