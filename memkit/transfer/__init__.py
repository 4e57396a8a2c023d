"""Move: bytes between a device and host memory, and between that and a disk.

Host memory:

- `arena`: `Arena`: pinned host memory of the exact size, allocated in the same places; copies of what is not pinned
- `host_memory`: `Span`: an arena's allocation; the segments below it, pinned by many threads side by side; free ranges

Copies to and from a device:

- `lanes`: `Lanes`: one stream for each direction, shared by all features; two by turns where copies are long
- `link`: bandwidth and latency, measured
- `device_memory`: how many bytes of a device memkit's own buffers take, by feature

Disk:

- `disk`: `Disk`: a directory and a limit; `DiskStore`: chunks in one file there, and the reads and writes that wait their turn
- `reference_disk`: `ReferenceDisk`: a stand-in for tests, on which every missing wait shows
"""

from memkit.plan.gpu import Link
from memkit.transfer.arena import Arena
from memkit.transfer.disk import Disk
from memkit.transfer.lanes import Lanes
from memkit.transfer.link import measure_link
from memkit.transfer.reference_disk import ReferenceDisk

__all__ = ["Arena", "Disk", "Lanes", "Link", "ReferenceDisk", "measure_link"]
