"""Move: bytes between a device and host memory, and between that and a disk."""

from memkit.transfer.arena import Arena
from memkit.transfer.disk import Disk
from memkit.transfer.disk_store import DiskCopy, DiskStore
from memkit.transfer.lanes import Lanes, Transfer, lanes_of
from memkit.transfer.link import Link, measure_link
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
