"""Move: bytes between a device and host memory, and between that and a disk.

Host memory:

- `host_memory`: `Arena`: pinned memory of exact size, in the same places each step; `Span`: its allocation; what is not pinned

Copies to and from a device:

- `lanes`: `Lanes`: one stream for each direction, shared by all features; their bandwidth and latency
- `device_memory`: how many bytes of a device memkit's own buffers take, by feature

Disk:

- `disk`: `Disk`: a directory and a limit; `DiskStore`: chunks in one file there, and the reads and writes that wait their turn
- `reference_disk`: `ReferenceDisk`: a stand-in for tests, on which every missing wait shows
"""

from memkit.plan.gpu import Link
from memkit.transfer.disk import Disk
from memkit.transfer.host_memory import Arena
from memkit.transfer.lanes import Lanes, measure_link
from memkit.transfer.reference_disk import ReferenceDisk

__all__ = ["Arena", "Disk", "Lanes", "Link", "ReferenceDisk", "measure_link"]
