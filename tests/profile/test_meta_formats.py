"""Outputs without data have the strides that they have on the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memkit import profile_memory
from tests.profile.calls import FORMAT_CALLS, FORMAT_INPUTS, channels_last
from tests.profile.cases import Function, Ops, both, saved

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", FORMAT_INPUTS)
@pytest.mark.parametrize("name", FORMAT_CALLS)
def test_outputs_have_the_strides_that_the_cpu_gives_them(name: str, kind: str) -> None:
    call, x = FORMAT_CALLS[name], FORMAT_INPUTS[kind](torch.randn(2, 4, 6, 6))

    assert _layout(call, x, "cpu") == _layout(call, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in FORMAT_CALLS if name.startswith("conv")])
def test_convolutions_of_other_dtypes_have_the_strides_that_the_cpu_gives_them(name: str, dtype: torch.dtype) -> None:
    for kind in ("channels_last", "one_channels_last"):
        call, x = FORMAT_CALLS[name], FORMAT_INPUTS[kind](torch.randn(2, 4, 6, 6, dtype=dtype))
        assert _layout(call, x, "cpu") == _layout(call, x)


def _layout(call: Callable[[Tensor], Tensor], x: Tensor, target: str | None = None) -> tuple[Any, ...]:
    """Return shape, strides and dtype of what a function returns, with data or as a target would run it."""
    found: list[tuple[Any, ...]] = []

    def note(x: Tensor) -> Tensor:
        output = call(x)
        found.append((output.shape, output.stride(), output.dtype))
        return output

    note(x) if target is None else profile_memory(Function(note), x, device="meta", target=target, print_table=False)
    return found[0]


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "keeps"),
    [
        ("conv2d", "channels_last", torch.float32, True),
        ("conv2d", "contiguous", torch.float32, False),
        ("conv2d_weight", "contiguous", torch.bfloat16, True),
        ("conv2d_depthwise", "channels_last", torch.float32, True),
        ("conv2d", "channels_last", torch.float64, False),  # cuDNN wants none of it
        ("conv_transpose2d", "channels_last", torch.float32, True),
        ("conv3d_of_one", "contiguous", torch.float32, True),
        ("batch_norm", "channels_last", torch.float32, True),
        ("max_pool2d", "channels_last", torch.float32, True),
        ("interpolate_bilinear", "channels_last", torch.float32, True),
        ("logsigmoid", "channels_last", torch.float32, True),
        ("pad_reflect", "channels_last", torch.float32, False),
        ("pad_replicate", "channels_last", torch.float32, False),
        ("pixel_shuffle", "channels_last", torch.float32, False),
        ("channel_shuffle", "channels_last", torch.float32, False),
        ("roll", "channels_last", torch.float32, False),
        ("max_unpool2d", "channels_last", torch.float32, False),
    ],
)
def test_cuda_keeps_channels_last_where_its_kernels_do(name: str, kind: str, dtype: torch.dtype, keeps: bool) -> None:
    x = FORMAT_INPUTS[kind](torch.randn(2, 4, 6, 6, dtype=dtype))

    assert (_layout(FORMAT_CALLS[name], x, "cuda")[1][1] == 1) is keeps


class Copies(nn.Module):
    """A block whose later copies depend on the format of a convolution's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.second(x.contiguous()) + self.norm(x)


@pytest.mark.parametrize("of_model", [torch.contiguous_format, torch.channels_last])
def test_a_copy_to_another_format_is_saved(of_model: torch.memory_format) -> None:
    model = Copies().to(memory_format=of_model)

    real, meta = both(model, channels_last(torch.randn(2, 4, 8, 8)), backward=True)

    assert saved(meta) == saved(real)


def test_group_norm_saves_no_copy_of_channels_last_on_the_cpu() -> None:
    x = channels_last(torch.randn(2, 4, 8, 8)).requires_grad_()

    real, meta = both(Function(lambda x: functional.group_norm(x.exp(), 2)), x, backward=True)

    assert saved(meta) == saved(real)


def test_batch_norm_of_cudnn_saves_a_copy_without_gaps() -> None:
    model = nn.BatchNorm1d(8)
    x = torch.randn(2, 5, 8).transpose(1, 2)

    meta = profile_memory(model, x, device="meta", target="cuda", print_table=False)

    assert [record.storage_bytes for record in meta.saved][:1] == [2 * 5 * 8 * 4]
    assert meta.input_bytes == 0


def test_nothing_is_computed_to_find_a_format() -> None:
    x = channels_last(torch.randn(2, 4, 6, 6, 6))

    with Ops() as ops:
        profile_memory(nn.Conv3d(4, 4, 3), x, device="meta", target="cpu", print_table=False)

    assert not [name for name, _ in ops.found if "mkldnn" in name or "slow_conv" in name]
