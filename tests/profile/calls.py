"""Functions on which runs with and without data are compared: for the strides of outputs, for dtypes, for constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def channels_last(tensor: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.dim()])


def _labels(x: Tensor) -> Tensor:
    return torch.zeros(4, dtype=torch.long, device=x.device)


def _first_two(x: Tensor) -> Tensor:
    return torch.arange(2, device=x.device)


FORMAT_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "conv2d": lambda x: functional.conv2d(x, x.new_ones(4, 4, 3, 3)),
    "conv2d_weight": lambda x: functional.conv2d(x, channels_last(x.new_ones(4, 4, 3, 3))),
    "conv2d_strided": lambda x: functional.conv2d(x, x.new_ones(8, 4, 3, 3), stride=2, padding=1),
    "conv2d_pointwise": lambda x: functional.conv2d(x, x.new_ones(8, 4, 1, 1)),
    "conv2d_dilated": lambda x: functional.conv2d(x, x.new_ones(4, 4, 3, 3), dilation=2),
    "conv2d_depthwise": lambda x: functional.conv2d(x, x.new_ones(4, 1, 3, 3), groups=4),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(x, x.new_ones(4, 4, 3, 3)),
    "conv1d": lambda x: functional.conv1d(x[:, :, 0], x.new_ones(4, 4, 3)),
    "conv3d": lambda x: functional.conv3d(channels_last(_volume(x)), x.new_ones(4, 4, 3, 3, 3)),
    "conv_transpose3d": lambda x: functional.conv_transpose3d(channels_last(_volume(x)), x.new_ones(4, 4, 3, 3, 3)),
    "conv3d_of_one": lambda x: functional.conv3d(channels_last(_volume(x[:1])), x.new_ones(4, 4, 3, 3, 3)),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "batch_norm_flat": lambda x: functional.batch_norm(x.flatten(2), None, None, training=True),
    "batch_norm_permuted": lambda x: functional.batch_norm(x.transpose(2, 3), None, None, training=True),
    "instance_norm": functional.instance_norm,
    "group_norm": lambda x: functional.group_norm(x, 2),
    "layer_norm": lambda x: functional.layer_norm(x, (6, 6)),
    "max_pool2d": lambda x: functional.max_pool2d(x, 2),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, 3),
    "adaptive_max_pool2d": lambda x: functional.adaptive_max_pool2d(x, 3),
    "max_pool3d": lambda x: functional.max_pool3d(channels_last(_volume(x)), 2),
    "avg_pool3d": lambda x: functional.avg_pool3d(channels_last(_volume(x)), 2),
    "max_unpool2d": lambda x: functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2),
    "interpolate_nearest": lambda x: functional.interpolate(x, scale_factor=2),
    "interpolate_bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "interpolate_bicubic": lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"),
    "interpolate_area": lambda x: functional.interpolate(x, size=3, mode="area"),
    "interpolate_antialias": lambda x: functional.interpolate(x, size=3, mode="bilinear", antialias=True),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: functional.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: functional.channel_shuffle(x, 2),
    "pad": lambda x: functional.pad(x, (1, 2, 1, 2)),
    "pad_reflect": lambda x: functional.pad(x, (1, 2, 1, 2), mode="reflect"),
    "pad_replicate": lambda x: functional.pad(x, (1, 2, 1, 2), mode="replicate"),
    "pad_circular": lambda x: functional.pad(x, (1, 2, 1, 2), mode="circular"),
    "pad_volume": lambda x: functional.pad(channels_last(_volume(x)), (1, 1, 1, 1, 1, 1), mode="replicate"),
    "grid_sample": lambda x: functional.grid_sample(x, x.new_zeros(x.shape[0], 5, 5, 2), align_corners=False),
    "logsigmoid": functional.logsigmoid,
    "dropout": lambda x: functional.dropout(x, 0.5),
    "add": lambda x: x + x.contiguous(),
    "add_contiguous": lambda x: x.contiguous() + x,
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "unfold": lambda x: functional.unfold(x, 2),
    "cumsum": lambda x: x.cumsum(1),
    "roll": lambda x: x.roll(1, 2),
}


def _volume(x: Tensor) -> Tensor:
    return x[:, :, None].expand(*x.shape[:2], 6, *x.shape[2:])


FORMAT_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.clone,
    "channels_last": channels_last,
    "one_channels_last": lambda x: channels_last(x[:1]),
    "permuted": lambda x: x.transpose(2, 3),
    "part": lambda x: channels_last(x.repeat(1, 2, 1, 1))[:, :4],
}


def _index_put(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[_first_two(x)] = w[:2]
    return y.exp()


def _image(x: Tensor) -> Tensor:
    return x[None, None]


# Each is called with two tensors of other dtypes.
DTYPE_CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "matmul_batched": lambda x, w: x[None] @ w[None],
    "matmul_vector": lambda x, w: x @ w[0],
    "linear": lambda x, w: functional.linear(x, w),
    "linear_bias": lambda x, w: functional.linear(x, w.to(x.dtype), w[0]),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "bilinear": lambda x, w: functional.bilinear(x, x, w[None]),
    "conv1d": lambda x, w: functional.conv1d(x[None], w[:, :, None]),
    "conv2d": lambda x, w: functional.conv2d(_image(x), _image(w)),
    "conv2d_bias": lambda x, w: functional.conv2d(_image(x).repeat(2, 1, 1, 1), _image(w.to(x.dtype)), w[0, :1]),
    "conv3d": lambda x, w: functional.conv3d(x[None, None, None], w[None, None, None]),
    "conv_transpose2d": lambda x, w: functional.conv_transpose2d(_image(x), _image(w)),
    "layer_norm": lambda x, w: functional.layer_norm(x, (4,), w[0], w[1]),
    "layer_norm_plain": lambda x, w: functional.layer_norm(x, (4,)) + w,
    "group_norm": lambda x, w: functional.group_norm(x, 2, w[0], w[1]),
    "batch_norm": lambda x, w: functional.batch_norm(x, w[2].detach(), w[3].detach() ** 2, w[0], w[1], training=True),
    "rms_norm": lambda x, w: functional.rms_norm(x, (4,), w[0]),
    "attention": lambda x, w: functional.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]),
    "attention_bias": lambda x, w: functional.scaled_dot_product_attention(*(x[None, None],) * 3, attn_mask=w.detach()),
    "prelu": lambda x, w: functional.prelu(x, w[0]),
    "cdist": lambda x, w: torch.cdist(x, w),
    "cdist_by_sums": lambda x, w: torch.cdist(x, w, p=1.0),
    "cdist_of_many": lambda x, w: torch.cdist(x.repeat(10, 1), w.repeat(10, 1)),
    "grid_sample": lambda x, w: functional.grid_sample(_image(x), w.view(1, 2, 4, 2), align_corners=False),
    "nll_loss": lambda x, w: functional.nll_loss(x.log_softmax(-1), _labels(x), weight=w[0].detach()),
    "cross_entropy": lambda x, w: functional.cross_entropy(x, _labels(x), weight=w[0].detach()),
    "binary_cross_entropy": lambda x, w: functional.binary_cross_entropy(x.sigmoid(), w.detach().sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, w: functional.binary_cross_entropy_with_logits(x, w.detach().sigmoid()),
    "index_put": _index_put,
    "index_add": lambda x, w: x.index_add(0, _first_two(x), w[:2]),
    "index_copy": lambda x, w: x.index_copy(0, _first_two(x), w[:2]),
    "scatter_add": lambda x, w: x.scatter_add(0, _labels(x)[:, None].repeat(1, 4), w),
    "add": lambda x, w: (x + w).exp(),
    "cat": lambda x, w: torch.cat([x, w]).exp(),
    "pow": lambda x, w: x.abs().pow(w),
    "embedding": lambda x, w: functional.embedding(_labels(x), w).exp() * x,
}


AUTOCAST_CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tensordot": lambda x, w: torch.tensordot(x.float(), w, 1),
    "baddbmm": lambda x, w: torch.baddbmm(x[None], x[None], w[None]),
    "prod": lambda x, w: functional.softmax(x @ w, -1).prod(),
    "cosine_similarity": lambda x, w: functional.cosine_similarity(x @ w, x),
    "normalize": lambda x, w: functional.normalize(x @ w),
    "interpolate": lambda x, w: functional.interpolate((x @ w)[None, None], scale_factor=2, mode="bilinear"),
    "pad": lambda x, w: functional.pad((x @ w)[None, None], (1, 1, 1, 1), mode="reflect").exp(),
    "avg_pool3d": lambda x, w: functional.avg_pool3d((x @ w).view(1, 1, 2, 2, 4), 2).exp(),
    "max_pool2d": lambda x, w: functional.max_pool2d((x @ w)[None, None], 2),
}


DTYPE_PAIRS = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)]


def _twice(x: Tensor, w: Tensor, constant: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Use a constant, and what comes of moving it to where the model is."""
    y = x @ w
    return y * constant + y.exp() * move(constant)


CONSTANT_CALLS: dict[str, Callable[..., Tensor]] = {
    "to_device": lambda x, w, m: _twice(x, w, torch.arange(4, device=x.device).float(), lambda c: c.to(x.device)),
    "to_tensor": lambda x, w, m: _twice(x, w, torch.arange(4, device=x.device).float(), lambda c: c.to(x)),
    "to_both": lambda x, w, m: _twice(
        x, w, torch.arange(4, device=x.device) / 4, lambda c: c.to(device=x.device, dtype=torch.float32)
    ),
    "to_half": lambda x, w, m: _twice(x, w, torch.arange(4, device=x.device) / 4, lambda c: c.to(x.device, torch.float16)),
    "made_on_cpu": lambda x, w, m: _twice(x, w, torch.linspace(0, 1, 4), lambda c: c.to(x.device)),
    "one_number": lambda x, w, m: _twice(x, w, torch.tensor(1e-3), lambda c: c.to(x.device)),
    "type_as": lambda x, w, m: _twice(x, w, torch.tensor(1e-3), lambda c: c.type_as(x)),
    "as_tensor": lambda x, w, m: _twice(x, w, torch.tensor(1e-3), lambda c: torch.as_tensor(c, device=x.device)),
    "attribute": lambda x, w, m: _twice(x, w, m.constant, lambda c: c.to(x.device)),
    "mask": lambda x, w, m: _twice(x, w, m.mask.float(), lambda c: c.to(x.device)),
    "mask_added": lambda x, w, m: _twice(x, w, (1.0 - m.mask.to(x.dtype)) * -1e9, lambda c: c.to(x)),
    "mask_filled": lambda x, w, m: (x @ w).masked_fill(m.mask, 0.0) * (x @ w).masked_fill(m.mask.to(x.device), 1.0),
    "labels": lambda x, w, m: _losses(x @ w, torch.zeros(4, dtype=torch.long)),
    "indices": lambda x, w, m: _losses(x @ w, torch.zeros(4, dtype=torch.long, device=x.device)),
    "timesteps": lambda x, w, m: _timesteps(x, w, torch.arange(4, device=x.device)),
    "tensor": lambda x, w, m: (x @ w) * torch.tensor(0.5),
    "tensor_there": lambda x, w, m: (x @ w) * torch.tensor(0.5, device=x.device),
    "double": lambda x, w, m: (x @ w) * torch.tensor(0.5, dtype=torch.float64),
    "new_tensor": lambda x, w, m: (x @ w) * x.new_tensor(0.5),
    "full": lambda x, w, m: (x @ w) * torch.full((), 0.5, device=x.device),
    "where": lambda x, w, m: torch.where(m.mask, x @ w, -1e9).softmax(-1),
    "where_tensor": lambda x, w, m: torch.where(m.mask, x @ w, torch.tensor(-1e9)).softmax(-1),
    "masked_fill": lambda x, w, m: (x @ w).masked_fill(m.mask, torch.tensor(-1e9)).softmax(-1),
    "in_place": lambda x, w, m: (x @ w).clone().mul_(torch.tensor(0.5)).exp(),
    "lerp": lambda x, w, m: torch.lerp(x.to(w.dtype), (x @ w).to(w.dtype), torch.tensor(0.3)),
    "logit_scale": lambda x, w, m: torch.clamp(w[0], max=torch.tensor(100.0).log()).exp() * (x @ w),
    "attention_mask": lambda x, w, m: functional.scaled_dot_product_attention(
        *((x @ w)[None, None],) * 3, attn_mask=torch.zeros(4, 4)
    ),
}


def _losses(y: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(y, labels) + functional.nll_loss(y.exp(), labels.to(y.device))


def _timesteps(x: Tensor, w: Tensor, steps: Tensor) -> Tensor:
    rates = torch.exp(-math.log(1e4) * torch.arange(2, dtype=torch.float32, device=steps.device))
    angles = steps[:, None].float() * rates
    return functional.silu(functional.linear(torch.cat([angles.sin(), angles.cos()], -1).to(x), w)) + x
