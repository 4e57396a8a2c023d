"""Models that tests on every device share: small, and each with something that a profiler can get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchvision.models import DenseNet, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt


class Tied(nn.Module):
    """A language model in small whose output weight is its embedding, and a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(self.block(self.block(hidden)))


class Functional(nn.Module):
    """Operations that no module of its own makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.weight)
        x = functional.layer_norm(functional.softmax(x.sin(), -1).exp(), (8,))
        x = functional.dropout(x, 0.3, self.training)
        return functional.normalize(torch.einsum("bi,ij->bj", x, self.weight), dim=-1)


class Checkpointed(nn.Module):
    """A checkpointed block between two that are not."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(16, 16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.last(x).sigmoid()


class ConvNet(nn.Module):
    """Convolution, BatchNorm and ReLU, in place or not, with a residual and dropout."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=inplace)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.1, inplace=inplace)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)) + x)
        return self.head(self.dropout(functional.adaptive_avg_pool2d(x, 1).flatten(1)))


class Attention(nn.Module):
    """Attention as transformers call it: causal, with a mask, with grouped heads, and with dropout."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.query = nn.Linear(64, 64)
        self.key_value = nn.Linear(64, 2 * (32 if options.get("enable_gqa") else 64))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = 2 if self.options.get("enable_gqa") else 4
        query = self.query(x).view(batch, length, 4, 16).transpose(1, 2)
        key, value = self.key_value(x).view(batch, length, 2, heads, 16).permute(2, 0, 3, 1, 4)
        options = dict(self.options)
        if options.pop("masked", False):
            options["attn_mask"] = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        return functional.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and whether they are indices."""

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(1)
        if self.dtype == torch.int64:
            return [torch.randint(0, 50, shape) for shape in self.shapes]
        return [torch.randn(shape, dtype=self.dtype) for shape in self.shapes]


def _vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, **options)


IMAGE = ((2, 3, 64, 64),)
_CONVNEXT = [CNBlockConfig(16, 32, 3), CNBlockConfig(32, 64, 3), CNBlockConfig(64, 128, 9), CNBlockConfig(128, None, 3)]

CASES = {  # those of torchvision are as deep as it has them, and narrow where their classes allow it: most tests make them anew
    "resnet18": Case(_vision("resnet18"), IMAGE),
    "mobilenet_v3_small": Case(_vision("mobilenet_v3_small"), IMAGE),
    "vision_transformer": Case(lambda: VisionTransformer(64, 16, 12, num_heads=4, hidden_dim=64, mlp_dim=128), IMAGE),
    "swin": Case(lambda: SwinTransformer([4, 4], 24, [2, 2, 6, 2], [1, 2, 4, 8], [7, 7], stochastic_depth_prob=0.2), IMAGE),
    "convnext": Case(lambda: ConvNeXt(_CONVNEXT, stochastic_depth_prob=0.1), IMAGE),
    "densenet": Case(lambda: DenseNet(8, (6, 12, 24, 16), 16), IMAGE),
    "googlenet": Case(_vision("googlenet", init_weights=False), ((2, 3, 96, 96),)),
    "fcn_resnet50": Case(_vision("fcn_resnet50", weights_backbone=None), IMAGE),
    "transformer_encoder": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        ),
        ((2, 10, 32),),
    ),
    "tied": Case(Tied, ((2, 7),), torch.int64),
    "functional": Case(Functional, ((4, 8),)),
    "checkpoint_reentrant": Case(lambda: Checkpointed(use_reentrant=True), ((4, 16),)),
    "checkpoint_non_reentrant": Case(lambda: Checkpointed(use_reentrant=False), ((4, 16),)),
    "conv_inplace": Case(lambda: ConvNet(inplace=True), ((2, 3, 16, 16),)),
    "conv_out_of_place": Case(lambda: ConvNet(inplace=False), ((2, 3, 16, 16),)),
    "attention": Case(Attention, ((2, 10, 64),)),
    "attention_causal": Case(lambda: Attention(is_causal=True), ((2, 10, 64),)),
    "attention_masked": Case(lambda: Attention(masked=True), ((2, 10, 64),)),
    "attention_grouped": Case(lambda: Attention(enable_gqa=True), ((2, 10, 64),)),
    "attention_dropout": Case(lambda: Attention(dropout_p=0.1), ((2, 10, 64),)),
    "rms_norm": Case(lambda: nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.SiLU()), ((4, 16),)),
    "group_norm": Case(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Softplus()), IMAGE),
    "rnn_cell": Case(lambda: nn.RNNCell(8, 8), ((4, 8),)),
}

LARGE = ("vision_transformer", "swin", "convnext", "densenet", "googlenet", "fcn_resnet50")
"""Of all: those that are deep."""

_CORE = ("tied", "functional", "checkpoint_reentrant", "conv_inplace", "attention_masked", "group_norm", "rnn_cell")

NAMES = [name if name in _CORE else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
"""Of all: those that are small run always."""
