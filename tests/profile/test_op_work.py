"""The kind of an op where its name does not tell it."""

from __future__ import annotations

import pytest
import torch

from memkit.plan import OpKind
from memkit.profile.trace import work_of


@pytest.mark.parametrize(
    ("channels", "kind"), [(1, OpKind.CONVOLUTION_OF_FEW), (3, OpKind.CONVOLUTION_OF_FEW), (4, OpKind.CONVOLUTION)]
)
def test_convolutions_of_few_channels_are_a_kind_of_their_own(channels: int, kind: OpKind) -> None:
    image, weight = torch.empty(2, channels, 8, 8, device="meta"), torch.empty(5, channels, 3, 3, device="meta")
    args = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    op = torch.ops.aten.convolution.default

    assert work_of(op, args, {}, op(*args)).kind is kind
