"""Train ResNet-50 with a share of its activations in host memory, and watch time and peak.

python examples/resnet50_offload.py                    # batch 256 on a GPU, 10 % offloaded
python examples/resnet50_offload.py --ratio 0.5
python examples/resnet50_offload.py --schedule         # the ratio changes from iteration to iteration
python examples/resnet50_offload.py --fit 12GiB        # the ratio is found that fits a target
python examples/resnet50_offload.py --tiny             # ResNet-18, small images, on any machine: shows how, not how fast
"""

import argparse
import time

import torch
import torchvision

import memkit

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ratio", type=float, default=0.1)
parser.add_argument("--schedule", action="store_true", help="offload nothing at first, everything at last")
parser.add_argument("--fit", metavar="SIZE", help='find the ratio whose peak fits, such as "12GiB"')
parser.add_argument("--iterations", type=int, default=12)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

if not options.tiny and not torch.cuda.is_available():
    print("No GPU here: running the tiny version on the CPU, which stands in for one.")
    options.tiny = True

if options.tiny:
    device, size = torch.device("cpu"), (4, 3, 32, 32)
    model = torchvision.models.resnet18()
    settings = {"device": memkit.device.ReferenceDevice(), "min_bytes": 1024}
else:
    device, size = torch.device("cuda"), (256, 3, 224, 224)
    model = torchvision.models.resnet50().to(device)
    settings = {}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loss_fn = torch.nn.CrossEntropyLoss()
images, labels = torch.randn(size, device=device), torch.randint(1000, size[:1], device=device)

ratio = options.ratio
if options.schedule:
    ratio = memkit.schedules.linear(0.0, 1.0, num_iterations=options.iterations - 1)
if options.fit:
    ratio = memkit.schedules.fit_memory(options.fit)
offload = memkit.CPUOffload(ratio, tag="resnet", **settings)

for iteration in range(options.iterations):
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    with offload:
        output = model(images)
    loss = loss_fn(output, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, stats = time.perf_counter() - start, memkit.stats("resnet")
    print(
        f"iteration {iteration}: loss {loss.item():.4f}, ratio {stats.ratio:.2f}, "
        f"moved {stats.moved_out_bytes / 2**20:.1f} of {stats.unique_bytes / 2**20:.1f} MiB, {seconds * 1e3:.0f} ms"
    )

print(f"\n{memkit.stats('resnet')}")
