"""Fine-tune on several GPUs: a model that is split between them, with adaptors, and saved tensors in host memory beside it.

torchrun --nproc-per-node 2 examples/shard.py          # 1.6 billion frozen parameters in bfloat16, on two GPUs
torchrun --nproc-per-node 2 examples/shard.py --tiny   # a small model on the CPU: shows how, not how fast
python examples/shard.py --tiny                        # one process is a group as well

The same model is trained twice from the same weights, first without `CPUOffload`. The losses are the same to the last bit.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memkit


class Adapted(nn.Module):
    """A frozen linear layer, and a low-rank adaptor that is trained."""

    def __init__(self, width: int, out: int, rank: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take [batch, width], return [batch, out]."""
        return self.linear(x) + self.up(self.down(x))


class Block(nn.Module):
    """A feed-forward network behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), Adapted(width, 4 * width), Adapted(4 * width, width)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, width]."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(args: argparse.Namespace, *, offload: bool) -> list[float]:
    """Return the losses of a training, as this rank has them."""
    width, depth, batch = (32, 4, 8) if args.tiny else (4096, 12, 4096)
    device = memkit.device.ReferenceDevice() if args.tiny else memkit.device.open_device("cuda")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(depth))).to(torch.float32 if args.tiny else torch.bfloat16)
    memkit.shard(model)
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
    x = torch.randn(batch, width).to(device.torch_device, model[0].norm.weight.dtype)
    losses = []
    for _ in range(args.steps):
        with memkit.CPUOffload(0.2, "sharded", min_bytes=0, device=device) if offload else nullcontext():
            loss = (model(x) - x.roll(1, 0)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.tiny = args.tiny or not torch.cuda.is_available()
    if not args.tiny:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "RANK" in os.environ:  # by torchrun
        dist.init_process_group("gloo" if args.tiny else "nccl")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, offloaded = train(args, offload=False), train(args, offload=True)
    finally:
        dist.destroy_process_group()
    rank = os.environ.get("RANK", "0")
    found = "the same bits" if plain == offloaded else "NOT the same bits"
    print(f"rank {rank}: {' '.join(f'{loss:.6f}' for loss in offloaded)}, {found}")


if __name__ == "__main__":
    main()
