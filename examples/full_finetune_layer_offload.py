"""Train all weights of a language model whose layers stream from host memory, with AdamW on the host.

python examples/full_finetune_layer_offload.py                       # 0.6 billion parameters on a GPU, 75 % streamed
python examples/full_finetune_layer_offload.py --ratio 1 --accumulate 8
python examples/full_finetune_layer_offload.py --tiny                # a small model, on any machine: shows how, not how fast

Gradients of streamed layers go to host memory while the backward runs, and the optimizer steps the weights there: neither they
nor the optimizer's state take memory of the device. Of layers that stay, both are on the device as usual; one optimizer steps
all. The same batches come again in each step: a falling loss shows that weights are trained, no more.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit


class LanguageModel(nn.Module):
    """Transformer layers between an embedding and a head."""

    def __init__(self, vocabulary: int, length: int, num_layers: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Take [batch, length], return [batch, length, vocabulary]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        x = self.embedding(tokens) + self.positions.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ratio", type=float, default=0.75, help="the share of the layers' bytes that streams")
parser.add_argument("--slots", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=2, help="batches per step of the optimizer")
parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of all gradients together")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

if not options.tiny and not torch.cuda.is_available():
    print("No GPU here: running the tiny version on the CPU, which stands in for one.")
    options.tiny = True

torch.manual_seed(0)
if options.tiny:
    vocabulary, size, learning_rate = 50, (4, 16), 3e-3
    model = LanguageModel(vocabulary, size[1], num_layers=8, width=64, num_heads=4)
    settings = {"device": memkit.device.ReferenceDevice()}
else:
    torch.set_float32_matmul_precision("high")
    vocabulary, size, learning_rate = 32000, (4, 1024), 1e-4
    model = LanguageModel(vocabulary, size[1], num_layers=12, width=2048, num_heads=16)  # on the CPU
    settings = {}

with memkit.LayerOffload(model, offload_ratio=options.ratio, num_slots=options.slots, train="host", **settings) as offload:
    print(offload.plan.explain(), end="\n\n")
    device = offload.device.torch_device
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)  # works on the host as well
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    batches = torch.randint(vocabulary, (options.accumulate, *size), device=device)

    for step in range(options.steps):
        start, total = time.perf_counter(), 0.0
        for tokens in batches:
            logits = model(tokens)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / options.accumulate
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.4f}, norm {norm.item():.2f}, {(time.perf_counter() - start) * 1e3:.0f} ms")

    if device.type == "cuda":
        print(f"\npeak: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
    print(f"\n{offload.stats()}")
