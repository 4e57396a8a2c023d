"""Train with an optimizer whose states are in host memory, and show that nothing else has changed.

python examples/state_offload.py                # 0.4 billion parameters in bfloat16 on a GPU, with float32 copies
python examples/state_offload.py --stay 1GiB    # of which as much stays on the GPU
python examples/state_offload.py --when backward
python examples/state_offload.py --tiny         # a small model, on any machine: shows how, not how fast

The same model is trained twice from the same weights, first with all states on the device. The losses are the same to the last
bit on one machine; the states that are left on the device are not.
"""

import argparse

import torch
from torch import Tensor, nn

import memkit


class Block(nn.Module):
    """A feed-forward network behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, width]."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(args: argparse.Namespace, *, offload: bool) -> list[float]:
    """Return the losses of a training, and print where the states are."""
    width, depth, batch = (32, 4, 8) if args.tiny else (2048, 12, 4096)
    device = memkit.device.ReferenceDevice() if args.tiny else memkit.device.open_device("cuda")
    dtype = torch.float32 if args.tiny else torch.bfloat16
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(depth))).to(device.torch_device, dtype)
    x = torch.randn(batch, width).to(device.torch_device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    states = memkit.StateOffload(
        optimizer,
        device=device,
        device_budget=args.stay if offload else "1TiB",
        master=None if args.tiny else torch.float32,
        when=args.when if offload else "step",
    )
    losses = []
    with states:
        for _ in range(args.steps):
            loss = (model(x) - x.roll(1, 0)).float().square().mean()
            loss.backward()
            if args.when == "step":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(states.plan.explain() if offload else f"All {memkit.core.sizes.format_bytes(states.plan.resident_bytes)} stay.")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stay", default="0", help="how many bytes of states stay on the device, such as 1GiB")
    parser.add_argument("--when", choices=("step", "backward"), default="step")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.tiny = args.tiny or not torch.cuda.is_available()
    plain, offloaded = train(args, offload=False), train(args, offload=True)
    print("plain:    ", *(f"{loss:.6f}" for loss in plain))
    print("offloaded:", *(f"{loss:.6f}" for loss in offloaded))
    print("the same bits" if plain == offloaded else "NOT the same bits")


if __name__ == "__main__":
    main()
