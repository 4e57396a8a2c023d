"""Train a supernet, which takes another random path each step, with its saved tensors held to a budget.

python examples/dtr_supernet.py                      # 20 choice blocks, batch 128 on a GPU, 40 % of what is saved
python examples/dtr_supernet.py --budget 4GiB
python examples/dtr_supernet.py --tiny               # small blocks and images, on any machine: shows how, not how fast

There is no plan for a path that is new: what is dropped is decided on the spot, by the score of dynamic tensor
rematerialization. With policy="ops" that stays so; by default, whole units would be recomputed after three steps.
"""

import argparse
import random
import time

import torch
from torch import Tensor, nn

import memkit


def unit(inputs: int, outputs: int, kernel: int, depth: int, stride: int) -> nn.Module:
    """One choice: depthwise convolutions of some size, each before one that is pointwise."""
    layers: list[nn.Module] = []
    for index in range(depth):
        channels = outputs if index else inputs
        layers += [
            nn.Conv2d(channels, channels, kernel, 1 if index else stride, kernel // 2, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
            nn.Conv2d(channels, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class Supernet(nn.Module):
    """Stages of choice blocks. A step runs one unit of each block."""

    CHOICES = ((3, 1), (7, 1), (3, 2), (3, 3))
    """Size and number of a unit's depthwise convolutions."""

    def __init__(self, widths: tuple[int, ...], num_blocks: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 2, 1)
        self.blocks, inputs = nn.ModuleList(), widths[0]
        for width, count in zip(widths, num_blocks, strict=True):
            for stride in (2, *(1,) * (count - 1)):
                self.blocks.append(nn.ModuleList(unit(inputs, width, *choice, stride) for choice in self.CHOICES))
                inputs = width
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor, path: list[int]) -> Tensor:
        """Take images and which unit to run in each block."""
        out = self.stem(images)
        for units, choice in zip(self.blocks, path, strict=True):
            out = units[choice](out)
        return self.head(out.mean((2, 3)))


def share_or_size(text: str) -> float | str:
    """A share of the saved bytes, such as 0.4, or a size, such as 4GiB."""
    try:
        return float(text)
    except ValueError:
        return text


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--budget", type=share_or_size, default=0.4, help='a share of what is saved, or a size such as "4GiB"')
parser.add_argument("--iterations", type=int, default=10)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

if not options.tiny and not torch.cuda.is_available():
    print("No GPU here: running the tiny version on the CPU.")
    options.tiny = True

torch.manual_seed(0)
if options.tiny:
    device, size = torch.device("cpu"), (4, 3, 32, 32)
    model = Supernet(widths=(8, 16), num_blocks=(2, 2), num_classes=10)
    settings = {"min_bytes": 1024}
else:
    device, size = torch.device("cuda"), (128, 3, 224, 224)
    model = Supernet(widths=(64, 160, 320, 640), num_blocks=(4, 4, 8, 4), num_classes=1000).to(device)
    settings = {}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()
images, labels = torch.randn(size, device=device), torch.randint(10, size[:1], device=device)
paths = random.Random(0)

for iteration in range(options.iterations):
    path = [paths.randrange(len(Supernet.CHOICES)) for _ in model.blocks]
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    with memkit.Rematerialize(options.budget, tag="supernet", policy="ops", **settings):
        output = model(images, path)
    loss = loss_fn(output, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, stats = time.perf_counter() - start, memkit.stats("supernet")
    print(
        f"iteration {iteration}: path {''.join(map(str, path))}, loss {loss.item():.4f}, "
        f"held {stats.ledger_peak_bytes / 2**20:.2f} of {stats.saved_bytes / 2**20:.2f} MiB, "
        f"dropped {stats.num_dropped}, replayed {stats.num_replayed_ops} ops, {seconds * 1e3:.0f} ms"
    )

print(f"\n{memkit.stats('supernet')}")
