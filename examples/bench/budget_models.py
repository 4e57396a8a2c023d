"""Models of many kinds for the parts `others` and `cap` of `bench_budget.py`. On an H200 a plain step of each is thought to
take 30 to 130 ms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from dit import dit
from measuring import Workload
from setting import Setting
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.convnext import CNBlockConfig
from workloads import llama_3b, lstms, on_images, resnet50, scalar, unet


def _images(name: str, batch: int, dtype: torch.dtype, setting: Setting) -> Workload:
    """One of torchvision's models by its name; in tiny runs a small one that is like it."""
    small: dict[str, Callable[[], nn.Module]] = {
        "vit_l_16": partial(torchvision.models.VisionTransformer, 32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64),
        "swin_b": partial(torchvision.models.SwinTransformer, [4, 4], 16, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0),
        "densenet121": partial(torchvision.models.DenseNet, 8, (2, 2), 16),
        "convnext_base": partial(torchvision.models.ConvNeXt, [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], 0.0),
    }
    model = small[name]() if setting.tiny else getattr(torchvision.models, name)()
    model = model.to(dtype)
    batch, size = (2, 32) if setting.tiny else (batch, 224)
    if dtype == torch.float32:
        return on_images(name, model, batch, size)
    images, labels = torch.empty(batch, 3, size, size).normal_().to(dtype), torch.randint(1000, (batch,))
    return Workload(
        name=f"{name}_b{batch}",
        model=model,
        forward=lambda: model(images),
        loss=lambda output: functional.cross_entropy(output.float(), labels),
    )


def _lstms(setting: Setting) -> Workload:
    """Width 1024, batch 128 x 256."""
    return lstms(*((16, 2, 4) if setting.tiny else (1024, 128, 256)))


def _unet(setting: Setting) -> Workload:
    return unet(*((8, 1, 32) if setting.tiny else ()))


class Experts(nn.Module):
    """A feed-forward network of several experts, of which each token goes to two. Source: arXiv 2401.04088, section 2.1.

    Tokens are gathered by expert, so how many there are for each depends on what they are.
    """

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [tokens, width]."""
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, rank = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weights[token, rank, None])
        return out


class MixtureBlock(nn.Module):
    """Attention, then experts, each beside a shortcut."""

    def __init__(self, width: int, num_heads: int, num_experts: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.experts_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = Experts(width, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, seq, width]."""
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.experts(self.experts_norm(x).flatten(0, 1)).view_as(x)


def _mixture(setting: Setting) -> Workload:
    """Eight blocks of eight experts, width 1024, batch 16 x 1024, bfloat16: 0.57 billion parameters."""
    num_blocks, width, num_heads, batch, length = (2, 32, 2, 2, 8) if setting.tiny else (8, 1024, 16, 16, 1024)
    model = nn.Sequential(*[MixtureBlock(width, num_heads, 8) for _ in range(num_blocks)]).bfloat16()
    tokens = torch.empty(batch, length, width).normal_().bfloat16()
    return Workload(name=f"experts_{num_blocks}x8_b{batch}", model=model, forward=lambda: model(tokens), loss=scalar)


def _dit(setting: Setting) -> Workload:
    """A DiT of 0.7 billion parameters without checkpoints, batch 4 x (1024 + 128), bfloat16, all of it trained."""
    if setting.tiny:
        return dit(1, 8, 4, width=32, num_heads=2, num_double=1, num_single=2, rank=0, checkpoints=False)
    return dit(4, 1024, 128, width=1536, num_heads=12, num_double=4, num_single=8, rank=0, checkpoints=False)


def _llama(batch: int, setting: Setting) -> Workload:
    """The Llama of 0.95 billion parameters, called as a whole, so that something may be attached to it."""
    if setting.tiny:
        return llama_3b(2, 32, num_layers=2, width=64, inner=128, num_heads=4)
    return llama_3b(batch, 2048, num_layers=16, width=2048, inner=5632, num_heads=16)


def _resnet50(batch: int, setting: Setting) -> Workload:
    return resnet50(setting.batch(batch), setting.size)


OTHERS: dict[str, Callable[[Setting], Workload]] = {
    "vit_l": partial(_images, "vit_l_16", 64, torch.bfloat16),
    "convnext_b": partial(_images, "convnext_base", 48, torch.float32),
    "unet": _unet,
    "experts": _mixture,
    "dit": _dit,
    "swin_b": partial(_images, "swin_b", 48, torch.float32),
    "densenet121": partial(_images, "densenet121", 96, torch.float32),
    "lstm": _lstms,
}
CAPPED: dict[str, Callable[[Setting], Workload]] = {
    "resnet50": partial(_resnet50, 128),
    "convnext_b": OTHERS["convnext_b"],
    "llama": partial(_llama, 4),
    "unet": _unet,
}


def built(build: Callable[[Setting], Workload], setting: Setting) -> Workload:
    """Build a workload on the device, the same each time, in train mode."""
    found: Any = setting.make(partial(build, setting))
    found.model.train()
    return found
