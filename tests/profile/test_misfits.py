"""Inputs of the wrong shape: which shape was needed, and which was found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memkit import profile_memory


class _Unpacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take [batch, 3, height, width]."""
        _, _, height, _ = x.shape
        return self.stem(x)[..., :height]


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize(
    ("model", "shape", "needs"),
    [
        (nn.Conv2d(3, 8, 3), (8,), "(batch, 3, height, width)"),
        (nn.Conv1d(3, 8, 3), (2, 4, 9), "(batch, 3, width)"),
        (nn.ConvTranspose3d(3, 8, 3), (2, 3, 9, 9, 9, 9), "(batch, 3, depth, height, width)"),
        (nn.BatchNorm2d(3), (3, 8, 8), "(batch, 3, height, width)"),
        (nn.Linear(4, 4), (2, 3), "(..., 4)"),
        (nn.LayerNorm((2, 3)), (3,), "(..., 2, 3)"),
        (_Unpacks(), (8, 8, 8), "(batch, 3, height, width)"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else None,
)
def test_a_shape_that_does_not_fit_is_told_beside_the_one_that_would(
    model: nn.Module, shape: tuple[int, ...], needs: str, device: str | None
) -> None:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        profile_memory(nn.Sequential(model), torch.zeros(shape), device=device)

    found = ", ".join(map(str, shape))
    assert raised.value.__notes__[-1] == f"memkit: it needs {needs}, and was given ({found})"


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8)])
def test_a_shape_that_fits_is_not_told(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError) as raised:
        profile_memory(nn.Conv2d(3, 8, 3), torch.zeros(shape, dtype=torch.int64))

    assert raised.value.__notes__ == ["memkit: raised in (model) (Conv2d)"]
