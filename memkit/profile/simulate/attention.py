"""Which fused operation `scaled_dot_product_attention` runs on a target: on the meta device torch always decomposes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from memkit.core import torch_private

_HALF_DTYPES = (torch.float16, torch.bfloat16)
# From this version on cuDNN is asked for probabilities of dropout that it has exactly: multiples of 1/16.
_COARSE_CUDNN_DROPOUT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


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
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if call.is_valid():
        batched = call.batched() if query.dim() == key.dim() == value.dim() == 3 and fused_take_three_dims() else call
        fused = (_choose_cuda if target == "cuda" else _choose_cpu)(batched)
        if fused is not None:
            output = fused(batched)
            return output if batched is call else output.squeeze(0)
        if target == "cuda" and dropout_p > 0.0 and not (is_causal and attn_mask is not None):
            return _math_cuda(call)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@dataclass(frozen=True, slots=True)
class _Call:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    def is_valid(self) -> bool:
        """Tell whether torch takes these dtypes together; of others it says itself what is wrong."""
        query, mask = self.query, self.mask
        return query.dtype == self.key.dtype == self.value.dtype and (
            mask is None or mask.dtype in (torch.bool, torch.float32, query.dtype)
        )

    def batched(self) -> _Call:
        mask = self.mask
        while mask is not None and mask.dim() < 4:
            mask = mask.unsqueeze(0)
        query, key, value = (tensor.unsqueeze(0) for tensor in self.tensors)
        return replace(self, query=query, key=key, value=value, mask=mask)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def is_dense(self) -> bool:
        return self.query.shape[0] == self.key.shape[0] == self.value.shape[0] and all(
            tensor.dim() == 4 and tensor.layout == torch.strided and 0 not in tensor.shape for tensor in self.tensors
        )

    def has_contiguous_rows(self) -> bool:
        return all(tensor.stride(-1) == 1 for tensor in self.tensors)

    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def heads_match(self, *, grouped: bool = True, key_as_value: bool = True) -> bool:
        # Source: check_batch_size_and_num_heads_dense and check_grouped_query_attention in sdp_utils_cpp.h.
        queries, keys, values = self.query.shape[1], self.key.shape[1], self.value.shape[1]
        if self.enable_gqa and grouped:
            return queries % keys == queries % values == 0 and (keys == values or not key_as_value)
        return queries == keys == values or (keys == values == 1 and fused_broadcast_heads())

    def mask_broadcasts(self) -> bool:
        """Tell whether an operation that makes no gradient for a mask takes this one."""
        # Source: check_attn_mask_shape in sdp_utils_cpp.h.
        if self.mask is None:
            return True
        if self.mask.dim() not in (2, 4) or self.mask.requires_grad:
            return False
        full = (*self.query.shape[:3], self.key.shape[2])
        return all(size in (1, whole) for size, whole in zip(self.mask.shape, full[-self.mask.dim() :], strict=True))

    def bias(self) -> Tensor | None:
        if self.mask is None or self.mask.dtype != torch.bool:
            return self.mask
        return _additive(self.mask, self.query.dtype)


Fused = Callable[[_Call], Tensor]


def _choose_cpu(call: _Call) -> Fused | None:
    # Source: use_flash_attention_cpp in aten/src/ATen/native/transformers/sdp_utils_cpp.cpp.
    possible = (
        torch.backends.cuda.flash_sdp_enabled()
        and call.is_dense()
        and call.query.dtype in (torch.float32, torch.float64, *_HALF_DTYPES)
        and call.dropout_p == 0.0
        and call.query.shape[-1] == call.key.shape[-1] == call.value.shape[-1]
        and call.heads_match()
        and call.has_contiguous_rows()
        and call.mask_broadcasts()
    )
    return _flash_cpu if possible else None


def _choose_cuda(call: _Call) -> Fused | None:
    # Source: can_use_cudnn_attention, can_use_flash_attention and can_use_mem_efficient_attention in
    # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, in the order that a GPU of compute capability 9.0 has.
    mask, dropout_p = call.mask, call.dropout_p
    if not call.is_dense() or not call.has_contiguous_rows() or (mask is not None and mask.stride(-1) != 1):
        return None
    query_len, head_dim = call.query.shape[-2:]
    key_len, value_dim = call.key.shape[-2], call.value.shape[-1]
    half = call.query.dtype in _HALF_DTYPES
    same_dim = head_dim == call.key.shape[-1]
    cudnn = (
        torch.backends.cuda.cudnn_sdp_enabled()
        and half
        and call.heads_match(key_as_value=False)
        and same_dim
        and all(size % 8 == 0 and size <= 256 for size in (head_dim, value_dim))
        and key_len > 1
        and (dropout_p == 0.0 or query_len > 1)
        and (dropout_p * 16 % 1 == 0 or not _COARSE_CUDNN_DROPOUT)
        and call.mask_broadcasts()
        and not torch.are_deterministic_algorithms_enabled()
    )
    if cudnn:
        return _cudnn
    flash = (
        torch.backends.cuda.flash_sdp_enabled()
        and half
        and mask is None
        and call.heads_match()
        and same_dim
        and head_dim == value_dim
        and head_dim <= 256
        and not (call.is_causal and query_len != key_len)
    )
    if flash:
        return _flash_cuda
    alignment = 8 if half else 4
    efficient = (  # which makes a gradient for a mask that requires one
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and (half or call.query.dtype == torch.float32)
        and call.heads_match(grouped=fused_broadcast_heads())
        and same_dim
        and head_dim % alignment == 0
        and value_dim % alignment == 0
    )
    return _efficient_cuda if efficient else None


@cache
def fused_broadcast_heads() -> bool:
    """Ask the CPU whether fused operations of this torch take one key head for all query heads without `enable_gqa`."""
    return _is_fused((1, 2, 2, 8), (1, 1, 2, 8))


@cache
def fused_take_three_dims() -> bool:
    """Ask the CPU whether this torch adds a batch of one to what has three dimensions, and so runs it fused."""
    return _is_fused((1, 2, 8), (1, 2, 8))


def _is_fused(query_shape: tuple[int, ...], key_shape: tuple[int, ...]) -> bool:
    query, key = (torch.empty(shape, device="cpu") for shape in (query_shape, key_shape))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # whatever is switched off now
        return bool(torch_private.fused_sdp_choice(query, key, key) == SDPBackend.FLASH_ATTENTION.value)


def _flash_cpu(call: _Call) -> Tensor:
    how = call.dropout_p, call.is_causal
    output: Tensor = torch_private.flash_attention_cpu(*call.tensors, *how, attn_mask=call.bias(), scale=call.scale)[0]
    return output


def _cudnn(call: _Call) -> Tensor:
    how = call.bias(), call.needs_grad(), call.dropout_p, call.is_causal, False
    output: Tensor = torch_private.cudnn_attention(*call.tensors, *how, scale=call.scale)[0]
    return output


def _flash_cuda(call: _Call) -> Tensor:
    head_dim = call.query.shape[-1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    padding = -head_dim % 8
    tensors = [functional.pad(tensor, (0, padding)) if padding else tensor for tensor in call.tensors]
    output: Tensor = torch_private.flash_attention(*tensors, call.dropout_p, call.is_causal, False, scale=scale)[0]
    return output[..., :head_dim] if padding else output


def _efficient_cuda(call: _Call) -> Tensor:
    bias = call.bias()
    if bias is not None:
        # The kernel reads groups of 8: a mask whose rows do not begin at one is padded, and the padded storage is saved.
        if any(stride % 8 for stride in bias.stride()[:-1]):
            key_len = bias.shape[-1]
            bias = functional.pad(bias, (0, 8 - key_len % 8))[..., :key_len]
        bias = bias.expand(*call.query.shape[:3], call.key.shape[2])
    how = bias, call.needs_grad(), call.dropout_p, call.is_causal
    output: Tensor = torch_private.efficient_attention(*call.tensors, *how, scale=call.scale)[0]
    return output


def _math_cuda(call: _Call) -> Tensor:
    """Decompose attention as torch does, but with CUDA's dropout, which saves a mask of one byte per element."""
    # Source: _scaled_dot_product_attention_math in aten/src/ATen/native/transformers/attention.cpp.
    query, key, value, bias = call.query, call.key, call.value, call.bias()
    dtype, head_dim = query.dtype, query.shape[-1]
    if dtype in _HALF_DTYPES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    if call.is_causal:
        bias = _additive(query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(), query.dtype)
    if call.enable_gqa:
        heads = query.shape[-3]
        key, value = (
            tensor if tensor.shape[-3] == heads else tensor.repeat_interleave(heads // tensor.shape[-3], -3)
            for tensor in (key, value)
        )
    factor = math.sqrt(abs(head_dim**-0.5 if call.scale is None else call.scale))
    weights = (query * factor) @ (key.transpose(-2, -1) * factor)
    if bias is not None:
        weights = weights + bias
    weights = torch.native_dropout(torch_private.safe_softmax(weights, -1), call.dropout_p, True)[0]
    return (weights @ value).to(dtype)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
