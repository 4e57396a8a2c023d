"""A diffusion transformer with blocks of two sizes, as image models are. Source: arXiv 2403.03206; Flux has the single ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lora import add_lora
from measuring import Workload
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

TEXT_WIDTH, PATCH_WIDTH, TIME_WIDTH = 4096, 64, 256


class Heads(nn.Module):
    """Queries, keys and values of tokens, by head; queries and keys are normed."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.query_norm, self.key_norm = (nn.RMSNorm(width // num_heads) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take [batch, tokens, width], return three of [batch, heads, tokens, width / heads]."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        return self.query_norm(query), self.key_norm(key), value


def _attend(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return what tokens of all parts see of each other, [batch, tokens, width]."""
    query, key, value = (torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # cuDNN's backward of these has read elsewhere, torch 2.11
        return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Modulation(nn.Module):
    """Shifts, scales and gates that depend on the condition."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count, self.linear = count, nn.Linear(width, count * width)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """Take [batch, width], return `count` of [batch, 1, width]."""
        return self.linear(functional.silu(condition))[:, None].chunk(self.count, dim=-1)


def _normed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class Stream(nn.Module):
    """The weights of a double block for one kind of tokens."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.modulation, self.heads = Modulation(width, 6), Heads(width, num_heads)
        self.proj, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def finish(self, x: Tensor, attended: Tensor, modulation: Sequence[Tensor]) -> Tensor:
        """Return the tokens after attention and what follows it."""
        gate, shift, scale, last_gate = modulation
        x = x + gate * self.proj(attended)
        return x + last_gate * self.down(functional.gelu(self.up(_normed(x, shift, scale)), approximate="tanh"))


class DoubleBlock(nn.Module):
    """Image and text attend to each other, each with weights of its own."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.image, self.text = Stream(width, num_heads), Stream(width, num_heads)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Take and return tokens, [batch, tokens, width]; the condition is [batch, width]."""
        of_image, of_text = self.image.modulation(condition), self.text.modulation(condition)
        parts = self.text.heads(_normed(text, *of_text[:2])), self.image.heads(_normed(image, *of_image[:2]))
        for_text, for_image = _attend(parts).split((text.size(1), image.size(1)), dim=1)
        return self.image.finish(image, for_image, of_image[2:]), self.text.finish(text, for_text, of_text[2:])


class SingleBlock(nn.Module):
    """All tokens with the same weights, attention beside the feed-forward network."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.modulation, self.heads = Modulation(width, 3), Heads(width, num_heads)
        self.up, self.proj = nn.Linear(width, 4 * width), nn.Linear(5 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Take and return [batch, tokens, width]; the condition is [batch, width]."""
        shift, scale, gate = self.modulation(condition)
        y = _normed(x, shift, scale)
        inner = functional.gelu(self.up(y), approximate="tanh")
        return x + gate * self.proj(torch.cat([_attend([self.heads(y)]), inner], dim=-1))


class DiT(nn.Module):
    """Double blocks, then single blocks; a checkpoint around each. Positions are not told apart: they cost next to nothing.

    Args:
        checkpoints: whether there are checkpoints.
    """

    def __init__(self, width: int, num_heads: int, num_double: int, num_single: int, *, checkpoints: bool = True) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.image_in, self.text_in = nn.Linear(PATCH_WIDTH, width), nn.Linear(TEXT_WIDTH, width)
        self.time_in = nn.Sequential(nn.Linear(TIME_WIDTH, width), nn.SiLU(), nn.Linear(width, width))
        self.double_blocks = nn.ModuleList(DoubleBlock(width, num_heads) for _ in range(num_double))
        self.single_blocks = nn.ModuleList(SingleBlock(width, num_heads) for _ in range(num_single))
        self.modulation, self.head = Modulation(width, 2), nn.Linear(width, PATCH_WIDTH)

    def forward(self, image: Tensor, text: Tensor, time: Tensor) -> Tensor:
        """Take [batch, tokens, PATCH_WIDTH], [batch, tokens, TEXT_WIDTH] and [batch, TIME_WIDTH]; return one like the image."""
        x, y, condition = self.image_in(image), self.text_in(text), self.time_in(time)
        for block in self.double_blocks:
            x, y = self._run(block, x, y, condition)
        x = torch.cat([y, x], dim=1)
        for block in self.single_blocks:
            x = self._run(block, x, condition)
        return self.head(_normed(x[:, text.size(1) :], *self.modulation(condition)))

    def _run(self, block: nn.Module, *inputs: Tensor) -> Any:
        return checkpoint(block, *inputs, use_reentrant=False) if self.checkpoints else block(*inputs)


def dit(
    batch: int = 4,
    num_patches: int = 4096,
    num_words: int = 512,
    *,
    width: int = 3072,
    num_heads: int = 24,
    num_double: int = 8,
    num_single: int = 16,
    rank: int = 16,
    checkpoints: bool = True,
) -> Workload:
    """A DiT, by default of 5.0 billion parameters, bfloat16, frozen, with LoRA on the attention's projections.

    Args:
        rank: of LoRA; 0 trains all.
    """
    model = DiT(width, num_heads, num_double, num_single, checkpoints=checkpoints).bfloat16()
    if rank:
        add_lora(model, ("qkv", "proj"), rank)
    image, text, time, noise = (
        torch.randn(batch, *size).bfloat16()
        for size in ((num_patches, PATCH_WIDTH), (num_words, TEXT_WIDTH), (TIME_WIDTH,), (num_patches, PATCH_WIDTH))
    )
    return Workload(
        name=f"dit_{num_double}+{num_single}" + (f"_lora{rank}" if rank else "") + ("_checkpointed" if checkpoints else ""),
        model=model,
        forward=lambda: model(image, text, time),
        loss=lambda predicted: functional.mse_loss(predicted.float(), noise.float()),
    )
