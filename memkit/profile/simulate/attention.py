"""Which fused operation `scaled_dot_product_attention` runs on a target.

On the meta device it always decomposes into matrix products and a softmax, and saves the attention matrix. Real devices
choose a fused operation that saves the queries, keys, values, the output and a few numbers per row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    target: str,
) -> Tensor:
    """Do what `torch.nn.functional.scaled_dot_product_attention` does with tensors on `target`.

    Args:
        query: `[..., query_len, head_dim]`, on the meta device; `key` and `value` as there.
        target: "cuda" or "cpu".
    """
    asked = (query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    choose = _choose_cuda if target == "cuda" else _choose_cpu
    fused = choose(*asked)
    if fused is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return fused(scale)


Fused = Callable[[float | None], Tensor]


def _choose_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> Fused | None:
    # Source: use_flash_attention_cpp in aten/src/ATen/native/transformers/sdp_utils_cpp.cpp.
    possible = (
        torch.backends.cuda.flash_sdp_enabled()
        and _dense_4d(query, key, value)
        and query.dtype in (torch.float32, torch.float64, *_HALF_DTYPES)
        and dropout_p == 0.0
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and (_same_heads(query, key, value) or enable_gqa)
        and _rows_are_contiguous(query, key, value)
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
    )
    if not possible:
        return None
    bias = _additive(mask, query.dtype)
    return lambda scale: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
    )[0]


def _choose_cuda(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> Fused | None:
    # Source: can_use_cudnn_attention, can_use_flash_attention and can_use_mem_efficient_attention in
    # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, in the order that a GPU of compute capability 9.0 has.
    if not _dense_4d(query, key, value) or not (_same_heads(query, key, value) or enable_gqa):
        return None
    if not _rows_are_contiguous(query, key, value):
        return None
    head_dim = query.shape[-1]
    cudnn = (
        torch.backends.cuda.cudnn_sdp_enabled()
        and query.dtype in _HALF_DTYPES
        and head_dim == key.shape[-1]
        and all(size % 8 == 0 and size <= 256 for size in (head_dim, value.shape[-1]))
        and key.shape[-2] > 1
        and (dropout_p == 0.0 or query.shape[-2] > 1)
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
        and not torch.are_deterministic_algorithms_enabled()
    )
    if cudnn:
        return lambda scale: _cudnn(query, key, value, mask, dropout_p, is_causal, scale)
    flash = (
        torch.backends.cuda.flash_sdp_enabled()
        and query.dtype in _HALF_DTYPES
        and mask is None
        and head_dim == key.shape[-1] == value.shape[-1]
        and head_dim <= 256
        and not (is_causal and query.shape[-2] != key.shape[-2])
    )
    if flash:
        return lambda scale: _flash_cuda(query, key, value, dropout_p, is_causal, scale)
    alignment = 8 if query.dtype in _HALF_DTYPES else 4
    efficient = (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (torch.float32, *_HALF_DTYPES)
        and _same_heads(query, key, value)
        and head_dim == key.shape[-1]
        and head_dim % alignment == 0
        and value.shape[-1] % alignment == 0
    )
    if efficient:
        return lambda scale: _efficient_cuda(query, key, value, mask, dropout_p, is_causal, scale)
    return None


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    needs_grad = _needs_grad(query, key, value)
    output: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, _additive(mask, query.dtype), needs_grad, dropout_p, is_causal, False, scale=scale
    )[0]
    return output


def _flash_cuda(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    query, key, value = (_pad_last(tensor, 8) for tensor in (query, key, value))
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return output[..., :head_dim] if output.shape[-1] != head_dim else output


def _efficient_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    bias = _additive(mask, query.dtype)
    if bias is not None:
        # The kernel reads rows of 16: the mask is padded to that, and the padded storage is what is saved.
        key_len = bias.shape[-1]
        bias = _pad_last(bias, 16)[..., :key_len]
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, _needs_grad(query, key, value), dropout_p, is_causal, scale=scale
    )[0]
    return output


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _dense_4d(*tensors: Tensor) -> bool:
    return all(tensor.dim() == 4 and tensor.layout == torch.strided and 0 not in tensor.shape for tensor in tensors)


def _same_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.shape[:2] == key.shape[:2] == value.shape[:2]


def _rows_are_contiguous(*tensors: Tensor) -> bool:
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _pad_last(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return functional.pad(tensor, (0, missing)) if missing else tensor
