"""Train LoRA on a frozen language model whose layers stream from host memory.

python examples/lora_layer_offload.py                       # 1.2 billion parameters in bfloat16 on a GPU, 75 % streamed
python examples/lora_layer_offload.py --ratio 1 --checkpoint
python examples/lora_layer_offload.py --ratio 0          # nothing streams: what to compare with
python examples/lora_layer_offload.py --tiny                # a small model, on any machine: shows how, not how fast

The base is frozen, so it is only ever copied to the device, never back. What LoRA trains is small and stays there. The base is
random here, and the same batch comes again in each step: a falling loss shows that gradients arrive, no more.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memkit


class LoRA(nn.Module):
    """A frozen linear layer, and a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)
        nn.init.zeros_(self.up.weight)  # the first step begins at the base model

    def forward(self, x: Tensor) -> Tensor:
        """Take [..., in_features], return [..., out_features]."""
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, length, width]."""
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(self.forward_norm(x))))


class LanguageModel(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, vocabulary: int, length: int, num_layers: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.checkpoints = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Take [batch, length], return [batch, length, vocabulary]."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.size(1)]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(self.norm(x))


def add_lora(model: LanguageModel, rank: int) -> None:
    """Freeze a model, and put LoRA around each linear layer of its blocks."""
    model.requires_grad_(False)
    for block in model.layers:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name), rank))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ratio", type=float, default=0.75, help="the share of the layers' bytes that streams")
parser.add_argument("--slots", type=int, default=3)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--checkpoint", action="store_true", help="checkpoint each layer")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

if not options.tiny and not torch.cuda.is_available():
    print("No GPU here: running the tiny version on the CPU, which stands in for one.")
    options.tiny = True

torch.manual_seed(0)
if options.tiny:
    vocabulary, size, learning_rate = 50, (4, 16), 1e-2
    model = LanguageModel(vocabulary, size[1], num_layers=8, width=64, num_heads=4)
    settings = {"device": memkit.device.ReferenceDevice()}
else:
    vocabulary, size, learning_rate = 32000, (4, 2048), 1e-3
    model = LanguageModel(vocabulary, size[1], num_layers=24, width=2048, num_heads=16).bfloat16()  # on the CPU
    settings = {}
model.checkpoints = options.checkpoint
add_lora(model, options.rank)

with memkit.LayerOffload(model, offload_ratio=options.ratio, num_slots=options.slots, train="frozen", **settings) as offload:
    print(offload.plan.explain(), end="\n\n")
    device = offload.device.torch_device
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=learning_rate)
    tokens = torch.randint(vocabulary, size, device=device)

    for step in range(options.steps):
        start = time.perf_counter()
        logits = model(tokens)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}, {(time.perf_counter() - start) * 1e3:.0f} ms")

    if device.type == "cuda":
        print(f"\npeak: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
    print(f"\n{offload.stats()}")
