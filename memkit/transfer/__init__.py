"""Move: bytes between a device and host memory, and between that and a disk.

Host memory:

- `arena`: `Arena`: pinned host memory of the exact size, allocated in the same places each step
- `spans`: `Span`: what was allocated of an arena
- `gaps`: the free ranges, and which one an allocation takes
- `segments`: ranges that were touched and pinned as one, by many threads side by side
- `host_memory`: `mmap` without memory behind it; what the machine and the container have left

Copies to and from a device:

- `lanes`: `Lanes`: one stream for each direction, shared by all features
- `turns`: copies on two streams by turns, so that others need not wait for all of them
- `staging`: copies from and to memory that is not pinned, through pinned buffers, in threads
- `link`: bandwidth and latency, measured
- `device_memory`: how many bytes of a device memkit's own buffers take, by feature

Disk:

- `disk`: `Disk`: a directory and a limit
- `disk_store`: `DiskStore`: chunks in one file, each with a read or a write under way at most
- `scratch`: the file: unnamed, of fixed size, past the page cache where the system can
- `disk_queue`: reads and writes that wait for their turn, and the threads that do them
- `blocks`: what one read or write moves
- `reference_disk`: `ReferenceDisk`: a stand-in for tests, on which every missing wait shows
"""

from memkit.plan.gpu import Link
from memkit.transfer.arena import Arena
from memkit.transfer.disk import Disk
from memkit.transfer.disk_store import DiskCopy, DiskStore
from memkit.transfer.lanes import Lanes, Transfer, lanes_of
from memkit.transfer.link import measure_link
from memkit.transfer.reference_disk import ReferenceDisk
from memkit.transfer.spans import Span

__all__ = [
    "Arena",
    "Disk",
    "DiskCopy",
    "DiskStore",
    "Lanes",
    "Link",
    "ReferenceDisk",
    "Span",
    "Transfer",
    "lanes_of",
    "measure_link",
]
