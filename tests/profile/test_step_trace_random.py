"""Traces of random programs, against what `Rematerialize` learns and what the profile counts."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given, reject, settings
from torch import Tensor

from memkit.errors import DataDependentError
from tests.profile.test_step_trace import assert_as_learned_and_counted
from tests.profile.traced import Weighted
from tests.programs import MARKING, Op, apply, graphs


def check(graph: list[Op]) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        tensors = [w[:4, :4].sin(), x[:4, :4] * w[:4, :4]]
        for step in graph:
            if step[0] not in MARKING:
                with torch.device(x.device), suppress(RuntimeError):  # some writes are illegal
                    apply(step, tensors)
        return torch.stack([tensor.square().sum() for tensor in (tensors[0], *tensors[-3:])]).sum()

    try:
        assert_as_learned_and_counted(Weighted(call), torch.randn(32, 32))
    except DataDependentError:
        reject()
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        reject()


@given(graph=graphs)
@settings(max_examples=10, deadline=None)
def test_random_programs(graph: list[Op]) -> None:
    check(graph)


@pytest.mark.slow
@given(graph=graphs)
@settings(max_examples=120, deadline=None)
def test_many_random_programs(graph: list[Op]) -> None:
    check(graph)
