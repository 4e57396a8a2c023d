"""Train ResNet-50 in less memory than it takes: one budget for all that is on the device, with AdamW.

python examples/fit_in_12gib.py                    # batch 256 on a GPU takes 21 GiB; here it is given 12
python examples/fit_in_12gib.py --budget 8GiB
python examples/fit_in_12gib.py --tiny             # SqueezeNet, small images, on any machine: shows how, not how fast

The plain run is there to compare with, where it can run. On a machine without a GPU a stand-in takes the place of one: it
knows of saved tensors alone, so that parameters and the optimizer's states are not counted.
"""

import argparse
import statistics
import time
from contextlib import nullcontext

import torch
import torchvision

import memkit

NUM_LEARNING = 10
"""In so many iterations a plan is made, and made again if one of them took more than the budget."""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--budget", help='such as "12GiB", which is the default, or "4MiB" with --tiny')
parser.add_argument("--iterations", type=int, default=14)
parser.add_argument("--no-plain", action="store_true", help="leave out the plain run")
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()
if options.iterations <= NUM_LEARNING:
    parser.error(f"the first {NUM_LEARNING} iterations are left out of what is shown; found --iterations {options.iterations}")

if not options.tiny and not torch.cuda.is_available():
    print("No GPU here: running the tiny version on the CPU, which stands in for one.")
    options.tiny = True

if options.tiny:
    device, size, make_model = torch.device("cpu"), (4, 3, 64, 64), torchvision.models.squeezenet1_1
    settings = {"device": memkit.device.ReferenceDevice(), "min_bytes": 1024}
else:
    device, size, make_model = torch.device("cuda"), (256, 3, 224, 224), torchvision.models.resnet50
    settings = {}
budget = options.budget or ("4MiB" if options.tiny else "12GiB")
loss_fn = torch.nn.CrossEntropyLoss()
images, labels = torch.randn(size, device=device), torch.randint(1000, size[:1], device=device)


def train(*, is_planned: bool) -> str:
    """Train for some iterations, and return what the last ones took."""
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    context = memkit.MemoryBudget(budget, tag="fit", optimizer=optimizer, **settings) if is_planned else nullcontext()
    seconds = []
    for iteration in range(options.iterations):
        if device.type == "cuda":
            torch.cuda.synchronize()
            if iteration == NUM_LEARNING:  # not before: memkit reads there what they took
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with context:
            loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if is_planned:
            found = "follows the plan" if memkit.stats("fit").follows_plan else "learns"
            print(f"iteration {iteration}: loss {loss.item():.4f}, {1e3 * seconds[-1]:.0f} ms, {found}")
    peak = f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if device.type == "cuda" else "not counted on the CPU"
    return f"{1e3 * statistics.median(seconds[NUM_LEARNING:]):.1f} ms, peak {peak}"


plain = "left out"
if not options.no_plain:
    try:
        plain = train(is_planned=False)
    except torch.OutOfMemoryError:
        plain = "does not fit on this device"
if device.type == "cuda":
    torch.cuda.empty_cache()
budgeted = train(is_planned=True)
print(f"\nplain: {plain}\nunder {budget}: {budgeted}")

stats, plan = memkit.stats("fit"), memkit.MemoryBudget(budget, "fit").plan
if plan is not None and stats.step_peak_bytes is not None and stats.step_s is not None:
    print(
        f"\nforward and backward, predicted / actual:"
        f"\n  peak {plan.predicted_peak_bytes / 2**20:.2f} / {stats.step_peak_bytes / 2**20:.2f} MiB, "
        f"plain {plan.plain_peak_bytes / 2**20:.2f} MiB"
        f"\n  time {1e3 * plan.predicted_s:.1f} / {1e3 * stats.step_s:.1f} ms, plain {1e3 * plan.plain_s:.1f} ms"
    )
    print(f"\n{plan.explain(depth=1)}")
