"""Attention without data takes the operation that the target takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from memkit import profile_memory
from memkit.profile.simulate.attention import fused_broadcast_heads, fused_take_three_dims
from tests.profile.cases import Biased, Function, both, saved


def _attend(*shapes: tuple[int, ...], mask: Tensor | None = None, **options: object) -> tuple[nn.Module, list[Tensor]]:
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    query = functional.scaled_dot_product_attention
    return Function(lambda q, k, v: query(q.sin(), k.sin(), v.sin(), attn_mask=mask, **options).exp()), tensors


def _bias(*shape: int) -> Tensor:
    return torch.zeros(shape)


def _learned(*shape: int) -> Tensor:
    return torch.nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 4, 12, 8), (2, 1, 12, 8), (2, 1, 12, 8)), {}),  # one key head for all
        (((2, 4, 12, 8), (2, 1, 12, 8), (2, 1, 12, 8)), {"is_causal": True}),
        (((2, 4, 12, 8), (2, 1, 12, 8), (2, 1, 12, 8)), {"mask": _bias(12, 12)}),
        (((2, 4, 12, 8), (2, 1, 12, 8), (2, 4, 12, 8)), {}),
        (((2, 1, 12, 8), (2, 4, 12, 8), (2, 4, 12, 8)), {}),
        (((2, 4, 12, 8), (1, 4, 12, 8), (1, 4, 12, 8)), {}),  # batches do not broadcast
        (((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8)), {"enable_gqa": True}),
        (((2, 4, 12, 8), (2, 2, 12, 8), (2, 1, 12, 8)), {"enable_gqa": True}),  # key and value heads differ
        (((4, 12, 8),) * 3, {}),
        (((4, 12, 8),) * 3, {"mask": _bias(12, 12)}),
        (((4, 12, 8),) * 3, {"mask": _bias(4, 12, 12)}),
        (((4, 12, 8), (1, 12, 8), (1, 12, 8)), {}),
        (((4, 12, 8),) * 3, {"dropout_p": 0.5}),
        (((12, 8),) * 3, {}),
        (((2, 4, 12, 8),) * 3, {"mask": _bias(12, 12).mT}),
        (((2, 4, 12, 8),) * 3, {"mask": _bias(12, 1)}),
        (((2, 4, 12, 8),) * 3, {"mask": _bias(4, 12, 12)}),  # three dimensions: no fused operation
        (((2, 4, 12, 8),) * 3, {"mask": _bias(2, 1, 1, 12)}),
        (((2, 4, 12, 8),) * 3, {"mask": _bias(12)[None]}),
        (((2, 4, 12, 8), (2, 4, 12, 8), (2, 4, 12, 16)), {}),
        (((2, 4, 1, 8), (2, 4, 12, 8), (2, 4, 12, 8)), {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_takes_the_operation_that_the_cpu_takes(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, object], dtype: torch.dtype
) -> None:
    if isinstance(options.get("mask"), Tensor):
        options = {**options, "mask": options["mask"].to(dtype)}
    model, inputs = _attend(*shapes, **options)

    real, meta = both(model, *(x.detach().to(dtype).requires_grad_() for x in inputs), backward=True)

    assert saved(meta) == saved(real)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("contiguous", [True, False])
def test_attention_with_a_mask_that_requires_grad_saves_what_the_cpu_saves(contiguous: bool, dropout_p: float) -> None:
    real, meta = both(Biased(contiguous=contiguous, dropout_p=dropout_p), torch.randn(2, 16, 32), backward=True)

    assert saved(meta) == saved(real)


def _bytes_of_attention(model: nn.Module) -> int:
    report = profile_memory(model, torch.randn(2, 16, 32, dtype=torch.bfloat16), device="meta", print_table=False)
    return sum(record.storage_bytes for record in report.saved if record.module == "(model)")


def test_cuda_decomposes_attention_with_a_mask_whose_rows_are_not_contiguous() -> None:
    heads = 2 * 4  # and the batch
    in_single = heads * 16 * 8 * 4  # queries, keys or values
    weights = heads * 16 * 16 * 4

    plain = _bytes_of_attention(Biased(contiguous=False).bfloat16())
    dropping = _bytes_of_attention(Biased(contiguous=False, dropout_p=0.1).bfloat16())

    assert plain == 3 * in_single + weights  # the softmax
    assert dropping == plain + heads * 16 * 16 + weights  # one byte for each weight, and what dropout gives


def test_cuda_makes_gradients_for_a_mask_with_contiguous_rows_in_one_operation() -> None:
    heads = 2 * 4
    output = heads * 16 * 8 * 2
    bias = 4 * 16 * 16 * 2
    sums = heads * 32 * 4  # one for each row, of which there are multiples of 32

    found = _bytes_of_attention(Biased(contiguous=True).bfloat16())

    # queries, keys and values are parts of one storage; the state of the random numbers is two numbers
    assert found == 3 * output + bias + output + sums + 2 * 8


@pytest.mark.parametrize(("key_len", "bias_bytes"), [(24, 24 * 24 * 4), (20, 24 * 24 * 4), (32, 24 * 32 * 4)])
def test_cuda_pads_a_mask_whose_rows_do_not_begin_at_multiples_of_eight(key_len: int, bias_bytes: int) -> None:
    model, inputs = _attend((2, 4, 24, 8), (2, 4, key_len, 8), (2, 4, key_len, 8), mask=_bias(24, key_len))

    report = profile_memory(model, *inputs, device="meta", print_table=False)

    assert bias_bytes in {record.storage_bytes for record in report.saved if (2, 4, 24, key_len) in record.shapes}


@pytest.mark.skipif(not fused_broadcast_heads(), reason="this torch decomposes it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_key_head_is_not_repeated_on_cuda(dtype: torch.dtype) -> None:
    model, inputs = _attend((2, 4, 64, 8), (2, 1, 64, 8), (2, 1, 64, 8))

    report = profile_memory(model, *(x.detach().to(dtype).requires_grad_() for x in inputs), device="meta", print_table=False)

    assert max(record.storage_bytes for record in report.saved) == 2 * 4 * 64 * 8 * dtype.itemsize


def test_what_torch_can_fuse_does_not_depend_on_what_is_switched_off() -> None:
    fused_broadcast_heads.cache_clear()
    fused_take_three_dims.cache_clear()
    expected = fused_broadcast_heads(), fused_take_three_dims()
    fused_broadcast_heads.cache_clear()
    fused_take_three_dims.cache_clear()

    with sdpa_kernel(SDPBackend.MATH), torch.device("meta"):
        found = fused_broadcast_heads(), fused_take_three_dims()

    assert found == expected
