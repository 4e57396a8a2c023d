"""What a `MemoryBudget` refuses to have inside of it, it refuses under its own name."""

from __future__ import annotations

import pytest
import torch

import memkit
from memkit.device import ReferenceDevice


@pytest.mark.parametrize("kind", [memkit.CPUOffload, memkit.Rematerialize])
def test_other_context_inside_is_told_of_the_budget(kind: type[memkit.CPUOffload] | type[memkit.Rematerialize]) -> None:
    device = ReferenceDevice()

    with (
        memkit.MemoryBudget("1MiB", "outer", device=device),
        pytest.raises(
            ValueError, match=r'"inner".* was entered inside a MemoryBudget \(tag "outer"\).* one budget holds for all'
        ),
    ):
        kind(0.5, "inner", device=device).__enter__()


def test_model_that_is_compiled_is_told_of_the_budget() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    model.compile(backend="aot_eager")

    with (
        memkit.MemoryBudget("1MiB", "whole", min_bytes=0, device=ReferenceDevice()),
        pytest.raises(RuntimeError, match=r'^MemoryBudget \(tag "whole"\) needs a model that is not compiled itself'),
    ):
        model(torch.randn(4, 8))
