"""Where does the memory of ResNet-50 go? Runs in a second on any machine: nothing is computed.

python examples/profile_resnet50.py [batch size]
"""

import sys

import torch
import torchvision

import memkit

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 256

with torch.device("meta"):
    model = torchvision.models.resnet50()
    images = torch.empty(batch_size, 3, 224, 224)
    labels = torch.empty(batch_size, dtype=torch.int64)

report = memkit.profile_memory(
    model,
    images,
    loss_fn=lambda output: torch.nn.functional.cross_entropy(output, labels),
    backward=True,
    depth=1,
)

largest = sorted(report.saved, key=lambda record: record.storage_bytes, reverse=True)[:5]
print("\nThe five largest tensors kept for the backward:")
for record in largest:
    print(f"  {record.storage_bytes / 2**20:8.2f} MiB  {record.module}  {record.shapes[0]}  saved {len(record.shapes)}x")
